//! Builds the status of a run from the findings of a pass. Pure: the caller supplies the time.

mod speed;

use crds::v1alpha1::{Counts, FailedFile, FailureGroup, Phase, PipelineRun, PipelineRunStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use queue::{FinalCounts, Stats};
use serde::{Deserialize, Serialize};
use strum::VariantArray;

use super::decide::End;
use crate::error::{Obstacle, Reason};
use speed::Speed;

/// A pass's findings about a run. Anything that the pass did not find out stays unchanged.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The runId, once it is known.
    pub run_id: Option<String>,
    /// The phase of the run; unchanged if the pass did not get that far.
    pub phase: Option<Phase>,
    /// The counts, if the queue returned them.
    pub counts: Option<Counts>,
    /// Files listed so far, while the bucket is being listed.
    pub listed: Option<i64>,
    /// Files that the listing left out, for the outcome.
    pub skipped: u64,
    /// The Job.
    pub job_name: Option<String>,
    /// When the run started.
    pub start_time: Option<Time>,
    /// The obstacle to the run's progress.
    pub obstacle: Option<Obstacle>,
    /// The newest files that failed permanently.
    pub recent_failures: Option<Vec<FailedFile>>,
    /// All files that failed permanently, in groups.
    pub failures: Option<Vec<FailureGroup>>,
    /// Files settled per second, if known.
    pub rate: Option<f64>,
    /// The pods that work.
    pub workers: Option<usize>,
    /// How the run ended.
    pub outcome: Option<RunOutcome>,
}

/// How a run ended. The ledger stores it as JSON, so that a run that is created again gets its status back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunOutcome {
    /// Whether the run succeeded.
    pub succeeded: bool,
    /// Why the run ended, in one word.
    pub reason: String,
    /// When the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the run ended.
    pub completion_time: Time,
    /// The run's Job, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,
    /// The newest files that failed permanently.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_failures: Vec<FailedFile>,
    /// All files that failed permanently, in groups.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<FailureGroup>,
    /// Files of the bucket that were skipped, because no run can process them.
    #[serde(default, skip_serializing_if = "is_none")]
    pub skipped_files: u64,
    /// Whether the run ended before the whole bucket was listed. The ledger has a separate field for that.
    #[serde(skip)]
    pub partly_listed: bool,
}

/// The longest message of a condition, in bytes. The API server allows 32 KiB, but a longer message helps no
/// reader.
const MESSAGE_BYTES_MAX: usize = 1_024;

/// Builds the new status.
pub fn build(run: &PipelineRun, report: &Report, now: &Time) -> PipelineRunStatus {
    let old = run.status.clone().unwrap_or_default();
    let counts = report.counts.or(old.counts);
    let outcome = report.outcome.as_ref();
    let phase = match outcome {
        Some(RunOutcome { succeeded: true, .. }) => Phase::Succeeded,
        Some(RunOutcome { succeeded: false, .. }) => Phase::Failed,
        None => report.phase.or(old.phase).unwrap_or_default(),
    };
    // While Valkey does not give the number, the last one stays.
    let listed = report.listed.or(old.listed_files.filter(|_| report.counts.is_none() && outcome.is_none()));
    let speed = match outcome {
        Some(_) => Speed::ended(&old),
        None if phase == Phase::Suspended => Speed::suspended(report),
        None if counts != old.counts || Some(phase) != old.phase => {
            Speed::of(report, counts.unwrap_or_default(), listed.is_some(), now)
        }
        None if report.rate == Some(0.0) => Speed::stalled(&old),
        // It changes all the time, and alone is no reason to write the status.
        None => Speed::shown(&old),
    };
    let start_time = outcome
        .and_then(|outcome| outcome.start_time.clone())
        .or(old.start_time)
        .or_else(|| report.start_time.clone());
    let completion_time = outcome.map(|outcome| outcome.completion_time.clone());
    let duration = start_time.as_ref().zip(completion_time.as_ref()).map(|(start, end)| between(start, end));
    let recent = outcome.map(|outcome| &outcome.recent_failures).or(report.recent_failures.as_ref());
    let failures = outcome.map(|outcome| &outcome.failures).or(report.failures.as_ref());
    PipelineRunStatus {
        observed_generation: run.metadata.generation,
        run_id: report.run_id.clone().or(old.run_id),
        phase: Some(phase),
        counts,
        listed_files: listed,
        progress: counts.filter(|_| phase != Phase::Listing).map(|counts| progress(counts, listed.is_some())),
        job_name: report
            .job_name
            .clone()
            .or(outcome.and_then(|outcome| outcome.job_name.clone()))
            .or(old.job_name),
        start_time,
        completion_time,
        duration,
        rate: speed.rate,
        estimated_completion_time: speed.completion,
        workers: speed.workers,
        failures: failures.cloned().unwrap_or(old.failures),
        recent_failures: recent.cloned().unwrap_or(old.recent_failures),
        conditions: conditions(run, report, phase, listed, counts.unwrap_or_default(), now),
    }
}

/// The files that a run which ends early never processed, as a group of failures.
pub fn never_processed(counts: Counts, end: &str) -> Option<FailureGroup> {
    let count = counts.queued + counts.running;
    let reason = format!("{end}: not processed before the run ended");
    (count > 0).then_some(FailureGroup { reason, count, example: None, last_time: None })
}

/// The counts of a queue, as the status shows them.
pub fn counts(stats: &Stats) -> Counts {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    Counts {
        total_files: number(stats.total),
        queued: number(stats.queued),
        running: number(stats.running),
        succeeded: number(stats.succeeded),
        failed: number(stats.failed),
        retried: number(stats.retried),
    }
}

/// The counts of a run that has ended.
pub fn final_counts(counts: &FinalCounts) -> Counts {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    Counts {
        total_files: number(counts.total),
        queued: 0,
        running: 0,
        succeeded: number(counts.succeeded),
        failed: number(counts.failed),
        retried: number(counts.retried),
    }
}

/// The obstacle that the status of an unfinished run shows.
pub fn obstacle(run: &PipelineRun) -> Option<Obstacle> {
    let mut conditions = run.status.as_ref()?.conditions.iter();
    let degraded =
        conditions.find(|condition| condition.type_ == "Degraded" && condition.status == "True")?;
    let reason = Reason::VARIANTS.iter().find(|reason| reason.as_ref() == degraded.reason)?;
    Some(reason.because(degraded.message.clone()))
}

/// Whether the run's status says that the run has ended.
pub fn is_finished(run: &PipelineRun) -> bool {
    run.status.as_ref().is_some_and(|status| {
        status.completion_time.is_some() && matches!(status.phase, Some(Phase::Succeeded | Phase::Failed))
    })
}

/// The status of a run that was changed after its end: the same, but for the current generation.
pub fn acknowledged(run: &PipelineRun) -> Option<PipelineRunStatus> {
    let generation = run.metadata.generation;
    let mut status = run.status.clone().filter(|status| status.observed_generation != generation)?;
    status.observed_generation = generation;
    status.conditions.iter_mut().for_each(|condition| condition.observed_generation = generation);
    Some(status)
}

/// Settled files out of the known ones; a plus means that more are still being listed.
fn progress(counts: Counts, is_listing: bool) -> String {
    let more = if is_listing { "+" } else { "" };
    format!("{}/{}{more}", counts.succeeded + counts.failed, counts.total_files)
}

/// A summary for conditions, events and the Job.
fn summary(counts: Counts) -> String {
    let Counts { total_files, succeeded, failed, .. } = counts;
    format!("{succeeded} of {total_files} files succeeded, {failed} failed")
}

fn is_none(count: &u64) -> bool {
    *count == 0
}

/// How a run ended, in words.
pub fn end_in_words(outcome: &RunOutcome, counts: Counts) -> String {
    let ended = how_it_ended(outcome, counts);
    match outcome.skipped_files {
        0 => ended,
        skipped => format!("{ended}; skipped files, whose key or etag is too long: {skipped}"),
    }
}

fn how_it_ended(outcome: &RunOutcome, counts: Counts) -> String {
    if outcome.reason == End::NoFilesFound.as_ref() {
        "no file of the bucket matches prefix, include and exclude".to_owned()
    } else if outcome.reason == End::TooManyFiles.as_ref() {
        format!(
            "the run was stopped when {} files were listed, more than --max-files of the operator allows: narrow prefix, include or exclude, or raise the setting; {}",
            counts.total_files,
            summary(counts)
        )
    } else if outcome.reason == End::WorkersMisbehaving.as_ref() {
        format!(
            "the run was stopped because its workers repeatedly wrote more into Valkey than reports can amount to, and their Valkey user was removed: find out who uses its password (a person or a program may have read the Secret of the run's workers), then create the run under another name; {}",
            summary(counts)
        )
    } else if outcome.partly_listed {
        format!(
            "{}; the run ended before the whole bucket was listed, and files that were not listed are not counted",
            summary(counts)
        )
    } else {
        summary(counts)
    }
}

fn between(start: &Time, end: &Time) -> String {
    let seconds = end.0.duration_since(start.0).as_secs().max(0);
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

/// A condition without its time: type, status, reason and message.
struct Said<'a>(&'a str, &'a str, &'a str, &'a str);

fn conditions(
    run: &PipelineRun,
    report: &Report,
    phase: Phase,
    listed: Option<i64>,
    counts: Counts,
    now: &Time,
) -> Vec<Condition> {
    let doing = doing(phase, listed, counts);
    let ended = report.outcome.as_ref();
    let told = ended.map(|outcome| end_in_words(outcome, counts));
    let told = told.as_deref().unwrap_or_default();
    let obstacle =
        report.obstacle.as_ref().map(|obstacle| (obstacle.reason.as_ref(), obstacle.message.as_str()));
    let stalled = report.obstacle.as_ref().is_some_and(|obstacle| obstacle.reason.is_stalled());
    let word = phase.to_string();
    let said = match (ended, obstacle) {
        (Some(RunOutcome { succeeded: true, reason, .. }), _) => vec![
            Said("Progressing", "False", reason, told),
            Said("Succeeded", "True", reason, told),
            Said("Degraded", "False", reason, told),
            Said("Ready", "True", reason, told),
            Said("Reconciling", "False", reason, told),
            Said("Stalled", "False", reason, told),
        ],
        (Some(RunOutcome { succeeded: false, reason, .. }), _) => vec![
            Said("Progressing", "False", reason, told),
            Said("Succeeded", "False", reason, told),
            Said("Degraded", "True", reason, told),
            Said("Ready", "False", reason, told),
            Said("Reconciling", "False", reason, told),
            Said("Stalled", "True", reason, told),
        ],
        (None, Some((reason, message))) if stalled => vec![
            Said("Progressing", "False", reason, message),
            Said("Succeeded", "Unknown", reason, message),
            Said("Degraded", "True", reason, message),
            Said("Ready", "False", reason, message),
            Said("Reconciling", "False", reason, message),
            Said("Stalled", "True", reason, message),
        ],
        (None, Some((reason, message))) => vec![
            Said("Progressing", "True", reason, message),
            Said("Succeeded", "Unknown", &word, &doing),
            Said("Degraded", "True", reason, message),
            Said("Ready", "Unknown", reason, message),
            Said("Reconciling", "True", reason, message),
            Said("Stalled", "False", &word, &doing),
        ],
        (None, None) => vec![
            Said("Progressing", "True", &word, &doing),
            Said("Succeeded", "Unknown", &word, &doing),
            Said("Degraded", "False", "AsExpected", ""),
            Said("Ready", "Unknown", &word, &doing),
            Said("Reconciling", "True", &word, &doing),
            Said("Stalled", "False", &word, &doing),
        ],
    };
    let old = run.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    said.into_iter().map(|said| condition(said, old, run.metadata.generation, now)).collect()
}

/// The activity of an unfinished run, in words that do not change with every file.
fn doing(phase: Phase, listed: Option<i64>, counts: Counts) -> String {
    match phase {
        Phase::Pending => "the run is being prepared".to_owned(),
        Phase::Listing => {
            format!("the bucket is being listed, {} files so far", listed.unwrap_or_default())
        }
        Phase::Running if listed.is_some() => {
            "files are being processed while the bucket is being listed".to_owned()
        }
        Phase::Running => format!("{} files are being processed", counts.total_files),
        Phase::Suspended => "no new file is started while the run or its Job is suspended".to_owned(),
        Phase::Succeeded | Phase::Failed => summary(counts),
    }
}

fn condition(said: Said<'_>, old: &[Condition], generation: Option<i64>, now: &Time) -> Condition {
    let Said(type_, status, reason, message) = said;
    let same = old.iter().find(|old| old.type_ == type_ && old.status == status);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned(),
        last_transition_time: same.map_or_else(|| now.clone(), |same| same.last_transition_time.clone()),
        observed_generation: generation,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
