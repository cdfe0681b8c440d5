//! The run's `execution`, parsed once and trusted afterwards.

use std::time::Duration;

use crds::rules::{FailureLimit, parse_duration};
use crds::v1alpha1::{Execution, RetryBackoff};
use queue::{RetryPolicy, Stats};

/// The limits of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Pods that may exist at once.
    pub parallelism: u64,
    /// When failed files are tried again.
    pub retry: RetryPolicy,
    /// How long a claim may sit on a lost node.
    pub pending_timeout: Duration,
    /// How long one attempt may take.
    pub file_timeout: Option<Duration>,
    /// How long the run may take.
    pub timeout: Option<Duration>,
    /// Exit codes that mean that the input is bad.
    pub non_retryable: Vec<i32>,
    /// How many files may fail without the run failing.
    pub max_failed: Option<FailureLimit>,
    /// How many dead letters a run may have: each takes up memory of Valkey.
    pub max_dead_letters: u64,
    /// How many files a run may have; no limit if absent.
    pub max_files: Option<u64>,
}

/// The operator's settings for every run.
#[derive(Clone, Copy, Debug)]
pub struct RunSettings {
    /// How many outcomes the results stream keeps.
    pub keep_results: u32,
    /// How many consecutive disruptions of a file are free; the next one is charged.
    pub max_disruptions: u32,
    /// How many dead letters a run may have before it ends.
    pub max_dead_letters: u64,
    /// How many files a run may have before it ends; no limit if absent.
    pub max_files: Option<u64>,
}

impl Limits {
    /// Parses the limits. `None` if a field cannot be parsed, which validation has already ruled out.
    pub fn parse(execution: &Execution, settings: RunSettings) -> Option<Self> {
        let RunSettings { keep_results, max_disruptions, max_dead_letters, max_files } = settings;
        let Execution {
            parallelism,
            max_attempts,
            pending_timeout,
            retry_backoff: RetryBackoff { initial, max },
            file_timeout,
            timeout,
            non_retryable_exit_codes,
            max_failed_files,
        } = execution;
        let optional = |text: &Option<String>| match text {
            None => Some(None),
            Some(text) => parse_duration(text).map(Some),
        };
        Some(Self {
            parallelism: u64::try_from(*parallelism).ok()?,
            retry: RetryPolicy {
                max_attempts: u32::try_from(*max_attempts).ok()?,
                max_disruptions,
                backoff_initial: parse_duration(initial)?,
                backoff_max: parse_duration(max)?,
                keep_results,
            },
            pending_timeout: parse_duration(pending_timeout)?,
            file_timeout: optional(file_timeout)?,
            timeout: optional(timeout)?,
            non_retryable: non_retryable_exit_codes.clone(),
            max_failed: match max_failed_files {
                None => None,
                Some(limit) => Some(FailureLimit::parse(limit)?),
            },
            max_dead_letters,
            max_files,
        })
    }

    /// How much time a run has left; `None` without a limit. Valkey measures the run's age, because operators
    /// take over from each other and their clocks differ.
    pub fn time_left(&self, stats: &Stats) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(stats.age.unwrap_or_default()))
    }

    /// Whether more files have failed than may fail.
    pub fn too_many_failed(&self, failed: u64, total: u64) -> bool {
        match self.max_failed {
            None => false,
            Some(FailureLimit::Count(limit)) => failed > limit,
            Some(FailureLimit::Percent(percent)) => failed * 100 > total * u64::from(percent),
        }
    }

    /// Whether a run has more dead letters than it may keep.
    pub fn too_many_dead_letters(&self, failed: u64) -> bool {
        failed > self.max_dead_letters
    }

    /// Whether a run that ends with these counts has succeeded.
    pub fn is_success(&self, failed: u64, total: u64) -> bool {
        failed == 0 || (self.max_failed.is_some() && !self.too_many_failed(failed, total))
    }
}

#[cfg(test)]
impl RunSettings {
    /// The defaults.
    pub fn for_tests() -> Self {
        Self { keep_results: 0, max_disruptions: 10, max_dead_letters: 50_000, max_files: None }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn limits(execution: Value) -> Limits {
        Limits::parse(&serde_json::from_value(execution).unwrap(), RunSettings::for_tests()).unwrap()
    }

    #[test]
    fn one_failed_file_fails_a_run_that_allows_none_and_stops_none() {
        let none = limits(json!({}));
        assert!(none.is_success(0, 9) && !none.is_success(1, 9));
        assert!(!none.too_many_failed(9, 9), "without a limit nothing stops early");
    }

    #[test]
    fn a_count_and_a_percentage_are_limits_that_may_be_reached() {
        let count = limits(json!({"maxFailedFiles": 2}));
        assert!(count.is_success(2, 9) && !count.too_many_failed(2, 9) && count.too_many_failed(3, 9));
        let percent = limits(json!({"maxFailedFiles": "10%"}));
        assert!(
            percent.is_success(1, 10) && !percent.too_many_failed(1, 10) && percent.too_many_failed(2, 19)
        );
        let zero = limits(json!({"maxFailedFiles": 0}));
        assert!(zero.too_many_failed(1, 1_000_000));
    }
}
