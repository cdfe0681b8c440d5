//! The counts of a run.

use std::time::Duration;

use strum::{AsRefStr, EnumString};

/// All counts of a run at one instant. They satisfy `total = queued + running + succeeded + failed`, or they
/// are not returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Whether the queue accepts files, is being aborted, or is closed.
    pub state: State,
    /// How far the bucket is listed.
    pub listing: Listing,
    /// Why the listing waits, if it does.
    pub paused: Option<Pause>,
    /// Whether files may be processed: the listing is complete, or has paused at least once.
    pub started: bool,
    /// Files listed so far.
    pub total: u64,
    /// Files that the listing omitted. No other count includes them.
    pub skipped: u64,
    /// Files that wait, for a pod or for their next attempt.
    pub queued: u64,
    /// Files that a pod has claimed.
    pub running: u64,
    /// Files that every filter processed.
    pub succeeded: u64,
    /// Files that were dead-lettered.
    pub failed: u64,
    /// Attempts that failed and were repeated.
    pub retried: u64,
    /// Files that were taken from dead pods.
    pub reclaimed: u64,
    /// How often a file was queued again without being charged an attempt.
    pub disrupted: u64,
    /// Waiting files whose back-off is not over: no pod can claim them yet.
    pub delayed: u64,
    /// The time until the next file in back-off is due.
    pub next_retry: Option<Duration>,
    /// How long ago the run began, by the server's clock; absent until [`crate::RunQueue::begin`] records it.
    pub age: Option<Duration>,
    /// The key of the file that succeeded most recently, unless it has control characters; absent until a
    /// file succeeds. It is also absent if older versions settled the files.
    pub canary: Option<String>,
}

impl Stats {
    /// Whether every file of the bucket is listed and settled.
    pub fn is_finished(&self) -> bool {
        self.listing == Listing::Complete && self.queued == 0 && self.running == 0
    }
}

/// The state of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It accepts and hands out files.
    Open,
    /// It is being aborted: the remaining files become dead letters.
    Closing,
    /// The run is finished.
    Closed,
}

/// How far the bucket is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listing {
    /// Up to this cursor; empty at the beginning.
    UpTo(String),
    /// To the end.
    Complete,
}

/// Why a listing waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr, EnumString)]
#[strum(serialize_all = "kebab-case")]
pub enum Pause {
    /// The maximum number of files already waits.
    HighWater,
    /// The server has little or no memory left.
    #[strum(serialize = "memory")]
    MemoryFull,
}

/// The counts of a finished run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinalCounts {
    /// Files of the run.
    pub total: u64,
    /// Files that every filter processed.
    pub succeeded: u64,
    /// Files that were dead-lettered.
    pub failed: u64,
    /// Attempts that failed and were repeated.
    pub retried: u64,
    /// Files that were taken from dead pods.
    pub reclaimed: u64,
}
