//! The runs, indexed by what a change may concern: a Pipeline or a namespace. Without these indexes, every
//! Pipeline and every grant would cost a walk over all runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crds::v1alpha1::PipelineRun;
use follow::Listed;
use kube::ResourceExt;

use super::shelf::Shelf;
use super::{Key, Uid};
use crate::run::is_finished;

/// All runs.
#[derive(Default)]
pub struct Runs {
    objects: Shelf<Uid, PipelineRun>,
    /// Runs that have not ended, by the Pipeline that they refer to.
    active_by_pipeline: BTreeMap<Key, BTreeSet<Uid>>,
    /// Runs that have not ended, by their namespace.
    active_by_namespace: BTreeMap<String, BTreeSet<Uid>>,
    active: usize,
}

impl Runs {
    pub fn get(&self, uid: &Uid) -> Option<&Arc<PipelineRun>> {
        self.objects.get(uid)
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<PipelineRun>> {
        self.objects.all()
    }

    /// How many runs have not ended.
    pub fn active(&self) -> usize {
        self.active
    }

    /// Runs that have not ended and refer to this Pipeline.
    pub fn of_pipeline(&self, pipeline: &Key) -> impl Iterator<Item = &Uid> {
        self.active_by_pipeline.get(pipeline).into_iter().flatten()
    }

    /// Runs that have not ended and are in this namespace, or refer to a Pipeline in it.
    pub fn concerned_with(&self, namespace: &str) -> BTreeSet<Uid> {
        let of_pipelines = self.active_by_pipeline.range((namespace.to_owned(), String::new())..);
        let of_pipelines = of_pipelines.take_while(|((of, _), _)| of == namespace).map(|(_, runs)| runs);
        self.active_by_namespace.get(namespace).into_iter().chain(of_pipelines).flatten().cloned().collect()
    }

    pub fn put(&mut self, uid: &Uid, run: PipelineRun) {
        let (namespace, pipeline, ended) = (namespace(&run), pipeline_of(&run), is_finished(&run));
        if let Some(before) = self.objects.put(Arc::clone(uid), run) {
            self.forget(uid, &before);
        }
        if !ended {
            self.active += 1;
            self.active_by_pipeline.entry(pipeline).or_default().insert(Arc::clone(uid));
            self.active_by_namespace.entry(namespace).or_default().insert(Arc::clone(uid));
        }
    }

    pub fn remove(&mut self, uid: &Uid) {
        if let Some(before) = self.objects.remove(uid) {
            self.forget(uid, &before);
        }
    }

    /// Removes the runs that are gone; returns their UIDs.
    pub fn keep(&mut self, listed: &Listed) -> Vec<Uid> {
        let gone = self.objects.keep(listed);
        let gone = gone.iter().filter_map(|run| Some((Uid::from(run.uid()?), run)));
        gone.map(|(uid, run)| {
            self.forget(&uid, run);
            uid
        })
        .collect()
    }

    fn forget(&mut self, uid: &Uid, run: &PipelineRun) {
        if !is_finished(run) {
            self.active -= 1;
            forget(&mut self.active_by_pipeline, &pipeline_of(run), uid);
            forget(&mut self.active_by_namespace, &namespace(run), uid);
        }
    }
}

fn forget<I: Ord>(index: &mut BTreeMap<I, BTreeSet<Uid>>, id: &I, uid: &Uid) {
    if let Some(uids) = index.get_mut(id) {
        uids.remove(uid);
        if uids.is_empty() {
            index.remove(id);
        }
    }
}

fn namespace(run: &PipelineRun) -> String {
    run.namespace().unwrap_or_default()
}

/// The Pipeline that a run refers to.
pub fn pipeline_of(run: &PipelineRun) -> Key {
    let reference = &run.spec.pipeline_ref;
    (reference.namespace.clone().unwrap_or_else(|| namespace(run)), reference.name.clone())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ended, run_named};
    use super::*;

    fn uids<'a>(found: impl IntoIterator<Item = &'a Uid>) -> Vec<String> {
        found.into_iter().map(ToString::to_string).collect()
    }

    fn key(namespace: &str, name: &str) -> Key {
        (namespace.to_owned(), name.to_owned())
    }

    #[test]
    fn the_indexes_follow_a_run_that_changes_ends_and_goes() {
        let mut runs = Runs::default();
        let uid = Uid::from("uid-r");
        runs.put(&uid, run_named("a", "r", "p"));
        runs.put(&uid, run_named("a", "r", "q"));
        assert_eq!(runs.active(), 1, "counted once");
        assert!(uids(runs.of_pipeline(&key("a", "p"))).is_empty(), "it refers to another one now");
        assert_eq!(uids(runs.of_pipeline(&key("a", "q"))), ["uid-r"]);
        assert_eq!(uids(&runs.concerned_with("a")), ["uid-r"]);
        runs.put(&uid, ended(run_named("a", "r", "q")));
        assert_eq!((runs.active(), uids(&runs.concerned_with("a")).len()), (0, 0));
        assert!(runs.get(&uid).is_some(), "it is still known");
        runs.put(&uid, run_named("a", "r", "q"));
        runs.remove(&uid);
        assert_eq!(runs.active(), 0);
        assert!(runs.active_by_pipeline.is_empty() && runs.active_by_namespace.is_empty());
    }

    #[test]
    fn a_namespace_concerns_its_own_runs_and_those_of_its_pipelines() {
        let mut runs = Runs::default();
        let mut across = run_named("b", "across", "p");
        across.spec.pipeline_ref.namespace = Some("a".to_owned());
        runs.put(&"uid-across".into(), across);
        runs.put(&"uid-own".into(), run_named("a", "own", "p"));
        runs.put(&"uid-other".into(), run_named("c", "other", "p"));
        assert_eq!(uids(&runs.concerned_with("a")), ["uid-across", "uid-own"]);
        assert_eq!(uids(&runs.concerned_with("b")), ["uid-across"]);
    }
}
