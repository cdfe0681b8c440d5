//! How an attempt at a file ended, and what became of the file.

use std::time::Duration;

use crate::message::EntryId;

/// Bytes of a reason that are kept: enough for a filter's last lines, and a status with ten of them stays small.
pub const REASON_BYTES_MAX: usize = 512;

/// An entry whose attempt has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// The entry.
    pub entry: EntryId,
    /// The consumer that claimed it: the pod.
    pub consumer: String,
    /// How the attempt ended.
    pub verdict: Verdict,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every filter succeeded.
    Succeeded,
    /// It failed, and another attempt may succeed.
    Failed(Failure),
    /// The input is bad: no other attempt can succeed.
    Rejected(Failure),
    /// Nobody tried it: it goes back as it was, without counting as an attempt.
    Released,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    reason: String,
    exit_code: Option<i32>,
}

impl Failure {
    /// A failure with its reason, of which the first 512 bytes are kept.
    pub fn new(reason: &str, exit_code: Option<i32>) -> Self {
        Self { reason: truncated(reason).to_owned(), exit_code }
    }

    /// The reason.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The exit code, if a container ended with one.
    pub fn exit_code(&self) -> Option<i32> {
        self.exit_code
    }
}

pub(crate) fn truncated(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

/// When a failed file is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How often a file is tried.
    pub max_attempts: u32,
    /// Wait after the first failure; it doubles with each further one.
    pub backoff_initial: Duration,
    /// The longest wait.
    pub backoff_max: Duration,
    /// How many outcomes the results stream keeps; none are written when it is 0.
    pub keep_results: u32,
}

/// What became of an entry that was settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Counted as succeeded.
    Succeeded,
    /// It will be tried again.
    Retrying {
        /// Key of the file.
        file: String,
        /// How often it was tried so far.
        attempts: u32,
        /// How long it waits.
        delay: Duration,
    },
    /// Queued again, as it was.
    Released,
    /// Dead-lettered and counted as failed.
    DeadLettered {
        /// Key of the file.
        file: String,
        /// How often it was tried.
        attempts: u32,
    },
    /// Nothing was done: it was settled or reclaimed before.
    Ignored,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        assert_eq!(Failure::new("short", None).reason(), "short");
        let long = format!("a{}", "ä".repeat(400));
        let reason = Failure::new(&long, Some(1)).reason().to_owned();
        assert_eq!(reason.len(), 511);
        assert!(long.starts_with(&reason));
    }
}
