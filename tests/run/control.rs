//! Actions of people and other controllers on a run, while it runs and afterwards.

use std::time::Duration;

use crds::v1alpha1::{Phase, PipelineRun};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use testbed::Doing;

use crate::harness::{Lab, Mode, condition, counts, is_degraded_by, message, names, phase, running};
use crate::storms::of;

in_both_modes! {
    a_suspended_run_finishes_what_it_has_and_goes_on_when_resumed_with_more_pods
    a_run_that_is_deleted_while_it_runs_leaves_nothing_and_can_be_run_again
    a_job_that_others_suspend_starts_nothing_until_they_resume_it
    a_deleted_job_comes_back_while_the_run_runs_and_never_after
    a_run_that_is_created_again_in_mid_run_takes_over_its_queue
}

async fn a_suspended_run_finishes_what_it_has_and_goes_on_when_resumed_with_more_pods(mode: Mode) {
    let lab = Lab::in_mode("suspend", mode).await;
    lab.put_many("", 12, |_| "sleep 12".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 2}})).await;
    lab.filters_work("r", 2).await;
    lab.patch("r", json!({"spec": {"suspend": true}})).await;
    let paused =
        lab.until("r", "nothing runs", |run| phase(run) == Some(Phase::Suspended) && running(run) == 0).await;
    let (_, done, failed) = counts(&paused);
    assert_eq!(failed, 0, "suspending fails no file");
    let suspended = async || {
        let status = lab.jobs().await.remove(0).status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        let told = conditions.iter().any(|told| told.type_ == "Suspended" && told.status == "True");
        Ok((told && status.active.unwrap_or(0) == 0).then_some(()))
    };
    lab.eventually("the Job says so", suspended).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(counts(&lab.get("r").await), (12, done, 0), "nothing is started");
    lab.patch("r", json!({"spec": {"suspend": false, "execution": {"parallelism": 6}}})).await;
    lab.until("r", "six files are processed", |run| running(run) == 6).await;
    let job = lab.jobs().await.remove(0);
    assert_eq!(job.spec.unwrap().parallelism, Some(6));
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (12, 12, 0));
    assert!(lab.witness.most_pods() <= 6, "{} pods", lab.witness.most_pods());
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn fewer_pods_and_fewer_failures_can_be_allowed_while_it_runs() {
    let lab = Lab::new("fewer").await;
    let content = |number| match number {
        0..4 => "sleep 20",
        4..10 => "sleep 2",
        _ => "exit 1",
    };
    lab.put_many("", 12, |number| content(number).to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4, "maxAttempts": 1}})).await;
    lab.filters_work("r", 4).await;
    lab.patch("r", json!({"spec": {"execution": {"parallelism": 1}}})).await;
    lab.until("r", "one file is processed", |run| running(run) == 1).await;
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(running(&lab.get("r").await) <= 1, "no other is started");
    }
    lab.patch("r", json!({"spec": {"execution": {"parallelism": 3, "maxFailedFiles": 0}}})).await;
    let run = lab.finished("r").await;
    assert_eq!(condition(&run, "Succeeded"), ("False".into(), "TooManyFailures".into()));
    // A file in progress was given up with the rest.
    assert!(matches!(counts(&run), (12, 7..=10, _)), "{:?}", counts(&run));
    lab.check_left_nothing(&run).await;
}

/// Quota systems suspend Jobs; the operator never takes that back.
async fn a_job_that_others_suspend_starts_nothing_until_they_resume_it(mode: Mode) {
    let lab = Lab::in_mode("kueue", mode).await;
    lab.put_many("", 6, |_| "sleep 2".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 2}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    let set = async |suspend: bool| {
        let patch = Patch::Merge(json!({"spec": {"suspend": suspend}}));
        lab.api::<Job>().patch("r-job", &PatchParams::default(), &patch).await.unwrap();
    };
    set(true).await;
    let paused =
        lab.until("r", "nothing runs", |run| phase(run) == Some(Phase::Suspended) && running(run) == 0).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(counts(&lab.get("r").await), counts(&paused));
    let job = lab.jobs().await.remove(0);
    assert_eq!(job.spec.as_ref().unwrap().suspend, Some(true));
    set(false).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (6, 6, 0));
    lab.check_left_nothing(&run).await;
}

/// A run is executed once: a Job that is deleted in mid-run is created again, but not one that is deleted
/// after the end.
async fn a_deleted_job_comes_back_while_the_run_runs_and_never_after(mode: Mode) {
    let mut lab = Lab::in_mode("jobs", mode).await;
    lab.put_many("", 5, |_| "sleep 2".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 3, "maxAttempts": 5}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    let first = lab.jobs().await.remove(0);
    lab.api::<Job>().delete("r-job", &DeleteParams::background()).await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (5, 5, 0));
    let second = lab.jobs().await.remove(0);
    assert_ne!(first.uid(), second.uid(), "another one was created");
    lab.check_left_nothing(&run).await;

    lab.api::<Job>().delete("r-job", &DeleteParams::background()).await.unwrap();
    lab.kill_operators().await;
    lab.start_operator();
    lab.operator_works().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(lab.jobs().await.len(), 0);
    assert_eq!(lab.pods().await.len(), 0);
    assert_eq!(counts(&lab.get("r").await), (5, 5, 0));
}

/// A pod whose file is done may be kept by anyone: it delays neither the next file nor the end.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_pod_that_somebody_else_holds_does_not_hold_up_the_run() {
    let lab = Lab::new("held").await;
    lab.put_many("", 2, |_| "sleep 5".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 1}})).await;
    let first = lab.pod_that("it is there", |_| Some(())).await.name_any();
    let hold = Patch::Merge(json!({"metadata": {"finalizers": ["example.com/hold"]}}));
    lab.api::<Pod>().patch(&first, &PatchParams::default(), &hold).await.unwrap();
    assert_eq!(counts(&lab.finished("r").await), (2, 2, 0));
    // The laboratory removes the finalizer.
    let held = lab.api::<Pod>().get(&first).await.unwrap();
    assert!(held.metadata.deletion_timestamp.is_some());
}

/// Pods cannot start without it, and only the operator knows its contents.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_queue_secret_that_somebody_spoils_is_made_whole_again() {
    let lab = Lab::new("spoilt").await;
    lab.put_many("", 4, |_| "sleep 3".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 1}})).await;
    lab.until("r", "a file is processed", |run| running(run) > 0).await;
    let secrets = lab.api::<Secret>();
    let user = secrets.get("r-queue").await.unwrap().data.unwrap()["username"].clone();
    // The name becomes "nobody".
    let spoilt = Patch::Merge(json!({"data": {"password": null, "username": "bm9ib2R5"}}));
    secrets.patch("r-queue", &PatchParams::default(), &spoilt).await.unwrap();
    let whole = async || {
        let found = secrets.get("r-queue").await.doing(|| "read the Secret".to_owned())?;
        let data = found.data.unwrap_or_default();
        let has_password = data.get("password").is_some_and(|password| !password.0.is_empty());
        Ok((has_password && data.get("username") == Some(&user)).then_some(()))
    };
    lab.eventually("the Secret is whole again", whole).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (4, 4, 0));
    lab.check_left_nothing(&run).await;
}

/// What GitOps needs: a deleted run leaves nothing behind; if it is created again, it gets its status back
/// and is not executed again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_finished_run_that_is_created_again_gets_its_status_back() {
    let lab = Lab::new("again").await;
    lab.put_many("", 3, |number| if number == 0 { "exit 1".to_owned() } else { "copy".to_owned() }).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let first = lab.finished("r").await;
    lab.delete("r").await;
    let left = lab.traces().await;
    assert!(left.iter().all(|trace| trace.ends_with(":ledger")), "{left:?}");
    assert!(lab.pods().await.is_empty());
    lab.run("r", json!({"execution": {"maxAttempts": 1, "parallelism": 3}})).await;
    let second = lab.finished("r").await;
    let (one, two) = (first.status.unwrap(), second.status.unwrap());
    assert_eq!((one.counts, one.phase, &one.completion_time), (two.counts, two.phase, &two.completion_time));
    assert_eq!(one.recent_failures, two.recent_failures);
    assert!(lab.pods().await.is_empty());

    lab.delete("r").await;
    lab.run("r", json!({"execution": {"maxAttempts": 2}})).await;
    let changed = lab.until("r", "it is refused", |run| is_degraded_by(run, "RunIdUsed")).await;
    assert_eq!(condition(&changed, "Stalled").0, "True");
    assert!(message(&changed, "Stalled").contains("new name"), "{}", message(&changed, "Stalled"));
}

/// Deleted and created again without an operator, as by a restore from a backup: its queue knows the run by
/// another UID. The same run takes it over, and continues where the old one stopped.
async fn a_run_that_is_created_again_in_mid_run_takes_over_its_queue(mode: Mode) {
    let mut lab = Lab::in_mode("restored", mode).await;
    let files = if mode == Mode::Warm { 12 } else { 8 };
    lab.put_many("", files, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    let same = json!({"execution": {"parallelism": 2, "maxAttempts": 1}});
    lab.run("r", same.clone()).await;
    let some_done = |run: &PipelineRun| of(run, |counts| counts.succeeded) >= 2;
    let before = lab.until("r", "some are done", some_done).await;
    lab.kill_operators().await;
    let (epoch, settled) = (lab.meta("r", "epoch").await, lab.tally("r", "succeeded").await);
    lab.patch("r", json!({"metadata": {"finalizers": null}})).await;
    lab.delete("r").await;
    // Kubernetes removes what belonged to the run, but not its queue or its workers' user.
    let removed = async || {
        let (pods, jobs) = (lab.pods().await, lab.jobs().await);
        let (secrets, stored) = (lab.list::<Secret>().await, lab.list::<ControllerRevision>().await);
        let all = pods.len() + jobs.len() + stored.len();
        Ok((all == 0 && names(secrets) == ["keys"]).then_some(()))
    };
    lab.eventually("what the run owned is gone", removed).await;
    let old_uid = before.uid().unwrap();
    assert!(has_user(&lab, &old_uid).await, "its user is still there");

    let new_uid = lab.run("r", same).await.uid().unwrap();
    lab.start_operator();
    let goes_on = |run: &PipelineRun| of(run, |counts| counts.succeeded) as u64 > settled;
    lab.until("r", "it goes on", goes_on).await;
    assert_eq!(lab.meta("r", "owner").await, Some(new_uid.clone()));
    assert_eq!(lab.meta("r", "epoch").await, epoch, "the queue is the same");
    assert!(!has_user(&lab, &old_uid).await && has_user(&lab, &new_uid).await, "old and new user");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (files as i64, files as i64, 0));
    assert_eq!((lab.tally("r", "succeeded").await, lab.tally("r", "retried").await), (files as u64, 0));
    assert!(!lab.witness.was_ever(|run| is_degraded_by(run, "RunIdTaken")), "it is no other run");
    lab.check_left_nothing(&run).await;
}

/// Its finalizer is removed by hand. If it were created again, it would continue from its queue. Therefore
/// the queue is removed only after a while, even if the operator restarts meanwhile.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn the_queue_of_a_run_that_is_gone_without_its_finalizer_is_removed_in_the_end() {
    let (mut lab, uid) = processing_and_soon_forgotten("vanished").await;
    // Otherwise the operator would set it again.
    lab.signal_operator(0, "STOP");
    lab.patch("r", json!({"metadata": {"finalizers": null}})).await;
    lab.delete("r").await;
    lab.signal_operator(0, "CONT");
    let noted = async || {
        let notes = lab.api::<ConfigMap>().get_opt("openfilter-operator-cleanup").await;
        let notes = notes.doing(|| "read what is left to do".to_owned())?;
        Ok(notes.is_some_and(|notes| notes.data.unwrap_or_default().contains_key(&uid)).then_some(()))
    };
    lab.eventually("the operator notes what is left", noted).await;
    assert_ne!(lab.traces().await, Vec::<String>::new(), "it is not due yet");
    lab.kill_operators().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    lab.start_operator();
    until_nothing_is_left(&lab).await;
}

/// No operator sees this run go: the next one finds it in the list of known runs.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn the_queue_of_a_run_that_is_gone_before_the_operator_starts_is_removed_in_the_end() {
    let (mut lab, _) = processing_and_soon_forgotten("unseen").await;
    lab.kill_operators().await;
    lab.patch("r", json!({"metadata": {"finalizers": null}})).await;
    lab.delete("r").await;
    assert_ne!(lab.traces().await, Vec::<String>::new(), "nothing removes them");
    lab.start_operator();
    until_nothing_is_left(&lab).await;
}

/// A run `r` whose files are processed, and its UID. What it leaves in Valkey is kept for five seconds.
async fn processing_and_soon_forgotten(name: &str) -> (Lab, String) {
    let mut lab = Lab::new(name).await;
    lab.restart_with("DETAILS_RETENTION", "5s").await;
    lab.put_many("", 2, |_| "sleep 60".to_owned()).await;
    lab.pipeline(json!({})).await;
    let uid = lab.run("r", json!({})).await.uid().unwrap();
    lab.until("r", "files are processed", |run| of(run, |counts| counts.running) > 0).await;
    (lab, uid)
}

async fn until_nothing_is_left(lab: &Lab) {
    let clean = async || Ok(lab.traces().await.is_empty().then_some(()));
    lab.eventually("nothing is left in Valkey", clean).await;
}

/// Whether Valkey has a user for the workers of the run `r` with this UID.
async fn has_user(lab: &Lab, uid: &str) -> bool {
    lab.traces().await.contains(&format!("openfilter:{}:{uid}", lab.run_id("r")))
}

async fn a_run_that_is_deleted_while_it_runs_leaves_nothing_and_can_be_run_again(mode: Mode) {
    let lab = Lab::in_mode("delete", mode).await;
    lab.put_many("", 6, |_| "sleep 2".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 3}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    lab.delete("r").await;
    // The run is gone once everything it had is gone: another one of the same name may follow at once.
    assert_eq!(names(lab.pods().await), Vec::<String>::new());
    assert_eq!(names(lab.jobs().await), Vec::<String>::new());
    assert_eq!(lab.traces().await, Vec::<String>::new());
    assert_eq!(names(lab.list::<Secret>().await), ["keys"]);
    assert_eq!(names(lab.list::<ControllerRevision>().await), Vec::<String>::new());
    lab.run("r", json!({"execution": {"parallelism": 6}})).await;
    assert_eq!(counts(&lab.finished("r").await), (6, 6, 0));
    assert!(!lab.witness.was_ever(|run| is_degraded_by(run, "NameTaken")));
}

/// Two runs with one runId: one of them is executed, and the other says why it is not.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn two_runs_of_one_run_id_are_one_run() {
    let lab = Lab::new("taken").await;
    lab.put("a", "sleep 10").await;
    lab.pipeline(json!({})).await;
    let id = format!("{}.shared", lab.namespace.name);
    let queue = json!({"stream": format!("pr:{id}:work"), "group": format!("cg:{id}")});
    lab.run("one", json!({"queue": queue})).await;
    lab.until("one", "it is processed", |run| running(run) > 0).await;
    lab.run("two", json!({"queue": queue})).await;
    let two = lab.until("two", "it is refused", |run| is_degraded_by(run, "RunIdTaken")).await;
    assert!(message(&two, "Degraded").contains(&lab.get("one").await.uid().unwrap()));
    assert_eq!(counts(&lab.finished("one").await), (1, 1, 0));
}
