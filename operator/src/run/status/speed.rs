//! How fast a run is: rate, estimated end, and the pods that work on it.

use crds::v1alpha1::{Counts, PipelineRunStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::Report;

/// A later end is not estimated: a rate that is nearly zero is an outage, not a forecast.
const ESTIMATE_SECONDS_MAX: f64 = 365.0 * 24.0 * 3_600.0;

/// How fast a run is, as its status shows it.
#[derive(Default)]
pub struct Speed {
    /// Files settled per second.
    pub rate: Option<String>,
    /// When the run will end at this rate.
    pub completion: Option<Time>,
    /// The pods that work.
    pub workers: Option<i64>,
}

impl Speed {
    /// What the status shows already.
    pub fn shown(old: &PipelineRunStatus) -> Self {
        let (rate, completion) = (old.rate.clone(), old.estimated_completion_time.clone());
        Self { rate, completion, workers: old.workers }
    }

    /// The speed of a run that processes files.
    pub fn of(report: &Report, counts: Counts, is_listing: bool, now: &Time) -> Self {
        let left = counts.queued + counts.running;
        // There may be more files than those that are listed.
        let rate = report.rate.filter(|rate| *rate > 0.0 && left > 0 && !is_listing);
        let seconds =
            rate.map(|rate| (left as f64 / rate).ceil()).filter(|left| *left < ESTIMATE_SECONDS_MAX);
        let end = seconds.and_then(|left| now.0.checked_add(SignedDuration::from_secs(left as i64)).ok());
        Self {
            rate: report.rate.map(in_words),
            // An estimate is not better than a second.
            completion: end.and_then(|end| Timestamp::from_second(end.as_second()).ok()).map(Time),
            ..Self::suspended(report)
        }
    }

    /// The speed of a run that has settled nothing for a minute: neither rate nor estimate holds any longer.
    /// Pods may come and go in the meantime, which is no reason to write the status.
    pub fn stalled(old: &PipelineRunStatus) -> Self {
        Self { rate: Some(in_words(0.0)), completion: None, workers: old.workers }
    }

    /// The speed of a run that processes nothing, while its last pods may still be ending.
    pub fn suspended(report: &Report) -> Self {
        let workers = report.workers.and_then(|workers| i64::try_from(workers).ok());
        Self { workers, ..Self::default() }
    }

    /// The speed of a run that has ended.
    pub fn ended(old: &PipelineRunStatus) -> Self {
        Self { workers: old.workers.map(|_| 0), ..Self::default() }
    }
}

fn in_words(files_per_second: f64) -> String {
    let decimals = if files_per_second < 10.0 { 2 } else { 0 };
    format!("{files_per_second:.decimals$}")
}
