//! What the watches have shown so far: runs, Pipelines, grants, and the Job and pods of each run. It decides nothing; it
//! only says which runs a change concerns.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use tokio::sync::{Notify, mpsc};

use crate::names::RUN_UID_LABEL;
use crate::pods::WorkerPod;

/// The UID of a PipelineRun.
pub type Uid = Arc<str>;

/// The namespace that a watch is limited to; `None` if it sees all.
pub type Scope = Option<Arc<str>>;

/// A run's own place: whatever carries its UID in another namespace is not its own.
type Place = (Option<String>, Uid);

/// Namespace and name.
pub type Key = (String, String);

/// Everything that was seen.
pub struct World {
    inner: Mutex<Inner>,
    touched: mpsc::UnboundedSender<Uid>,
    pipelines_touched: Notify,
}

#[derive(Default)]
struct Inner {
    runs: Shelf<Uid, PipelineRun>,
    pipelines: Shelf<Key, Pipeline>,
    grants: Shelf<Key, ReferenceGrant>,
    jobs: Shelf<Place, Job>,
    pods: HashMap<Place, RunPods>,
    pod_rounds: Rounds,
}

/// How often the watch of each scope has started.
#[derive(Default)]
struct Rounds(HashMap<Scope, u64>);

impl Rounds {
    fn begin(&mut self, scope: &Scope) {
        *self.0.entry(scope.clone()).or_default() += 1;
    }

    fn of(&self, scope: &Scope) -> u64 {
        self.0.get(scope).copied().unwrap_or_default()
    }
}

#[derive(Default)]
struct RunPods {
    present: BTreeMap<String, (Arc<WorkerPod>, u64)>,
    /// Pods that were deleted, as they were last, until somebody has looked after their files.
    gone: BTreeMap<String, Arc<WorkerPod>>,
}

/// What is known of one run at one moment.
pub struct View {
    /// The run.
    pub run: Arc<PipelineRun>,
    /// Its Job.
    pub job: Option<Arc<Job>>,
    /// Its pods, by name.
    pub pods: Vec<Arc<WorkerPod>>,
}

/// What a watch follows. A watch that starts again begins a round; what it has not shown by the end of it is gone.
pub trait Follows<K>: Send + Sync {
    /// A round begins.
    fn begin(&self, scope: &Scope);
    /// An object is there, or has changed.
    fn put(&self, scope: &Scope, object: K);
    /// An object is gone.
    fn remove(&self, object: K);
    /// The round is over.
    fn end(&self, scope: &Scope);
}

impl World {
    /// An empty world. The receiver gets the UID of every run that something happened to.
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Uid>) {
        let (touched, receiver) = mpsc::unbounded_channel();
        (Arc::new(Self { inner: Mutex::default(), touched, pipelines_touched: Notify::new() }), receiver)
    }

    /// The run, with its Job and pods; `None` if it is gone.
    pub fn view(&self, uid: &Uid) -> Option<View> {
        let inner = self.lock();
        let run = inner.runs.get(uid)?;
        let place = (run.namespace(), Arc::clone(uid));
        let pods = inner
            .pods
            .get(&place)
            .map(|pods| pods.present.values().map(|(pod, _)| Arc::clone(pod)).collect());
        let job = inner.jobs.get(&place).filter(|job| is_owned_by(job.as_ref(), uid));
        Some(View { run, job, pods: pods.unwrap_or_default() })
    }

    /// Pods of the run that were deleted since this was asked last, as they were last.
    pub fn take_gone(&self, uid: &Uid) -> BTreeMap<String, Arc<WorkerPod>> {
        let mut inner = self.lock();
        let namespace = inner.runs.get(uid).and_then(|run| run.namespace());
        let pods = inner.pods.get_mut(&(namespace, Arc::clone(uid)));
        pods.map(|pods| std::mem::take(&mut pods.gone)).unwrap_or_default()
    }

    /// A Pipeline.
    pub fn pipeline(&self, namespace: &str, name: &str) -> Option<Arc<Pipeline>> {
        self.lock().pipelines.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// All Pipelines.
    pub fn pipelines(&self) -> Vec<Arc<Pipeline>> {
        self.lock().pipelines.all()
    }

    /// Waits until something happens that the status of a Pipeline may speak of.
    pub async fn pipelines_touched(&self) {
        self.pipelines_touched.notified().await;
    }

    /// All grants.
    pub fn grants(&self) -> Vec<ReferenceGrant> {
        self.lock().grants.all().iter().map(|grant| ReferenceGrant::clone(grant)).collect()
    }

    /// The grants of some namespaces.
    pub fn grants_in(&self, namespaces: &[String]) -> Vec<ReferenceGrant> {
        let there = |grant: &ReferenceGrant| grant.namespace().is_some_and(|own| namespaces.contains(&own));
        let all = self.lock().grants.all();
        all.iter().filter(|grant| there(grant)).map(|grant| ReferenceGrant::clone(grant)).collect()
    }

    /// All runs.
    pub fn runs(&self) -> Vec<Arc<PipelineRun>> {
        self.lock().runs.all()
    }

    /// Something happened to a run that no watch shows: its listing went on, for example.
    pub fn touch(&self, uid: &Uid) {
        // Without a receiver the operator is ending.
        let _ = self.touched.send(Arc::clone(uid));
    }

    fn touch_runs_that(&self, concerned: impl Fn(&PipelineRun) -> bool) {
        for run in self.runs() {
            if let (true, Some(uid)) = (concerned(&run), run.uid()) {
                self.touch(&uid.into());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Objects of one kind, with the round in which each was last seen.
struct Shelf<I, K> {
    objects: HashMap<I, (Arc<K>, u64)>,
    rounds: Rounds,
}

impl<I, K> Default for Shelf<I, K> {
    fn default() -> Self {
        Self { objects: HashMap::new(), rounds: Rounds::default() }
    }
}

impl<I: Eq + Hash + Clone, K: Resource> Shelf<I, K> {
    fn get(&self, id: &I) -> Option<Arc<K>> {
        self.objects.get(id).map(|(object, _)| Arc::clone(object))
    }

    fn all(&self) -> Vec<Arc<K>> {
        self.objects.values().map(|(object, _)| Arc::clone(object)).collect()
    }

    fn put(&mut self, scope: &Scope, id: I, mut object: K) {
        // Nobody reads them, and they are half of most objects.
        object.meta_mut().managed_fields = None;
        self.objects.insert(id, (Arc::new(object), self.rounds.of(scope)));
    }

    /// Removes what was not seen in this round; returns it.
    fn end(&mut self, scope: &Scope) -> Vec<Arc<K>> {
        let round = self.rounds.of(scope);
        let old: Vec<I> = self
            .objects
            .iter()
            .filter(|(_, (object, seen))| {
                *seen < round && in_scope(scope, object.meta().namespace.as_deref())
            })
            .map(|(id, _)| id.clone())
            .collect();
        old.iter().filter_map(|id| self.objects.remove(id)).map(|(object, _)| object).collect()
    }
}

fn in_scope(scope: &Scope, namespace: Option<&str>) -> bool {
    scope.as_deref().is_none_or(|scope| namespace == Some(scope))
}

fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn run_uid<K: ResourceExt>(object: &K) -> Option<Uid> {
    object.labels().get(RUN_UID_LABEL).map(|uid| uid.as_str().into())
}

impl Follows<PipelineRun> for World {
    fn begin(&self, scope: &Scope) {
        self.lock().runs.rounds.begin(scope);
    }

    fn put(&self, scope: &Scope, run: PipelineRun) {
        let Some(uid) = run.uid().map(Uid::from) else { return };
        self.lock().runs.put(scope, Arc::clone(&uid), run);
        self.pipelines_touched.notify_one();
        self.touch(&uid);
    }

    fn remove(&self, run: PipelineRun) {
        let Some(uid) = run.uid().map(Uid::from) else { return };
        let mut inner = self.lock();
        inner.runs.objects.remove(&uid);
        inner.forget_empty(&(run.namespace(), Arc::clone(&uid)));
        drop(inner);
        self.touch(&uid);
    }

    fn end(&self, scope: &Scope) {
        let gone = self.lock().runs.end(scope);
        gone.iter().filter_map(|run| run.uid()).for_each(|uid| self.touch(&uid.into()));
    }
}

/// Whether the run refers to this Pipeline.
pub fn refers_to(run: &PipelineRun, pipeline: &Pipeline) -> bool {
    let reference = &run.spec.pipeline_ref;
    let namespace = reference.namespace.clone().or_else(|| run.namespace());
    reference.name == pipeline.name_any() && namespace == pipeline.namespace()
}

impl Follows<Pipeline> for World {
    fn begin(&self, scope: &Scope) {
        self.lock().pipelines.rounds.begin(scope);
    }

    fn put(&self, scope: &Scope, pipeline: Pipeline) {
        self.lock().pipelines.put(scope, key(&pipeline), pipeline.clone());
        self.pipelines_touched.notify_one();
        self.touch_runs_that(|run| refers_to(run, &pipeline));
    }

    fn remove(&self, pipeline: Pipeline) {
        self.lock().pipelines.objects.remove(&key(&pipeline));
    }

    fn end(&self, scope: &Scope) {
        self.lock().pipelines.end(scope);
    }
}

impl Follows<ReferenceGrant> for World {
    fn begin(&self, scope: &Scope) {
        self.lock().grants.rounds.begin(scope);
    }

    fn put(&self, scope: &Scope, grant: ReferenceGrant) {
        self.lock().grants.put(scope, key(&grant), grant);
        // Whom a grant concerns takes longer to find out than to ask.
        self.touch_runs_that(|_| true);
    }

    fn remove(&self, grant: ReferenceGrant) {
        self.lock().grants.objects.remove(&key(&grant));
        self.touch_runs_that(|_| true);
    }

    fn end(&self, scope: &Scope) {
        if !self.lock().grants.end(scope).is_empty() {
            self.touch_runs_that(|_| true);
        }
    }
}

impl Follows<Job> for World {
    fn begin(&self, scope: &Scope) {
        self.lock().jobs.rounds.begin(scope);
    }

    fn put(&self, scope: &Scope, job: Job) {
        let Some(uid) = run_uid(&job) else { return };
        self.lock().jobs.put(scope, (job.namespace(), Arc::clone(&uid)), job);
        self.touch(&uid);
    }

    fn remove(&self, job: Job) {
        let Some(uid) = run_uid(&job) else { return };
        self.lock().jobs.objects.remove(&(job.namespace(), Arc::clone(&uid)));
        self.touch(&uid);
    }

    fn end(&self, scope: &Scope) {
        let gone = self.lock().jobs.end(scope);
        gone.iter().filter_map(|job| run_uid(job.as_ref())).for_each(|uid| self.touch(&uid));
    }
}

impl Follows<Pod> for World {
    fn begin(&self, scope: &Scope) {
        self.lock().pod_rounds.begin(scope);
    }

    fn put(&self, scope: &Scope, pod: Pod) {
        let Some(uid) = run_uid(&pod) else { return };
        let mut inner = self.lock();
        let round = inner.pod_rounds.of(scope);
        let pods = &mut inner.pods.entry((pod.namespace(), Arc::clone(&uid))).or_default().present;
        let before = pods.get(&pod.name_any()).map(|(before, _)| Arc::clone(before));
        let now = WorkerPod::read(&pod, before.as_deref(), Instant::now());
        let news = before.as_deref() != Some(&now);
        pods.insert(now.name.clone(), (Arc::new(now), round));
        drop(inner);
        // Most changes of a pod (an address, a condition, a start time) mean nothing to us.
        if news {
            self.touch(&uid);
        }
    }

    fn remove(&self, pod: Pod) {
        let Some(uid) = run_uid(&pod) else { return };
        let mut inner = self.lock();
        let place = (pod.namespace(), Arc::clone(&uid));
        let Some(pods) = inner.pods.get_mut(&place) else { return };
        let before = pods.present.remove(&pod.name_any()).map(|(before, _)| before);
        // It may have ended and been deleted between two looks of ours: its last state still says how it ended.
        let last = WorkerPod::read(&pod, before.as_deref(), Instant::now());
        pods.gone.insert(last.name.clone(), Arc::new(last));
        inner.forget_empty(&place);
        drop(inner);
        self.touch(&uid);
    }

    fn end(&self, scope: &Scope) {
        let mut inner = self.lock();
        let round = inner.pod_rounds.of(scope);
        let mut touched = Vec::new();
        for ((namespace, uid), pods) in &mut inner.pods {
            if !in_scope(scope, namespace.as_deref()) {
                continue;
            }
            let old = pods.present.extract_if(.., |_, (_, seen)| *seen < round);
            let old: Vec<_> = old.map(|(name, (pod, _))| (name, pod)).collect();
            if !old.is_empty() {
                touched.push(Arc::clone(uid));
                pods.gone.extend(old);
            }
        }
        drop(inner);
        touched.iter().for_each(|uid| self.touch(uid));
    }
}

impl Inner {
    /// Pods of runs that are gone need nobody to look after their files.
    fn forget_empty(&mut self, place: &Place) {
        let (_, uid) = place;
        if !self.runs.objects.contains_key(uid)
            && self.pods.get(place).is_some_and(|pods| pods.present.is_empty())
        {
            self.pods.remove(place);
        }
    }
}

fn is_owned_by(job: &Job, uid: &Uid) -> bool {
    job.owner_references().iter().any(|owner| owner.uid == uid.as_ref())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(namespace: &str, name: &str) -> Pod {
        let labels = json!({RUN_UID_LABEL: format!("uid-{namespace}")});
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": namespace, "labels": labels}}))
            .unwrap()
    }

    fn run(namespace: &str) -> PipelineRun {
        let metadata = json!({"name": "r", "namespace": namespace, "uid": format!("uid-{namespace}")});
        let spec = json!({"pipelineRef": {"name": "p"}});
        let kind = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun"});
        let mut object = json!({"metadata": metadata, "spec": spec});
        object.as_object_mut().unwrap().extend(kind.as_object().unwrap().clone());
        serde_json::from_value(object).unwrap()
    }

    fn names(world: &World, uid: &str) -> Vec<String> {
        world.view(&uid.into()).unwrap().pods.iter().map(|pod| pod.name.clone()).collect()
    }

    #[test]
    fn what_a_restarted_watch_does_not_show_is_gone_but_only_in_its_own_namespace() {
        let (world, _touched) = World::new();
        let (a, b): (Scope, Scope) = (Some("a".into()), Some("b".into()));
        for scope in [&a, &b] {
            Follows::<Pod>::begin(world.as_ref(), scope);
            let namespace = scope.as_deref().unwrap();
            world.put(scope, run(namespace));
            world.put(scope, pod(namespace, "one"));
            world.put(scope, pod(namespace, "two"));
            Follows::<Pod>::end(world.as_ref(), scope);
        }
        Follows::<Pod>::begin(world.as_ref(), &a);
        Follows::<Pod>::begin(world.as_ref(), &b);
        world.put(&a, pod("a", "two"));
        Follows::<Pod>::end(world.as_ref(), &a);
        assert_eq!(names(&world, "uid-a"), ["two"]);
        assert_eq!(names(&world, "uid-b"), ["one", "two"], "the round of b is not over");
        assert_eq!(world.take_gone(&"uid-a".into()).into_keys().collect::<Vec<_>>(), ["one"]);
        assert!(world.take_gone(&"uid-a".into()).is_empty(), "taken once");
    }

    /// A label alone makes nothing a run's own.
    #[test]
    fn what_carries_a_runs_uid_in_another_namespace_is_not_its_own() {
        let (world, _touched) = World::new();
        world.put(&None, run("a"));
        let mut stranger = pod("b", "stranger");
        stranger.labels_mut().insert(RUN_UID_LABEL.to_owned(), "uid-a".to_owned());
        world.put(&None, stranger);
        let metadata = json!({"name": "j", "namespace": "a", "labels": {RUN_UID_LABEL: "uid-a"}});
        world.put(&None, serde_json::from_value::<Job>(json!({"metadata": metadata})).unwrap());
        let view = world.view(&"uid-a".into()).unwrap();
        assert!(view.pods.is_empty() && view.job.is_none());
    }

    /// Nothing waits for the next look of the clock.
    #[test]
    fn whatever_a_run_depends_on_touches_it_when_it_comes_and_when_it_goes() {
        let (world, mut touched) = World::new();
        world.put(&None, run("a"));
        world.put(&None, run("b"));
        let mut touches = |what: &str, wanted: &[&str]| {
            let mut found: Vec<Uid> = std::iter::from_fn(|| touched.try_recv().ok()).collect();
            found.sort();
            assert_eq!(found.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), wanted, "{what}");
        };
        touches("runs", &["uid-a", "uid-b"]);
        let pipeline = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "Pipeline",
            "metadata": {"name": "p", "namespace": "a"},
            "spec": {"source": {"bucket": {"name": "bkt"}}, "filters": []}});
        world.put(&None, serde_json::from_value::<Pipeline>(pipeline).unwrap());
        touches("a Pipeline", &["uid-a"]);
        let grant: ReferenceGrant = serde_json::from_value(json!({"apiVersion": "filter.plainsight.ai/v1alpha1",
            "kind": "ReferenceGrant", "metadata": {"name": "g", "namespace": "a"}, "spec": {"from": [], "to": []}}))
        .unwrap();
        world.put(&None, grant.clone());
        touches("a grant", &["uid-a", "uid-b"]);
        world.remove(grant);
        touches("a grant that is taken back", &["uid-a", "uid-b"]);
        let labels = json!({RUN_UID_LABEL: "uid-a"});
        let job = json!({"metadata": {"name": "j", "namespace": "a", "labels": labels}});
        let job: Job = serde_json::from_value(job).unwrap();
        world.put(&None, job.clone());
        touches("a Job", &["uid-a"]);
        world.remove(job);
        touches("a Job that is deleted", &["uid-a"]);
        world.remove(run("a"));
        touches("a run that is gone", &["uid-a"]);
    }

    #[test]
    fn only_changes_that_matter_touch_a_run() {
        let (world, mut touched) = World::new();
        world.put(&None, pod("a", "one"));
        assert!(touched.try_recv().is_ok());
        let mut same = pod("a", "one");
        same.metadata.resource_version = Some("2".to_owned());
        world.put(&None, same);
        assert!(touched.try_recv().is_err(), "nothing that matters has changed");
        world.remove(pod("a", "one"));
        assert!(touched.try_recv().is_ok());
    }
}
