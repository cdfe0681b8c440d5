//! The pods of each run: the existing ones, and deleted ones whose files are not settled yet.
//!
//! Existing pods are known from the watch and from lists that were taken for other purposes. A list may be
//! ahead of the watch or behind it: resource versions, which grow with every write, tell which.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use follow::{Listed, Sink, version};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::api::ObjectList;

use super::{Uid, World, run_uid};
use crate::pods::WorkerPod;

/// The pods of one run.
#[derive(Default)]
pub struct RunPods {
    pub present: BTreeMap<String, Arc<WorkerPod>>,
    /// Deleted pods, in their last state, until their files are settled.
    pub gone: BTreeMap<String, Arc<WorkerPod>>,
    /// The newest version that the watch has shown. The watch is in order, so it has also shown everything
    /// older.
    watched: u64,
    /// The version of the newest list that was absorbed. Older versions from the watch are out of date.
    absorbed: u64,
    /// When that list was absorbed.
    absorbed_at: Option<Instant>,
}

impl RunPods {
    /// Stores a pod; returns whether anything relevant has changed.
    fn put(&mut self, pod: &Pod) -> bool {
        let before = self.present.get(&pod.name_any()).map(Arc::clone);
        let now = WorkerPod::read(pod, before.as_deref(), Instant::now());
        let news = now.is_news(before.as_deref());
        self.present.insert(now.name.clone(), Arc::new(now));
        news
    }

    fn show(&mut self, pod: &Pod) -> bool {
        let shown = version(&pod.metadata);
        self.watched = self.watched.max(shown.unwrap_or_default());
        if shown.is_some_and(|shown| shown < self.absorbed) {
            return false;
        }
        self.put(pod)
    }

    fn remove(&mut self, pod: &Pod) {
        let deleted = version(&pod.metadata);
        self.watched = self.watched.max(deleted.unwrap_or_default());
        let name = pod.name_any();
        if deleted.is_some_and(|deleted| deleted < self.absorbed) && self.present.contains_key(&name) {
            // The list was newer, so this pod is a later one of the same name.
            return;
        }
        let before = self.present.remove(&name).or_else(|| self.gone.get(&name).map(Arc::clone));
        // A pod may end and be deleted between two events: its last state still shows how it ended.
        let last = WorkerPod::read(pod, before.as_deref(), Instant::now());
        self.gone.insert(name, Arc::new(last));
    }

    /// Moves lost pods to the gone ones; returns whether there were any.
    fn lose(&mut self, is_lost: impl Fn(&str) -> bool) -> bool {
        let lost: Vec<_> = self.present.extract_if(.., |name, _| is_lost(name)).collect();
        let any = !lost.is_empty();
        self.gone.extend(lost);
        any
    }

    /// Takes a list of all pods of the run as the current state, unless the watch has already shown something
    /// newer.
    fn absorb(&mut self, list: &ObjectList<Pod>) -> bool {
        let complete = list.metadata.continue_.as_deref().is_none_or(str::is_empty);
        let taken = list.metadata.resource_version.as_deref().and_then(|version| version.parse().ok());
        let Some(taken) = taken.filter(|taken| complete && *taken > self.watched.max(self.absorbed)) else {
            return false;
        };
        self.absorbed = taken;
        self.absorbed_at = Some(Instant::now());
        let names: HashSet<String> = list.items.iter().map(ResourceExt::name_any).collect();
        let lost = self.lose(|name| !names.contains(name));
        // Every pod must be put, even after one has changed.
        list.items.iter().fold(lost, |news, pod| self.put(pod) || news)
    }
}

impl World {
    /// Learns from a complete list of a run's pods that was taken for another purpose: pods missing from it
    /// are gone, and pods that no watch has shown become known. A list that is older than the watch's state
    /// changes nothing. Returns whether anything changed; if so, the run is touched.
    pub fn absorb_pods(&self, uid: &Uid, namespace: &str, list: &ObjectList<Pod>) -> bool {
        let place = (Some(namespace.to_owned()), Arc::clone(uid));
        let mut inner = self.lock();
        let known = inner.runs.get(uid).is_some();
        let changed = known && inner.pods.entry(place).or_default().absorb(list);
        drop(inner);
        if changed {
            self.touch(uid);
        }
        changed
    }
}

impl Sink<Pod> for World {
    fn put(&self, pod: Pod) {
        let Some(uid) = run_uid(&pod.metadata) else { return };
        let place = (pod.namespace(), Arc::clone(&uid));
        let news = self.lock().pods.entry(place).or_default().show(&pod);
        if news {
            self.touch(&uid);
        }
    }

    fn remove(&self, pod: Pod) {
        let Some(uid) = run_uid(&pod.metadata) else { return };
        let mut inner = self.lock();
        let place = (pod.namespace(), Arc::clone(&uid));
        let Some(pods) = inner.pods.get_mut(&place) else { return };
        pods.remove(&pod);
        inner.forget_empty(&place);
        drop(inner);
        self.touch(&uid);
    }

    /// How the pod ended is unknown.
    fn forget(&self, pod: &ObjectMeta) {
        let (Some(uid), Some(name)) = (run_uid(pod), pod.name.as_deref()) else { return };
        let mut inner = self.lock();
        let place = (pod.namespace.clone(), Arc::clone(&uid));
        let Some(pods) = inner.pods.get_mut(&place) else { return };
        pods.lose(|known| known == name);
        inner.forget_empty(&place);
        drop(inner);
        self.touch(&uid);
    }

    fn listed(&self, listed: &Listed) {
        let mut inner = self.lock();
        let mut touched = Vec::new();
        for ((namespace, uid), pods) in &mut inner.pods {
            // A list that was absorbed while the watch started over contains pods that are too new for this
            // round. Compare by time, not by version: only the versions of its pods are known of a round, and
            // these may be much older than the round.
            let newer = pods.absorbed_at.is_some_and(|absorbed| absorbed >= listed.began());
            if !newer {
                // The round is now the newest state, even if versions start over after a restore of the
                // cluster.
                pods.absorbed = 0;
            }
            if !newer && pods.lose(|name| listed.lacks_name(namespace.as_ref(), name)) {
                touched.push(Arc::clone(uid));
            }
        }
        drop(inner);
        touched.iter().for_each(|uid| self.touch(uid));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{names, pod, run};
    use super::*;
    use kube::Resource;
    use serde_json::json;

    fn pod_at(name: &str, version: u64) -> Pod {
        let mut pod = pod("a", name);
        pod.metadata.resource_version = Some(version.to_string());
        pod
    }

    fn ended(mut pod: Pod) -> Pod {
        pod.status = serde_json::from_value(json!({"phase": "Succeeded"})).unwrap();
        pod
    }

    fn list(version: u64, pods: impl IntoIterator<Item = Pod>) -> ObjectList<Pod> {
        let metadata = json!({"resourceVersion": version.to_string()});
        let mut list: ObjectList<Pod> = serde_json::from_value(
            json!({"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": []}),
        )
        .unwrap();
        list.items.extend(pods);
        list
    }

    fn world() -> (Arc<World>, Uid) {
        let (world, _) = World::new();
        world.put(run("a"));
        (world, "uid-a".into())
    }

    fn gone(world: &World, uid: &Uid) -> Vec<String> {
        world.take_gone(uid).into_keys().collect()
    }

    #[test]
    fn a_list_shows_what_a_silent_watch_does_not() {
        let (world, uid) = world();
        world.put(pod_at("lost", 1));
        world.put(pod_at("kept", 2));
        assert!(world.absorb_pods(&uid, "a", &list(9, [ended(pod_at("kept", 5)), pod_at("new", 6)])));
        assert_eq!(names(&world, &uid), ["kept", "new"]);
        assert!(world.view(&uid).unwrap().pods[0].is_finished());
        assert_eq!(gone(&world, &uid), ["lost"]);
        assert!(!world.absorb_pods(&uid, "a", &list(10, [ended(pod_at("kept", 5)), pod_at("new", 6)])));
    }

    #[test]
    fn a_list_that_is_older_than_the_watch_changes_nothing() {
        let (world, uid) = world();
        world.put(pod_at("deleted", 1));
        world.put(pod_at("since", 8));
        world.remove(pod_at("deleted", 9));
        assert_eq!(gone(&world, &uid), ["deleted"]);
        assert!(!world.absorb_pods(&uid, "a", &list(7, [pod_at("deleted", 1)])));
        assert_eq!(names(&world, &uid), ["since"], "the watch showed it after the list was taken");
        assert!(gone(&world, &uid).is_empty());
    }

    #[test]
    fn a_list_that_is_incomplete_or_has_no_version_changes_nothing() {
        let (world, uid) = world();
        world.put(pod_at("one", 1));
        let mut page = list(9, []);
        page.metadata.continue_ = Some("more".to_owned());
        assert!(!world.absorb_pods(&uid, "a", &page));
        let mut opaque = list(9, []);
        opaque.metadata.resource_version = Some("x".to_owned());
        assert!(!world.absorb_pods(&uid, "a", &opaque));
        assert_eq!(names(&world, &uid), ["one"]);
    }

    #[test]
    fn a_watch_that_catches_up_with_a_list_takes_nothing_back() {
        let (world, uid) = world();
        world.put(pod_at("done", 1));
        world.put(pod_at("lost", 2));
        world.absorb_pods(&uid, "a", &list(9, [ended(pod_at("done", 6))]));
        assert_eq!(gone(&world, &uid), ["lost"]);
        world.put(pod_at("lost", 3));
        world.put(pod_at("done", 4));
        assert_eq!(names(&world, &uid), ["done"]);
        assert!(world.view(&uid).unwrap().pods[0].is_finished());
        world.remove(ended(pod_at("lost", 5)));
        let last = world.take_gone(&uid);
        assert!(last["lost"].is_finished(), "its last state says how it ended");
        world.put(pod_at("next", 10));
        assert_eq!(names(&world, &uid), ["done", "next"]);
    }

    #[test]
    fn a_watch_that_starts_over_does_not_lose_what_a_newer_list_has_shown() {
        let (world, uid) = world();
        let mut round = Listed::new(None);
        round.add(pod_at("old", 3).meta());
        world.put(pod_at("old", 3));
        world.absorb_pods(&uid, "a", &list(9, [pod_at("old", 3), pod_at("new", 8)]));
        Sink::<Pod>::listed(world.as_ref(), &round);
        assert_eq!(names(&world, &uid), ["new", "old"]);
        let mut round = Listed::new(None);
        round.add(pod_at("old", 3).meta());
        Sink::<Pod>::listed(world.as_ref(), &round);
        assert_eq!(names(&world, &uid), ["old"], "a later round knows better, however old its pods are");
        Sink::<Pod>::listed(world.as_ref(), &Listed::new(None));
        assert_eq!(names(&world, &uid), [""; 0], "also one without any pod");
    }
}
