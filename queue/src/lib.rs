//! The queue of a run on Valkey Streams: one entry per file; no file is lost or duplicated.
//!
//! The operator holds a [`RunQueue`] and makes every transition through it; each is one script, atomic in the
//! server. A worker holds a [`Worker`], which can only claim. A worker that processes many files also holds a
//! [`Reporter`] for reports that the operator may believe or not. The invariant, at every instant: `total =
//! queued + running + succeeded + failed`. This crate does not depend on Kubernetes.

mod acl;
mod calls;
mod claims;
mod connection;
mod dead_letters;
mod error;
mod keys;
mod known_runs;
mod message;
mod outcome;
mod ownership;
mod random;
mod reply;
mod run_queue;
mod script;
mod settling;
mod stats;
mod taking;
mod worker;

pub use acl::{Ensured, Rights, WorkerUser};
pub use calls::{
    Closed, Ending, Enqueued, Finished, Opened, Owner, Page, Pending, Promoted, Reclaimed, Retention,
};
pub use connection::{Connection, Password, Server};
pub use error::Error;
pub use keys::QueueKeys;
pub use known_runs::KnownRuns;
pub use message::{Claim, DeadLetter, EntryId, File};
pub use outcome::{Disruption, Failure, Fate, REASON_BYTES_MAX, RetryPolicy, Settlement, Verdict};
pub use run_queue::{BATCH_MAX, RunQueue};
pub use stats::{FinalCounts, Listing, Pause, State, Stats};
pub use taking::{Reported, ReportsLimit, Taken};
pub use worker::{Inbox, Reporter, Worker};
