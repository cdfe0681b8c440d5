//! The objects that the watches have shown so far: runs, Pipelines, grants, and the Job and pods of each run.
//! It decides nothing; it only determines which runs a change concerns.

mod pods;
mod runs;
mod shelf;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use follow::{Listed, Sink};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use tokio::sync::{Notify, mpsc};

use crate::names::RUN_UID_LABEL;
use crate::pods::WorkerPod;
use pods::RunPods;
use runs::Runs;
use shelf::Shelf;

pub use runs::pipeline_of;

/// The UID of a PipelineRun.
pub type Uid = Arc<str>;

/// The place of a run. An object with the run's UID in another namespace does not belong to the run.
type Place = (Option<String>, Uid);

/// Namespace and name.
pub type Key = (String, String);

/// All watched objects.
pub struct World {
    inner: Mutex<Inner>,
    touched: mpsc::UnboundedSender<Uid>,
    pipelines_touched: Notify,
}

#[derive(Default)]
struct Inner {
    runs: Runs,
    pipelines: Shelf<Key, Pipeline>,
    grants: Shelf<Key, ReferenceGrant>,
    jobs: Shelf<Place, Job>,
    pods: HashMap<Place, RunPods>,
    /// Namespaces of which not everything is known yet.
    unread: HashSet<String>,
}

/// A consistent view of one run.
pub struct View {
    /// The run.
    pub run: Arc<PipelineRun>,
    /// Its Job.
    pub job: Option<Arc<Job>>,
    /// Its pods, by name.
    pub pods: Vec<Arc<WorkerPod>>,
}

impl World {
    /// An empty world. The receiver gets the UID of every run to which something happened.
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Uid>) {
        let (touched, receiver) = mpsc::unbounded_channel();
        (Arc::new(Self { inner: Mutex::default(), touched, pipelines_touched: Notify::new() }), receiver)
    }

    /// Notes a namespace that is watched from now on.
    pub fn await_namespace(&self, namespace: &str) {
        self.lock().unread.insert(namespace.to_owned());
    }

    /// Notes that everything but the runs of a namespace is known.
    pub fn namespace_is_read(&self, namespace: &str) {
        self.lock().unread.remove(namespace);
    }

    /// Whether a namespace is watched, and nothing can be said about its grants yet.
    pub fn is_unread(&self, namespace: &str) -> bool {
        self.lock().unread.contains(namespace)
    }

    /// The run, with its Job and pods; `None` if the run is gone.
    pub fn view(&self, uid: &Uid) -> Option<View> {
        let inner = self.lock();
        let run = Arc::clone(inner.runs.get(uid)?);
        let place = (run.namespace(), Arc::clone(uid));
        let pods = inner.pods.get(&place).map(|pods| pods.present.values().map(Arc::clone).collect());
        let job = inner.jobs.get(&place).filter(|job| is_owned_by(job, uid)).map(Arc::clone);
        Some(View { run, job, pods: pods.unwrap_or_default() })
    }

    /// The namespace of a run; empty if the run is gone.
    pub fn namespace(&self, uid: &Uid) -> String {
        self.lock().runs.get(uid).and_then(|run| run.namespace()).unwrap_or_default()
    }

    /// The run's pods that were deleted since the last call, in their last state.
    pub fn take_gone(&self, uid: &Uid) -> BTreeMap<String, Arc<WorkerPod>> {
        let mut inner = self.lock();
        let namespace = inner.runs.get(uid).and_then(|run| run.namespace());
        let pods = inner.pods.get_mut(&(namespace, Arc::clone(uid)));
        pods.map(|pods| std::mem::take(&mut pods.gone)).unwrap_or_default()
    }

    /// A Pipeline, by namespace and name.
    pub fn pipeline(&self, namespace: &str, name: &str) -> Option<Arc<Pipeline>> {
        self.lock().pipelines.get(&(namespace.to_owned(), name.to_owned())).map(Arc::clone)
    }

    /// All Pipelines.
    pub fn pipelines(&self) -> Vec<Arc<Pipeline>> {
        self.lock().pipelines.all().map(Arc::clone).collect()
    }

    /// Waits for a change that may affect the status of a Pipeline.
    pub async fn pipelines_touched(&self) {
        self.pipelines_touched.notified().await;
    }

    /// The grants of some namespaces. No other grants can permit a reference to these namespaces.
    pub fn grants_in(&self, namespaces: &[String]) -> Vec<ReferenceGrant> {
        let inner = self.lock();
        let mut found = Vec::new();
        for namespace in namespaces.iter().collect::<BTreeSet<_>>() {
            let from_here = inner.grants.from((namespace.clone(), String::new()));
            let here = from_here.take_while(|((of, _), _)| of == namespace);
            found.extend(here.map(|(_, grant)| ReferenceGrant::clone(grant)));
        }
        found
    }

    /// All runs.
    pub fn runs(&self) -> Vec<Arc<PipelineRun>> {
        self.lock().runs.all().map(Arc::clone).collect()
    }

    /// How many runs have not ended.
    pub fn active_runs(&self) -> usize {
        self.lock().runs.active()
    }

    /// Announces a change to a run that no watch shows, such as progress of its listing.
    pub fn touch(&self, uid: &Uid) {
        // If the receiver is gone, the operator is ending.
        let _ = self.touched.send(Arc::clone(uid));
    }

    /// Touches the runs that a grant may concern: it permits references from objects of some namespaces,
    /// which are runs, or Pipelines that runs refer to.
    fn touch_runs_of<'a>(&self, grants: impl IntoIterator<Item = &'a ReferenceGrant>) {
        let from = grants.into_iter().flat_map(|grant| &grant.spec.from);
        let namespaces: BTreeSet<&str> = from.map(|from| from.namespace.as_str()).collect();
        let inner = self.lock();
        let runs: BTreeSet<Uid> =
            namespaces.into_iter().flat_map(|of| inner.runs.concerned_with(of)).collect();
        drop(inner);
        runs.iter().for_each(|uid| self.touch(uid));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Forgets the pods of a run that is gone, once none is present: no files are left to settle.
    fn forget_empty(&mut self, place: &Place) {
        let (_, uid) = place;
        if self.runs.get(uid).is_none() && self.pods.get(place).is_some_and(|pods| pods.present.is_empty()) {
            self.pods.remove(place);
        }
    }
}

fn key(object: &ObjectMeta) -> Key {
    (object.namespace.clone().unwrap_or_default(), object.name.clone().unwrap_or_default())
}

fn run_uid(object: &ObjectMeta) -> Option<Uid> {
    object.labels.as_ref()?.get(RUN_UID_LABEL).map(|uid| uid.as_str().into())
}

fn is_owned_by(job: &Job, uid: &Uid) -> bool {
    job.owner_references().iter().any(|owner| owner.uid == uid.as_ref())
}

impl Sink<PipelineRun> for World {
    fn put(&self, run: PipelineRun) {
        let Some(uid) = run.uid().map(Uid::from) else { return };
        self.lock().runs.put(&uid, run);
        self.pipelines_touched.notify_one();
        self.touch(&uid);
    }

    fn forget(&self, run: &ObjectMeta) {
        let Some(uid) = run.uid.as_deref().map(Uid::from) else { return };
        let mut inner = self.lock();
        inner.runs.remove(&uid);
        inner.forget_empty(&(run.namespace.clone(), Arc::clone(&uid)));
        drop(inner);
        self.touch(&uid);
    }

    fn listed(&self, listed: &Listed) {
        let gone = self.lock().runs.keep(listed);
        gone.iter().for_each(|uid| self.touch(uid));
    }
}

impl Sink<Pipeline> for World {
    fn put(&self, pipeline: Pipeline) {
        let key = key(&pipeline.metadata);
        let mut inner = self.lock();
        let runs: Vec<Uid> = inner.runs.of_pipeline(&key).cloned().collect();
        inner.pipelines.put(key, pipeline);
        drop(inner);
        self.pipelines_touched.notify_one();
        runs.iter().for_each(|uid| self.touch(uid));
    }

    fn forget(&self, pipeline: &ObjectMeta) {
        self.lock().pipelines.remove(&key(pipeline));
    }

    fn listed(&self, listed: &Listed) {
        self.lock().pipelines.keep(listed);
    }
}

impl Sink<ReferenceGrant> for World {
    fn put(&self, grant: ReferenceGrant) {
        let before = self.lock().grants.put(key(&grant.metadata), grant.clone());
        // Permissions that the grant no longer gives concern runs as well.
        self.touch_runs_of(before.as_deref().into_iter().chain([&grant]));
    }

    fn forget(&self, grant: &ObjectMeta) {
        let before = self.lock().grants.remove(&key(grant));
        self.touch_runs_of(before.as_deref());
    }

    fn listed(&self, listed: &Listed) {
        let gone = self.lock().grants.keep(listed);
        self.touch_runs_of(gone.iter().map(Arc::as_ref));
    }

    /// A grant that cannot be read permits nothing.
    fn unreadable(&self, grant: &ObjectMeta) {
        Sink::<ReferenceGrant>::forget(self, grant);
    }
}

impl Sink<Job> for World {
    fn put(&self, job: Job) {
        let Some(uid) = run_uid(&job.metadata) else { return };
        self.lock().jobs.put((job.namespace(), Arc::clone(&uid)), job);
        self.touch(&uid);
    }

    fn forget(&self, job: &ObjectMeta) {
        let Some(uid) = run_uid(job) else { return };
        self.lock().jobs.remove(&(job.namespace.clone(), Arc::clone(&uid)));
        self.touch(&uid);
    }

    fn listed(&self, listed: &Listed) {
        let gone = self.lock().jobs.keep(listed);
        gone.iter().filter_map(|job| run_uid(&job.metadata)).for_each(|uid| self.touch(&uid));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Resource;
    use serde_json::json;

    pub fn pod(namespace: &str, name: &str) -> Pod {
        let labels = json!({RUN_UID_LABEL: format!("uid-{namespace}")});
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": namespace, "labels": labels}}))
            .unwrap()
    }

    fn ours(kind: &str, metadata: serde_json::Value, spec: serde_json::Value) -> serde_json::Value {
        json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})
    }

    /// A run whose UID contains its name.
    pub fn run_named(namespace: &str, name: &str, pipeline: &str) -> PipelineRun {
        let metadata = json!({"name": name, "namespace": namespace, "uid": format!("uid-{name}")});
        let spec = json!({"pipelineRef": {"name": pipeline}});
        serde_json::from_value(ours("PipelineRun", metadata, spec)).unwrap()
    }

    /// The only run of a namespace.
    pub fn run(namespace: &str) -> PipelineRun {
        let mut run = run_named(namespace, "r", "p");
        run.metadata.uid = Some(format!("uid-{namespace}"));
        run
    }

    pub fn ended(mut run: PipelineRun) -> PipelineRun {
        let status = json!({"phase": "Succeeded", "completionTime": "2026-01-01T00:00:00Z"});
        run.status = serde_json::from_value(status).unwrap();
        run
    }

    fn pipeline(namespace: &str, name: &str) -> Pipeline {
        let spec = json!({"source": {"bucket": {"name": "bkt"}}, "filters": []});
        serde_json::from_value(ours("Pipeline", json!({"name": name, "namespace": namespace}), spec)).unwrap()
    }

    fn grant(namespace: &str, name: &str, from: &[&str]) -> ReferenceGrant {
        let from: Vec<_> =
            from.iter().map(|from| json!({"kind": "PipelineRun", "namespace": from})).collect();
        let metadata = json!({"name": name, "namespace": namespace});
        serde_json::from_value(ours("ReferenceGrant", metadata, json!({"from": from, "to": []}))).unwrap()
    }

    pub fn names(world: &World, uid: &str) -> Vec<String> {
        world.view(&uid.into()).unwrap().pods.iter().map(|pod| pod.name.clone()).collect()
    }

    fn drain(touched: &mut mpsc::UnboundedReceiver<Uid>) -> Vec<String> {
        let mut found: Vec<String> =
            std::iter::from_fn(|| touched.try_recv().ok()).map(|uid| uid.to_string()).collect();
        found.sort();
        found
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
        assert_eq!(world.active_runs(), 1);
    }

    #[test]
    fn a_pod_whose_last_state_cannot_be_read_is_gone_all_the_same() {
        let (world, _touched) = World::new();
        world.put(run("a"));
        world.put(pod("a", "one"));
        world.put(pod("a", "two"));
        Sink::<Pod>::forget(world.as_ref(), pod("a", "one").meta());
        assert_eq!(names(&world, "uid-a"), ["two"]);
        assert_eq!(world.take_gone(&"uid-a".into()).into_keys().collect::<Vec<_>>(), ["one"]);
    }

    /// A label alone does not make an object part of a run.
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

    #[test]
    fn whatever_a_run_depends_on_touches_it_when_it_comes_and_when_it_goes() {
        let (world, mut touched) = World::new();
        world.put(run("a"));
        world.put(run("b"));
        let mut touches = |what: &str, wanted: &[&str]| assert_eq!(drain(&mut touched), wanted, "{what}");
        touches("runs", &["uid-a", "uid-b"]);
        world.put(pipeline("a", "p"));
        touches("a Pipeline", &["uid-a"]);
        world.put(grant("c", "g", &["a", "b"]));
        touches("a grant", &["uid-a", "uid-b"]);
        world.put(grant("c", "g", &["b"]));
        touches("a grant that permits less", &["uid-a", "uid-b"]);
        world.remove(grant("c", "g", &["b"]));
        touches("a grant that is taken back", &["uid-b"]);
        world.put(grant("c", "g", &["a"]));
        touches("a grant that is given again", &["uid-a"]);
        Sink::<ReferenceGrant>::unreadable(world.as_ref(), grant("c", "g", &["a"]).meta());
        touches("a grant that cannot be read any more", &["uid-a"]);
        assert!(world.grants_in(&["c".to_owned()]).is_empty(), "it permits nothing");
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

    /// Each Pipeline has its own run, and each has a grant: walking over all runs for every object would
    /// cause a hundred million touches.
    #[test]
    fn ten_thousand_pipelines_and_grants_touch_only_the_runs_that_they_concern() {
        const MANY: usize = 10_000;
        let (world, mut touched) = World::new();
        for i in 0..MANY {
            world.put(run_named(&format!("n{i}"), &format!("r{i}"), "p"));
            world.put(ended(run_named(&format!("n{i}"), &format!("old{i}"), "p")));
        }
        drain(&mut touched);
        for i in 0..MANY {
            world.put(pipeline(&format!("n{i}"), "p"));
        }
        assert_eq!(drain(&mut touched).len(), MANY, "runs that have ended depend on nothing");
        for i in 0..MANY {
            world.put(grant("shared", &format!("g{i}"), &[&format!("n{i}")]));
        }
        assert_eq!(drain(&mut touched).len(), MANY);
        assert_eq!(world.active_runs(), MANY);
    }

    #[test]
    fn grants_are_found_by_their_namespace() {
        let (world, _touched) = World::new();
        for (namespace, name) in [("a", "1"), ("aa", "2"), ("b", "3"), ("b", "4"), ("c", "5")] {
            world.put(grant(namespace, name, &[]));
        }
        let found = |namespaces: &[&str]| {
            let namespaces: Vec<String> = namespaces.iter().map(ToString::to_string).collect();
            world.grants_in(&namespaces).iter().map(ResourceExt::name_any).collect::<Vec<_>>()
        };
        assert_eq!(found(&["b", "a", "b"]), ["1", "3", "4"]);
        assert!(found(&["0", "d"]).is_empty());
    }
}
