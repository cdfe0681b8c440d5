//! The keys of a run. Every script gets all of them, in this order.

use protocol::RunId;

/// Keys and group of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueKeys {
    /// Stream of files that wait or are being processed.
    pub work: String,
    /// Sorted set of files in back-off, by the time they are due.
    pub retry: String,
    /// Stream of files that failed permanently.
    pub dlq: String,
    /// Hash with owner, epoch, listing cursor and counters.
    pub meta: String,
    /// Stream of outcomes, trimmed; exists only if results are kept.
    pub results: String,
    /// Hash with the outcome of the finished run. Each run has its own key, instead of a shared hash: it lies
    /// in the run's own slot of a Valkey Cluster, so that `close` stays atomic, and it can expire separately.
    pub ledger: String,
    /// Hash with the reports of workers that process many files, about the files they hold.
    pub states: String,
    /// Consumer group of the work stream.
    pub group: String,
}

impl QueueKeys {
    /// The keys of a run.
    pub fn of(run: &RunId) -> Self {
        Self {
            work: run.key("work"),
            retry: run.key("retry"),
            dlq: run.key("dlq"),
            meta: run.key("meta"),
            results: run.key("results"),
            ledger: run.key("ledger"),
            states: run.key("states"),
            group: run.group(),
        }
    }

    /// Stream with the files of one pod.
    pub fn inbox(&self, pod: &str) -> String {
        inbox_beside(&self.work, pod)
    }

    /// The keys in the order that the scripts expect.
    pub(crate) fn in_order(&self) -> [&str; 7] {
        [&self.work, &self.retry, &self.dlq, &self.meta, &self.results, &self.ledger, &self.states]
    }
}

/// The inbox of a pod, derived from the work stream of its run, which is all that a worker knows.
pub(crate) fn inbox_beside(work: &str, pod: &str) -> String {
    beside(work, &format!("inbox:{pod}"))
}

/// Another key of the run with this work stream.
pub(crate) fn beside(work: &str, kind: &str) -> String {
    format!("{}{kind}", work.strip_suffix("work").unwrap_or(work))
}
