//! What every run of the cluster stands on breaks: Valkey, the API server, a node. These tests run alone, and so after all
//! others: each of them in between would wait for those under way to end, and keep the next from starting.

use std::time::Duration;

use crds::v1alpha1::PipelineRun;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;

use crate::harness::{Lab, Mode, condition, counts, is_degraded_by};
use crate::storms::{check_loss_was_told, of};

in_both_modes! {
    valkey_killed_and_restarted_keeps_the_counts_and_goes_on
    files_of_a_dead_node_are_processed_elsewhere
}

/// Valkey is unavailable, comes back with what its log kept, and has forgotten its users.
async fn valkey_killed_and_restarted_keeps_the_counts_and_goes_on(mode: Mode) {
    let lab = Lab::alone_in_mode("valkey", mode).await;
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
    assert_eq!(lab.tally("r", "retried").await, 0, "no file is at fault");
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
    assert_eq!(run.status.as_ref().unwrap().recent_failures, [], "none of them failed in the end");
    check_loss_was_told(&lab).await;
    lab.check_left_nothing(&run).await;
}

/// While Valkey is unavailable a run can be deleted all the same, and what it left is removed when Valkey is back.
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
async fn files_of_a_dead_node_are_processed_elsewhere(mode: Mode) {
    let lab = Lab::alone_in_mode("node", mode).await;
    lab.put_many("", 6, |_| "sleep 30".to_owned()).await;
    let victim = node_for_workers(&lab).await;
    processed_on(&lab, "r", &victim).await;
    lab.testbed.kill_node(&victim).unwrap();
    let run = lab.finished("r").await;
    lab.testbed.restart_node(&victim).await.unwrap();
    check_none_is_charged(&lab, &run).await;
    lab.check_left_nothing(&run).await;
}

/// Maintenance of a node: every pod on it is evicted, the node restarts, and takes pods again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn neither_a_drained_nor_a_rebooted_node_charges_a_file() {
    let mut lab = Lab::alone("maintained").await;
    // A container that was created and not started when its node went down stays so: the kubelet never starts it.
    lab.restart_with("START_TIMEOUT", "15s").await;
    lab.put_many("", 6, |_| "sleep 15".to_owned()).await;
    let victim = node_for_workers(&lab).await;
    processed_on(&lab, "drained", &victim).await;
    let drain = ["drain", &victim, "--force", "--ignore-daemonsets", "--delete-emptydir-data"];
    let drained = lab.kubectl(&drain);
    let run = lab.finished("drained").await;
    lab.kubectl(&["uncordon", &victim]).unwrap();
    drained.unwrap();
    check_none_is_charged(&lab, &run).await;

    processed_on(&lab, "rebooted", &victim).await;
    lab.testbed.kill_node(&victim).unwrap();
    // The node is back before the cluster notices that it was gone.
    lab.testbed.restart_node(&victim).await.unwrap();
    check_none_is_charged(&lab, &lab.finished("rebooted").await).await;
    assert_eq!(lab.pods().await.len(), 0);
}

/// The node without the backing services, and a Pipeline whose pods prefer it.
async fn node_for_workers(lab: &Lab) -> String {
    let node = lab.other_node(&lab.node_of("backing", "valkey").await).await;
    let affinity = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference":
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}}]}});
    lab.pipeline(json!({"pod": {"affinity": affinity}})).await;
    node
}

/// Starts a run whose six files are processed at once, some of them on this node.
async fn processed_on(lab: &Lab, run: &str, node: &str) {
    lab.run(run, json!({"execution": {"parallelism": 6, "pendingTimeout": "10s", "maxAttempts": 1}})).await;
    let pods = lab.filters_work(run, 6).await;
    let is_there = |pod: &Pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some(node);
    assert!(pods.iter().any(is_there), "no file is on {node}");
}

/// All six files succeeded, although some were disrupted.
async fn check_none_is_charged(lab: &Lab, run: &PipelineRun) {
    let name = run.name_any();
    assert_eq!(counts(run), (6, 6, 0));
    assert!(lab.tally(&name, "disrupted").await >= 1, "{name}: no disruption was noticed");
    assert_eq!(lab.tally(&name, "retried").await, 0, "{name}: no file is at fault");
}
