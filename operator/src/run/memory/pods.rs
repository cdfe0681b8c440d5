//! The fates of pods: settled, removed, kept for their logs, dismissed, or gone before their file was
//! settled.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;

use queue::EntryId;

use crate::pods::WorkerPod;

/// The operator's memory of a run's pods.
#[derive(Default)]
pub struct PodsMemory {
    /// Pods whose attempt is settled, each with the entry of its file, if it had one.
    pub settled: HashMap<String, Option<EntryId>>,
    /// Pods that were given a file, which is now in their inbox.
    pub served: HashSet<String>,
    /// Pods that did not start in time, so their file was taken back.
    pub late: HashSet<String>,
    /// Pods that were deleted and that the watch still shows.
    pub removed: HashSet<String>,
    /// Pods that are gone and whose files are not settled yet.
    pub gone: BTreeMap<String, Arc<WorkerPod>>,
    /// Pods that were removed because no file may be started, or fewer at once. A file that such a pod
    /// claimed meanwhile was not tried.
    pub dismissed: HashSet<String>,
    /// When all claims were last compared with all pods.
    pub last_scan: Option<Instant>,
    kept: Kept<String>,
}

impl PodsMemory {
    /// Whether the pod needs no further attention.
    pub fn is_done(&self, pod: &str) -> bool {
        self.settled.contains_key(pod) || self.removed.contains(pod)
    }

    /// Forgets pods that are gone and settled; returns their names.
    pub fn forget_gone(&mut self) -> Vec<String> {
        let names: Vec<String> = std::mem::take(&mut self.gone).into_keys().collect();
        for name in &names {
            self.settled.remove(name);
            self.served.remove(name);
            self.late.remove(name);
            self.removed.remove(name);
            self.dismissed.remove(name);
            self.kept.forget(name);
        }
        names
    }

    /// Keeps a failed pod for its log.
    pub fn keep(&mut self, pod: &str) {
        self.kept.add(pod.to_owned());
    }

    /// The oldest pod beyond the number that may be kept.
    pub fn next_not_to_keep(&mut self, most: usize) -> Option<String> {
        self.kept.oldest_beyond(most)
    }
}

/// Failed pods that are kept for their logs, oldest first, and the place of each: a pass asks about every
/// pod, and many can go at once.
#[derive(Default)]
struct Kept<N> {
    order: BTreeMap<u64, N>,
    places: HashMap<N, u64>,
    next: u64,
}

impl<N: Clone + Eq + Hash> Kept<N> {
    fn add(&mut self, pod: N) {
        let (order, place) = (&mut self.order, self.next);
        self.places.entry(pod).or_insert_with_key(|pod| {
            order.insert(place, pod.clone());
            place
        });
        self.next += 1;
    }

    fn forget<Q>(&mut self, pod: &Q)
    where
        N: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        if let Some(place) = self.places.remove(pod) {
            self.order.remove(&place);
        }
    }

    fn oldest_beyond(&mut self, most: usize) -> Option<N> {
        let (_, oldest) = if self.order.len() > most { self.order.pop_first() } else { None }?;
        self.places.remove(&oldest);
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::hash::Hasher;

    #[test]
    fn the_newest_failed_pods_are_kept_and_each_counts_once() {
        let mut pods = PodsMemory::default();
        for name in ["a", "b", "a", "c"] {
            pods.keep(name);
        }
        assert_eq!(pods.next_not_to_keep(2).as_deref(), Some("a"));
        assert_eq!(pods.next_not_to_keep(2), None);
        pods.gone.insert(
            "b".into(),
            Arc::new(WorkerPod::in_stage("b", crate::pods::Stage::Claiming, Instant::now())),
        );
        assert_eq!(pods.forget_gone(), ["b"]);
        assert_eq!(pods.next_not_to_keep(0).as_deref(), Some("c"), "b is gone");
    }

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// A name that counts how often it is compared.
    #[derive(Clone, Debug, Eq)]
    struct Name(usize);

    impl Hash for Name {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    impl PartialEq for Name {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.with(|compared| compared.set(compared.get() + 1));
            self.0 == other.0
        }
    }

    /// A walk over all kept pods for each of them would compare fifty million names.
    #[test]
    fn ten_thousand_kept_pods_are_found_and_forgotten_without_a_walk_for_each() {
        const PODS: usize = 10_000;
        let mut kept = Kept { order: BTreeMap::new(), places: HashMap::new(), next: 0 };
        for _ in 0..2 {
            (0..PODS).for_each(|number| kept.add(Name(number)));
        }
        (0..PODS).step_by(2).rev().for_each(|number| kept.forget(&Name(number)));
        (0..PODS / 4).for_each(|number| {
            assert_eq!(kept.oldest_beyond(PODS / 4), Some(Name(2 * number + 1)));
        });
        assert_eq!(kept.oldest_beyond(PODS / 4), None);
        let compared = COMPARED.with(Cell::get);
        assert!(compared < 10 * PODS, "{compared} names were compared");
    }
}
