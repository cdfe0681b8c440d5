//! Faults of what one run depends on: its operator, its storage, its keys in Valkey, its pods. No file is
//! lost and none is counted twice. Faults that affect all runs at once are in `whole_cluster`.

use std::time::Duration;

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use http::Method;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use testbed::{Doing, Fault, FaultyS3, Rule};

use crate::harness::{Lab, Mode, condition, counts, filter, is_degraded_by, is_in_phase, names, phase};

in_both_modes! {
    an_operator_that_is_killed_again_and_again_loses_nothing
    valkey_that_went_back_to_before_a_failure_is_told_of_it_again
    two_operators_at_once_count_every_file_once
    an_operator_that_is_killed_while_a_run_ends_has_it_ended_by_the_next
    a_pod_that_is_deleted_by_hand_leaves_its_file_to_another
    storage_that_fails_costs_attempts_and_never_a_file
}

pub fn of(run: &PipelineRun, count: impl Fn(&crds::v1alpha1::Counts) -> i64) -> i64 {
    run.status.as_ref().and_then(|status| status.counts.as_ref()).map_or(0, count)
}

/// A backup of the runs' data in Valkey.
async fn backup(lab: &Lab) -> Vec<(String, Vec<u8>)> {
    let mut valkey = lab.raw().await;
    let mut backup = Vec::new();
    for key in lab.traces().await.into_iter().filter(|key| key.starts_with("pr:")) {
        let content: Vec<u8> = redis::cmd("DUMP").arg(&key).query_async(&mut valkey).await.unwrap();
        backup.push((key, content));
    }
    assert!(backup.iter().any(|(key, _)| key.ends_with(":meta")), "{backup:?}");
    backup
}

/// Restores Valkey to a backup, without knowledge of later events.
async fn go_back_to(lab: &Lab, backup: &[(String, Vec<u8>)]) {
    let mut restore = redis::pipe();
    for key in lab.traces().await.into_iter().filter(|key| key.starts_with("pr:")) {
        restore.del(key);
    }
    for (key, content) in backup {
        restore.cmd("RESTORE").arg(key).arg(0).arg(content);
    }
    restore.atomic().exec_async(&mut lab.raw().await).await.unwrap();
}

/// Both the run's status and its events report the loss.
pub async fn check_loss_was_told(lab: &Lab) {
    assert!(lab.witness.was_ever(|run| is_degraded_by(run, "QueueLost")), "no status tells of it");
    lab.events("r", "QueueLost", 1).await;
}

/// Killed again and again, in every phase: in the middle of each page of the listing, and while files are
/// processed, also between the creation of the Job and the status that reports it. The progress of the
/// listing is visible.
async fn an_operator_that_is_killed_again_and_again_loses_nothing(mode: Mode) {
    let mut lab = Lab::in_mode("crash", mode).await;
    lab.kill_operators().await;
    // Without a pod for each file, files take so long that many operators die meanwhile.
    let (pods, good) = if mode == Mode::Warm { (2, "sleep 1") } else { (8, "copy") };
    // Three pages.
    lab.put_many("other/", 2_050, |_| String::new()).await;
    let content = |number: usize| if number.is_multiple_of(6) { "exit 1" } else { good };
    lab.put_many("wanted/", 24, |number| content(number).to_owned()).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    let bucket = lab.bucket_behind(&proxy);
    lab.pipeline(json!({"source": {"bucket": bucket, "include": ["wanted/*"]}})).await;
    lab.run("r", json!({"execution": {"parallelism": pods, "maxAttempts": 2}})).await;
    // It finds more files than it could process, and is deleted afterwards.
    lab.run("all", json!({"source": {"include": ["**"]}})).await;
    for (listed, last) in [(1_000, "0999"), (2_000, "1999")] {
        // The page after this key gets no answer, so that no operator gets further.
        proxy.inject(Rule::every(Fault::Stuck, last));
        lab.start_operator();
        let is_listed = async || Ok(lab.meta("r", "cursor").await.filter(|cursor| cursor.ends_with(last)));
        lab.eventually("another page is listed", is_listed).await;
        lab.until("all", "the page is told", |run| {
            run.status.as_ref().and_then(|status| status.listed_files) == Some(listed)
        })
        .await;
        lab.kill_operators().await;
        proxy.heal();
    }
    lab.api::<PipelineRun>().delete("all", &DeleteParams::default()).await.unwrap();
    lab.start_operator();
    let created = async || Ok(lab.jobs().await.pop());
    let job = lab.eventually("there is a Job", created).await;
    lab.kill_operators().await;
    let forget = Patch::Merge(json!({"status": {"jobName": null}}));
    lab.api::<PipelineRun>().patch_status("r", &PatchParams::default(), &forget).await.unwrap();
    for round in 0..40_u64 {
        lab.start_operator();
        tokio::time::sleep(Duration::from_millis(150 + round * 120)).await;
        lab.kill_operators().await;
        if phase(&lab.get("r").await).is_some_and(|phase| matches!(phase, Phase::Succeeded | Phase::Failed)) {
            break;
        }
    }
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (24, 20, 4));
    assert_eq!(lab.dead_letters("r").await.len(), 4);
    lab.check_failures_shown(&run).await;
    assert_eq!(lab.jobs().await.remove(0).uid(), job.uid(), "it was adopted");
    // The working pods, and those whose creation a crash forgot before the watch showed them.
    assert!(
        lab.witness.most_pods() <= pods + pods,
        "more pods than parallelism and one crash explain: {}",
        lab.witness.most_pods()
    );
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
    lab.stop_operators().await;
}

/// Killed while the queue is closed and a pod still exists.
async fn an_operator_that_is_killed_while_a_run_ends_has_it_ended_by_the_next(mode: Mode) {
    let mut lab = Lab::in_mode("ending", mode).await;
    lab.put("bad", "exit 1").await;
    // As the first process of its container, the filter ignores the signal to stop, and takes all of its ten
    // seconds.
    lab.put("long", "sleep 300").await;
    lab.pipeline(json!({})).await;
    // A pod for each: which file is first depends on how soon the kubelet has the pods' Secrets.
    lab.run("r", json!({"execution": {"maxAttempts": 1, "parallelism": 2}})).await;
    lab.until("r", "one has failed", |run| of(run, |counts| counts.failed) == 1).await;
    match mode {
        Mode::PodPerFile => drop(lab.filters_work("r", 1).await),
        // The other pod may still be there.
        Mode::Warm => {
            let works = async || Ok((lab.reports("r", "started").await == 1).then_some(()));
            lab.eventually("the other filter works", works).await;
        }
    }
    lab.patch("r", json!({"spec": {"execution": {"maxFailedFiles": 0}}})).await;
    let closed = async || Ok(lab.meta("r", "state").await.filter(|state| state == "closed"));
    lab.eventually("the queue is closed", closed).await;
    lab.kill_operators().await;
    assert_eq!(phase(&lab.get("r").await), Some(Phase::Running), "it is killed too late");
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), condition(&run, "Succeeded").1), ((2, 0, 2), "TooManyFailures".into()));
    assert_eq!(lab.dead_letters("r").await.len(), 2);
    lab.check_left_nothing(&run).await;
}

/// A leader has lost its lease without knowing it: two operators decide about the same run at once.
async fn two_operators_at_once_count_every_file_once(mode: Mode) {
    let mut lab = Lab::in_mode("two", mode).await;
    lab.start_operator();
    lab.put_many("", 15, |number| if number % 5 == 0 { "exit 1".to_owned() } else { "copy".to_owned() })
        .await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 6, "maxAttempts": 2}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (15, 12, 3));
    assert_eq!(lab.dead_letters("r").await.len(), 3);
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
    // One of them reports the end; the other would do so at its next pass, after five seconds.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let ends = lab.events("r", "FilesFailed", 1).await;
    let times = |event: &Event| event.series.as_ref().and_then(|series| series.count).unwrap_or(1);
    assert_eq!(ends.iter().map(times).sum::<i32>(), 1, "{ends:?}");
}

/// The leader freezes for longer than its lease lasts; the other operator continues the run, and the first
/// ends when it finds out.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_leader_that_stands_still_is_followed_by_the_other_replica() {
    let mut lab = Lab::new("leaders").await;
    lab.set("POD_NAME", "first");
    lab.restart_with("LEADER_ELECTION", "true").await;
    let led_by = async |lab: &Lab, identity: &str| {
        let leases = lab.api::<Lease>();
        let holder = async || {
            let found = leases.list(&Default::default()).await.doing(|| "look at the Lease".to_owned())?;
            let held = |lease: &Lease| lease.spec.as_ref()?.holder_identity.clone();
            Ok(found.items.iter().any(|lease| held(lease).as_deref() == Some(identity)).then_some(()))
        };
        lab.eventually(&format!("{identity} leads"), holder).await;
    };
    led_by(&lab, "first").await;
    lab.set("POD_NAME", "second");
    lab.start_operator();
    lab.put_many("", 8, |_| "sleep 3".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 2}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 2).await;
    lab.signal_operator(0, "STOP");
    led_by(&lab, "second").await;
    let before = of(&lab.get("r").await, |counts| counts.succeeded);
    lab.until("r", "the other goes on", |run| of(run, |counts| counts.succeeded) > before).await;
    lab.signal_operator(0, "CONT");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (8, 8, 0));
    lab.witness.check_monotonic();
    lab.check_left_nothing(&run).await;
    assert!(!lab.operator_ended(0).await.success(), "it has lost what it led");
}

/// A backup from before the end of the listing, or a replica that lagged behind, does not reveal its loss:
/// sums add up, but files are missing. They are listed again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn valkey_that_went_back_to_before_the_listing_is_listed_into_again() {
    let lab = Lab::new("earlier").await;
    // Only the first file is bad, and only the first time.
    lab.put_many("", 6, |number| if number == 0 { "exit 1".to_owned() } else { "sleep 2".to_owned() }).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    proxy.inject(Rule::every(Fault::Stuck, "list-type=2"));
    lab.pipeline(json!({"source": {"bucket": {"endpoint": proxy.url}}})).await;
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    lab.until("r", "it is being listed", |run| phase(run) == Some(Phase::Listing)).await;
    let before = backup(&lab).await;
    proxy.heal();
    let done =
        |run: &PipelineRun| of(run, |counts| counts.succeeded) >= 2 && of(run, |counts| counts.failed) == 1;
    lab.until("r", "some are done and one has failed", done).await;
    lab.put("0000", "copy").await;
    go_back_to(&lab, &before).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (6, 6, 0));
    assert_eq!(run.status.as_ref().unwrap().recent_failures, [], "none of them failed in the end");
    check_loss_was_told(&lab).await;
    lab.check_left_nothing(&run).await;
}

/// A failed file is claimed again: by a pod that has long ended and is kept for its log, or by one that is
/// already working on another file.
async fn valkey_that_went_back_to_before_a_failure_is_told_of_it_again(mode: Mode) {
    let mut lab = Lab::in_mode("unsettled", mode).await;
    lab.put("bad", "exit 1").await;
    lab.put("long", if mode == Mode::Warm { "sleep 5" } else { "sleep 15" }).await;
    let main = filter("main", &["obey"]);
    // One pod holds one file at a time here.
    let pods = if mode == Mode::Warm { 1 } else { 2 };
    // The first filter takes so long that the operator is gone before the second fails.
    lab.pipeline(json!({"filters": [filter("wait", &["sleep", "3"]), main]})).await;
    lab.run("r", json!({"execution": {"parallelism": pods, "maxAttempts": 1}})).await;
    // All pods have a file, and no operator settles it.
    let handed_out = async || {
        let running = lab.meta("r", "epoch").await.is_some()
            && lab.queue("r").await.stats().await.is_ok_and(|stats| stats.running == pods);
        Ok(running.then_some(()))
    };
    lab.eventually("files are handed out", handed_out).await;
    lab.kill_operators().await;
    let before = backup(&lab).await;
    lab.start_operator();
    lab.until("r", "one has failed", |run| of(run, |counts| counts.failed) == 1).await;
    if mode == Mode::PodPerFile {
        let failed = lab.pod_that("it is kept", |pod| is_in_phase(pod, "Failed").then_some(())).await;
        assert!(failed.metadata.deletion_timestamp.is_none(), "it is being removed");
    }
    go_back_to(&lab, &before).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 1, 1));
    assert_eq!(lab.dead_letters("r").await.len(), 1);
    assert_eq!(run.status.as_ref().unwrap().recent_failures.len(), 1);
    lab.check_left_nothing(&run).await;
}

/// Another operator with a stale view hands a file to a pod that has ended. The file was not tried.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_file_that_a_pod_is_handed_after_its_end_is_not_blamed_for_it() {
    let lab = Lab::new("stray").await;
    for (key, content) in [("1-bad", "exit 1"), ("2-long", "sleep 10"), ("3-stray", "copy")] {
        lab.put(key, content).await;
    }
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    let bad = lab.pod_that("it is kept", |pod| is_in_phase(pod, "Failed").then_some(())).await.name_any();
    lab.until("r", "the next file is processed", |run| {
        of(run, |counts| counts.failed) == 1 && of(run, |counts| counts.running) == 1
    })
    .await;
    let id = lab.run_id("r");
    let mut handed = redis::cmd("XREADGROUP");
    handed
        .arg("GROUP")
        .arg(id.group())
        .arg(&bad)
        .arg("COUNT")
        .arg(1)
        .arg("STREAMS")
        .arg(id.key("work"))
        .arg(">");
    let handed: redis::Value = handed.query_async(&mut lab.raw().await).await.unwrap();
    assert_ne!(handed, redis::Value::Nil, "it is handed a file");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (3, 2, 1));
    lab.check_left_nothing(&run).await;
}

/// The storage fails in every way it can: while listing, the run waits; while fetching, the file is tried
/// again, and an object that fails alone and permanently is dead-lettered with the reason.
async fn storage_that_fails_costs_attempts_and_never_a_file(mode: Mode) {
    let mut lab = Lab::in_mode("storage", mode).await;
    lab.restart_with("MAX_DISRUPTIONS", "1").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    for key in ["slow", "flaky", "cut", "gone", "secret", "fine"] {
        lab.put(key, "copy").await;
    }
    proxy.inject(Rule::every(Fault::Forbidden, "list-type=2").times(1));
    proxy.inject(Rule::every(Fault::Slow(Duration::from_secs(2)), "/slow").method(Method::GET));
    proxy.inject(Rule::every(Fault::InternalError, "/flaky").method(Method::GET).times(3));
    proxy.inject(Rule::every(Fault::Truncated(1), "/cut").method(Method::GET).times(1));
    proxy.inject(Rule::every(Fault::Missing, "/gone").method(Method::GET));
    proxy.inject(Rule::every(Fault::Forbidden, "/secret").method(Method::GET));
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 3, "maxAttempts": 2}})).await;
    let run = lab.finished("r").await;
    assert!(lab.witness.was_ever(|run| is_degraded_by(run, "CredentialsInvalid")), "the listing was refused");
    assert_eq!(counts(&run), (6, 4, 2));
    let letters = lab.dead_letters("r").await;
    let reason = |file: &str| letters.iter().find(|letter| letter.file == file).unwrap().reason.clone();
    assert!(reason("gone").starts_with("ObjectGone"), "{}", reason("gone"));
    assert!(reason("secret").contains("NoAccess"), "{}", reason("secret"));
    lab.check_left_nothing(&run).await;
}

/// Listing has a task of its own, so that hanging storage delays only its own run. When told to slow down,
/// the listing does so, and continues.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_whose_storage_hangs_delays_no_other() {
    let mut lab = Lab::new("hangs").await;
    // A listing that occupied a pass would occupy the only one.
    lab.restart_with("CONCURRENCY", "1").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("", 3, |_| "copy".to_owned()).await;
    proxy.inject(Rule::every(Fault::SlowDown, "list-type=2").times(1));
    proxy.inject(Rule::every(Fault::Stuck, "list-type=2"));
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("hangs", json!({})).await;
    lab.until("hangs", "it is being listed", |run| phase(run) == Some(Phase::Listing)).await;
    // A run is a snapshot, so the Pipeline can be changed for the next one.
    let direct = json!({"spec": {"source": {"bucket": {"endpoint": lab.bucket()["endpoint"]}}}});
    let changed = lab.api::<Pipeline>().patch("p", &PatchParams::default(), &Patch::Merge(direct)).await;
    changed.unwrap();
    lab.run("other", json!({})).await;
    assert_eq!(counts(&lab.finished("other").await), (3, 3, 0));
    assert_eq!(phase(&lab.get("hangs").await), Some(Phase::Listing));
    proxy.heal();
    assert_eq!(counts(&lab.finished("hangs").await), (3, 3, 0));
}

/// Pods are deleted by hand, one while an operator watches and one without any: each leaves its file to
/// another.
async fn a_pod_that_is_deleted_by_hand_leaves_its_file_to_another(mode: Mode) {
    let mut lab = Lab::in_mode("evicted", mode).await;
    lab.put_many("", 3, |_| "sleep 10".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 3, "maxAttempts": 1}})).await;
    let pods = names(lab.filters_work("r", 3).await);
    let api = lab.api::<Pod>();
    let at_once = DeleteParams::default().grace_period(0);
    api.delete(&pods[0], &at_once).await.unwrap();
    lab.kill_operators().await;
    api.delete(&pods[1], &at_once).await.unwrap();
    let gone = async || {
        let found = api.get_opt(&pods[1]).await.doing(|| "look for the pod".to_owned())?;
        Ok(found.is_none().then_some(()))
    };
    lab.eventually("the pod is gone", gone).await;
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (3, 3, 0));
    let told = lab.events("r", "FileDisrupted", 2).await;
    assert!(told.iter().all(|event| event.message.as_ref().unwrap().contains("PodGone")), "{told:?}");
}
