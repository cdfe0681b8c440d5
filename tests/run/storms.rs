//! Everything that a run stands on breaks: the operator, Valkey, the API server, a node, the storage. No file is lost and
//! none is counted twice.

use std::time::Duration;

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use http::Method;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use testbed::{Doing, Fault, FaultyS3, Rule};

use crate::harness::{Lab, condition, counts, is_degraded_by, phase};

fn of(run: &PipelineRun, count: impl Fn(&crds::v1alpha1::Counts) -> i64) -> i64 {
    run.status.as_ref().and_then(|status| status.counts.as_ref()).map_or(0, count)
}

/// Killed again and again, whatever it does: while it lists, while files are processed, and while the run ends. Trap 9: also
/// between the creation of the Job and the status that tells of it.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn an_operator_that_is_killed_again_and_again_loses_nothing() {
    let mut lab = Lab::new("crash").await;
    lab.kill_operators().await;
    // Three pages, of which each takes a while.
    lab.put_many("other/", 2_050, |_| String::new()).await;
    lab.put_many(
        "wanted/",
        60,
        |number| if number % 6 == 0 { "exit 1".to_owned() } else { "copy".to_owned() },
    )
    .await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    proxy.inject(Rule::every(Fault::Slow(Duration::from_secs(3)), "list-type=2").times(4));
    let mut bucket = lab.bucket();
    bucket["endpoint"] = json!(proxy.url);
    lab.pipeline(json!({"source": {"bucket": bucket, "include": ["wanted/*"]}})).await;
    lab.run("r", json!({"execution": {"parallelism": 8, "maxAttempts": 2}})).await;
    for _ in 0..2 {
        lab.start_operator();
        lab.until("r", "it is being listed", |run| phase(run) == Some(Phase::Listing)).await;
        lab.kill_operators().await;
    }
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
    assert_eq!(counts(&run), (60, 50, 10));
    assert_eq!(lab.dead_letters("r").await.len(), 10);
    assert_eq!(lab.jobs().await.remove(0).uid(), job.uid(), "it was adopted");
    // Those that work, and those whose creation a crash forgot before the watch showed them.
    assert!(lab.witness.most_pods() <= 8 + 8, "trap 31: {} pods", lab.witness.most_pods());
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
    lab.stop_operators().await;
}

/// A leader that has lost its lease and does not know it: two operators decide about the same run at once.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn two_operators_at_once_count_every_file_once() {
    let mut lab = Lab::new("two").await;
    lab.start_operator();
    lab.put_many("", 30, |number| if number % 5 == 0 { "exit 1".to_owned() } else { "copy".to_owned() })
        .await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 6, "maxAttempts": 2}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (30, 24, 6));
    assert_eq!(lab.dead_letters("r").await.len(), 6);
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// The one that leads stands still for longer than its lease lasts; the other goes on with the run, and the first ends when it
/// finds out.
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
    lab.put_many("", 16, |_| "sleep 3".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 2}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 2).await;
    lab.signal_operator(0, "STOP");
    led_by(&lab, "second").await;
    let before = of(&lab.get("r").await, |counts| counts.succeeded);
    lab.until("r", "the other goes on", |run| of(run, |counts| counts.succeeded) > before).await;
    lab.signal_operator(0, "CONT");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (16, 16, 0));
    lab.witness.check_monotonic();
    lab.check_left_nothing(&run).await;
    assert!(!lab.operator_ended(0).await.success(), "it has lost what it led");
}

/// Traps 3 and 17: Valkey is away, comes back with what its log kept, and has forgotten its users.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn valkey_killed_and_restarted_keeps_the_counts_and_goes_on() {
    let lab = Lab::alone("valkey").await;
    lab.put_many("", 20, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    // The log is written once a second: what was done in the last one may be done again.
    lab.services.kill_valkey().await.unwrap();
    let down = lab.until("r", "Valkey is missed", |run| is_degraded_by(run, "QueueUnavailable")).await;
    assert!(of(&down, |counts| counts.succeeded) >= 3, "the last counts stay");
    assert_eq!(condition(&down, "Succeeded").0, "Unknown");
    lab.services.restart_valkey().await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (20, 20, 0));
    lab.check_left_nothing(&run).await;
}

/// Valkey has lost everything: the run says so, lists again, and never reports success on missing data.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn valkey_that_lost_everything_is_noticed_and_the_run_starts_over() {
    let lab = Lab::alone("wiped").await;
    // The first is bad, and only then: the counts of the Job must not hold up the end when they go back.
    lab.put_many("", 12, |number| if number == 0 { "exit 1".to_owned() } else { "sleep 1".to_owned() }).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 3, "maxAttempts": 1}})).await;
    let done =
        |run: &PipelineRun| of(run, |counts| counts.succeeded) >= 2 && of(run, |counts| counts.failed) == 1;
    lab.until("r", "some are done and one has failed", done).await;
    lab.put("0000", "copy").await;
    lab.services.wipe_valkey().await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (12, 12, 0));
    let events = lab.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]).unwrap();
    assert!(events.contains("QueueLost"), "{events}");
    lab.check_left_nothing(&run).await;
}

/// A backup from before the end of the listing, or a replica that was behind, knows nothing of its loss: sums add up, and files
/// are missing. They are listed again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn valkey_that_went_back_to_before_the_listing_is_listed_into_again() {
    let lab = Lab::new("earlier").await;
    lab.put_many("", 6, |_| "sleep 2".to_owned()).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    proxy.inject(Rule::every(Fault::Stuck, "list-type=2"));
    lab.pipeline(json!({"source": {"bucket": {"endpoint": proxy.url}}})).await;
    lab.run("r", json!({"execution": {"parallelism": 2}})).await;
    lab.until("r", "it is being listed", |run| phase(run) == Some(Phase::Listing)).await;
    let mut valkey = lab.raw().await;
    let mut backup: Vec<(String, Vec<u8>)> = Vec::new();
    for key in lab.traces().await.into_iter().filter(|key| key.starts_with("pr:")) {
        let content = redis::cmd("DUMP").arg(&key).query_async(&mut valkey).await.unwrap();
        backup.push((key, content));
    }
    assert!(backup.iter().any(|(key, _)| key.ends_with(":meta")), "{backup:?}");
    proxy.heal();
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 2).await;
    let mut restore = redis::pipe();
    for key in lab.traces().await.into_iter().filter(|key| key.starts_with("pr:")) {
        restore.del(key);
    }
    for (key, content) in &backup {
        restore.cmd("RESTORE").arg(key).arg(0).arg(content);
    }
    restore.atomic().exec_async(&mut valkey).await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (6, 6, 0));
    lab.check_left_nothing(&run).await;
}

/// Trap 18: with Valkey away a run can be deleted all the same, and what it left is removed when Valkey is back.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_can_be_deleted_while_valkey_is_away() {
    let mut lab = Lab::alone("orphan").await;
    lab.put_many("", 4, |_| "sleep 30".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({})).await;
    lab.until("r", "files are processed", |run| of(run, |counts| counts.running) > 0).await;
    // Long enough for the log to have it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    lab.services.kill_valkey().await.unwrap();
    lab.delete("r").await;
    // A new operator knows what is left to do: it is written down.
    lab.kill_operators().await;
    lab.services.restart_valkey().await.unwrap();
    assert_ne!(lab.traces().await, Vec::<String>::new(), "Valkey was away");
    lab.start_operator();
    let clean = async || Ok(lab.traces().await.is_empty().then_some(()));
    lab.eventually("nothing is left in Valkey", clean).await;
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_paused_api_server_delays_and_loses_nothing() {
    let lab = Lab::alone("paused").await;
    lab.put_many("", 20, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    for _ in 0..2 {
        let paused = lab.testbed.pause_api_server().unwrap();
        tokio::time::sleep(Duration::from_secs(8)).await;
        paused.resume();
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (20, 20, 0));
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// The pods of a dead node hold files; after `pendingTimeout` others get them.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn files_of_a_dead_node_are_processed_elsewhere() {
    let lab = Lab::alone("node").await;
    lab.put_many("", 6, |_| "sleep 30".to_owned()).await;
    // The backing services are on one of the nodes; the workers are on the other.
    let services = lab.node_of("backing", "valkey").await;
    let victim = lab.other_node(&services).await;
    let affinity = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference":
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [victim]}]}}]}});
    lab.pipeline(json!({"pod": {"affinity": affinity}})).await;
    lab.run("r", json!({"execution": {"parallelism": 6, "pendingTimeout": "10s", "maxAttempts": 3}})).await;
    lab.until("r", "all are processed", |run| of(run, |counts| counts.running) == 6).await;
    lab.testbed.kill_node(&victim).unwrap();
    let run = lab.finished("r").await;
    lab.testbed.restart_node(&victim).await.unwrap();
    assert_eq!(counts(&run), (6, 6, 0));
    lab.check_left_nothing(&run).await;
}

/// The storage fails in each way that it can: while listing, the run waits; while fetching, the file is tried again, and
/// what does not heal is dead-lettered with the reason. Trap 21.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn storage_that_fails_costs_attempts_and_never_a_file() {
    let lab = Lab::new("storage").await;
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
    let mut bucket = lab.bucket();
    bucket["endpoint"] = json!(proxy.url);
    lab.pipeline(json!({"source": {"bucket": bucket}})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 2}})).await;
    let run = lab.finished("r").await;
    assert!(lab.witness.was_ever(|run| is_degraded_by(run, "CredentialsInvalid")), "the listing was refused");
    assert_eq!(counts(&run), (6, 4, 2));
    let letters = lab.dead_letters("r").await;
    let reason = |file: &str| letters.iter().find(|letter| letter.file == file).unwrap().reason.clone();
    assert!(reason("gone").starts_with("ObjectGone"), "{}", reason("gone"));
    assert!(reason("secret").starts_with("NoAccess"), "{}", reason("secret"));
    lab.check_left_nothing(&run).await;
}

/// Trap 16: listing has a task of its own, so that a storage that hangs holds up nobody but its own run. Told to slow down,
/// the listing does, and goes on.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_whose_storage_hangs_delays_no_other() {
    let lab = Lab::new("hangs").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("", 3, |_| "copy".to_owned()).await;
    proxy.inject(Rule::every(Fault::SlowDown, "list-type=2").times(1));
    proxy.inject(Rule::every(Fault::Stuck, "list-type=2"));
    let mut bucket = lab.bucket();
    bucket["endpoint"] = json!(proxy.url);
    lab.pipeline(json!({"source": {"bucket": bucket}})).await;
    lab.run("hangs", json!({})).await;
    lab.until("hangs", "it is being listed", |run| phase(run) == Some(Phase::Listing)).await;
    // A run is a snapshot: the Pipeline can be changed for the next.
    let direct = json!({"spec": {"source": {"bucket": {"endpoint": lab.bucket()["endpoint"]}}}});
    let changed = lab.api::<Pipeline>().patch("p", &PatchParams::default(), &Patch::Merge(direct)).await;
    changed.unwrap();
    lab.run("other", json!({})).await;
    assert_eq!(counts(&lab.finished("other").await), (3, 3, 0));
    assert_eq!(phase(&lab.get("hangs").await), Some(Phase::Listing));
    proxy.heal();
    assert_eq!(counts(&lab.finished("hangs").await), (3, 3, 0));
}

/// A pod that is deleted by hand leaves its file to another one.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_pod_that_is_deleted_by_hand_leaves_its_file_to_another() {
    let mut lab = Lab::new("evicted").await;
    lab.put_many("", 4, |_| "sleep 30".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    lab.until("r", "all are processed", |run| of(run, |counts| counts.running) == 4).await;
    let pods = lab.pods().await;
    let name = pods[0].metadata.name.clone().unwrap();
    // Once while the operator watches, and once while there is none.
    lab.api::<k8s_openapi::api::core::v1::Pod>()
        .delete(&name, &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    lab.kill_operators().await;
    let name = pods[1].metadata.name.clone().unwrap();
    lab.api::<k8s_openapi::api::core::v1::Pod>()
        .delete(&name, &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    let gone = async || {
        let found = lab
            .api::<k8s_openapi::api::core::v1::Pod>()
            .get_opt(&name)
            .await
            .doing(|| "look for the pod".to_owned())?;
        Ok(found.is_none().then_some(()))
    };
    lab.eventually("the pod is gone", gone).await;
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (4, 4, 0));
}
