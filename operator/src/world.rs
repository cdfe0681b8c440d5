//! What the watches have shown so far: runs, Pipelines, grants, and the Job and pods of each run. It decides nothing; it
//! only says which runs a change concerns.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use follow::{Listed, Sink};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use tokio::sync::{Notify, mpsc};

use crate::names::RUN_UID_LABEL;
use crate::pods::WorkerPod;

/// The UID of a PipelineRun.
pub type Uid = Arc<str>;

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
}

#[derive(Default)]
struct RunPods {
    present: BTreeMap<String, Arc<WorkerPod>>,
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
        let pods = inner.pods.get(&place).map(|pods| pods.present.values().map(Arc::clone).collect());
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

/// Objects of one kind.
struct Shelf<I, K> {
    objects: HashMap<I, Arc<K>>,
}

impl<I, K> Default for Shelf<I, K> {
    fn default() -> Self {
        Self { objects: HashMap::new() }
    }
}

impl<I: Eq + Hash + Clone, K: Resource> Shelf<I, K> {
    fn get(&self, id: &I) -> Option<Arc<K>> {
        self.objects.get(id).map(Arc::clone)
    }

    fn all(&self) -> Vec<Arc<K>> {
        self.objects.values().map(Arc::clone).collect()
    }

    fn put(&mut self, id: I, mut object: K) {
        // Nobody reads them, and they are half of most objects.
        object.meta_mut().managed_fields = None;
        self.objects.insert(id, Arc::new(object));
    }

    /// Removes what is gone; returns it.
    fn keep(&mut self, listed: &Listed) -> Vec<Arc<K>> {
        self.objects.extract_if(|_, object| listed.lacks(object.meta())).map(|(_, object)| object).collect()
    }
}

fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn run_uid<K: ResourceExt>(object: &K) -> Option<Uid> {
    object.labels().get(RUN_UID_LABEL).map(|uid| uid.as_str().into())
}

impl Sink<PipelineRun> for World {
    fn put(&self, run: PipelineRun) {
        let Some(uid) = run.uid().map(Uid::from) else { return };
        self.lock().runs.put(Arc::clone(&uid), run);
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

    fn listed(&self, listed: &Listed) {
        let gone = self.lock().runs.keep(listed);
        gone.iter().filter_map(|run| run.uid()).for_each(|uid| self.touch(&uid.into()));
    }
}

/// Whether the run refers to this Pipeline.
pub fn refers_to(run: &PipelineRun, pipeline: &Pipeline) -> bool {
    let reference = &run.spec.pipeline_ref;
    let namespace = reference.namespace.clone().or_else(|| run.namespace());
    reference.name == pipeline.name_any() && namespace == pipeline.namespace()
}

impl Sink<Pipeline> for World {
    fn put(&self, pipeline: Pipeline) {
        self.lock().pipelines.put(key(&pipeline), pipeline.clone());
        self.pipelines_touched.notify_one();
        self.touch_runs_that(|run| refers_to(run, &pipeline));
    }

    fn remove(&self, pipeline: Pipeline) {
        self.lock().pipelines.objects.remove(&key(&pipeline));
    }

    fn listed(&self, listed: &Listed) {
        self.lock().pipelines.keep(listed);
    }
}

impl Sink<ReferenceGrant> for World {
    fn put(&self, grant: ReferenceGrant) {
        self.lock().grants.put(key(&grant), grant);
        // Whom a grant concerns takes longer to find out than to ask.
        self.touch_runs_that(|_| true);
    }

    fn remove(&self, grant: ReferenceGrant) {
        self.lock().grants.objects.remove(&key(&grant));
        self.touch_runs_that(|_| true);
    }

    fn listed(&self, listed: &Listed) {
        if !self.lock().grants.keep(listed).is_empty() {
            self.touch_runs_that(|_| true);
        }
    }
}

impl Sink<Job> for World {
    fn put(&self, job: Job) {
        let Some(uid) = run_uid(&job) else { return };
        self.lock().jobs.put((job.namespace(), Arc::clone(&uid)), job);
        self.touch(&uid);
    }

    fn remove(&self, job: Job) {
        let Some(uid) = run_uid(&job) else { return };
        self.lock().jobs.objects.remove(&(job.namespace(), Arc::clone(&uid)));
        self.touch(&uid);
    }

    fn listed(&self, listed: &Listed) {
        let gone = self.lock().jobs.keep(listed);
        gone.iter().filter_map(|job| run_uid(job.as_ref())).for_each(|uid| self.touch(&uid));
    }
}

impl Sink<Pod> for World {
    fn put(&self, pod: Pod) {
        let Some(uid) = run_uid(&pod) else { return };
        let mut inner = self.lock();
        let pods = &mut inner.pods.entry((pod.namespace(), Arc::clone(&uid))).or_default().present;
        let before = pods.get(&pod.name_any()).map(Arc::clone);
        let now = WorkerPod::read(&pod, before.as_deref(), Instant::now());
        let news = before.as_deref() != Some(&now);
        pods.insert(now.name.clone(), Arc::new(now));
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
        let before = pods.present.remove(&pod.name_any());
        // It may have ended and been deleted between two looks of ours: its last state still says how it ended.
        let last = WorkerPod::read(&pod, before.as_deref(), Instant::now());
        pods.gone.insert(last.name.clone(), Arc::new(last));
        inner.forget_empty(&place);
        drop(inner);
        self.touch(&uid);
    }

    fn listed(&self, listed: &Listed) {
        let mut inner = self.lock();
        let mut touched = Vec::new();
        for ((namespace, uid), pods) in &mut inner.pods {
            let old = pods.present.extract_if(.., |name, _| listed.lacks_name(namespace.as_ref(), name));
            let old: Vec<_> = old.collect();
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
        for namespace in ["a", "b"] {
            world.put(run(namespace));
            world.put(pod(namespace, "one"));
            world.put(pod(namespace, "two"));
        }
        let mut listed = Listed::new(Some("a".to_owned()));
        listed.add(pod("a", "two").meta());
        Sink::<Pod>::listed(world.as_ref(), &listed);
        assert_eq!(names(&world, "uid-a"), ["two"]);
        assert_eq!(names(&world, "uid-b"), ["one", "two"], "another watch shows those");
        assert_eq!(world.take_gone(&"uid-a".into()).into_keys().collect::<Vec<_>>(), ["one"]);
        assert!(world.take_gone(&"uid-a".into()).is_empty(), "taken once");
    }

    #[test]
    fn a_run_that_was_deleted_and_created_again_meanwhile_is_another() {
        let (world, _touched) = World::new();
        world.put(run("a"));
        let mut again = run("a");
        again.metadata.uid = Some("uid-2".to_owned());
        let mut listed = Listed::new(None);
        listed.add(again.meta());
        world.put(again);
        Sink::<PipelineRun>::listed(world.as_ref(), &listed);
        assert!(world.view(&"uid-a".into()).is_none() && world.view(&"uid-2".into()).is_some());
    }

    /// A label alone makes nothing a run's own.
    #[test]
    fn what_carries_a_runs_uid_in_another_namespace_is_not_its_own() {
        let (world, _touched) = World::new();
        world.put(run("a"));
        let mut stranger = pod("b", "stranger");
        stranger.labels_mut().insert(RUN_UID_LABEL.to_owned(), "uid-a".to_owned());
        world.put(stranger);
        let metadata = json!({"name": "j", "namespace": "a", "labels": {RUN_UID_LABEL: "uid-a"}});
        world.put(serde_json::from_value::<Job>(json!({"metadata": metadata})).unwrap());
        let view = world.view(&"uid-a".into()).unwrap();
        assert!(view.pods.is_empty() && view.job.is_none());
    }

    /// Nothing waits for the next look of the clock.
    #[test]
    fn whatever_a_run_depends_on_touches_it_when_it_comes_and_when_it_goes() {
        let (world, mut touched) = World::new();
        world.put(run("a"));
        world.put(run("b"));
        let mut touches = |what: &str, wanted: &[&str]| {
            let mut found: Vec<Uid> = std::iter::from_fn(|| touched.try_recv().ok()).collect();
            found.sort();
            assert_eq!(found.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), wanted, "{what}");
        };
        touches("runs", &["uid-a", "uid-b"]);
        let pipeline = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "Pipeline",
            "metadata": {"name": "p", "namespace": "a"},
            "spec": {"source": {"bucket": {"name": "bkt"}}, "filters": []}});
        world.put(serde_json::from_value::<Pipeline>(pipeline).unwrap());
        touches("a Pipeline", &["uid-a"]);
        let grant: ReferenceGrant = serde_json::from_value(json!({"apiVersion": "filter.plainsight.ai/v1alpha1",
            "kind": "ReferenceGrant", "metadata": {"name": "g", "namespace": "a"}, "spec": {"from": [], "to": []}}))
        .unwrap();
        world.put(grant.clone());
        touches("a grant", &["uid-a", "uid-b"]);
        world.remove(grant);
        touches("a grant that is taken back", &["uid-a", "uid-b"]);
        let labels = json!({RUN_UID_LABEL: "uid-a"});
        let job = json!({"metadata": {"name": "j", "namespace": "a", "labels": labels}});
        let job: Job = serde_json::from_value(job).unwrap();
        world.put(job.clone());
        touches("a Job", &["uid-a"]);
        world.remove(job);
        touches("a Job that is deleted", &["uid-a"]);
        world.remove(run("a"));
        touches("a run that is gone", &["uid-a"]);
    }

    #[test]
    fn only_changes_that_matter_touch_a_run() {
        let (world, mut touched) = World::new();
        world.put(pod("a", "one"));
        assert!(touched.try_recv().is_ok());
        let mut same = pod("a", "one");
        same.metadata.resource_version = Some("2".to_owned());
        world.put(same);
        assert!(touched.try_recv().is_err(), "nothing that matters has changed");
        world.remove(pod("a", "one"));
        assert!(touched.try_recv().is_ok());
    }
}
