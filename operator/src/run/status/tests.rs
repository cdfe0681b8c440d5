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

/// How a run ended after nine seconds, without a file left out.
fn outcome(succeeded: bool, reason: &str) -> RunOutcome {
    RunOutcome {
        succeeded,
        reason: reason.to_owned(),
        start_time: None,
        completion_time: at(9),
        job_name: None,
        recent_failures: Vec::new(),
        failures: Vec::new(),
        skipped_files: 0,
        partly_listed: false,
    }
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
    let down = Report { obstacle: Some(Reason::QueueUnavailable.because("no answer")), ..Report::default() };
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
    assert_eq!(down.progress.as_deref(), Some("4/9+"), "while Valkey does not answer, the last word stays");
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
    let progressing = status.conditions.iter().find(|condition| condition.type_ == "Progressing").unwrap();
    assert_eq!((progressing.reason.as_str(), &progressing.last_transition_time), ("Listing", &at(0)));
}

#[test]
fn an_end_is_told_to_people_and_to_tools() {
    let counts = Counts { total_files: 2, queued: 0, running: 0, succeeded: 1, failed: 1, retried: 0 };
    let outcome = |succeeded, reason| RunOutcome {
        start_time: Some(at(0)),
        completion_time: at(3_725),
        ..outcome(succeeded, reason)
    };
    let report = |outcome| Report { counts: Some(counts), outcome: Some(outcome), ..Report::default() };
    let failed = build(&run(), &report(outcome(false, "FilesFailed")), &at(3_725));
    assert_eq!((failed.phase, failed.duration.as_deref()), (Some(Phase::Failed), Some("1h2m5s")));
    assert_eq!((state(&failed, "Succeeded"), state(&failed, "Stalled")), ("False", "True"));
    let good = build(&run(), &report(outcome(true, "Completed")), &at(3_725));
    assert_eq!((state(&good, "Succeeded"), state(&good, "Ready")), ("True", "True"));
    assert!(good.conditions.iter().any(|condition| condition.message == "1 of 2 files succeeded, 1 failed"));
}

#[test]
fn a_run_whose_workers_misbehaved_says_what_to_do() {
    let outcome = RunOutcome { partly_listed: true, ..outcome(false, End::WorkersMisbehaving.as_ref()) };
    let counts = Counts { total_files: 5, queued: 0, running: 0, succeeded: 2, failed: 3, retried: 0 };
    let words = end_in_words(&outcome, counts);
    for part in ["user was removed", "who uses its password", "under another name", "2 of 5"] {
        assert!(words.contains(part), "no {part} in {words}");
    }
}

#[test]
fn a_run_with_too_many_files_says_how_many_and_what_to_change() {
    let outcome = outcome(false, End::TooManyFiles.as_ref());
    let counts =
        Counts { total_files: 2_000, queued: 0, running: 0, succeeded: 0, failed: 2_000, retried: 0 };
    let words = end_in_words(&outcome, counts);
    for part in ["2000 files were listed", "--max-files", "prefix, include or exclude", "2000 failed"] {
        assert!(words.contains(part), "no {part} in {words}");
    }
}

#[test]
fn a_run_that_left_files_out_says_how_many_and_so_does_its_ledger() {
    let outcome = RunOutcome { skipped_files: 2, ..outcome(true, End::Completed.as_ref()) };
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
    let outcome = outcome(true, "Completed");
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
