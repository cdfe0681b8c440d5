//! Builds the status of a run from the findings of a pass. Pure: the caller supplies the time.

use crds::v1alpha1::{Counts, FailedFile, FailureGroup, Phase, PipelineRun, PipelineRunStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use queue::{FinalCounts, Stats};
use serde::{Deserialize, Serialize};
use strum::VariantArray;

use super::decide::End;
use crate::error::{Obstacle, Reason};

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
/// A later end is not estimated: a rate that is nearly zero is an outage, not a forecast.
const ESTIMATE_SECONDS_MAX: f64 = 365.0 * 24.0 * 3_600.0;

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
    let start_time = outcome
        .and_then(|outcome| outcome.start_time.clone())
        .or(old.start_time)
        .or_else(|| report.start_time.clone());
    let completion_time = outcome.map(|outcome| outcome.completion_time.clone());
    let duration = start_time.as_ref().zip(completion_time.as_ref()).map(|(start, end)| between(start, end));
    let recent = outcome.map(|outcome| &outcome.recent_failures).or(report.recent_failures.as_ref());
    let failures = outcome.map(|outcome| &outcome.failures).or(report.failures.as_ref());
    let speed = match outcome {
        Some(_) => Speed { workers: old.workers.map(|_| 0), ..Speed::default() },
        None if phase == Phase::Suspended => Speed { workers: whole(report.workers), ..Speed::default() },
        None if counts != old.counts || Some(phase) != old.phase => {
            Speed::of(report, counts.unwrap_or_default(), listed.is_some(), now)
        }
        // Nothing was settled for a minute: neither rate nor estimate holds any longer.
        None if report.rate == Some(0.0) => {
            Speed { workers: old.workers, ..Speed::of(report, Counts::default(), true, now) }
        }
        // They change all the time, and alone are no reason to write the status.
        None => Speed { rate: old.rate, completion: old.estimated_completion_time, workers: old.workers },
    };
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

/// How fast a run is, and what works on it.
#[derive(Default)]
struct Speed {
    rate: Option<String>,
    completion: Option<Time>,
    workers: Option<i64>,
}

impl Speed {
    fn of(report: &Report, counts: Counts, is_listing: bool, now: &Time) -> Self {
        let left = counts.queued + counts.running;
        // Without a whole number of files there is no end to estimate.
        let seconds =
            report.rate.filter(|rate| *rate > 0.0 && left > 0 && !is_listing).map(|rate| left as f64 / rate);
        let completion = seconds.filter(|seconds| *seconds < ESTIMATE_SECONDS_MAX).and_then(|seconds| {
            // Whole seconds: an estimate is not better than that.
            now.0.checked_add(SignedDuration::from_secs(seconds.ceil() as i64)).ok()
        });
        Self {
            rate: report
                .rate
                .map(|rate| format!("{rate:.decimals$}", decimals = if rate < 10.0 { 2 } else { 0 })),
            completion: completion.and_then(|time| Timestamp::from_second(time.as_second()).ok()).map(Time),
            workers: whole(report.workers),
        }
    }
}

fn whole(number: Option<usize>) -> Option<i64> {
    number.and_then(|number| i64::try_from(number).ok())
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
mod tests {
    use super::*;
    use crate::error::Reason;
    use serde_json::json;

    fn run() -> PipelineRun {
        serde_json::from_value(json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun",
            "metadata": {"name": "r", "namespace": "n", "generation": 3}, "spec": {"pipelineRef": {"name": "p"}}}))
        .unwrap()
    }

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    fn state<'a>(status: &'a PipelineRunStatus, type_: &str) -> &'a str {
        &status.conditions.iter().find(|condition| condition.type_ == type_).unwrap().status
    }

    #[test]
    fn the_first_status_reads_as_in_progress_for_tools() {
        let status = build(&run(), &Report::default(), &at(0));
        assert_eq!((state(&status, "Reconciling"), state(&status, "Ready")), ("True", "Unknown"));
        assert_eq!(status.phase, Some(Phase::Pending));
        assert_eq!(status.observed_generation, Some(3));
    }

    #[test]
    fn what_a_pass_did_not_find_out_stays_as_it_was() {
        let mut run = run();
        let counts = Counts { total_files: 9, queued: 4, running: 1, succeeded: 3, failed: 1, retried: 0 };
        let report = Report { phase: Some(Phase::Running), counts: Some(counts), ..Report::default() };
        run.status = Some(build(&run, &report, &at(0)));
        let down =
            Report { obstacle: Some(Reason::QueueUnavailable.because("no answer")), ..Report::default() };
        let status = build(&run, &down, &at(9));
        assert_eq!((status.counts, status.phase), (Some(counts), Some(Phase::Running)));
        assert_eq!(status.progress.as_deref(), Some("4/9"));
        assert_eq!(state(&status, "Degraded"), "True");
        assert_eq!(state(&status, "Succeeded"), "Unknown", "no answer is no success");
    }

    #[test]
    fn how_far_a_listing_is_stays_while_valkey_does_not_answer_and_goes_with_the_listing() {
        let mut run = run();
        let listing = Report { phase: Some(Phase::Listing), listed: Some(7), ..Report::default() };
        run.status = Some(build(&run, &listing, &at(0)));
        let down = build(&run, &Report::default(), &at(1));
        assert_eq!(down.listed_files, Some(7));
        assert!(down.conditions.iter().any(|condition| condition.message.contains("7 files so far")));
        let counts = Some(Counts::default());
        let running = Report { phase: Some(Phase::Running), counts, ..Report::default() };
        assert_eq!(build(&run, &running, &at(2)).listed_files, None);
    }

    #[test]
    fn progress_says_while_more_files_are_being_listed() {
        let mut run = run();
        let counts = Counts { total_files: 9, queued: 4, running: 1, succeeded: 3, failed: 1, retried: 0 };
        let running = Report { phase: Some(Phase::Running), counts: Some(counts), ..Report::default() };
        let listing = Report { listed: Some(9), ..running.clone() };
        run.status = Some(build(&run, &listing, &at(0)));
        assert_eq!(run.status.as_ref().unwrap().progress.as_deref(), Some("4/9+"));
        let down = build(&run, &Report::default(), &at(1));
        assert_eq!(
            down.progress.as_deref(),
            Some("4/9+"),
            "while Valkey does not answer, the last word stays"
        );
        assert_eq!(build(&run, &running, &at(2)).progress.as_deref(), Some("4/9"));
    }

    #[test]
    fn rate_and_estimate_change_only_with_the_counts() {
        let mut run = run();
        let counts = |succeeded| Counts {
            total_files: 100,
            queued: 80 - succeeded,
            running: 20,
            succeeded,
            ..Counts::default()
        };
        let report = |succeeded, rate| Report {
            phase: Some(Phase::Running),
            counts: Some(counts(succeeded)),
            rate,
            workers: Some(4),
            ..Report::default()
        };
        run.status = Some(build(&run, &report(20, Some(2.5)), &at(0)));
        let shown = |run: &PipelineRun| {
            let status = run.status.clone().unwrap();
            (status.rate, status.estimated_completion_time, status.workers)
        };
        assert_eq!(shown(&run), (Some("2.50".to_owned()), Some(at(32)), Some(4)));
        let same = build(&run, &Report { workers: Some(9), ..report(20, Some(7.0)) }, &at(5));
        assert_eq!(Some(&same), run.status.as_ref(), "nothing to write");
        run.status = Some(build(&run, &report(40, Some(160.0)), &at(5)));
        assert_eq!(shown(&run), (Some("160".to_owned()), Some(at(6)), Some(4)));
        for rate in [None, Some(0.0), Some(1e-9)] {
            let slow = build(&run, &report(41, rate), &at(6));
            assert_eq!(slow.estimated_completion_time, None, "{rate:?}");
        }
        // An outage: the status must not promise an end that has passed.
        let still = build(&run, &report(40, Some(0.0)), &at(99));
        assert_eq!(
            (still.rate.as_deref(), still.estimated_completion_time, still.workers),
            (Some("0.00"), None, Some(4))
        );
        let suspended = Report { phase: Some(Phase::Suspended), workers: Some(0), ..report(40, Some(9.0)) };
        let suspended = build(&run, &suspended, &at(99));
        assert_eq!(
            (suspended.rate, suspended.estimated_completion_time, suspended.workers),
            (None, None, Some(0))
        );
        let listing = Report { listed: Some(100), ..report(41, Some(2.5)) };
        assert_eq!(build(&run, &listing, &at(6)).estimated_completion_time, None, "there may be more files");
    }

    #[test]
    fn files_that_an_early_end_left_are_a_group_of_their_own() {
        let counts = Counts { total_files: 9, queued: 4, running: 1, succeeded: 3, failed: 1, retried: 0 };
        let group = never_processed(counts, "TimedOut").unwrap();
        assert_eq!((group.count, group.reason.starts_with("TimedOut: ")), (5, true));
        assert_eq!(never_processed(Counts { queued: 0, running: 0, ..counts }, "TimedOut"), None);
    }

    #[test]
    fn a_time_changes_only_with_its_state() {
        let mut run = run();
        run.status = Some(build(&run, &Report::default(), &at(0)));
        let report = Report { phase: Some(Phase::Listing), listed: Some(7), ..Report::default() };
        let status = build(&run, &report, &at(60));
        let progressing =
            status.conditions.iter().find(|condition| condition.type_ == "Progressing").unwrap();
        assert_eq!((progressing.reason.as_str(), &progressing.last_transition_time), ("Listing", &at(0)));
    }

    #[test]
    fn an_end_is_told_to_people_and_to_tools() {
        let counts = Counts { total_files: 2, queued: 0, running: 0, succeeded: 1, failed: 1, retried: 0 };
        let outcome = |succeeded, reason: &str| RunOutcome {
            succeeded,
            reason: reason.to_owned(),
            start_time: Some(at(0)),
            completion_time: at(3_725),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 0,
            partly_listed: false,
        };
        let report = |outcome| Report { counts: Some(counts), outcome: Some(outcome), ..Report::default() };
        let failed = build(&run(), &report(outcome(false, "FilesFailed")), &at(3_725));
        assert_eq!((failed.phase, failed.duration.as_deref()), (Some(Phase::Failed), Some("1h2m5s")));
        assert_eq!((state(&failed, "Succeeded"), state(&failed, "Stalled")), ("False", "True"));
        let good = build(&run(), &report(outcome(true, "Completed")), &at(3_725));
        assert_eq!((state(&good, "Succeeded"), state(&good, "Ready")), ("True", "True"));
        assert!(
            good.conditions.iter().any(|condition| condition.message == "1 of 2 files succeeded, 1 failed")
        );
    }

    #[test]
    fn a_run_whose_workers_misbehaved_says_what_to_do() {
        let outcome = RunOutcome {
            succeeded: false,
            reason: End::WorkersMisbehaving.as_ref().to_owned(),
            start_time: None,
            completion_time: at(9),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 0,
            partly_listed: true,
        };
        let counts = Counts { total_files: 5, queued: 0, running: 0, succeeded: 2, failed: 3, retried: 0 };
        let words = end_in_words(&outcome, counts);
        for part in ["user was removed", "who uses its password", "under another name", "2 of 5"] {
            assert!(words.contains(part), "no {part} in {words}");
        }
    }

    #[test]
    fn a_run_with_too_many_files_says_how_many_and_what_to_change() {
        let outcome = RunOutcome {
            succeeded: false,
            reason: End::TooManyFiles.as_ref().to_owned(),
            start_time: None,
            completion_time: at(9),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 0,
            partly_listed: false,
        };
        let counts =
            Counts { total_files: 2_000, queued: 0, running: 0, succeeded: 0, failed: 2_000, retried: 0 };
        let words = end_in_words(&outcome, counts);
        for part in ["2000 files were listed", "--max-files", "prefix, include or exclude", "2000 failed"] {
            assert!(words.contains(part), "no {part} in {words}");
        }
    }

    #[test]
    fn a_run_that_left_files_out_says_how_many_and_so_does_its_ledger() {
        let outcome = RunOutcome {
            succeeded: true,
            reason: End::Completed.as_ref().to_owned(),
            start_time: None,
            completion_time: at(9),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 2,
            partly_listed: false,
        };
        let counts = Counts { total_files: 1, queued: 0, running: 0, succeeded: 1, failed: 0, retried: 0 };
        let words = "1 of 1 files succeeded, 0 failed; skipped files, whose key or etag is too long: 2";
        assert_eq!(end_in_words(&outcome, counts), words);
        let stored = serde_json::to_value(&outcome).unwrap();
        assert_eq!(serde_json::from_value::<RunOutcome>(stored.clone()).unwrap(), outcome);
        let mut older = stored;
        older.as_object_mut().unwrap().remove("skippedFiles");
        let older: RunOutcome = serde_json::from_value(older).unwrap();
        assert_eq!(end_in_words(&older, counts), "1 of 1 files succeeded, 0 failed");
    }

    #[test]
    fn a_change_after_the_end_is_acknowledged_and_changes_nothing_else() {
        let outcome = RunOutcome {
            succeeded: true,
            reason: "Completed".to_owned(),
            start_time: None,
            completion_time: at(9),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 0,
            partly_listed: false,
        };
        let mut run = run();
        let ended = build(&run, &Report { outcome: Some(outcome), ..Report::default() }, &at(9));
        run.status = Some(ended.clone());
        assert_eq!(acknowledged(&run), None);
        run.metadata.generation = Some(4);
        let mut status = acknowledged(&run).unwrap();
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(4)));
        assert_eq!(status.observed_generation, Some(4));
        status.observed_generation = Some(3);
        status.conditions.iter_mut().for_each(|condition| condition.observed_generation = Some(3));
        assert_eq!(status, ended);
    }

    #[test]
    fn every_message_fits() {
        let obstacle = Reason::PodsRefused.because("ü".repeat(40_000));
        let status = build(&run(), &Report { obstacle: Some(obstacle), ..Report::default() }, &at(0));
        assert!(status.conditions.iter().all(|condition| condition.message.len() <= MESSAGE_BYTES_MAX));
    }
}
