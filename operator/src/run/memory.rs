//! What the operator remembers of a run between passes. All of it can be lost at any moment: a restarted operator finds
//! out again what it needs.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::v1alpha1::{FailedFile, PipelineRunStatus};
use k8s_openapi::api::batch::v1::Job;
use queue::{EntryId, Listing, RunQueue, WorkerUser};

use super::build::snapshot::Snapshot;
use super::listing::ListingTask;
use crate::error::Obstacle;
use crate::pods::WorkerPod;

/// Failed files that a status shows.
const RECENT_FAILURES_MAX: usize = 10;
/// Events about failed files of one run.
const FAILURES_TOLD_MAX: usize = 10;
/// A pod that the watch has not shown after this long was not created after all.
const CREATION_SHOWN_WITHIN: Duration = Duration::from_secs(60);
/// The same of one whose creation the API server has answered with an error: it is over, and the watch is only a little
/// late.
const FAILURE_SHOWN_WITHIN: Duration = Duration::from_secs(5);

/// What is remembered of a run.
#[derive(Default)]
pub struct Memory {
    /// The Pipeline, once it is stored.
    pub snapshot: Option<Arc<Snapshot>>,
    /// The queue, while it is open.
    pub queue: Option<RunQueue>,
    /// The workers' Valkey user, and when it was last seen to be there.
    pub user: Option<(WorkerUser, Instant)>,
    /// Why the run may not use its keys any more, if it may not: no file is started, what is under way is settled.
    pub withheld: Option<Obstacle>,
    /// The bucket is listed to its end: from then on one look at the counts is enough for a pass.
    pub listed: bool,
    /// The listing that is under way, or has failed.
    pub listing: Option<ListingTask>,
    /// Why it failed, and how far it had got.
    listing_problem: Option<(Obstacle, Listing)>,
    /// How the listing fared.
    listing_backoff: Backoff,
    /// How often the queue was lost. A listing that succeeds makes no difference: the next loss may follow it.
    loss_backoff: Backoff,
    /// Valkey lost the queue, and the bucket is being listed again.
    pub lost: bool,
    /// The Job as it was created, until the watch shows it.
    pub job: Option<(Arc<Job>, Instant)>,
    /// Pods that were asked for and not shown by the watch yet, and until when they may be.
    in_flight: HashMap<String, Instant>,
    /// Pods whose attempt is settled, with the entry of their file, if they had one.
    pub settled: HashMap<String, Option<EntryId>>,
    /// Pods that were deleted and that the watch still shows.
    pub removed: HashSet<String>,
    /// Failed pods that are kept for their logs, oldest first.
    pub kept: VecDeque<String>,
    /// Pods that are gone and whose files nobody has looked after yet.
    pub gone: BTreeMap<String, Arc<WorkerPod>>,
    /// Pods that were removed because no file may be started, or fewer at once: should one have claimed meanwhile, nobody tried
    /// its file.
    pub dismissed: HashSet<String>,
    /// How the creation of pods fared.
    pub creation_backoff: Backoff,
    /// Why pods were refused or die, if they do.
    pub creation_problem: Option<Obstacle>,
    /// When all claims were last compared with all pods.
    pub last_scan: Option<Instant>,
    /// The status that was written last, and when.
    pub published: Option<(PipelineRunStatus, Instant)>,
    /// What the Job's status said last.
    pub job_status: Option<serde_json::Value>,
    /// The newest files that failed for good, newest last.
    failures: VecDeque<FailedFile>,
    failures_told: usize,
    /// Valkey has forgotten those that the status still shows.
    older_failures_forgotten: bool,
    /// What people were told last to stand in the way.
    pub obstacle: Option<Obstacle>,
    /// Passes that have failed, one after the other.
    pub failed_passes: u32,
    /// Since when the run is being deleted.
    pub deleting: Option<Instant>,
}

impl Memory {
    /// The queue must be opened again: it was lost, closed, or begun anew.
    pub fn forget_queue(&mut self) {
        self.queue = None;
        self.listed = false;
        self.listing = None;
        self.last_scan = None;
    }

    /// The queue was lost. A server that keeps losing it, because it evicts keys, must not be listed into without end.
    pub fn queue_lost(&mut self, now: Instant) {
        self.loss_backoff.failed(now);
        self.forget_queue();
    }

    /// Valkey has forgotten all that became of files: nothing that was known of them holds any more.
    pub fn everything_lost(&mut self) {
        self.lost = true;
        self.failures.clear();
        self.older_failures_forgotten = true;
    }

    /// The listing failed, and got as far as this.
    pub fn listing_failed(&mut self, why: Obstacle, at: Listing, now: Instant) {
        self.listing_backoff.failed(now);
        self.listing_problem = Some((why, at));
    }

    /// The bucket is listed to its end.
    pub fn listing_succeeded(&mut self) {
        self.listing_backoff.reset();
        self.lost = false;
    }

    /// How long the next listing waits still; `None` if not at all.
    pub fn listing_waits(&self, now: Instant) -> Option<Duration> {
        self.listing_backoff.left(now).max(self.loss_backoff.left(now))
    }

    /// Why the listing does not get on, if it does not: once it is further than where it failed, it does.
    pub fn listing_problem(&mut self, at: &Listing) -> Option<Obstacle> {
        if self.listing_problem.as_ref().is_some_and(|(_, failed_at)| failed_at != at) {
            self.listing_problem = None;
            self.listing_backoff.reset();
        }
        self.listing_problem.as_ref().map(|(why, _)| why.clone())
    }

    /// A pod was asked for.
    pub fn created(&mut self, pod: &str, now: Instant) {
        self.in_flight.insert(pod.to_owned(), now + CREATION_SHOWN_WITHIN);
    }

    /// The API server answered with an error that leaves open whether there is a pod.
    pub fn perhaps_created(&mut self, pod: &str, now: Instant) {
        self.in_flight.insert(pod.to_owned(), now + FAILURE_SHOWN_WITHIN);
    }

    /// Pods that were asked for and are not among these. Trap 31: without them a slow watch would let us create too many.
    pub fn in_flight(&mut self, shown: &[Arc<WorkerPod>], now: Instant) -> u64 {
        if !self.in_flight.is_empty() {
            for pod in shown {
                self.in_flight.remove(&pod.name);
            }
            self.in_flight.retain(|pod, until| !self.gone.contains_key(pod) && now < *until);
        }
        self.in_flight.len() as u64
    }

    /// When the first of them counts no more.
    pub fn in_flight_expires(&self, now: Instant) -> Option<Duration> {
        self.in_flight.values().min().map(|until| until.saturating_duration_since(now))
    }

    /// The API server did not take the pod.
    pub fn not_created(&mut self, pod: &str) {
        self.in_flight.remove(pod);
    }

    /// Whether another event about a failed file is bearable: all of them are in the dead-letter queue.
    pub fn may_tell_of_a_failure(&mut self) -> bool {
        self.failures_told += 1;
        self.failures_told <= FAILURES_TOLD_MAX
    }

    /// A file failed for good.
    pub fn failed(&mut self, failure: FailedFile) {
        self.failures.retain(|known| known.file != failure.file);
        self.failures.push_back(failure);
        while self.failures.len() > RECENT_FAILURES_MAX {
            self.failures.pop_front();
        }
    }

    /// The newest failures, newest first; those that the status knew come after our own.
    pub fn recent_failures(&self, known: &[FailedFile]) -> Vec<FailedFile> {
        let own = self.failures.iter().rev();
        let known = if self.older_failures_forgotten { &[] } else { known };
        let older = known.iter().filter(|known| !self.failures.iter().any(|own| own.file == known.file));
        own.chain(older).take(RECENT_FAILURES_MAX).cloned().collect()
    }
}

/// Waits that double.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// The first wait.
    const FIRST: Duration = Duration::from_secs(1);
    /// The longest wait: long enough to hurt nobody, short enough that people who mended something see it.
    const LONGEST: Duration = Duration::from_secs(60);

    /// Another failure.
    pub fn failed(&mut self, now: Instant) {
        let wait = Self::FIRST.saturating_mul(1 << self.failures.min(16)).min(Self::LONGEST);
        self.failures += 1;
        self.until = Some(now + wait);
    }

    /// It works.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// How long to wait still; `None` if not at all.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.until.and_then(|until| until.checked_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;
    use crate::pods::Stage;

    fn pod(name: &str, now: Instant) -> Arc<WorkerPod> {
        Arc::new(WorkerPod::in_stage(name, Stage::Claiming, now))
    }

    /// Trap 31.
    #[test]
    fn a_pod_counts_from_its_creation_and_only_once() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        memory.created("a", now);
        memory.created("b", now);
        assert_eq!(memory.in_flight(&[], now), 2, "the watch has shown none");
        assert_eq!(memory.in_flight(&[pod("a", now)], now), 1);
        memory.gone.insert("b".into(), pod("b", now));
        assert_eq!(memory.in_flight(&[], now), 0, "b was there and is gone");
        memory.created("c", now);
        assert_eq!(memory.in_flight(&[], now + CREATION_SHOWN_WITHIN), 0, "c was lost");
    }

    /// A burst of errors must not keep us from trying again for a minute.
    #[test]
    fn a_creation_that_was_answered_with_an_error_counts_for_a_moment_only() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        memory.created("unanswered", now);
        memory.created("failed", now);
        memory.perhaps_created("failed", now);
        assert_eq!(memory.in_flight(&[], now), 2);
        assert_eq!(memory.in_flight_expires(now), Some(FAILURE_SHOWN_WITHIN), "nothing else would wake us");
        assert_eq!(memory.in_flight(&[], now + FAILURE_SHOWN_WITHIN), 1);
    }

    #[test]
    fn waits_double_up_to_a_limit_and_start_over_after_a_success() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        assert_eq!(backoff.left(now), None);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            backoff.failed(now);
            assert_eq!(backoff.left(now), Some(Duration::from_secs(seconds)));
        }
        assert_eq!(backoff.left(now + Duration::from_secs(60)), None);
        backoff.reset();
        backoff.failed(now);
        assert_eq!(backoff.left(now), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_queue_that_is_lost_again_and_again_is_listed_ever_more_rarely() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        for seconds in [1, 2, 4] {
            memory.queue_lost(now);
            assert_eq!(memory.listing_waits(now), Some(Duration::from_secs(seconds)));
            memory.listing_succeeded();
        }
        memory.listing_failed(Reason::ListingFailed.because("as a test"), Listing::UpTo(String::new()), now);
        assert_eq!(memory.listing_waits(now), Some(Duration::from_secs(4)), "the longer of both");
    }

    /// Trap 28.
    #[test]
    fn a_status_shows_the_ten_newest_failures() {
        let mut memory = Memory::default();
        for number in (0..20).chain([19]) {
            memory.failed(FailedFile { file: number.to_string(), ..FailedFile::default() });
        }
        let known = [FailedFile { file: "19".into(), ..FailedFile::default() }];
        let shown = memory.recent_failures(&known);
        assert_eq!(shown.len(), 10);
        assert_eq!((shown[0].file.as_str(), shown[9].file.as_str()), ("19", "10"));
        memory.everything_lost();
        assert_eq!(memory.recent_failures(&known), [], "Valkey knows nothing of them");
    }
}
