//! The operator's memory of a run between passes. All of it can be lost at any moment: a restarted operator
//! finds out again what it needs.

mod backoff;
mod canaries;
mod creation;
mod decisions;
mod failures;
mod listing;
mod pace;
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
pub use failures::Failures;
pub use listing::ListingProgress;
pub use pace::Pace;
pub use pods::PodsMemory;

/// The operator's memory of one run.
#[derive(Default)]
pub struct Memory {
    /// The Pipeline, once it is stored.
    pub snapshot: Option<Arc<Snapshot>>,
    /// The runId, once the run may have something in Valkey.
    pub run_id: Option<RunId>,
    /// The queue, while it is open.
    pub queue: Option<RunQueue>,
    /// The workers' Valkey user, and when it was last checked.
    pub user: Option<(WorkerUser, Instant)>,
    /// Why the run may not use its keys, if that is so: no file is started, and files that are under way are
    /// settled.
    pub withheld: Option<Obstacle>,
    /// The listing of the bucket.
    pub listing: ListingProgress,
    /// The creation of pods.
    pub creation: Creation,
    /// The pods.
    pub pods: PodsMemory,
    /// Pods that process many files.
    pub warm: WarmMemory,
    /// Files that failed permanently.
    pub failures: Failures,
    /// How fast files are settled.
    pub pace: Pace,
    /// Decisions about files that were logged.
    pub decisions: Decisions,
    /// The breakers of the run's dependencies.
    pub breakers: Breakers,
    /// Open breakers, as counted in metrics.
    pub open_breakers: OpenBreakers,
    /// Objects that tell pods whether a storage is down or an object fails.
    pub canaries: Canaries,
    /// Nodes on which pods never come up.
    pub nodes: Nodes,
    /// When the listing last waited because Valkey is full.
    pub queue_full: Option<Instant>,
    /// The created Job, until the watch shows it.
    pub job: Option<(Arc<Job>, Instant)>,
    /// The last write of the Job's status.
    pub job_write: Option<JobWrite>,
    /// The last written status, and when it was written.
    pub published: Option<(PipelineRunStatus, Instant)>,
    /// The last reported obstacle.
    pub obstacle: Option<Obstacle>,
    /// The outage of the storage that the status showed when this operator started.
    pub outage_before: Option<Obstacle>,
    /// How many passes have failed in a row.
    pub failed_passes: u32,
    /// When the deletion of the run was first noticed.
    pub deleting: Option<Instant>,
}

impl Memory {
    /// Forgets the queue, which must be opened again: it was lost, closed, or started over.
    pub fn forget_queue(&mut self) {
        self.queue = None;
        // The user's Secret holds the epoch of the queue.
        self.user = None;
        self.listing.stop();
        self.pods.last_scan = None;
        self.pods.served.clear();
    }

    /// Notes that the queue was lost.
    pub fn queue_lost(&mut self, now: Instant) {
        self.listing.queue_lost(now);
        self.forget_queue();
    }

    /// Notes that Valkey has forgotten the outcomes of all files.
    pub fn outcomes_lost(&mut self) {
        self.listing.is_repeated = true;
        self.failures.lost();
    }
}
