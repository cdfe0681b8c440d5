use queue::REASON_BYTES_MAX;
use strum::VariantArray;

use super::*;
use crate::pods::{Deleting, Doomed};

const SECOND: Duration = Duration::from_secs(1);

fn failed(container: Option<&str>, exit_code: Option<i32>, reason: &str, message: &str) -> WorkerPod {
    let failed = Failed {
        container: container.map(str::to_owned),
        exit_code,
        reason: reason.to_owned(),
        message: message.to_owned(),
        ..Failed::default()
    };
    WorkerPod::in_stage("p", Stage::Failed(failed), Instant::now())
}

fn killed_for_memory(container: &str, memory_limit: bool) -> WorkerPod {
    let mut pod = failed(Some(container), Some(137), "OOMKilled", "");
    if let Stage::Failed(failed) = &mut pod.stage {
        failed.memory_limit = memory_limit;
    }
    pod
}

fn of_added_container() -> WorkerPod {
    let mut pod = failed(Some("mesh-init"), Some(1), "Error", "");
    if let Stage::Failed(failed) = &mut pod.stage {
        failed.added = true;
    }
    pod
}

/// A pod whose failed filter ran behind our shim.
fn behind_shim(exit_code: u8) -> WorkerPod {
    let mut pod = failed(Some("detect"), Some(exit_code.into()), "Error", "cannot execute `/detect`");
    if let Stage::Failed(failed) = &mut pod.stage {
        failed.behind_shim = true;
    }
    pod
}

fn deleted(mut pod: WorkerPod) -> WorkerPod {
    pod.deleting = Some(Deleting { since: pod.since, grace: SECOND });
    pod
}

fn doomed(mut pod: WorkerPod, reason: &str) -> WorkerPod {
    pod.doomed = Some(Doomed { since: pod.since, reason: reason.to_owned(), message: "said".to_owned() });
    pod
}

fn filter(exit_code: i32, reason: &str) -> WorkerPod {
    failed(Some("resize"), Some(exit_code), reason, "")
}

fn whole(reason: &str) -> WorkerPod {
    failed(None, None, reason, "")
}

fn ours(container: &str, exit: Exit) -> WorkerPod {
    failed(Some(container), Some(exit.code()), "Error", "")
}

/// A failed operation that took a second, with the claimer's or publisher's report about it.
fn reported(container: &str, exit: Exit, canary: Option<bool>) -> WorkerPod {
    let report = Report {
        entry: Some("7-1".to_owned()),
        attempt: 1,
        outcome: Err(exit),
        canary,
        started_ms: 5_000,
        ended_ms: 6_000,
        text: "s3://bkt/a: 503".to_owned(),
    };
    let mut pod = ours(container, exit);
    if container == CLAIMER {
        pod.claimer = Some(report);
    } else {
        pod.publisher = Some(report);
    }
    pod
}

fn judge(pod: &WorkerPod) -> Judgement {
    of(pod, &[15], &Known::default()).expect("it has ended")
}

fn reason_of(pod: &WorkerPod) -> String {
    judge(pod).failure().map(|failure| failure.reason().to_owned()).unwrap_or_default()
}

fn counts(judgement: &Judgement) -> bool {
    matches!(&judgement.verdict, Verdict::Disrupted(disruption) if disruption.counts)
}

/// The table of docs/runs.md, line by line.
#[test]
fn a_file_is_charged_only_when_its_own_processing_failed() {
    use Cause::{File, Input, Pod, Success, Worker};
    let image = Cause::Dependency(Dependency::Container);
    let done = WorkerPod::in_stage("p", Stage::Succeeded, Instant::now());
    for (what, pod, cause) in [
        ("every container succeeded", done, Success),
        ("a filter fails", filter(3, "Error"), File),
        ("a filter ends with the code of the claimer", filter(17, "Error"), File),
        ("a filter is killed", filter(137, "Error"), File),
        ("a filter ends with 128 by itself", filter(128, "Error"), File),
        ("a filter ends with 255 by itself", filter(255, "Error"), File),
        ("a filter says that its input is bad", filter(15, "Error"), Input),
        ("a filter exceeds its memory", killed_for_memory("resize", true), File),
        ("the pod exceeds its own storage", whole("Evicted"), File),
        ("its node has too little memory", killed_for_memory("resize", false), Pod),
        ("a filter cannot be started", filter(128, "StartError"), image),
        ("a filter's command cannot be executed", behind_shim(shim::UNUSABLE), image),
        ("a filter ends with the code of the shim", filter(shim::UNUSABLE.into(), "Error"), File),
        ("a filter that is a script lacks a program", behind_shim(127), File),
        ("a filter answers that its input is bad", behind_shim(shim::REJECTED), Input),
        ("a filter without a shim ends so", filter(shim::REJECTED.into(), "Error"), File),
        ("it is deleted while a command cannot be executed", deleted(behind_shim(shim::UNUSABLE)), Pod),
        ("our claimer cannot be started", failed(Some(CLAIMER), Some(128), "StartError", ""), image),
        ("its node is short of something", doomed(whole("Evicted"), "TerminationByKubelet"), Pod),
        ("its node is drained", doomed(filter(143, "Error"), "EvictionByEvictionAPI"), Pod),
        ("a pod of more weight needs its place", doomed(filter(137, "Error"), "PreemptionByScheduler"), Pod),
        ("it is deleted, and its filter says what it likes", deleted(filter(15, "Error")), Pod),
        ("it is deleted while its filter uses much memory", deleted(killed_for_memory("resize", true)), Pod),
        ("it is deleted while it publishes", deleted(ours(PUBLISHER, Exit::StorageUnreachable)), Pod),
        ("its node restarted", filter(255, "Unknown"), Pod),
        ("its node lost the container", filter(137, "ContainerStatusUnknown"), Pod),
        ("its node restarted while it fetched", failed(Some(CLAIMER), Some(255), "Unknown", ""), Pod),
        ("its node is lost", whole("NodeLost"), Pod),
        ("its node did not take it", whole("OutOfcpu"), Pod),
        ("our claimer is killed", failed(Some(CLAIMER), Some(137), "Error", ""), Worker),
        ("our claimer uses too much memory", killed_for_memory(CLAIMER, true), Worker),
        ("our claimer crashes", failed(Some(CLAIMER), Some(101), "Error", ""), Worker),
        ("our publisher is killed", failed(Some(PUBLISHER), Some(137), "Error", ""), Worker),
        ("a container of a mesh fails", of_added_container(), Worker),
    ] {
        let judgement = judge(&pod);
        assert_eq!(judgement.cause, cause, "{what}");
        match cause {
            Success => assert_eq!(judgement.verdict, Verdict::Succeeded, "{what}"),
            File => assert!(matches!(judgement.verdict, Verdict::Failed(_)), "{what}: {judgement:?}"),
            Input => assert!(matches!(judgement.verdict, Verdict::Rejected(_)), "{what}: {judgement:?}"),
            Cause::Unclaimed => assert_eq!(judgement.verdict, Verdict::Released, "{what}"),
            Pod | Worker | Cause::Dependency(_) => assert!(counts(&judgement), "{what}: {judgement:?}"),
        }
    }
}

/// One line per exit code: its meaning from the claimer, and from the publisher.
#[test]
fn every_exit_code_of_ours_has_a_cause() {
    use Cause::{File, Pod, Unclaimed, Worker};
    use Dependency::{Sink, SinkCredentials, Source, SourceCredentials, Workspace};
    for exit in Exit::VARIANTS {
        let (claimer, publisher) = match exit {
            Exit::BadSettings => (Worker, Worker),
            Exit::QueueUnreachable | Exit::QueueDenied => (Unclaimed, Worker),
            Exit::NoAccess => (Cause::Dependency(SourceCredentials), Cause::Dependency(SinkCredentials)),
            Exit::ObjectGone => (File, Cause::Dependency(Sink)),
            Exit::ObjectChanged => (File, File),
            Exit::StorageUnreachable => (Cause::Dependency(Source), Cause::Dependency(Sink)),
            Exit::DiskFull => (Cause::Dependency(Workspace), Cause::Dependency(Workspace)),
            Exit::LocalIo => (Worker, File),
            Exit::PublishIncomplete => (Worker, File),
            Exit::ObjectTruncated => (File, File),
            Exit::QueueBroken => (Worker, Worker),
            Exit::NothingToPublish => (Worker, File),
            Exit::StorageRefused => (File, File),
            Exit::FilterUnusable | Exit::FilterLost => (Worker, Worker),
            Exit::Terminated => (Pod, Pod),
        };
        assert_eq!(judge(&ours(CLAIMER, *exit)).cause, claimer, "claimer: {exit:?}");
        assert_eq!(judge(&ours(PUBLISHER, *exit)).cause, publisher, "publisher: {exit:?}");
    }
}

/// The kubelet announces nothing, and the container's end is visible before the pod's.
#[test]
fn a_pod_that_its_kubelet_evicts_is_no_files_fault_whichever_is_seen_first() {
    let killed = filter(137, "Error");
    let since = killed.since;
    assert!(!killed.is_over(since) && killed.is_over(since + SECOND * 5), "its last status may follow");
    assert_eq!(judge(&killed).cause, Cause::File, "none came");
    for mut last in [killed, whole("Evicted"), filter(1, "Error")] {
        last.stopped = true;
        assert!(last.is_over(since));
        last.doomed = Some(Doomed {
            since: last.since + SECOND,
            reason: ENDED_BY_KUBELET.to_owned(),
            message: "The node was low on resource: memory.".to_owned(),
        });
        assert_eq!(judge(&last).cause, Cause::Pod);
    }
    let failed = filter(1, "Error");
    assert!(failed.is_over(failed.since), "it ended by itself");
}

#[test]
fn a_storage_disruption_counts_only_if_another_object_could_be_reached() {
    for container in [CLAIMER, PUBLISHER] {
        for exit in [Exit::NoAccess, Exit::StorageUnreachable] {
            let with = |canary| judge(&reported(container, exit, canary));
            assert!(counts(&with(Some(true))), "{container} {exit:?}: it works for another object");
            assert!(!counts(&with(Some(false))), "{container} {exit:?}: the storage is down");
            assert!(!counts(&with(None)), "{container} {exit:?}: there is nothing to compare with");
            assert!(!counts(&judge(&ours(container, exit))), "{container} {exit:?}: an older claimer");
        }
    }
    let gone = |canary| judge(&reported(PUBLISHER, Exit::ObjectGone, canary));
    assert!(!counts(&gone(None)), "there is nothing to compare with");
    assert!(counts(&gone(Some(true))), "only this result cannot be written");
    assert!(counts(&judge(&ours(CLAIMER, Exit::DiskFull))), "a file may be too large for every node");
}

#[test]
fn a_storage_disruption_counts_if_the_same_operation_of_another_pod_succeeded_meanwhile() {
    let pod = reported(CLAIMER, Exit::StorageUnreachable, None);
    let with = |last_fetch, last_publish| {
        counts(&of(&pod, &[], &Known { last_fetch, last_publish }).expect("it has ended"))
    };
    // The fetch began a second before its end was noticed.
    assert!(with(Some(pod.since - SECOND / 2), None));
    assert!(!with(Some(pod.since - SECOND * 2), None), "the storage may have gone down since");
    assert!(!with(None, Some(pod.since)), "the sink is another storage");

    let mut waited = ours(CLAIMER, Exit::StorageUnreachable);
    waited.claiming = Some(waited.since - SECOND * 3);
    let known = Known { last_fetch: Some(waited.since - SECOND * 2), last_publish: None };
    assert!(counts(&of(&waited, &[], &known).expect("it has ended")), "without a report the start must do");

    let mut publishing = ours(PUBLISHER, Exit::NoAccess);
    publishing.claiming = Some(publishing.since - SECOND * 60);
    publishing.publishing = Some(Milestone { at: publishing.since - SECOND, witnessed: true });
    let known = |before: Duration| Known { last_fetch: None, last_publish: Some(publishing.since - before) };
    assert!(counts(&of(&publishing, &[], &known(SECOND / 2)).expect("it has ended")));
    assert!(!counts(&of(&publishing, &[], &known(SECOND * 2)).expect("it has ended")), "long filters wait");
}

#[test]
fn the_entry_of_the_report_is_settled() {
    assert_eq!(judge(&reported(CLAIMER, Exit::ObjectGone, None)).entry, Some("7-1".to_owned().into()));
    assert_eq!(judge(&ours(CLAIMER, Exit::ObjectGone)).entry, None, "an older claimer");
    let mut lost = WorkerPod::in_stage("p", Stage::Working, Instant::now());
    lost.claimer = reported(CLAIMER, Exit::ObjectGone, None).claimer;
    assert_eq!(of_vanished(&lost).entry, Some("7-1".to_owned().into()));
}

/// A drain ends the pods of a node.
#[test]
fn a_filter_that_failed_before_its_pod_was_deleted_is_to_blame() {
    let mut pod = deleted(filter(15, "Error"));
    pod.deleting = pod.deleting.map(|deleting| Deleting { since: pod.since + SECOND, ..deleting });
    assert_eq!(judge(&pod).cause, Cause::Input);
    let mut pod = doomed(filter(3, "Error"), "EvictionByEvictionAPI");
    if let Some(doomed) = &mut pod.doomed {
        doomed.since = pod.since + SECOND;
    }
    assert_eq!(judge(&pod).cause, Cause::File);
}

#[test]
fn pods_that_are_gone_stuck_or_unprepared_are_disruptions_and_slow_filters_are_not() {
    let pod = WorkerPod::in_stage("p", Stage::Working, Instant::now());
    assert!(counts(&of_vanished(&pod)) && of_vanished(&pod).cause == Cause::Pod);
    assert!(counts(&of_unprepared(&pod)) && of_unprepared(&pod).cause == Cause::Pod);
    let stuck = |reason: &str| Stuck {
        container: "resize".to_owned(),
        image: "r:1".to_owned(),
        reason: reason.to_owned(),
        message: "not found".to_owned(),
    };
    let pulling = of_stuck(&pod, &stuck("ImagePullBackOff"));
    assert_eq!((counts(&pulling), pulling.dependency()), (true, Some(Dependency::Image)));
    assert_eq!(
        pulling.failure().map(Failure::reason),
        Some("ImagePullBackOff: container resize (image r:1) does not start: not found")
    );
    assert_eq!(of_stuck(&pod, &stuck("CreateContainerError")).dependency(), Some(Dependency::Container));
    assert!(matches!(of_timeout(&pod, SECOND).verdict, Verdict::Failed(_)));
    assert_eq!(of(&pod, &[], &Known::default()), None, "it has not ended");
}

/// Uploads continue while filters work on the next file.
#[test]
fn of_the_files_of_a_pod_only_the_one_that_its_filters_worked_on_gets_their_verdict() {
    let held = |begun, pod: &WorkerPod| of_held(begun, 1, "p", &judge(pod));
    let warm = |mut pod: WorkerPod| {
        pod.is_warm = true;
        pod
    };
    let counts = |verdict: &Verdict| matches!(verdict, Verdict::Disrupted(disruption) if disruption.counts);
    let (filtering, publishing) = (Some(Begun::Filtering), Some(Begun::Publishing));
    for (what, pod) in [
        ("its shim is killed", filter(137, "Error")),
        ("a filter exceeds its memory, and its shim with it", killed_for_memory("resize", true)),
        ("its shim ends with a code that is not tried again", filter(15, "Error")),
    ] {
        let pod = warm(pod);
        assert!(matches!(held(filtering, &pod), Verdict::Failed(_) | Verdict::Rejected(_)), "{what}");
        let interrupted = held(publishing, &pod);
        assert!(counts(&interrupted), "{what}: {interrupted:?}");
        let Verdict::Disrupted(Disruption { failure, .. }) = interrupted else { continue };
        assert_eq!(
            failure.reason(),
            "PublishInterrupted: the pod p ended while it published the results",
            "{what}"
        );
        assert_eq!(held(None, &pod), Verdict::Released, "{what}");
    }
    for (what, pod) in [
        ("its worker is killed", failed(Some(WORKER), Some(137), "Error", "")),
        ("its node is drained", doomed(filter(143, "Error"), "EvictionByEvictionAPI")),
        ("its node restarted", filter(255, "Unknown")),
    ] {
        let pod = warm(pod);
        for begun in [filtering, publishing] {
            assert_eq!(held(begun, &pod), judge(&pod).verdict, "{what}: the reason is the pod's own");
            assert!(counts(&held(begun, &pod)), "{what}");
        }
        assert_eq!(held(None, &pod), Verdict::Released, "{what}");
    }
    let done = warm(WorkerPod::in_stage("p", Stage::Succeeded, Instant::now()));
    for begun in [filtering, publishing] {
        assert!(counts(&held(begun, &done)), "it ended well, and what it said last is lost");
    }
    let dismissed = Judgement { verdict: Verdict::Released, ..judge(&done) };
    assert_eq!(of_held(publishing, 1, "p", &dismissed), Verdict::Released);
}

/// The whole pod exceeded its limit. Only if there was one file is it known which file filled the storage.
#[test]
fn a_pod_that_exceeds_its_own_storage_charges_its_file_only_if_it_had_one() {
    let mut pod = whole("Evicted");
    pod.is_warm = true;
    for begun in [Some(Begun::Filtering), Some(Begun::Publishing)] {
        assert_eq!(of_held(begun, 0, "p", &judge(&pod)), judge(&pod).verdict);
        assert!(matches!(judge(&pod).verdict, Verdict::Failed(_)));
        let among_others = of_held(begun, 1, "p", &judge(&pod));
        assert!(matches!(among_others, Verdict::Disrupted(disruption) if disruption.counts), "{begun:?}");
    }
    assert_eq!(of_held(None, 1, "p", &judge(&pod)), Verdict::Released);
}

/// A pod is given its file when it gets a node: the file is not responsible for the pod's start, including
/// image pulls.
#[test]
fn neither_the_start_of_a_pod_nor_waiting_for_storage_is_processing_time() {
    let instant = Instant::now();
    let now = Moment { instant, unix_ms: 60_000 };
    let mut pod = WorkerPod::in_stage("p", Stage::Claiming, instant - SECOND * 60);
    assert_eq!(processing_time(&pod, SECOND * 60, now), Duration::ZERO, "it fetches");
    pod.fetched = Some(Milestone { at: instant - SECOND * 30, witnessed: true });
    assert_eq!(processing_time(&pod, SECOND * 60, now), SECOND * 30);
    pod.fetched = Some(Milestone { at: instant, witnessed: false });
    assert_eq!(processing_time(&pod, SECOND * 60, now), SECOND * 60, "an older claimer does not say");
    pod.claimer = Some(Report {
        entry: None,
        attempt: 1,
        outcome: Ok(()),
        canary: None,
        started_ms: 0,
        ended_ms: 20_000,
        text: "a".to_owned(),
    });
    assert_eq!(processing_time(&pod, SECOND * 60, now), SECOND * 40, "a new operator asks the claimer");
    assert_eq!(processing_time(&pod, SECOND * 30, now), SECOND * 10, "the clock of its node is slow");
    let ahead = Moment { unix_ms: 10_000, ..now };
    pod.fetched = Some(Milestone { at: instant - SECOND * 5, witnessed: false });
    assert_eq!(processing_time(&pod, SECOND * 60, ahead), SECOND * 5, "the clock of its node is fast");
    pod.publishing = Some(Milestone { at: instant - SECOND * 15, witnessed: true });
    assert_eq!(processing_time(&pod, SECOND * 60, now), SECOND * 25);
}

#[test]
fn the_reason_names_who_failed_and_keeps_what_was_said_last() {
    assert_eq!(
        reason_of(&failed(Some("resize"), Some(3), "Error", "a\nno such format\n")),
        "resize exited with code 3: a\nno such format"
    );
    let long = reason_of(&failed(Some("resize"), Some(3), "Error", &format!("{} the end", "ä".repeat(900))));
    assert!(long.starts_with("resize exited with code 3: …") && long.ends_with("the end"), "{long}");
    assert!(long.len() <= REASON_BYTES_MAX);
}

#[test]
fn the_reason_of_our_own_containers_is_what_they_say_themselves() {
    assert_eq!(
        reason_of(&failed(Some(CLAIMER), Some(15), "Error", "ObjectGone: 404")),
        "ObjectGone: 404",
        "an older claimer"
    );
    assert_eq!(reason_of(&ours(CLAIMER, Exit::NoAccess)), "NoAccess", "its message was lost");
    let killed = failed(Some(CLAIMER), Some(137), "OOMKilled", "claimed s3://bkt/a (attempt 1)");
    assert!(reason_of(&killed).starts_with("OOMKilled: claimer"), "{}", reason_of(&killed));
}

#[test]
fn the_reason_of_an_end_from_outside_is_kubernetes_own_word() {
    assert_eq!(reason_of(&failed(None, None, "Evicted", "low on disk")), "Evicted: low on disk");
    assert!(reason_of(&killed_for_memory("resize", true)).starts_with("OOMKilled: resize used more"));
    assert!(reason_of(&killed_for_memory("resize", false)).starts_with("OOMKilled: resize, which has no"));
    assert_eq!(
        reason_of(&doomed(filter(143, "Error"), "EvictionByEvictionAPI")),
        "EvictionByEvictionAPI: said"
    );
    assert_eq!(
        reason_of(&deleted(failed(Some("resize"), Some(143), "Error", "stopping"))),
        "PodDeleted: the pod was deleted while resize ran: stopping"
    );
    assert_eq!(reason_of(&filter(255, "Unknown")), "Unknown: the node lost resize");
    assert_eq!(
        reason_of(&failed(Some("resize"), Some(128), "StartError", "no such file")),
        "StartError: resize does not start: no such file"
    );
}

#[test]
fn the_reason_of_a_command_that_cannot_be_executed_names_the_filter_and_the_command() {
    let reason = reason_of(&behind_shim(shim::UNUSABLE));
    assert_eq!(reason, "FilterUnusable: detect does not start: cannot execute `/detect`");
}
