//! The webhook's view of the cluster: policies, Pipelines, runs, grants and namespaces, kept up to date by
//! watches. Every replica has its own view and never asks another replica.
//!
//! This file contains no client: `watch.rs` fills the view, tests fill it directly, and requests read it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use crds::policy::{Policy, PolicySet, Usage};
use crds::v1alpha1::{Phase, Pipeline, PipelineReference, PipelineRun, ReferenceGrant};
use protocol::RunId;
use serde::Deserialize;
use serde_json::Value;

/// How long a runId stays reserved for a run that was just admitted, until the watch shows the run: much
/// longer than a watch lags, and short enough that a create that fails after admission does not matter.
const RESERVED: Duration = Duration::from_secs(10);

/// Namespace and name.
pub type Key = (String, String);

/// The known state of the cluster.
#[derive(Debug, Default)]
pub struct World {
    index: RwLock<Index>,
    reserved: Mutex<Reservations>,
}

/// Reservations by runId.
#[derive(Debug, Default)]
struct Reservations {
    of: HashMap<String, Reservation>,
    /// How many reservations were ever made.
    made: u64,
}

/// The runId of a run that was admitted but that the watch has not shown yet.
#[derive(Debug)]
struct Reservation {
    holder: Key,
    /// Reservations with lower numbers came first.
    number: u64,
    parallelism: i64,
    since: Instant,
}

/// The objects, indexed by what requests ask about them.
#[derive(Debug, Default)]
pub struct Index {
    /// Compiled policies. They are shared, so that a request keeps the set that it started with.
    pub policies: Arc<PolicySet>,
    /// Pipelines, typed for the rules and as JSON for the policies.
    pub pipelines: HashMap<Key, Arc<KnownPipeline>>,
    /// Runs, in the order of their namespaces.
    pub runs: BTreeMap<Key, KnownRun>,
    run_ids: HashMap<String, BTreeSet<Key>>,
    /// Runs that are not finished, by the Pipeline that they refer to.
    active_of: HashMap<Key, BTreeSet<Key>>,
    /// Grants.
    pub grants: BTreeMap<Key, ReferenceGrant>,
    /// Namespaces.
    pub namespaces: HashMap<String, Arc<KnownNamespace>>,
}

/// A Pipeline.
#[derive(Debug)]
pub struct KnownPipeline {
    /// For the rules.
    pub typed: Pipeline,
    /// For the policies.
    pub json: Value,
}

/// The part of a run that is remembered: a cluster may have many thousands of runs.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownRun {
    /// The runId; `None` if the queue keys are malformed.
    pub run_id: Option<String>,
    /// The Pipeline that the run refers to.
    pub pipeline: PipelineReference,
    /// The number of pods that the run uses at once.
    pub parallelism: i64,
    /// Whether the run has ended.
    pub finished: bool,
}

/// A namespace.
#[derive(Debug, Default)]
pub struct KnownNamespace {
    /// Its labels, for selectors.
    pub labels: BTreeMap<String, String>,
    /// Its metadata, for expressions.
    pub json: Value,
}

impl World {
    /// Locks the index for reading. Hold it only briefly, and never over an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Index> {
        // A panic during a write leaves each entry as it was, so the index stays usable.
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the index for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current policies.
    pub fn policies(&self) -> Arc<PolicySet> {
        Arc::clone(&self.read().policies)
    }

    /// A namespace; `None` if the watch has not brought it yet.
    pub fn namespace(&self, name: &str) -> Option<Arc<KnownNamespace>> {
        self.read().namespaces.get(name).map(Arc::clone)
    }

    /// Another run that has this runId, if any. A real create reserves the id for the asker, so that if this
    /// replica answers two requests before the watch shows either run, only one is admitted. Between replicas
    /// the operator decides, with an atomic guard in the queue.
    pub fn taken(&self, run_id: &RunId, asker: &Key, reserve: Option<&PipelineRun>) -> Option<Key> {
        let stored = self
            .read()
            .run_ids
            .get(run_id.as_str())
            .and_then(|keys| keys.iter().find(|key| *key != asker).cloned());
        if stored.is_some() {
            return stored;
        }
        let mut reserved = self.reserved();
        reserved.of.retain(|_, reservation| reservation.since.elapsed() < RESERVED);
        match reserved.of.get(run_id.as_str()) {
            Some(Reservation { holder, .. }) if holder != asker => Some(holder.clone()),
            own => {
                // A run that asks again keeps its turn, because others may have counted it already.
                let turn = own.map(|own| own.number);
                if let Some(run) = reserve {
                    reserved.made += 1;
                    let (number, parallelism) = (turn.unwrap_or(reserved.made), parallelism(run));
                    let reservation =
                        Reservation { holder: asker.clone(), number, parallelism, since: Instant::now() };
                    reserved.of.insert(run_id.as_str().to_owned(), reservation);
                }
                None
            }
        }
    }

    /// Releases the reservation of a run that was not admitted after all.
    pub fn give_back(&self, asker: &Key) {
        self.reserved().of.retain(|_, reservation| reservation.holder != *asker);
    }

    fn reserved(&self) -> MutexGuard<'_, Reservations> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The usage of the other unfinished runs in the run's namespace: the known ones, and those that this
    /// replica has just admitted. Runs that other replicas admit at the same moment are not included.
    ///
    /// Among concurrent requests, the later counts the earlier: if each counted all others, none would be
    /// admitted where there is room for one.
    pub fn usage_of_others(&self, asker: &Key) -> Usage {
        let (namespace, name) = asker;
        let mut usage = Usage::default();
        let mut add = |parallelism: i64| {
            usage.active_runs += 1;
            usage.parallelism = usage.parallelism.saturating_add(parallelism);
        };
        let reserved = self.reserved();
        let index = self.read();
        // For an update of a stored run, all others count.
        let creating = !index.runs.contains_key(asker);
        let own = reserved.of.values().find(|reservation| creating && reservation.holder == *asker);
        let turn = own.map_or(u64::MAX, |own| own.number);
        let other = |key: &Key| key.0 == *namespace && key.1 != *name;
        index
            .runs_in(namespace)
            .filter(|(key, run)| other(key) && !run.finished)
            .for_each(|(_, run)| add(run.parallelism));
        for Reservation { holder, number, parallelism, since } in reserved.of.values() {
            let counts = other(holder) && *number < turn && since.elapsed() < RESERVED;
            if counts && !index.runs.contains_key(holder) {
                add(*parallelism);
            }
        }
        usage
    }
}

impl Index {
    /// Enforces a compiled policy.
    pub fn set_policy(&mut self, policy: impl Into<Arc<Policy>>) {
        Arc::make_mut(&mut self.policies).insert(policy.into());
    }

    /// Adds or updates a run.
    pub fn set_run(&mut self, run: &PipelineRun) {
        let (namespace, name) = (run.metadata.namespace.clone(), run.metadata.name.clone());
        let key = (namespace.unwrap_or_default(), name.unwrap_or_default());
        let known = KnownRun::new(run, &key);
        self.remove_run(&key);
        if let Some(run_id) = &known.run_id {
            self.run_ids.entry(run_id.clone()).or_default().insert(key.clone());
        }
        if !known.finished {
            self.active_of.entry(known.pipeline_key(&key)).or_default().insert(key.clone());
        }
        self.runs.insert(key, known);
    }

    /// Removes a run.
    pub fn remove_run(&mut self, key: &Key) {
        let Some(run) = self.runs.remove(key) else { return };
        forget(&mut self.active_of, &run.pipeline_key(key), key);
        if let Some(run_id) = &run.run_id {
            forget(&mut self.run_ids, run_id, key);
        }
    }

    fn runs_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = (&'a Key, &'a KnownRun)> {
        let here = self.runs.range((namespace.to_owned(), String::new())..);
        here.take_while(move |((of, _), _)| of == namespace)
    }

    /// The grants in a namespace.
    pub fn grants_in(&self, namespace: &str) -> Vec<ReferenceGrant> {
        let here = self.grants.range((namespace.to_owned(), String::new())..);
        here.take_while(|((of, _), _)| of == namespace).map(|(_, grant)| grant.clone()).collect()
    }

    /// Unfinished runs that refer to this Pipeline.
    pub fn active_runs(&self, pipeline: &Key) -> impl Iterator<Item = &Key> {
        self.active_of.get(pipeline).into_iter().flatten()
    }
}

/// Removes a run from an index.
fn forget<I: Eq + Hash>(index: &mut HashMap<I, BTreeSet<Key>>, id: &I, run: &Key) {
    if let Some(runs) = index.get_mut(id) {
        runs.remove(run);
        if runs.is_empty() {
            index.remove(id);
        }
    }
}

impl KnownPipeline {
    /// Reads a stored Pipeline; `None` if it does not fit its type.
    pub fn read(mut json: Value) -> Option<Self> {
        let typed = Pipeline::deserialize(&json).ok()?;
        // About half of a stored object is the record of which manager owns which field.
        if let Some(metadata) = json.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        Some(Self { typed, json })
    }
}

impl KnownRun {
    fn new(run: &PipelineRun, key: &Key) -> Self {
        let phase = run.status.as_ref().and_then(|status| status.phase);
        Self {
            run_id: run.spec.run_id(&key.0, &key.1).ok().map(|id| id.as_str().to_owned()),
            pipeline: run.spec.pipeline_ref.clone(),
            parallelism: parallelism(run),
            finished: matches!(phase, Some(Phase::Succeeded | Phase::Failed)),
        }
    }

    /// The Pipeline that the run refers to.
    fn pipeline_key(&self, own: &Key) -> Key {
        (self.pipeline.namespace.clone().unwrap_or_else(|| own.0.clone()), self.pipeline.name.clone())
    }
}

fn parallelism(run: &PipelineRun) -> i64 {
    i64::from(run.spec.execution.parallelism)
}

impl KnownNamespace {
    /// A namespace with these labels.
    pub fn new(name: &str, labels: BTreeMap<String, String>, annotations: BTreeMap<String, String>) -> Self {
        let json = serde_json::json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": name, "labels": labels, "annotations": annotations }
        });
        Self { labels, json }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(name: &str, stream: Option<&str>, phase: &str) -> PipelineRun {
        let queue =
            stream.map(|id| json!({ "stream": format!("pr:{id}:work"), "group": format!("cg:{id}") }));
        serde_json::from_value(json!({
            "metadata": { "namespace": "team-a", "name": name },
            "spec": { "pipelineRef": { "name": "p" }, "queue": queue }, "status": { "phase": phase }
        }))
        .unwrap()
    }

    fn key(name: &str) -> Key {
        ("team-a".into(), name.into())
    }

    #[test]
    fn a_run_id_belongs_to_the_first_run_that_has_it() {
        let world = World::default();
        world.write().set_run(&run("monday", None, "Running"));
        let id: RunId = "team-a.monday".parse().unwrap();
        let asking = run("other", None, "Pending");
        assert_eq!(world.taken(&id, &key("monday"), Some(&asking)), None);
        assert_eq!(world.taken(&id, &key("other"), Some(&asking)), Some(key("monday")));
        world.write().remove_run(&key("monday"));
        assert_eq!(world.read().run_ids.len(), 0);
    }

    #[test]
    fn a_run_id_is_reserved_until_the_watch_shows_the_run_and_a_dry_run_reserves_nothing() {
        let world = World::default();
        let id: RunId = "x".parse().unwrap();
        let asking = run("b", None, "Pending");
        assert_eq!(world.taken(&id, &key("a"), None), None);
        assert_eq!(world.taken(&id, &key("b"), Some(&asking)), None);
        assert_eq!(world.taken(&id, &key("b"), Some(&asking)), None);
        assert_eq!(world.taken(&id, &key("a"), Some(&asking)), Some(key("b")));
        world.give_back(&key("b"));
        assert_eq!(world.taken(&id, &key("a"), Some(&asking)), None);
    }

    #[test]
    fn a_run_that_changes_its_id_gives_the_old_one_back() {
        let world = World::default();
        world.write().set_run(&run("monday", Some("one"), "Running"));
        world.write().set_run(&run("monday", Some("two"), "Running"));
        assert_eq!(world.taken(&"one".parse().unwrap(), &key("other"), None), None);
        assert_eq!(world.taken(&"two".parse().unwrap(), &key("other"), None), Some(key("monday")));
    }

    #[test]
    fn usage_counts_other_active_runs_of_the_namespace_and_those_just_admitted() {
        let world = World::default();
        world.write().set_run(&run("a", None, "Running"));
        world.write().set_run(&run("b", None, "Succeeded"));
        world.taken(&"c".parse().unwrap(), &key("c"), Some(&run("c", None, "Pending")));
        world.taken(&"x".parse().unwrap(), &("team-b".into(), "x".into()), Some(&run("x", None, "Pending")));
        let default = i64::from(crds::v1alpha1::Execution::default().parallelism);
        let usage = |name: &str| world.usage_of_others(&key(name));
        assert_eq!(usage("new"), Usage { active_runs: 2, parallelism: 2 * default });
        assert_eq!(usage("a"), Usage { active_runs: 1, parallelism: default }, "a run is no other of itself");
        world.write().set_run(&run("c", None, "Running"));
        assert_eq!(usage("new").active_runs, 2, "one that the watch has shown is counted once");
    }

    #[test]
    fn of_runs_that_are_asked_about_at_once_the_later_counts_the_earlier() {
        let world = World::default();
        for name in ["first", "second", "third"] {
            let id = format!("team-a.{name}").parse().unwrap();
            assert_eq!(world.taken(&id, &key(name), Some(&run(name, None, "Pending"))), None);
        }
        let counted = |name: &str| world.usage_of_others(&key(name)).active_runs;
        assert_eq!(["first", "second", "third", "dry-run"].map(counted), [0, 1, 2, 3]);
        let first = "team-a.first".parse().unwrap();
        assert_eq!(world.taken(&first, &key("first"), Some(&run("first", None, "Pending"))), None);
        assert_eq!((counted("first"), counted("second")), (0, 1), "who asks again keeps his turn");
        world.give_back(&key("first"));
        assert_eq!(counted("third"), 1);
        world.write().set_run(&run("second", None, "Running"));
        assert_eq!(counted("second"), 1, "one that is changed counts all others");
    }

    #[test]
    fn finished_runs_are_not_active() {
        let mut index = Index::default();
        index.set_run(&run("a", None, "Running"));
        index.set_run(&run("b", None, "Succeeded"));
        index.set_run(&run("c", None, "Failed"));
        assert_eq!(index.active_runs(&key("p")).collect::<Vec<_>>(), [&key("a")]);
        assert_eq!(index.active_runs(&key("q")).count(), 0);
        index.set_run(&run("a", None, "Succeeded"));
        assert!(index.active_of.is_empty(), "what is empty is not kept");
    }

    #[test]
    fn a_request_reads_the_runs_of_its_namespace_only() {
        let mut index = Index::default();
        for (namespace, name) in [("team", "x"), ("team-a", "x"), ("team-a", "y"), ("team-b", "x")] {
            let mut run = run(name, None, "Running");
            run.metadata.namespace = Some(namespace.to_owned());
            index.set_run(&run);
        }
        let read: Vec<&Key> = index.runs_in("team-a").map(|(key, _)| key).collect();
        assert_eq!(read, [&key("x"), &key("y")]);
    }
}
