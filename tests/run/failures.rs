//! Files, filters and images that fail, and limits that end an attempt or a run.

use std::time::Duration;

use crds::v1alpha1::Phase;
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::ResourceExt;
use serde_json::json;
use testbed::images::reference;

use crate::harness::{Lab, condition, counts, filter, is_degraded_by, message, phase};

/// Trap 6: a run of only bad files ends as fast as its own back-off allows; the built-in Job controller would take hours, and
/// after six failures wait for longer at once than [`crate::harness::LONG`].
/// Trap 7: not one of the Job's completions is ever reached, and yet it ends, and no pod waits for a file.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn forty_files_that_all_fail_end_within_their_own_back_off() {
    let lab = Lab::new("forty").await;
    lab.put_many("", 40, |_| "exit 9".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 20, "maxAttempts": 2}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (40, 0, 40));
    assert_eq!(lab.dead_letters("r").await.len(), 40);
    lab.check_left_nothing(&run).await;
    lab.check_all_statuses();
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_filter_that_says_bad_input_is_not_asked_again_and_one_killed_for_memory_says_so() {
    let lab = Lab::new("reasons").await;
    lab.put("bad", "exit 42").await;
    lab.put("big", "eat-memory").await;
    let mut greedy = filter("main", &["obey"]);
    greedy["resources"] = json!({"limits": {"memory": "48Mi"}});
    lab.pipeline(json!({"filters": [greedy]})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 2, "nonRetryableExitCodes": [42]}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 0, 2));
    let letters = lab.dead_letters("r").await;
    let of = |file: &str| letters.iter().find(|letter| letter.file == file).unwrap();
    assert_eq!((of("bad").attempts, of("bad").exit_code), (1, Some(42)));
    assert_eq!(of("big").attempts, 2);
    assert!(of("big").reason.starts_with("OOMKilled: main"), "{}", of("big").reason);
    assert!(of("big").pod.is_some());
}

/// Trap 11: an image that cannot be pulled. A filter's fails its files after a while; the claimer's is the run's problem
/// and no file's.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_wrong_image_is_told_at_once_and_blames_no_file_for_the_claimers() {
    let mut lab = Lab::new("images").await;
    lab.kill_operators().await;
    lab.set("START_TIMEOUT", "5s");
    lab.start_operator();
    lab.put("a", "copy").await;
    let mut missing = filter("main", &["obey"]);
    missing["image"] = json!("localhost/openfilter/nowhere:1");
    lab.pipeline(json!({"filters": [missing]})).await;
    lab.run("filter", json!({"execution": {"maxAttempts": 2}})).await;
    let stuck =
        lab.until("filter", "the image is missed", |run| is_degraded_by(run, "ImagePullFailed")).await;
    assert!(
        message(&stuck, "Degraded").contains("localhost/openfilter/nowhere:1"),
        "{}",
        message(&stuck, "Degraded")
    );
    let run = lab.finished("filter").await;
    assert_eq!(counts(&run), (1, 0, 1));
    assert!(run.status.unwrap().recent_failures[0].reason.contains("nowhere"));

    lab.kill_operators().await;
    lab.set("CLAIMER_IMAGE", "localhost/openfilter/noclaimer:1");
    lab.start_operator();
    lab.api::<crds::v1alpha1::Pipeline>().delete("p", &Default::default()).await.unwrap();
    lab.pipeline(json!({})).await;
    lab.run("claimer", json!({})).await;
    let stuck =
        lab.until("claimer", "the image is missed", |run| is_degraded_by(run, "ImagePullFailed")).await;
    assert!(message(&stuck, "Degraded").contains("--claimer-image"), "{}", message(&stuck, "Degraded"));
    tokio::time::sleep(Duration::from_secs(8)).await;
    let waiting = lab.get("claimer").await;
    assert_eq!((counts(&waiting), phase(&waiting)), ((1, 0, 0), Some(Phase::Running)), "no file is blamed");
    // One that is stuck for too long is replaced by another.
    assert!(lab.pods().await.len() <= 1, "no pod is added");
}

/// Trap 13: a filter that takes longer than `pendingTimeout` keeps its file; one that takes longer than `fileTimeout` does
/// not.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_long_filter_is_not_duplicated_and_one_that_is_too_long_is_ended() {
    let lab = Lab::new("long").await;
    lab.put("long", "sleep 25").await;
    lab.pipeline(json!({})).await;
    lab.run("patient", json!({"execution": {"pendingTimeout": "10s", "parallelism": 4}})).await;
    lab.run("strict", json!({"execution": {"fileTimeout": "4s", "maxAttempts": 2}})).await;
    let strict = lab.finished("strict").await;
    assert_eq!(counts(&strict), (1, 0, 1));
    let failure = &strict.status.unwrap().recent_failures[0];
    assert!(failure.attempts == 2 && failure.reason.starts_with("FileTimeout"), "{failure:?}");
    let patient = lab.finished("patient").await;
    assert_eq!(counts(&patient), (1, 1, 0));
    assert!(lab.dead_letters("patient").await.is_empty());
    lab.check_all_statuses();
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_stops_when_its_time_is_over_or_too_many_files_failed() {
    let lab = Lab::new("stops").await;
    lab.put_many("slow/", 6, |_| "sleep 60".to_owned()).await;
    lab.put_many("bad/", 12, |_| "exit 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    let part = |prefix: &str| json!({"prefix": prefix});
    lab.run("time", json!({"source": part("slow/"), "execution": {"timeout": "12s", "parallelism": 2}}))
        .await;
    let few = json!({"maxFailedFiles": 2, "maxAttempts": 1, "parallelism": 2});
    lab.run("failures", json!({"source": part("bad/"), "execution": few})).await;
    let time = lab.finished("time").await;
    assert_eq!((counts(&time), condition(&time, "Degraded").1), ((6, 0, 6), "TimedOut".into()));
    assert!(lab.dead_letters("time").await.iter().all(|letter| letter.reason == "TimedOut"));
    let failures = lab.finished("failures").await;
    assert_eq!(
        (counts(&failures), condition(&failures, "Succeeded").1),
        ((12, 0, 12), "TooManyFailures".into())
    );
    let letters = lab.dead_letters("failures").await;
    let tried = letters.iter().filter(|letter| letter.attempts > 0).count();
    assert!((3..=6).contains(&tried), "{tried} of 12 files were tried");
    assert_eq!(lab.pods().await.len(), 0);
    lab.check_all_statuses();
}

/// A quota that is used up, and pods that admission refuses, are the run's problem, told with the API server's own words.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_quota_and_a_refusal_are_told_and_waited_for() {
    let lab = Lab::new("quota").await;
    lab.put_many("", 8, |_| "sleep 1".to_owned()).await;
    lab.create::<ResourceQuota>(json!({"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}})).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4}})).await;
    let waiting = lab.until("r", "the quota is missed", |run| is_degraded_by(run, "QuotaExceeded")).await;
    assert!(message(&waiting, "Degraded").contains("exceeded quota"), "{}", message(&waiting, "Degraded"));
    let more = kube::api::Patch::Merge(json!({"spec": {"hard": {"pods": "2"}}}));
    lab.api::<ResourceQuota>().patch("few", &Default::default(), &more).await.unwrap();
    // A quota below parallelism does not stop a run.
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (8, 8, 0));
    // Pods that have ended do not count, until they are deleted a moment later.
    assert!(lab.most_pods() <= 4, "{} pods", lab.most_pods());

    // The namespace is "restricted", and this Pipeline asks for root.
    lab.api::<crds::v1alpha1::Pipeline>().delete("p", &Default::default()).await.unwrap();
    lab.pipeline(json!({"pod": {"securityContext": {"runAsNonRoot": false, "runAsUser": 0}}})).await;
    lab.run("root", json!({})).await;
    let refused = lab.until("root", "pods are refused", |run| is_degraded_by(run, "PodsRefused")).await;
    assert!(message(&refused, "Degraded").contains("restricted"), "{}", message(&refused, "Degraded"));
    lab.check_all_statuses();
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn pods_that_no_node_takes_are_told() {
    let lab = Lab::new("nowhere").await;
    lab.put("a", "copy").await;
    lab.pipeline(json!({"pod": {"nodeSelector": {"no-such": "node"}}})).await;
    lab.run("r", json!({})).await;
    let waiting = lab.until("r", "no node takes them", |run| is_degraded_by(run, "PodsUnschedulable")).await;
    assert_eq!(counts(&waiting), (1, 0, 0));
    let pod: Pod = lab.pods().await.remove(0);
    assert_eq!(pod.labels()["filter.plainsight.ai/pipelinerun"], "r");
    assert_eq!(pod.labels()["filter.plainsight.ai/run"], format!("{}.r", lab.namespace.name));
    assert_eq!(
        pod.spec.unwrap().init_containers.unwrap()[0].image.as_deref(),
        Some(reference("claimer").as_str())
    );
}
