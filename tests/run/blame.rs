//! Blame: a file is charged an attempt only when its own processing failed. With `maxAttempts: 1`, a single
//! wrong charge shows as a dead letter.

use std::time::{Duration, Instant};

use crds::v1alpha1::{Phase, PipelineRun};
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::EvictParams;
use serde_json::{Value, json};
use testbed::{Fault, FaultyS3, Rule};

use crate::harness::{Lab, Mode, condition, counts, is_degraded_by, is_soak, message, phase, running, soon};
use crate::storms::of;

/// A new proxy at the address of an old one, so that the storage is back. Connections that are still closing
/// occupy the address for a moment.
async fn listen_again(lab: &Lab, url: &str) -> FaultyS3 {
    let address = url.trim_start_matches("http://").to_owned();
    let listen = async || Ok(FaultyS3::listen(&address, testbed::services::S3_IP_URL).await.ok());
    lab.eventually("the proxy listens again", listen).await
}

in_both_modes! {
    an_outage_of_the_storage_charges_no_file_and_is_over_in_seconds
    keys_that_are_refused_and_accepted_again_cost_no_file_an_attempt
    objects_that_alone_are_refused_or_fail_are_charged_in_the_end
    a_last_object_that_is_refused_is_charged_after_a_restart_of_the_operator
    a_pod_that_is_evicted_costs_its_file_nothing
    neither_an_outage_nor_revoked_keys_charge_the_last_file_of_a_run
}

/// `make soak` has default settings and an outage of five minutes.
async fn an_outage_of_the_storage_charges_no_file_and_is_over_in_seconds(mode: Mode) {
    let (files, seconds, execution) = match mode {
        _ if is_soak() => (60, 300, json!({})),
        Mode::PodPerFile => (20, 60, json!({"parallelism": 4, "maxAttempts": 1})),
        // More, because pods finish the files that they have prefetched.
        Mode::Warm => (80, 60, json!({"parallelism": 4, "maxAttempts": 1})),
    };
    let lab = Lab::in_mode("outage", mode).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("", files, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    let pipeline = json!({"name": "p"});
    lab.create::<PipelineRun>(
        json!({"metadata": {"name": "r"}, "spec": {"pipelineRef": pipeline, "execution": execution}}),
    )
    .await;
    lab.until("r", "some are done", |run| of(run, |counts| counts.succeeded) >= 3).await;
    let (url, down) = (proxy.url.clone(), Instant::now());
    drop(proxy);
    let fails = async || Ok((lab.tally("r", "disrupted").await >= 3).then_some(()));
    lab.eventually("three files are disrupted", fails).await;
    println!("disrupted three files {:?} after the storage stopped", down.elapsed());
    let is_reported = |run: &PipelineRun| is_degraded_by(run, "StorageUnavailable");
    let degraded = lab.until_within(soon(), "r", "the outage is reported", is_reported).await;
    println!("reported {:?} after the storage stopped", down.elapsed());
    let words = message(&degraded, "Degraded");
    assert!(words.contains("no file is charged") && words.contains("one pod at a time"), "{words}");
    // Each probe during this time would cost a file an attempt.
    tokio::time::sleep(Duration::from_secs(seconds).saturating_sub(down.elapsed())).await;
    let disrupted = lab.tally("r", "disrupted").await;
    // Pods that process many files stay, and get one file at a time.
    let pods = lab.pods().await.iter().filter(|pod| is_active(pod)).count();
    assert!(mode == Mode::Warm || pods <= 1, "{pods} pods at once probe a storage that is down");
    let run = lab.get("r").await;
    assert!(running(&run) <= 1, "more than one file at a time");
    let (files, parallelism) = (files as i64, run.spec.execution.parallelism);
    let left = files - counts(&run).1;
    assert!(left > i64::from(parallelism), "{left} files are too few to show full parallelism");
    let proxy = listen_again(&lab, &url).await;
    let back = Instant::now();
    lab.processes_at_once("r", usize::try_from(parallelism).unwrap(), soon()).await;
    println!("at full parallelism {:?} after the storage was back", back.elapsed());
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (files, files, 0));
    // The files in progress, and a probe every few seconds.
    assert!((3..20 + seconds * 2 / 3).contains(&disrupted), "{disrupted} disruptions in {seconds} s");
    assert_eq!(lab.tally("r", "retried").await, 0, "no attempt is charged");
    lab.check_left_nothing(&run).await;
    drop(proxy);
}

/// Pods that process many files keep the access keys that they started with, so pods whose keys are refused
/// are replaced.
async fn keys_that_are_refused_and_accepted_again_cost_no_file_an_attempt(mode: Mode) {
    // Enough to be at work when the second of the new pods has started.
    let files = if mode == Mode::Warm { 30 } else { 10 };
    let lab = Lab::in_mode("revoked", mode).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("", files, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    lab.until("r", "one is done", |run| of(run, |counts| counts.succeeded) >= 1).await;
    proxy.inject(Rule::every(Fault::Forbidden, &format!("/{}/", lab.bucket)));
    let fails = async || Ok((lab.tally("r", "disrupted").await >= 3).then_some(()));
    lab.eventually("three files are disrupted", fails).await;
    let are_reported = |run: &PipelineRun| is_degraded_by(run, "CredentialsInvalid");
    lab.until_within(soon(), "r", "the keys are reported", are_reported).await;
    proxy.heal();
    let back = Instant::now();
    lab.processes_at_once("r", 2, soon()).await;
    println!("at full parallelism {:?} after the keys were accepted", back.elapsed());
    let run = lab.finished("r").await;
    let files = files as i64;
    assert_eq!((counts(&run), phase(&run)), ((files, files, 0), Some(Phase::Succeeded)));
    assert_eq!(lab.tally("r", "retried").await, 0, "no attempt is charged");
    if mode == Mode::Warm {
        assert!(lab.witness.pods_ever("r") > 2, "new pods have the new keys");
    }
    lab.check_left_nothing(&run).await;
}

/// With one file left, no other transfer shows that the storage is down, but the canary does.
async fn neither_an_outage_nor_revoked_keys_charge_the_last_file_of_a_run(mode: Mode) {
    let mut lab = Lab::in_mode("last", mode).await;
    lab.restart_with("MAX_DISRUPTIONS", "1").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    let refuse = || Rule::every(Fault::Forbidden, &format!("/{}/", lab.bucket));
    let is_refused = |run: &PipelineRun| is_degraded_by(run, "CredentialsInvalid");
    lab.put("a", "sleep 5").await;
    lab.put("b", "copy").await;
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    // The keys are revoked while the first file is being processed, so that the second one is the last. In
    // either mode it is fetched only once the first one is settled.
    lab.filters_work("r", 1).await;
    proxy.inject(refuse());
    lab.until("r", "the keys are reported", is_refused).await;
    let url = proxy.url.clone();
    drop(proxy);
    let is_out = |run: &PipelineRun| is_degraded_by(run, "StorageUnavailable");
    lab.until("r", "the outage is reported", is_out).await;
    let before = lab.tally("r", "disrupted").await;
    assert!(before >= 6, "{before} disruptions, where one alone is free");
    // The storage is back, but the keys are not. Nothing is served before the rule is in place, because both
    // run on this thread.
    let proxy = listen_again(&lab, &url).await;
    proxy.inject(refuse());
    lab.until("r", "the keys are reported again", is_refused).await;
    proxy.heal();
    lab.until_within(soon(), "r", "it goes on", goes_on).await;
    assert_eq!(counts(&lab.finished("r").await), (2, 2, 0));
    assert_eq!(lab.tally("r", "retried").await, 0);
}

async fn objects_that_alone_are_refused_or_fail_are_charged_in_the_end(mode: Mode) {
    let mut lab = Lab::in_mode("objects", mode).await;
    lab.restart_with("MAX_DISRUPTIONS", "3").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("good/", 20, |_| "copy".to_owned()).await;
    lab.put("refused", "copy").await;
    lab.put("broken", "copy").await;
    proxy.inject(Rule::every(Fault::Forbidden, "/refused").method(Method::GET));
    proxy.inject(Rule::every(Fault::InternalError, "/broken").method(Method::GET));
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 4, "maxAttempts": 1}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (22, 20, 2));
    let letters = lab.dead_letters("r").await;
    let reason = |file: &str| letters.iter().find(|letter| letter.file == file).unwrap().reason.clone();
    for (file, why) in [("refused", "NoAccess"), ("broken", "StorageUnreachable")] {
        let reason = reason(file);
        assert!(reason.starts_with("disrupted 4 times in a row") && reason.contains(why), "{reason}");
    }
    lab.check_failures_shown(&run).await;
    lab.check_left_nothing(&run).await;
}

/// The new operator has seen no successful fetch, so it must learn from the queue that the storage is up.
async fn a_last_object_that_is_refused_is_charged_after_a_restart_of_the_operator(mode: Mode) {
    let mut lab = Lab::in_mode("forgotten", mode).await;
    lab.restart_with("MAX_DISRUPTIONS", "1000").await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put("good", "copy").await;
    lab.put("refused", "copy").await;
    proxy.inject(Rule::every(Fault::Forbidden, "/refused").method(Method::GET));
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    lab.until("r", "the good one is done", |run| of(run, |counts| counts.succeeded) == 1).await;
    // No pod is left either that has fetched the good one, or was told of it.
    lab.patch("r", json!({"spec": {"suspend": true}})).await;
    let without_pods = async || Ok(lab.pods().await.is_empty().then_some(()));
    lab.eventually("the run is suspended", without_pods).await;
    lab.restart_with("MAX_DISRUPTIONS", "1").await;
    lab.patch("r", json!({"spec": {"suspend": false}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 1, 1));
    let reason = lab.dead_letters("r").await[0].reason.clone();
    assert!(reason.contains("NoAccess"), "{reason}");
    lab.check_left_nothing(&run).await;
}

/// Does what a drain does to each pod of a node.
async fn a_pod_that_is_evicted_costs_its_file_nothing(mode: Mode) {
    let lab = Lab::in_mode("drained", mode).await;
    // Longer than a pod's grace period.
    lab.put("file", "sleep 20").await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let pods = lab.filters_work("r", 1).await;
    lab.api::<Pod>().evict(&pods[0].name_any(), &EvictParams::default()).await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (1, 1, 0));
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (0, 1));
    let told = lab.events("r", "FileDisrupted", 1).await;
    let note = told[0].message.as_deref().unwrap();
    assert!(note.starts_with("file: "), "{note}");
    assert_eq!(told[0].related.as_ref().unwrap().name.as_ref(), Some(&pods[0].name_any()));
    lab.check_left_nothing(&run).await;
}

/// The kubelet keeps 12 KiB of termination messages for a whole pod: even with as many filters as a Pipeline
/// may have, the entry that the claimer reports must be readable.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_pod_with_as_many_containers_as_there_may_be_settles_its_own_file() {
    let lab = Lab::new("many").await;
    let key = format!("{}a", "long/".repeat(150));
    lab.put(&key, "copy").await;
    let filters: Vec<Value> =
        (0..32).map(|number| crate::harness::filter(&format!("f{number}"), &["copy"])).collect();
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    let mut source = lab.bucket();
    source["prefix"] = json!("long/");
    lab.pipeline(json!({"source": {"bucket": source}, "filters": filters, "sink": {"bucket": sink}})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let pod = lab.pod_that("its claimer reported", |pod| claimer_message(pod).map(|_| ())).await;
    let said = claimer_message(&pod).unwrap();
    let report = protocol::Report::parse(&said).unwrap_or_else(|| panic!("{said}"));
    assert!(report.entry.is_some() && report.outcome.is_ok(), "{said}");
    assert_eq!(counts(&lab.finished("r").await), (1, 1, 0));
}

/// Whether everything that the run depends on works again.
fn goes_on(run: &PipelineRun) -> bool {
    condition(run, "Degraded").0 == "False"
}

/// The claimer's final report.
fn claimer_message(pod: &Pod) -> Option<String> {
    let claimer = pod.status.as_ref()?.init_container_statuses.as_ref()?.first()?;
    claimer.state.as_ref()?.terminated.as_ref()?.message.clone()
}

fn is_active(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}
