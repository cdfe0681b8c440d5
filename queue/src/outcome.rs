//! The results of attempts, and the fates of files.

use std::time::Duration;

use crate::message::EntryId;

/// Reasons are cut to this number of bytes: enough for a filter's last lines, while a status with ten of them
/// stays small.
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
    /// It failed, but another attempt may succeed.
    Failed(Failure),
    /// The input is bad: no other attempt can succeed.
    Rejected(Failure),
    /// Something other than the file ended it: the file goes back without being charged an attempt.
    Disrupted(Disruption),
    /// It was never tried: the file goes back unchanged.
    Released,
}

/// An event that ended an attempt through no fault of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disruption {
    /// The event.
    pub failure: Failure,
    /// Whether it counts. A file that is disrupted more than [`RetryPolicy::max_disruptions`] times in a row
    /// is charged an attempt, because it may be what takes its node down each time. An outage that affects
    /// every file does not count.
    pub counts: bool,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    reason: String,
    exit_code: Option<i32>,
}

impl Failure {
    /// A failure with its reason, cut to 512 bytes.
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
    &reason[..reason.floor_char_boundary(REASON_BYTES_MAX)]
}

/// Room for the text that a script puts before the reason when it charges a disruption: "disrupted 4294967295
/// times in a row, the last time: ".
const CHARGE_BYTES_MAX: usize = 52;

/// A reason that fits even after the script adds the number of disruptions.
pub(crate) fn truncated_for_charge(reason: &str) -> &str {
    &reason[..reason.floor_char_boundary(REASON_BYTES_MAX - CHARGE_BYTES_MAX)]
}

/// When and how often a failed file is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How often a file is tried.
    pub max_attempts: u32,
    /// How many disruptions in a row a file may have; the next one is charged as an attempt.
    pub max_disruptions: u32,
    /// The wait after the first failure; it doubles with each further one.
    pub backoff_initial: Duration,
    /// The longest wait.
    pub backoff_max: Duration,
    /// How many outcomes the results stream keeps; 0 means that none are written.
    pub keep_results: u32,
}

/// The result of settling an entry.
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
    /// Queued again, without being charged an attempt.
    Disrupted {
        /// Key of the file.
        file: String,
        /// How many disruptions in a row now count against it.
        disruptions: u32,
    },
    /// Queued again, unchanged.
    Released,
    /// Dead-lettered and counted as failed.
    DeadLettered {
        /// Key of the file.
        file: String,
        /// How often it was tried.
        attempts: u32,
    },
    /// Nothing was done, because this consumer does not hold the entry (or no longer does).
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
