//! What the operator remembers of a run between passes. All of it can be lost at any moment: a restarted operator finds
//! out again what it needs.

mod backoff;
mod canaries;
mod creation;
mod decisions;
mod failures;
mod listing;
mod pods;

use std::sync::Arc;
use std::time::Instant;

use crds::v1alpha1::PipelineRunStatus;
use k8s_openapi::api::batch::v1::Job;
use protocol::RunId;
use queue::{RunQueue, WorkerUser};

use super::breaker::Breakers;
use super::build::snapshot::Snapshot;
use super::job::JobWrite;
use super::nodes::Nodes;
use super::warm::WarmMemory;
use crate::error::Obstacle;
use crate::metrics::OpenBreakers;

pub use backoff::Backoff;
pub use canaries::Canaries;
pub use creation::Creation;
pub use decisions::Decisions;
pub use failures::{Failures, RECENT_MAX};
pub use listing::ListingProgress;
pub use pods::PodsMemory;

/// What is remembered of a run.
#[derive(Default)]
pub struct Memory {
    /// The Pipeline, once it is stored.
    pub snapshot: Option<Arc<Snapshot>>,
    /// The runId, once the run may have something in Valkey.
    pub run_id: Option<RunId>,
    /// The queue, while it is open.
    pub queue: Option<RunQueue>,
    /// The workers' Valkey user, and when it was last seen.
    pub user: Option<(WorkerUser, Instant)>,
    /// Why the run may not use its keys, if it may not: no file is started, what is under way is settled.
    pub withheld: Option<Obstacle>,
    /// The listing of the bucket.
    pub listing: ListingProgress,
    /// The creation of pods.
    pub creation: Creation,
    /// The pods.
    pub pods: PodsMemory,
    /// Those that process many files.
    pub warm: WarmMemory,
    /// Files that failed for good.
    pub failures: Failures,
    /// What was logged about files.
    pub decisions: Decisions,
    /// Whether what the run depends on works.
    pub breakers: Breakers,
    /// The same, as it is counted in metrics.
    pub open_breakers: OpenBreakers,
    /// Objects by which pods tell a storage that is down from an object that fails.
    pub canaries: Canaries,
    /// Nodes on which pods never come up.
    pub nodes: Nodes,
    /// When the listing last waited because Valkey is full.
    pub queue_full: Option<Instant>,
    /// The Job as it was created, until the watch shows it.
    pub job: Option<(Arc<Job>, Instant)>,
    /// The Job's status that was written last.
    pub job_write: Option<JobWrite>,
    /// The status that was written last, and when.
    pub published: Option<(PipelineRunStatus, Instant)>,
    /// The obstacle that was reported last.
    pub obstacle: Option<Obstacle>,
    /// Passes that have failed, one after the other.
    pub failed_passes: u32,
    /// Since when the run is being deleted.
    pub deleting: Option<Instant>,
}

impl Memory {
    /// The queue must be opened again: it was lost, closed, or started over.
    pub fn forget_queue(&mut self) {
        self.queue = None;
        // Its Secret holds the epoch of the queue.
        self.user = None;
        self.listing.stop();
        self.pods.last_scan = None;
        self.pods.served.clear();
    }

    /// The queue was lost.
    pub fn queue_lost(&mut self, now: Instant) {
        self.listing.queue_lost(now);
        self.forget_queue();
    }

    /// Valkey has forgotten what became of all files.
    pub fn outcomes_lost(&mut self) {
        self.listing.is_repeated = true;
        self.failures.lost();
    }
}
