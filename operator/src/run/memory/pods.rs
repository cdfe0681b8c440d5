//! The fates of pods: settled, removed, kept for their logs, dismissed, or gone before their file was settled.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
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
    /// Pods that were removed because no file may be started, or fewer at once. A file that such a pod claimed
    /// meanwhile was not tried.
    pub dismissed: HashSet<String>,
    /// When all claims were last compared with all pods.
    pub last_scan: Option<Instant>,
    kept: Kept,
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
        self.kept.add(pod);
    }

    /// The oldest pod beyond the number that may be kept.
    pub fn next_not_to_keep(&mut self, most: usize) -> Option<String> {
        self.kept.oldest_beyond(most)
    }
}

/// Failed pods that are kept for their logs, oldest first. The set complements the queue, because a pass asks about
/// every pod.
#[derive(Default)]
struct Kept {
    order: VecDeque<String>,
    names: HashSet<String>,
}

impl Kept {
    fn add(&mut self, pod: &str) {
        if self.names.insert(pod.to_owned()) {
            self.order.push_back(pod.to_owned());
        }
    }

    fn forget(&mut self, pod: &str) {
        if self.names.remove(pod) {
            self.order.retain(|kept| kept != pod);
        }
    }

    fn oldest_beyond(&mut self, most: usize) -> Option<String> {
        let oldest = if self.order.len() > most { self.order.pop_front() } else { None }?;
        self.names.remove(&oldest);
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
