//! The counts of a run.

use std::time::Duration;

use strum::{AsRefStr, EnumString};

/// Every count of a run at one instant. `total = queued + running + succeeded + failed`, or there are no counts at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Whether the queue takes files, is being aborted, or is closed.
    pub state: State,
    /// How far the bucket is listed.
    pub listing: Listing,
    /// Why the listing waits, if it does.
    pub paused: Option<Pause>,
    /// Whether files may be processed: the listing is complete, or has paused at least once.
    pub started: bool,
    /// Files listed so far.
    pub total: u64,
    /// Files that the listing left out. They are in no other count.
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
    /// Those of the files that wait whose back-off is not over: no pod can claim them yet.
    pub delayed: u64,
    /// When the next file that waits for its back-off is due.
    pub next_retry: Option<Duration>,
    /// How long ago the run began, by the server's clock; absent until [`crate::RunQueue::begin`] notes it.
    pub age: Option<Duration>,
    /// The key of the file that succeeded last, unless it has control characters; absent until one did. A queue that older
    /// versions settled files of does not know it either.
    pub canary: Option<String>,
}

impl Stats {
    /// Whether every file of the bucket is listed and settled.
    pub fn is_finished(&self) -> bool {
        self.listing == Listing::Complete && self.queued == 0 && self.running == 0
    }
}

/// What a queue does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It takes and hands out files.
    Open,
    /// It is being aborted: what remains goes to the dead letters.
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
    /// As many files wait as may.
    HighWater,
    /// The server has little memory left, or none.
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
