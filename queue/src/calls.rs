//! Arguments and results of the calls of [`RunQueue`].

use std::time::Duration;

use crate::message::{EntryId, File};
use crate::outcome::Fate;
use crate::run_queue::RunQueue;
use crate::stats::{FinalCounts, Listing, Pause};

/// The result of `open`.
pub enum Opened {
    /// The queue is new and empty. If the run had an earlier epoch, the queue of that epoch is lost.
    Created(RunQueue),
    /// The queue already existed.
    Resumed(RunQueue),
    /// The run was executed before, with this result. It is not executed again.
    Finished(Finished),
    /// Another object holds this runId. If it is this run under an older UID, [`RunQueue::take_over`] gets
    /// the queue.
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
    /// The outcome that the caller of `close` recorded.
    pub outcome: String,
    /// The counts at the end.
    pub counts: FinalCounts,
    /// Whether the whole bucket was listed. If not, the files after the cursor were not counted.
    pub listed: bool,
    /// The cursor that the listing reached.
    pub cursor: String,
}

/// A page of the listing.
#[derive(Clone, Debug)]
pub struct Page {
    /// Where the page begins: the cursor of the page before it, empty for the first.
    pub after: String,
    /// Where the next page begins; `None` at the end of the bucket.
    pub next: Option<String>,
    /// The files of the page, at most 1,000. May be empty: even a page whose files are all excluded moves the
    /// cursor.
    pub files: Vec<File>,
    /// Files of the page that are omitted, because no run can process them.
    pub skipped: u64,
}

/// The result of `enqueue`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// The page was added.
    Added {
        /// Files listed so far.
        total: u64,
    },
    /// Nothing was added, because the listing has moved elsewhere (this page was added before, or by another
    /// operator). Continue there.
    Superseded(Listing),
    /// Nothing was added, because enough files already wait. Send the page again later.
    Paused(Pause),
}

/// The result of `promote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promoted {
    /// Files that were moved to the stream.
    pub moved: u64,
    /// The time until the next file is due.
    pub next: Option<Duration>,
}

/// The result of `reclaim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// The fates of the entries whose consumers are dead.
    pub fates: Vec<Fate>,
    /// Files that had been handed out but had no holder; they are queued again.
    pub held_by_nobody: u64,
    /// Consumers that cannot be pods and were removed; their entries are queued again.
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

/// The way in which a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Ending<'a> {
    /// Every file is settled.
    Finish,
    /// Unsettled files are dead-lettered with this reason.
    Abort {
        /// The reason for the dead letters.
        reason: &'a str,
    },
}

/// How long the data of a finished run is kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// The retention of dead letters, results and counters.
    pub details: Duration,
    /// The retention of the ledger entry, which keeps the run from being executed again. It counts from when
    /// the run was last seen; unlimited when absent.
    pub ledger: Option<Duration>,
}

/// The result of `close`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The run is closed, with this result. The outcome is that of the first call that ended the run.
    Closed(Finished),
    /// An abort moved as many files as one call may; call again.
    More {
        /// The number of files that are left.
        remaining: u64,
    },
    /// The run cannot be finished, because not every file is listed and settled.
    Unfinished {
        /// The number of files that are left.
        remaining: u64,
    },
}
