use std::sync::Arc;

use super::*;
use crate::error::Reason;
use crate::pods::{Failed, Milestone, Stage, Started, Stuck};
use crate::run::verdict;
use protocol::container::{CLAIMER, PUBLISHER};
use protocol::{Exit, Report};
use queue::Verdict;

const SECOND: Duration = Duration::from_secs(1);

fn pod(stage: Stage, since: Instant) -> Arc<WorkerPod> {
    Arc::new(WorkerPod::in_stage("p", stage, since))
}

fn open_labels(breakers: &Breakers) -> Vec<&'static str> {
    breakers.next_probes().map(|(label, _)| label).collect()
}

fn probe(breakers: &Breakers, now: Instant, alive: &[Arc<WorkerPod>]) -> Probe {
    breakers.probe(now, alive.iter().map(Arc::as_ref), 0)
}

/// Treats a pod whose claimer failed as a pass would.
fn fetch_fails(breakers: &mut Breakers, exit: Exit, canary: Option<bool>, at: Instant) {
    let failed = Failed {
        container: Some(CLAIMER.to_owned()),
        exit_code: Some(exit.code()),
        message: format!("{}: s3://bkt/a: no answer", exit.as_ref()),
        ..Failed::default()
    };
    let report = Report {
        entry: None,
        attempt: 1,
        outcome: Err(exit),
        canary,
        started_ms: 0,
        ended_ms: 1,
        text: String::new(),
    };
    let pod = WorkerPod { claimer: Some(report), ..WorkerPod::in_stage("p", Stage::Failed(failed), at) };
    let judgement = verdict::of(&pod, &[], &breakers.known()).expect("it has ended");
    breakers.judged(&judgement);
}

fn fetched(at: Instant, witnessed: bool) -> WorkerPod {
    let pod = WorkerPod::in_stage("p", Stage::Working, at);
    WorkerPod { fetched: Some(Milestone { at, witnessed }), ..pod }
}

fn outage(at: Instant) -> Breakers {
    let mut breakers = Breakers::default();
    for _ in 0..OPENS_AFTER {
        fetch_fails(&mut breakers, Exit::StorageUnreachable, Some(false), at);
    }
    breakers
}

#[test]
fn three_disruptions_in_a_row_open_a_breaker() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for number in 1..OPENS_AFTER {
        fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now);
        assert_eq!(probe(&breakers, now, &[]), Probe::Full, "after {number}");
        assert_eq!(breakers.obstacle(), None);
    }
    fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now);
    assert_eq!(probe(&breakers, now, &[]), Probe::Wait(SECOND));
    assert_eq!(breakers.next_probes().collect::<Vec<_>>(), [("source", now + SECOND)]);
}

#[test]
fn a_success_between_them_starts_the_count_again() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for second in 0..10 {
        fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now + SECOND * 2 * second);
        breakers.observe([&fetched(now + SECOND * (2 * second + 1), true)]);
    }
    assert_eq!(probe(&breakers, now, &[]), Probe::Full);
}

/// Workers that process many files fetch files ahead of their turn, and report each file when they begin and
/// when they end it.
#[test]
fn a_file_that_was_handed_out_before_an_outage_does_not_end_it_when_it_succeeds() {
    let began = Instant::now();
    let mut breakers = outage(began + SECOND);
    breakers.file_fetched(began);
    assert_eq!(open_labels(&breakers), ["source"], "it may have been fetched before");
    breakers.results_published(began + SECOND * 2);
    assert_eq!(open_labels(&breakers), ["source"], "the sink is another storage");
    breakers.file_fetched(began + SECOND * 2);
    assert_eq!(open_labels(&breakers).len(), 0);
}

#[test]
fn one_probe_at_a_time_after_one_second_doubling_to_five() {
    let mut now = Instant::now();
    let mut breakers = outage(now);
    for seconds in [1, 2, 4, 5, 5] {
        let wait = SECOND * seconds;
        assert_eq!(probe(&breakers, now, &[]), Probe::Wait(wait));
        now += wait;
        assert_eq!(probe(&breakers, now, &[]), Probe::One);
        assert_eq!(probe(&breakers, now, &[pod(Stage::Claiming, now)]), Probe::UnderWay);
        assert_eq!(breakers.probe(now, [], 1), Probe::UnderWay, "the watch has not shown it yet");
        fetch_fails(&mut breakers, Exit::StorageUnreachable, Some(false), now);
    }
}

#[test]
fn pods_that_fail_while_we_wait_do_not_make_us_wait_longer() {
    let now = Instant::now();
    let mut breakers = outage(now);
    for part in 1..50 {
        fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now + SECOND / 50 * part);
    }
    assert_eq!(probe(&breakers, now + SECOND, &[]), Probe::One);
}

#[test]
fn the_first_success_closes_it() {
    let now = Instant::now();
    let mut breakers = outage(now);
    breakers.observe([&fetched(now + SECOND, true)]);
    assert_eq!(probe(&breakers, now + SECOND, &[]), Probe::Full);
    assert_eq!(breakers.obstacle(), None);
    assert_eq!(open_labels(&breakers).len(), 0);
    fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now + SECOND * 2);
    assert_eq!(probe(&breakers, now + SECOND * 2, &[]), Probe::Full, "it takes three again");
}

/// A pod that works for hours fetched its file long ago.
#[test]
fn a_success_before_the_outage_does_not_close_it() {
    let now = Instant::now();
    let mut breakers = Breakers::default();
    let working = fetched(now - SECOND, true);
    for second in 0..OPENS_AFTER {
        breakers.observe([&working]);
        fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now + SECOND * second);
    }
    breakers.observe([&working]);
    assert_ne!(probe(&breakers, now + SECOND * 2, &[]), Probe::Full);
    breakers.observe([&fetched(now + SECOND * 3, false)]);
    assert_ne!(probe(&breakers, now + SECOND * 3, &[]), Probe::Full, "a restarted operator finds old pods");
    assert_eq!(breakers.known().last_fetch, Some(now - SECOND));
}

/// Events count in the order of their times, not in the order in which a pass sees them.
#[test]
fn a_disruption_before_the_last_success_does_not_count() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    breakers.observe([&fetched(now, true)]);
    for _ in 0..5 {
        fetch_fails(&mut breakers, Exit::StorageUnreachable, None, now - SECOND);
    }
    assert_eq!(probe(&breakers, now, &[]), Probe::Full);
}

#[test]
fn bad_objects_at_the_end_of_a_run_are_no_outage() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for (second, exit) in (0..).zip([Exit::NoAccess, Exit::StorageUnreachable].into_iter().cycle().take(20)) {
        fetch_fails(&mut breakers, exit, Some(true), now + SECOND * second);
    }
    assert_eq!(probe(&breakers, now, &[]), Probe::Full);
    assert_eq!(breakers.obstacle(), None);
}

#[test]
fn a_canary_that_is_reached_closes_the_breaker() {
    let now = Instant::now();
    let mut breakers = outage(now);
    fetch_fails(&mut breakers, Exit::NoAccess, Some(true), now + SECOND);
    assert_eq!(probe(&breakers, now + SECOND, &[]), Probe::Full);
}

/// The last result of a run that its sink alone refuses: without this the run would probe forever.
#[test]
fn a_result_that_alone_is_refused_neither_stops_a_run_nor_passes_for_an_outage() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for second in 0..20 {
        let at = now + SECOND * second;
        let exit = Exit::NoAccess;
        let failed = Failed {
            container: Some(PUBLISHER.to_owned()),
            exit_code: Some(exit.code()),
            ..Failed::default()
        };
        let publisher = Report::parse("- 1 NoAccess+up 0-1 s3://results/k: 403");
        let pod = WorkerPod { publisher, ..WorkerPod::in_stage("p", Stage::Failed(failed), at) };
        let judgement = verdict::of(&pod, &[], &breakers.known()).expect("it has ended");
        assert!(matches!(&judgement.verdict, Verdict::Disrupted(disruption) if disruption.counts));
        breakers.judged(&judgement);
    }
    assert_eq!((probe(&breakers, now, &[]), breakers.obstacle()), (Probe::Full, None));
}

#[test]
fn thirty_drained_pods_never_throttle_a_run() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for _ in 0..30 {
        let drained = WorkerPod::in_stage("p", Stage::Working, now);
        breakers.judged(&verdict::of_vanished(&drained));
        let failed = Failed { container: Some("resize".into()), exit_code: Some(3), ..Failed::default() };
        let of_filter = WorkerPod::in_stage("p", Stage::Failed(failed), now);
        breakers.judged(&verdict::of(&of_filter, &[], &Known::default()).expect("it has ended"));
    }
    assert_eq!(probe(&breakers, now, &[]), Probe::Full);
    assert_eq!(breakers.obstacle(), None);
}

#[test]
fn only_pods_that_will_show_something_count_as_probes() {
    let now = Instant::now();
    let working = Arc::new(fetched(now, true));
    let later = now + SECOND;
    assert_eq!(
        probe(&outage(now), later, &[Arc::clone(&working)]),
        Probe::One,
        "it needs the source no more"
    );
    let of = |dependency| {
        let mut breakers = Breakers::default();
        (0..OPENS_AFTER).for_each(|_| breakers.disrupted(dependency, now, "no answer"));
        probe(&breakers, later, &[Arc::clone(&working)])
    };
    assert_eq!(of(Dependency::Sink), Probe::UnderWay, "it will publish");
    assert_eq!(of(Dependency::Image), Probe::UnderWay, "not all of its containers have started");
}

#[test]
fn success_of_one_storage_says_nothing_about_the_other() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for second in 0..OPENS_AFTER {
        breakers.observe([&fetched(now + SECOND * second, true)]);
        breakers.disrupted(Dependency::SinkCredentials, now + SECOND * second, "403");
    }
    assert_ne!(probe(&breakers, now, &[]), Probe::Full);
    assert_eq!(breakers.obstacle().map(|found| found.reason), Some(Reason::CredentialsInvalid));
    assert_eq!(open_labels(&breakers), ["credentials"]);
}

#[test]
fn an_image_is_back_as_soon_as_its_container_has_started_also_if_others_still_wait() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    let with = |containers, at, stage| {
        let started = Some(Started { containers, last: Milestone { at, witnessed: true } });
        WorkerPod { started, ..WorkerPod::in_stage("p", stage, at) }
    };
    let stuck = Stuck { reason: "ImagePullBackOff".into(), ..Stuck::default() };
    for _ in 0..OPENS_AFTER {
        let pod = with(1, now, Stage::Stuck(stuck.clone()));
        breakers.judged(&verdict::of_stuck(&pod, &stuck));
    }
    let later = now + SECOND;
    let claiming = with(1, later, Stage::Working);
    breakers.observe([&claiming]);
    assert_ne!(probe(&breakers, later, &[]), Probe::Full, "the claimer has another image");
    assert_eq!(probe(&breakers, later, &[Arc::new(claiming)]), Probe::UnderWay, "it will show");
    let filtering = with(2, later, Stage::Working);
    assert_eq!(probe(&breakers, later, &[Arc::new(filtering.clone())]), Probe::One, "it has shown before");
    breakers.observe([&filtering]);
    assert_eq!(probe(&breakers, later, &[]), Probe::Full, "its publisher need not have started");
}

#[test]
fn a_full_workspace_is_reported_and_throttles_nothing() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    for _ in 0..OPENS_AFTER {
        fetch_fails(&mut breakers, Exit::DiskFull, None, now);
    }
    assert_eq!(breakers.obstacle().map(|found| found.reason), Some(Reason::WorkspaceFull));
    assert_eq!(probe(&breakers, now, &[]), Probe::Full);
    assert_eq!(open_labels(&breakers).len(), 0);
    breakers.observe([&fetched(now + SECOND, true)]);
    assert_eq!(breakers.obstacle(), None);
}

#[test]
fn a_new_operator_knows_nothing_of_the_storage_until_something_succeeds_or_often_fails() {
    let now = Instant::now();
    assert!(Breakers::default().know_nothing_of_storage());
    assert!(!outage(now).know_nothing_of_storage(), "it knows of the outage itself");
    let mut breakers = Breakers::default();
    breakers.disrupted(Dependency::Source, now, "StorageUnreachable");
    assert!(breakers.know_nothing_of_storage(), "that may be one object");
    breakers.file_fetched(now + SECOND);
    assert!(!breakers.know_nothing_of_storage());
}

#[test]
fn the_message_names_what_fails_how_and_what_happens_next() {
    let now = Instant::now();
    let mut breakers = outage(now);
    let message = |breakers: &Breakers| breakers.obstacle().map(|found| found.message).unwrap_or_default();
    let first = message(&breakers);
    for part in [
        "the source's storage is unavailable",
        "StorageUnreachable: s3://bkt/a: no answer",
        "this operator has not seen a file fetched yet",
        "one pod at a time tries again",
    ] {
        assert!(first.contains(part), "no {part:?} in {first:?}");
    }
    assert_eq!(breakers.obstacle().map(|found| found.reason), Some(Reason::StorageUnavailable));
    // Each probe fails with another file, which is no reason to write the status.
    breakers.disrupted(Dependency::Source, now + SECOND, "StorageUnreachable: s3://bkt/b: no answer");
    assert_eq!(message(&breakers), first);
    breakers.disrupted(Dependency::Source, now + MESSAGE_KEPT, "StorageUnreachable: s3://bkt/c: 503");
    assert!(message(&breakers).contains("s3://bkt/c: 503"));
}

#[test]
fn what_may_be_created_is_capped() {
    for (probe, created) in
        [(Probe::Full, 9), (Probe::One, 1), (Probe::Wait(SECOND), 0), (Probe::UnderWay, 0)]
    {
        assert_eq!(probe.cap(9), created);
        assert_eq!(probe.cap(0), 0);
        assert_eq!(probe.wake(), (probe == Probe::Wait(SECOND)).then_some(SECOND));
    }
}

/// The shim of a filter's container has started even if its command has not, so no pod starts more
/// containers.
#[test]
fn a_command_that_cannot_be_executed_opens_the_breaker_and_a_pod_that_succeeds_closes_it() {
    let (mut breakers, now) = (Breakers::default(), Instant::now());
    let started = |at| Started { containers: 2, last: Milestone { at, witnessed: true } };
    let failed = Failed {
        container: Some("detect".to_owned()),
        exit_code: Some(shim::UNUSABLE.into()),
        behind_shim: true,
        ..Failed::default()
    };
    let ended = |stage: Stage, at: Instant| WorkerPod {
        started: Some(started(at)),
        ..WorkerPod::in_stage("p", stage, at + SECOND)
    };
    for second in 0..OPENS_AFTER {
        let pod = ended(Stage::Failed(failed.clone()), now + SECOND * second);
        breakers.observe([&pod]);
        breakers.judged(&verdict::of(&pod, &[], &breakers.known()).expect("it has ended"));
    }
    assert_eq!(breakers.obstacle().map(|found| found.reason), Some(Reason::ContainerStartFailed));
    let pod = ended(Stage::Succeeded, now + SECOND * 9);
    breakers.observe([&pod]);
    breakers.judged(&verdict::of(&pod, &[], &breakers.known()).expect("it has ended"));
    assert_eq!(breakers.obstacle(), None);
}
