//! What the calls of [`RunQueue`] take and return.

use std::time::Duration;

use crate::message::{EntryId, File};
use crate::outcome::Fate;
use crate::run_queue::RunQueue;
use crate::stats::{FinalCounts, Listing, Pause};

/// What `open` found.
pub enum Opened {
    /// The queue is new, and empty. If the run had an epoch before, the queue of that epoch is lost.
    Created(RunQueue),
    /// The queue was there.
    Resumed(RunQueue),
    /// The run has been executed before: this is its result. It is not executed again.
    Finished(Finished),
    /// Another object holds this runId. If it is this run under an older UID, [`RunQueue::take_over`] gets the queue.
    Taken {
        /// UID of the other object.
        owner: String,
        /// Its namespace; absent if an older version opened the queue.
        namespace: Option<String>,
        /// Its name; absent if an older version opened the queue.
        name: Option<String>,
    },
    /// A run with another spec, or of another namespace, was executed under this runId.
    Used,
}

/// The PipelineRun that a queue belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The result of a run that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// What the caller of `close` wrote down.
    pub outcome: String,
    /// The counts at the end.
    pub counts: FinalCounts,
    /// Whether the whole bucket was listed. If not, the files after the cursor were not counted.
    pub listed: bool,
    /// How far the bucket was listed.
    pub cursor: String,
}

/// A page of the listing.
#[derive(Clone, Debug)]
pub struct Page {
    /// Where the page begins: the cursor of the page before it, empty for the first.
    pub after: String,
    /// Where the next page begins; `None` at the end of the bucket.
    pub next: Option<String>,
    /// The files of the page, at most 1,000. May be empty: a page whose files are all excluded moves the cursor too.
    pub files: Vec<File>,
    /// Files of the page that are left out, because no run can process them.
    pub skipped: u64,
}

/// What `enqueue` did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// The page was added.
    Added {
        /// Files listed so far.
        total: u64,
    },
    /// Nothing was added: the listing is elsewhere (this page was added before, or by another operator). Go on there.
    Superseded(Listing),
    /// Nothing was added: enough files wait already. Send the page again later.
    Paused(Pause),
}

/// What `promote` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promoted {
    /// Files that were moved to the stream.
    pub moved: u64,
    /// When the next one is due.
    pub next: Option<Duration>,
}

/// What `reclaim` did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// What became of the entries whose consumer is dead.
    pub fates: Vec<Fate>,
    /// Files that had been handed out and had no holder; they are queued again.
    pub held_by_nobody: u64,
    /// Consumers that cannot be pods and were removed; what they held is queued again.
    pub removed_consumers: u64,
}

/// An entry that a consumer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The entry.
    pub entry: EntryId,
    /// The consumer: a pod.
    pub consumer: String,
    /// How long ago it was handed out.
    pub idle: Duration,
}

/// How a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Ending<'a> {
    /// Every file is settled.
    Finish,
    /// What is not settled is dead-lettered with this reason.
    Abort {
        /// Why, for the dead letters.
        reason: &'a str,
    },
}

/// How long what remains of a finished run is kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Dead letters, results and counters.
    pub details: Duration,
    /// The entry in the ledger, which keeps the run from being executed again, since the run was last
    /// seen; unlimited when absent.
    pub ledger: Option<Duration>,
}

/// What `close` did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The run is closed, with this result: the outcome is that of the first call that ended it.
    Closed(Finished),
    /// An abort moved as many files as one call may; call again.
    More {
        /// Files that are left.
        remaining: u64,
    },
    /// Not every file is listed and settled, so that the run cannot be finished.
    Unfinished {
        /// Files that are left.
        remaining: u64,
    },
}
