//! Faults of what every run of the cluster depends on: Valkey, the API server, a node. These tests run alone,
//! after all others: in between, each would have to wait for running tests, and keep the next from starting.

mod victims;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crds::v1alpha1::{Phase, PipelineRun};
use futures::future::join_all;
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use testbed::FaultyS3;
use testbed::services::S3_IP_URL;

use crate::harness::{Lab, Mode, condition, counts, is_degraded_by, is_in_phase, merge, phase, running};
use crate::storms::{check_loss_was_told, of};
use crate::warm::{Process, fetches, kill, lives, processes, requests};
use victims::{Victims, charged};

/// Files, and concurrent pods, of tests in which a node fails.
const FILES: usize = 4;

in_both_modes! {
    valkey_killed_and_restarted_keeps_the_counts_and_goes_on
    valkey_that_lost_everything_is_noticed_and_the_run_starts_over
    the_s3_server_killed_in_the_middle_of_a_run_costs_no_file_an_attempt
}

/// Valkey is unavailable, returns with the contents of its log, and has forgotten its users.
async fn valkey_killed_and_restarted_keeps_the_counts_and_goes_on(mode: Mode) {
    let lab = Lab::alone_in_mode("valkey", mode).await;
    let files = if mode == Mode::Warm { 60 } else { 10 };
    lab.put_many("", files, |_| "sleep 1".to_owned()).await;
    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    lab.services.kill_valkey().await.unwrap();
    let down = lab.until("r", "Valkey is missed", |run| is_degraded_by(run, "QueueUnavailable")).await;
    assert!(of(&down, |counts| counts.succeeded) >= 3, "the last counts stay");
    assert_eq!(condition(&down, "Succeeded").0, "Unknown");
    lab.services.restart_valkey().await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (files as i64, files as i64, 0));
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (0, 0));
    if mode == Mode::Warm {
        // Workers keep what they could not report, and report it when Valkey is back.
        let fetched = fetches(&lab, &proxy, "");
        assert!(fetched.len() == files && fetched.values().all(|times| *times == 1), "{fetched:?}");
    }
    lab.check_left_nothing(&run).await;
}

/// Valkey has lost everything: the run says so, lists again, and never reports success on missing data.
async fn valkey_that_lost_everything_is_noticed_and_the_run_starts_over(mode: Mode) {
    let lab = Lab::alone_in_mode("wiped", mode).await;
    let (files, good) = if mode == Mode::Warm { (30, "sleep 2") } else { (8, "sleep 1") };
    // Only the first file is bad, and only the first time: the Job's counts must not delay the end when they
    // decrease.
    lab.put_many("", files, |number| if number == 0 { "exit 1" } else { good }.to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 3, "maxAttempts": 1}})).await;
    let done =
        |run: &PipelineRun| of(run, |counts| counts.succeeded) >= 2 && of(run, |counts| counts.failed) == 1;
    lab.until("r", "some are done and one has failed", done).await;
    lab.put("0000", "copy").await;
    lab.services.wipe_valkey().await.unwrap();
    let run = lab.finished("r").await;
    let files = files as i64;
    assert_eq!(counts(&run), (files, files, 0));
    assert_eq!(run.status.as_ref().unwrap().recent_failures, [], "none of them failed in the end");
    check_loss_was_told(&lab).await;
    lab.check_left_nothing(&run).await;
}

/// The server itself dies, while files are fetched, processed and published, and comes back with what it had
/// stored.
async fn the_s3_server_killed_in_the_middle_of_a_run_costs_no_file_an_attempt(mode: Mode) {
    let lab = Lab::alone_in_mode("s3", mode).await;
    // Warm pods also finish the files that they have prefetched.
    let files = if mode == Mode::Warm { 80 } else { 12 };
    lab.put_many("in/", files, |_| "sleep 1".to_owned()).await;
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    lab.pipeline(json!({"source": {"bucket": {"prefix": "in/"}}, "sink": {"bucket": sink}})).await;
    lab.run("r", json!({"execution": {"parallelism": 4, "maxAttempts": 1}})).await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    lab.services.kill_s3().await.unwrap();
    let is_reported = |run: &PipelineRun| is_degraded_by(run, "StorageUnavailable");
    let down = lab.until("r", "the outage is reported", is_reported).await;
    assert!(counts(&down).1 < files as i64, "it is killed too late");
    lab.services.restart_s3().await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((files as i64, files as i64, 0), Some(Phase::Succeeded)));
    assert!(lab.tally("r", "disrupted").await >= 1, "no transfer was interrupted");
    assert_eq!(lab.tally("r", "retried").await, 0, "no attempt is charged");
    let results: Vec<String> = (0..files).map(|number| format!("results/{number:04}/copy")).collect();
    assert_eq!(lab.keys_below("results/").await, results);
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// While Valkey is unavailable a run can be deleted all the same, and what it left is removed when Valkey is
/// back.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_can_be_deleted_while_valkey_is_unavailable() {
    let mut labs = Lab::alone_in_both_modes("orphan").await;
    for lab in &labs {
        lab.put_many("", 2, |_| "sleep 30".to_owned()).await;
        lab.pipeline(json!({})).await;
        lab.run("r", json!({})).await;
    }
    for lab in &labs {
        lab.until("r", "files are processed", |run| running(run) > 0).await;
    }
    // Long enough for the log to contain it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    labs[0].services.kill_valkey().await.unwrap();
    join_all(labs.iter().map(|lab| lab.delete("r"))).await;
    // A new operator knows what is left to do, because it is recorded.
    for lab in &mut labs {
        lab.kill_operators().await;
    }
    labs[0].services.restart_valkey().await.unwrap();
    for lab in &mut labs {
        assert_ne!(lab.traces().await, Vec::<String>::new(), "Valkey was unavailable");
        lab.start_operator();
    }
    for lab in &labs {
        let clean = async || Ok(lab.traces().await.is_empty().then_some(()));
        lab.eventually("nothing is left in Valkey", clean).await;
    }
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_paused_api_server_delays_and_loses_nothing() {
    let labs = Lab::alone_in_both_modes("paused").await;
    // Pods that stay up go on meanwhile.
    let files = |lab: &Lab| if lab.is_warm() { 60 } else { 12 };
    for lab in &labs {
        lab.put_many("", files(lab), |_| "sleep 1".to_owned()).await;
        lab.pipeline(json!({})).await;
        lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    }
    for lab in &labs {
        lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    }
    for _ in 0..2 {
        let paused = labs[0].testbed.pause_api_server().unwrap();
        // Shorter than the time after which silent nodes lose their pods.
        tokio::time::sleep(Duration::from_secs(5)).await;
        paused.resume();
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    for lab in &labs {
        let run = lab.finished("r").await;
        assert_eq!(counts(&run), (files(lab) as i64, files(lab) as i64, 0));
        assert_eq!(lab.tally("r", "retried").await, 0, "no file is at fault");
        lab.check_left_nothing(&run).await;
        lab.witness.check_monotonic();
    }
}

/// Operator, workers, shims, filters and Valkey are killed again and again, at random moments. Every attempt
/// whose filter was killed, alone or with its shim, is charged, and no other one. The filters and shims of
/// another run are spared: none of its files is charged. `STORM_SEED` repeats the choices of a storm.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn five_hundred_files_survive_fifty_kills() {
    let begin = Instant::now();
    let mut chance = Chance::from_seed();
    let mut lab = Lab::alone_in_mode("storm", Mode::Warm).await;
    // The outcomes tell how often each file was charged.
    lab.restart_with("KEEP_RESULTS", "10000").await;
    lab.put_many("any/", 500, |_| "sleep 0.2".to_owned()).await;
    lab.put_many("ours/", 60, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    let source = |run: &str| json!({"prefix": format!("{run}/")});
    lab.run("any", json!({"source": source("any"), "execution": {"parallelism": 4, "maxAttempts": 20}}))
        .await;
    lab.run("ours", json!({"source": source("ours"), "execution": {"parallelism": 2, "maxAttempts": 1}}))
        .await;
    for run in ["any", "ours"] {
        lab.until(run, "files are processed", |run| running(run) > 0).await;
    }
    let mut victims = Victims::of("any");
    let (mut kills, mut of_valkey, mut charging, mut spared, mut round) = (0, 0, 0, 0, 0_usize);
    let mut is_valkey_up = true;
    while (kills < 100 || of_valkey < 3) && !is_over(&lab.get("any").await) {
        round += 1;
        // The kinds of victims take turns, so that each is struck; the moment and the victim are left to
        // chance.
        tokio::time::sleep(Duration::from_millis(chance.below(350) + 50)).await;
        let pick = chance.below(u64::MAX) as usize;
        // Some of the others die while Valkey is unavailable.
        match round % 40 {
            17 => {
                victims.note_settled(&lab).await;
                lab.services.kill_valkey().await.unwrap();
                (kills, of_valkey, is_valkey_up) = (kills + 1, of_valkey + 1, false);
                continue;
            }
            22 => {
                lab.services.restart_valkey().await.unwrap();
                is_valkey_up = true;
            }
            _ => {}
        }
        let was_killed = match round % 10 {
            0 => {
                lab.kill_operators().await;
                lab.start_operator();
                true
            }
            1 => victims.strike_worker(&lab, pick, is_valkey_up).await,
            3 => {
                let found = processes(&lab, "ours", Process::Worker);
                let was_killed = found.get(pick % found.len().max(1)).is_some_and(|pid| kill(*pid));
                spared += u64::from(was_killed);
                was_killed
            }
            // Only while Valkey shows which file the pod has begun.
            5 if is_valkey_up => victims.strike_shim(&lab, pick).await,
            _ => victims.strike_filter(&lab, pick),
        };
        kills += u64::from(was_killed);
        charging += u64::from(was_killed && !matches!(round % 10, 0 | 1 | 3));
    }
    // It may just have been killed.
    lab.services.restart_valkey().await.unwrap();
    let (any, ours) = (lab.finished("any").await, lab.finished("ours").await);
    assert!(
        kills >= 50 && of_valkey >= 2 && spared >= 3 && charging >= 30,
        "only {kills} kills: {of_valkey} of Valkey, {spared} of ours, {charging} of filters and shims"
    );
    assert_eq!((counts(&any), phase(&any)), ((500, 500, 0), Some(Phase::Succeeded)));
    assert_eq!((counts(&ours), phase(&ours)), ((60, 60, 0), Some(Phase::Succeeded)));
    assert_eq!(lab.tally("ours", "retried").await, 0, "no filter of ours was killed");
    let charged = charged(&lab, "any").await;
    assert_eq!(lab.tally("any", "retried").await as usize, charged.len());
    let undecided = victims.check_charged(&charged);
    let (filters, shims) = (victims.certain(Process::Filter), victims.certain(Process::Shim));
    // Otherwise the check above would have had little to check.
    assert!(filters >= 10 && shims >= 2, "certain: {filters} filters and {shims} shims of {charging}");
    for run in [&any, &ours] {
        lab.check_left_nothing(run).await;
    }
    lab.witness.check_monotonic();
    println!(
        "{kills} kills in {round} rounds, {of_valkey} of Valkey, {charging} of filters and shims, {filters} and {shims} of them \
         certain: {} attempts charged, {undecided} lost their worker at the same time; {:.0?} of 8 minutes",
        charged.len(),
        begin.elapsed()
    );
}

/// Random numbers that can be repeated.
struct Chance(u64);

impl Chance {
    /// Begins with `STORM_SEED`, or with a seed of its own, and prints it: it is shown if the test fails.
    fn from_seed() -> Self {
        let given = std::env::var("STORM_SEED").ok();
        let seed = given.map_or_else(
            || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64,
            |seed| seed.parse().expect("STORM_SEED is a number"),
        );
        println!("STORM_SEED={seed}");
        Self(seed)
    }

    /// The next number (SplitMix64).
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// The pods of a dead node hold files; after `pendingTimeout` other pods get them.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn files_of_a_dead_node_are_processed_elsewhere() {
    let labs = Lab::alone_in_both_modes("node").await;
    let victim = &node_for_workers(&labs).await;
    processed_on(&labs, "r", victim).await;
    labs[0].testbed.kill_node(victim).unwrap();
    let runs = labs.each_ref().map(|lab| lab.finished("r"));
    let runs = join_all(runs).await;
    labs[0].testbed.restart_node(victim).await.unwrap();
    for (lab, run) in labs.iter().zip(&runs) {
        check_none_is_charged(lab, run).await;
        lab.check_left_nothing(run).await;
    }
}

/// Maintenance of a node: every pod on it is evicted, the node restarts, and takes pods again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn neither_a_drained_nor_a_rebooted_node_charges_a_file() {
    let mut labs = Lab::alone_in_both_modes("maintained").await;
    for lab in &mut labs {
        // A container that was created but not started when its node went down stays that way: the kubelet
        // never starts it.
        lab.restart_with("START_TIMEOUT", "15s").await;
    }
    let victim = &node_for_workers(&labs).await;
    processed_on(&labs, "drained", victim).await;
    let cordoned = Cordoned::new(&labs[0], victim);
    let drain = ["drain", victim, "--force", "--ignore-daemonsets", "--delete-emptydir-data"];
    labs[0].kubectl(&drain).unwrap();
    check_all_end_uncharged(&labs, "drained").await;
    drop(cordoned);

    processed_on(&labs, "rebooted", victim).await;
    labs[0].testbed.kill_node(victim).unwrap();
    // The node is back before the cluster notices its absence.
    labs[0].testbed.restart_node(victim).await.unwrap();
    check_all_end_uncharged(&labs, "rebooted").await;
    for lab in &labs {
        assert_eq!(lab.pods().await.len(), 0);
    }
}

/// A partition: nothing ends the workers of a node whose kubelet is unreachable. They finish files that other
/// pods hold by then, publish the results and report them.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn workers_that_go_on_after_their_pods_are_gone_change_nothing() {
    let lab = Lab::alone_in_mode("partition", Mode::Warm).await;
    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    // So long that none ends before its pod is deleted.
    lab.put_many("in/", 6, |_| "sleep 4".to_owned()).await;
    let victim = node_without_services(&lab).await;
    let mut sink = lab.bucket_behind(&proxy);
    sink["prefix"] = json!("results/");
    prefer_node(&lab, &victim, json!({"sink": {"bucket": sink}})).await;
    let source = json!({"prefix": "in/"});
    lab.run("r", json!({"source": source, "execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    let pods = lab.filters_work("r", 2).await;
    let workers = processes(&lab, "r", Process::Worker);
    let _cordoned = Cordoned::new(&lab, &victim);
    let paused = lab.testbed.pause_node(&victim).unwrap();
    let lost: Vec<Pod> = pods.into_iter().filter(|pod| is_on(pod, &victim)).collect();
    assert!(!lost.is_empty(), "no pod is on {victim}");
    for pod in &lost {
        lab.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    let replaced = async || Ok((lab.witness.pods_ever("r") >= 2 + lost.len()).then_some(()));
    lab.eventually("the pods are replaced", replaced).await;
    assert!(workers.iter().all(|worker| lives(*worker)), "the workers of the lost pods still run");
    let run = lab.finished("r").await;
    paused.resume();
    assert_eq!((counts(&run), phase(&run)), ((6, 6, 0), Some(Phase::Succeeded)));
    assert_eq!(lab.tally("r", "retried").await, 0, "no file is at fault");
    // Each lost pod had begun a file, which its worker and the pod that holds it now both finish.
    let published = requests(&lab, &proxy, &Method::PUT, "results/");
    let twice = published.values().filter(|times| **times >= 2).count();
    assert!(published.len() == 6 && twice >= 1, "the lost workers did not go on: {published:?}");
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
    // The next test may need pods there.
    lab.kubectl(&["wait", "--for=condition=Ready", &format!("node/{victim}"), "--timeout=60s"]).unwrap();
}

fn is_over(run: &PipelineRun) -> bool {
    phase(run).is_some_and(|phase| matches!(phase, Phase::Succeeded | Phase::Failed))
}

/// A node that takes no new pods until this is dropped, even by a panic.
struct Cordoned<'a> {
    lab: &'a Lab,
    node: &'a str,
}

impl<'a> Cordoned<'a> {
    fn new(lab: &'a Lab, node: &'a str) -> Self {
        lab.kubectl(&["cordon", node]).unwrap();
        Self { lab, node }
    }
}

impl Drop for Cordoned<'_> {
    fn drop(&mut self) {
        let _ = self.lab.kubectl(&["uncordon", self.node]);
    }
}

fn is_on(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().unwrap().node_name.as_deref() == Some(node)
}

async fn node_without_services(lab: &Lab) -> String {
    lab.other_node(&lab.node_of("backing", "valkey").await).await
}

/// A Pipeline with these changes whose pods prefer this node.
async fn prefer_node(lab: &Lab, node: &str, changes: Value) {
    let affinity = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference":
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}}]}});
    let mut changes = changes;
    merge(&mut changes, json!({"pod": {"affinity": affinity}}));
    lab.pipeline(changes).await;
}

/// The node without the backing services; pods of Pipelines with a few long files prefer it.
async fn node_for_workers(labs: &[Lab]) -> String {
    let node = node_without_services(&labs[0]).await;
    for lab in labs {
        // Longer than the grace period of a pod, and than it takes until pods of both runs work.
        lab.put_many("", FILES, |_| "sleep 30".to_owned()).await;
        prefer_node(lab, &node, json!({})).await;
    }
    node
}

/// Starts runs that process all their files at once, and waits until a filter of each works on this node.
async fn processed_on(labs: &[Lab], run: &str, node: &str) {
    let execution = json!({"parallelism": FILES, "pendingTimeout": "10s", "maxAttempts": 1});
    for lab in labs {
        lab.run(run, json!({"execution": execution})).await;
    }
    let some_work = async || {
        for lab in labs {
            let at_work = if lab.is_warm() { lab.reporters(run, "started").await } else { Vec::new() };
            let works = |pod: &Pod| {
                is_in_phase(pod, "Running") && (!lab.is_warm() || at_work.contains(&pod.name_any()))
            };
            if !lab.pods().await.iter().any(|pod| is_on(pod, node) && works(pod)) {
                return Ok(None);
            }
        }
        Ok(Some(()))
    };
    labs[0].eventually(&format!("{run}: filters of all runs work on {node}"), some_work).await;
}

async fn check_all_end_uncharged(labs: &[Lab], run: &str) {
    let check = async |lab: &Lab| check_none_is_charged(lab, &lab.finished(run).await).await;
    join_all(labs.iter().map(check)).await;
}

/// Checks that all files succeeded, although some were disrupted.
async fn check_none_is_charged(lab: &Lab, run: &PipelineRun) {
    let name = run.name_any();
    assert_eq!(counts(run), (FILES as i64, FILES as i64, 0));
    assert!(lab.tally(&name, "disrupted").await >= 1, "{name}: no disruption was noticed");
    assert_eq!(lab.tally(&name, "retried").await, 0, "{name}: no file is at fault");
}
