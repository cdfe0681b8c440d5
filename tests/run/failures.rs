//! Files, filters and images that fail, and limits that end an attempt or a run.

use std::time::Duration;

use crds::v1alpha1::{Phase, PipelineRun};
use futures::TryStreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, ResourceQuota, Secret};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchParams};
use serde_json::{Value, json};
use testbed::Testbed;
use testbed::images::reference;

use crate::harness::{Lab, Mode, condition, counts, filter, is_degraded_by, message, names, phase, running};
use crate::player::Player;

in_both_modes! {
    a_filter_that_says_bad_input_is_not_asked_again_and_one_killed_for_memory_says_so
    a_wrong_image_is_told_at_once_and_blames_no_file_for_the_claimers
    a_container_that_cannot_be_created_is_told_and_charged_to_a_claimed_file_only
    pods_that_a_node_never_brings_up_are_replaced_and_the_node_is_named
    pods_that_no_node_takes_are_told_and_go_when_fewer_are_allowed
    a_run_stops_when_its_time_is_over_or_too_many_files_failed
    a_quota_and_a_refusal_are_told_and_waited_for
}

/// Cluster-scoped objects, which are deleted when this value is dropped, even by a panic.
pub struct ForTheCluster {
    testbed: Testbed,
    objects: String,
}

impl ForTheCluster {
    pub fn apply(lab: &Lab, objects: &[Value]) -> Self {
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let made = Self { testbed: lab.testbed.clone(), objects };
        made.testbed.kubectl(&["apply", "-f", "-"], &made.objects).unwrap();
        made
    }
}

impl Drop for ForTheCluster {
    fn drop(&mut self) {
        let _ = self.testbed.kubectl(&["delete", "--ignore-not-found", "-f", "-"], &self.objects);
    }
}

/// Who would manage a Job with `managedBy`, or why there would be no Job: the API server takes a moment to
/// apply new admission settings.
fn manager_of_a_job(lab: &Lab) -> Result<String, String> {
    let pod = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "any"},
        "spec": {"managedBy": "example.com/somebody", "template": {"spec": pod}}});
    let namespace = lab.namespace.name.as_str();
    let words =
        ["create", "-n", namespace, "--dry-run=server", "-o", "jsonpath={.spec.managedBy}", "-f", "-"];
    lab.testbed.kubectl(&words, &job.to_string())
}

/// A run of only bad files ends as fast as its own back-off allows. The built-in Job controller would take
/// hours, and after six failures a single wait exceeds [`crate::harness::LONG`]. None of the Job's
/// completions is ever reached, and yet it ends, and no pod waits for a file.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn forty_files_that_all_fail_end_within_their_own_back_off() {
    let lab = Lab::new("forty").await;
    // Some are tried twice: more failures than a Job would allow before it waits for minutes.
    lab.put_many("", 40, |number| if number % 5 == 0 { "exit 9" } else { "exit 8" }.to_owned()).await;
    lab.pipeline(json!({})).await;
    let execution = json!({"parallelism": 20, "maxAttempts": 2, "nonRetryableExitCodes": [8]});
    lab.run("r", json!({"execution": execution})).await;
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), lab.tally("r", "retried").await), ((40, 0, 40), 8));
    assert_eq!(lab.dead_letters("r").await.len(), 40);
    lab.check_left_nothing(&run).await;
}

async fn a_filter_that_says_bad_input_is_not_asked_again_and_one_killed_for_memory_says_so(mode: Mode) {
    let lab = Lab::in_mode("reasons", mode).await;
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

/// An image that cannot be pulled. A filter's image fails its files after a while, where pods claim a file
/// before their filters start; the claimer's image is the run's problem and no file's.
async fn a_wrong_image_is_told_at_once_and_blames_no_file_for_the_claimers(mode: Mode) {
    let mut lab = Lab::in_mode("images", mode).await;
    lab.set("MAX_DISRUPTIONS", "1");
    lab.restart_with("START_TIMEOUT", "5s").await;
    lab.put("a", "copy").await;
    let mut missing = filter("main", &["obey"]);
    missing["image"] = json!("localhost/openfilter/nowhere:1");
    lab.pipeline(json!({"filters": [missing]})).await;
    lab.run("filter", json!({"execution": {"maxAttempts": 1}})).await;
    let stuck =
        lab.until("filter", "the image is missed", |run| is_degraded_by(run, "ImagePullFailed")).await;
    assert!(
        message(&stuck, "Degraded").contains("localhost/openfilter/nowhere:1"),
        "{}",
        message(&stuck, "Degraded")
    );
    match mode {
        Mode::PodPerFile => {
            let run = lab.finished("filter").await;
            assert_eq!(counts(&run), (1, 0, 1));
            assert!(run.status.unwrap().recent_failures[0].reason.contains("nowhere"));
        }
        Mode::Warm => {
            check_waits_without_a_claim(&lab, "filter", "ImagePullFailed").await;
            lab.delete("filter").await;
        }
    }

    lab.restart_with("CLAIMER_IMAGE", "localhost/openfilter/noclaimer:1").await;
    lab.api::<crds::v1alpha1::Pipeline>().delete("p", &Default::default()).await.unwrap();
    lab.pipeline(json!({})).await;
    lab.run("claimer", json!({})).await;
    let stuck =
        lab.until("claimer", "the image is missed", |run| is_degraded_by(run, "ImagePullFailed")).await;
    assert!(message(&stuck, "Degraded").contains("--claimer-image"), "{}", message(&stuck, "Degraded"));
    tokio::time::sleep(Duration::from_secs(8)).await;
    let waiting = lab.get("claimer").await;
    assert_eq!((counts(&waiting), phase(&waiting)), ((1, 0, 0), Some(Phase::Running)), "no file is blamed");
    // A pod that is stuck for too long is replaced.
    assert!(lab.pods().await.len() <= 1, "no pod is added");

    // Correcting the setting repairs the run.
    lab.restart_with("CLAIMER_IMAGE", &reference("claimer")).await;
    assert_eq!(counts(&lab.finished("claimer").await), (1, 1, 0));
}

/// Waits until pods of a run with one file were replaced again and again because they do not start, and
/// checks that the run keeps waiting for this reason, and that its file is as it was.
async fn check_waits_without_a_claim(lab: &Lab, run: &str, reason: &str) {
    // From the third one on, the run slows down, and reports the reason even between two pods.
    let replaced = async || Ok((lab.witness.pods_ever(run) >= 4).then_some(()));
    lab.eventually("its pods are replaced", replaced).await;
    let waiting = lab.until(run, "it is still blocked", |run| is_degraded_by(run, reason)).await;
    assert_eq!((counts(&waiting), running(&waiting)), ((1, 0, 0), 0));
    assert_eq!(phase(&waiting), Some(Phase::Running));
    for charge in ["retried", "disrupted", "reclaimed"] {
        assert_eq!(lab.tally(run, charge).await, 0, "{charge}: nothing was claimed");
    }
}

/// A container that cannot be created, here because a Secret is missing. Where nothing is claimed before all
/// containers run, no file is charged, and the run goes on once there is the Secret.
async fn a_container_that_cannot_be_created_is_told_and_charged_to_a_claimed_file_only(mode: Mode) {
    let mut lab = Lab::in_mode("created", mode).await;
    lab.set("MAX_DISRUPTIONS", "1");
    lab.restart_with("START_TIMEOUT", "5s").await;
    lab.put("a", "copy").await;
    let mut secretive = filter("main", &["obey"]);
    let missing = json!({"secretKeyRef": {"name": "nowhere", "key": "k"}});
    secretive["env"] = json!([{"name": "TOKEN", "valueFrom": missing}]);
    lab.pipeline(json!({"filters": [secretive]})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let stuck = lab.until("r", "it is told", |run| is_degraded_by(run, "ContainerStartFailed")).await;
    assert!(message(&stuck, "Degraded").contains("nowhere"), "{}", message(&stuck, "Degraded"));
    if mode == Mode::Warm {
        check_waits_without_a_claim(&lab, "r", "ContainerStartFailed").await;
        lab.create::<Secret>(json!({"metadata": {"name": "nowhere"}, "stringData": {"k": "v"}})).await;
        let run = lab.finished("r").await;
        assert_eq!((counts(&run), condition(&run, "Degraded").0), ((1, 1, 0), "False".into()));
        return;
    }
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (1, 0, 1));
    let reason = &run.status.unwrap().recent_failures[0].reason;
    assert!(reason.contains("CreateContainerConfigError"), "{reason}");
}

/// A node whose sandbox, network or volumes fail looks empty and attracts pods. Pods that it does not start
/// are replaced, their files go back unchanged, and the node is named.
async fn pods_that_a_node_never_brings_up_are_replaced_and_the_node_is_named(mode: Mode) {
    let mut lab = Lab::in_mode("sandbox", mode).await;
    lab.restart_with("START_TIMEOUT", "15s").await;
    lab.put_many("", 2, |_| "copy".to_owned()).await;
    // No node of the cluster takes the pods: this test plays scheduler and kubelet.
    let nowhere = json!({"nodeSelector": {"played-by": "suite"}});
    lab.pipeline(json!({"pod": nowhere, "filters": [filter("main", &["copy"])]})).await;
    let node = format!("broken-{}", lab.namespace.name);
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "spec": {"unschedulable": true}});
    let _node = ForTheCluster::apply(&lab, &[object]);
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    let without_node = async || {
        let mut pods = lab.pods().await;
        pods.retain(is_unschedulable);
        Ok((pods.len() == 2).then_some(pods))
    };
    let broken = names(lab.eventually("two pods have no node", without_node).await);
    for pod in &broken {
        bind_to_broken_node(&lab, pod, &node).await;
    }
    // Pods that stay up get files only once all of their containers run.
    let files = if mode == Mode::Warm { 0 } else { 2 };
    let handed_out = async || {
        let stats = lab.queue("r").await.stats().await;
        Ok(stats.is_ok_and(|stats| stats.running == files).then_some(()))
    };
    lab.eventually("each pod has the files that it may have", handed_out).await;
    let told = lab.until("r", "the node is named", |run| is_degraded_by(run, "NodeNotStarting")).await;
    let words = message(&told, "Degraded");
    assert!(words.contains(&format!("the node {node} ")), "{words}");
    let replaced = async || {
        let pods = names(lab.pods().await);
        Ok((pods.len() == 2 && !pods.iter().any(|pod| broken.contains(pod))).then_some(()))
    };
    lab.eventually("both pods are replaced", replaced).await;
    for charge in ["retried", "disrupted", "reclaimed"] {
        assert_eq!(lab.tally("r", charge).await, 0, "{charge}: nothing was claimed");
    }
    let _playing = Player::start(lab.api(), lab.server(), Duration::ZERO, 0);
    assert_eq!(counts(&lab.finished("r").await), (2, 2, 0));
    assert_eq!((lab.tally("r", "retried").await, lab.witness.pods_ever("r")), (0, 4));
}

fn is_unschedulable(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.reason.as_deref() == Some("Unschedulable"))
}

/// Places a pod on a node whose kubelet reports no sandbox, network or volumes for it. The report comes
/// first: by itself it is no news to the operator, which would notice it only half a minute later.
async fn bind_to_broken_node(lab: &Lab, pod: &str, node: &str) {
    let (pods, patch) = (lab.api::<Pod>(), PatchParams::default());
    let condition = json!({"type": "PodReadyToStartContainers", "status": "False"});
    let says = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    pods.patch_status(pod, &patch, &says).await.unwrap();
    let target = json!({"apiVersion": "v1", "kind": "Node", "name": node});
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target});
    let _: Value = pods.create_subresource("binding", pod, &PostParams::default(), &binding).await.unwrap();
}

/// Workers that end before they have a file are the run's problem: they are replaced with increasing delays,
/// and no file is blamed.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn workers_that_die_without_a_file_are_told_and_made_ever_more_rarely() {
    let mut lab = Lab::new("dying").await;
    // A program that knows nothing about claiming.
    lab.restart_with("CLAIMER_IMAGE", &reference("probe")).await;
    lab.put("a", "copy").await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    let told = lab.until("r", "it is told", |run| is_degraded_by(run, "WorkersFailing")).await;
    assert!(message(&told, "Degraded").contains("probe copy"), "{}", message(&told, "Degraded"));
    // Waits of 1, 2, 4, 8 and 16 s: a sixth pod comes after half a minute. Without them there would be one
    // per second.
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(lab.witness.pods_ever("r") <= 6, "{} pods", lab.witness.pods_ever("r"));
    assert_eq!(counts(&lab.get("r").await), (1, 0, 0), "no file is blamed");
    lab.restart_with("CLAIMER_IMAGE", &reference("claimer")).await;
    assert_eq!(counts(&lab.finished("r").await), (1, 1, 0));
}

/// Errors that only the API server can detect: the message is its own, and retries are slow.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_job_that_the_api_server_refuses_is_told() {
    let lab = Lab::new("refused").await;
    lab.put("a", "copy").await;
    lab.pipeline(json!({"pod": {"tolerations": [{"key": "gpu", "operator": "Exist"}]}})).await;
    lab.run("r", json!({})).await;
    let told = lab.until("r", "it is told", |run| is_degraded_by(run, "JobRefused")).await;
    let message = message(&told, "Degraded");
    assert!(message.contains("tolerations") && message.contains("Exist"), "{message}");
    // A quota for Jobs works like any other.
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}});
    lab.create::<ResourceQuota>(quota).await;
    let pipelines = lab.api::<crds::v1alpha1::Pipeline>();
    pipelines.delete("p", &Default::default()).await.unwrap();
    lab.pipeline(json!({})).await;
    lab.run("other", json!({})).await;
    lab.until("other", "the quota is told", |run| is_degraded_by(run, "QuotaExceeded")).await;
    lab.api::<ResourceQuota>().delete("none", &Default::default()).await.unwrap();
    assert_eq!(counts(&lab.finished("other").await), (1, 1, 0));
}

/// A Job that has the run's name but another owner is left alone, and reported as an obstacle.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_job_of_somebody_else_is_not_taken_over() {
    let lab = Lab::new("theirs").await;
    lab.put("a", "copy").await;
    lab.pipeline(json!({})).await;
    let container = json!({"name": "c", "image": "i"});
    let template = json!({"spec": {"restartPolicy": "Never", "containers": [container]}});
    let spec = json!({"suspend": true, "template": template});
    let theirs: Job = lab.create(json!({"metadata": {"name": "r-job"}, "spec": spec})).await;
    lab.run("r", json!({})).await;
    let waiting = lab.until("r", "it is told", |run| is_degraded_by(run, "NameTaken")).await;
    assert!(message(&waiting, "Degraded").contains("r-job"), "{}", message(&waiting, "Degraded"));
    assert_eq!(lab.jobs().await.remove(0).uid(), theirs.uid());
    lab.api::<Job>().delete("r-job", &DeleteParams::background()).await.unwrap();
    assert_eq!(counts(&lab.finished("r").await), (1, 1, 0));
}

/// A cluster that drops `managedBy` would run the Job itself, so the operator runs nothing there.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn where_jobs_cannot_be_managed_nothing_is_run_and_the_reason_is_told() {
    let mut lab = Lab::new("dropped").await;
    lab.put("a", "copy").await;
    let name = lab.namespace.name.clone();
    let match_jobs = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "resourceRules": [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}],
    });
    let drop = json!({"patchType": "JSONPatch",
        "jsonPatch": {"expression": "[JSONPatch{op: 'remove', path: '/spec/managedBy'}]"}});
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name}, "spec": {"matchConstraints": match_jobs, "mutations": [drop],
            "failurePolicy": "Fail", "reinvocationPolicy": "Never"}});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": name}, "spec": {"policyName": name}});
    let _dropping = ForTheCluster::apply(&lab, &[policy, binding]);
    let heeded = async || Ok(manager_of_a_job(&lab).unwrap().is_empty().then_some(()));
    lab.eventually("managedBy is dropped", heeded).await;
    lab.pipeline(json!({})).await;
    let jobs = lab.api::<Job>();
    let before = jobs.list(&Default::default()).await.unwrap().metadata.resource_version.unwrap();
    lab.run("r", json!({})).await;
    let run = lab.until("r", "it is told", |run| is_degraded_by(run, "JobNotManaged")).await;
    assert_eq!((condition(&run, "Stalled").0, counts(&run)), ("True".into(), (1, 0, 0)));
    // Not even for a moment, in which the built-in controller would have started its pods.
    let since = jobs.watch(&WatchParams::default().disable_bookmarks().timeout(2), &before).await.unwrap();
    assert_eq!(since.try_collect::<Vec<_>>().await.unwrap().len(), 0, "there was a Job");
    assert_eq!(lab.witness.pods_ever("r"), 0);
    // An operator that is started there does not even begin.
    lab.kill_operators().await;
    lab.start_operator();
    let refuses =
        async || Ok(lab.operator_log().contains("use this cluster: it drops managedBy").then_some(()));
    lab.eventually("the operator says why it does not start", refuses).await;
}

/// An unavailable admission webhook is no refusal, and yet nothing progresses: the run says so in the API
/// server's own words.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn an_admission_webhook_that_is_away_is_told_once_it_lasts_and_waited_for() {
    let lab = Lab::new("webhook").await;
    lab.put("a", "copy").await;
    let name = lab.namespace.name.as_str();
    let webhook = json!({
        "name": "away.example.com",
        "clientConfig": {"service": {"namespace": name, "name": "away"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "rules": [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}],
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    });
    let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration", "metadata": {"name": name}, "webhooks": [webhook]});
    let away = ForTheCluster::apply(&lab, &[configuration]);
    let heeded = async || Ok(manager_of_a_job(&lab).err());
    lab.eventually("no Job can be created", heeded).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({})).await;
    let told = lab.until("r", "it is told", |run| is_degraded_by(run, "OperatorRefused")).await;
    let message = message(&told, "Degraded");
    assert!(message.contains("failed calling webhook \"away.example.com\""), "{message}");
    drop(away);
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), condition(&run, "Degraded").0), ((1, 1, 0), "False".into()));
}

/// A filter that takes longer than `pendingTimeout` keeps its file; one that takes longer than `fileTimeout`
/// does not.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_long_filter_is_not_duplicated_and_one_that_is_too_long_is_ended() {
    let lab = Lab::new("long").await;
    // So long that all claims are compared with all pods twice meanwhile.
    lab.put("long", "sleep 75").await;
    lab.pipeline(json!({})).await;
    lab.run("patient", json!({"execution": {"pendingTimeout": "10s", "parallelism": 4}})).await;
    lab.run("strict", json!({"execution": {"fileTimeout": "4s", "maxAttempts": 2}})).await;
    let strict = lab.finished("strict").await;
    assert_eq!(counts(&strict), (1, 0, 1));
    let failure = &strict.status.unwrap().recent_failures[0];
    assert!(failure.attempts == 2 && failure.reason.starts_with("FileTimeout"), "{failure:?}");
    let patient = lab.finished("patient").await;
    assert_eq!(counts(&patient), (1, 1, 0));
    assert_eq!((lab.tally("patient", "retried").await, lab.tally("patient", "reclaimed").await), (0, 0));
    assert_eq!((lab.witness.pods_ever("patient"), lab.witness.pods_ever("strict")), (1, 2));
}

async fn a_run_stops_when_its_time_is_over_or_too_many_files_failed(mode: Mode) {
    let lab = Lab::in_mode("stops", mode).await;
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
    // Pods that stay up also process the files that they already hold when they are told to end.
    let most = if mode == Mode::Warm { 11 } else { 6 };
    assert!((3..=most).contains(&tried), "{tried} of 12 files were tried");
    assert_eq!(lab.pods().await.len(), 0);
}

/// An exhausted quota, and pods that admission refuses, are the run's problem, reported in the API server's
/// own words.
async fn a_quota_and_a_refusal_are_told_and_waited_for(mode: Mode) {
    let lab = Lab::in_mode("quota", mode).await;
    lab.put_many("", 8, |number| format!("sleep {}", if number == 7 { 10 } else { 1 })).await;
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
    assert!(lab.witness.most_pods() <= 2, "{} pods", lab.witness.most_pods());
    // Once there are no more files than pods, the quota no longer matters. The last of the files takes a
    // while.
    let goes_on_well = |run: &PipelineRun| {
        phase(run) == Some(Phase::Running) && counts(run).1 >= 6 && condition(run, "Degraded").0 == "False"
    };
    assert!(lab.witness.was_ever(goes_on_well), "the quota was told for too long");

    // The namespace is "restricted", and this Pipeline asks for root.
    lab.api::<crds::v1alpha1::Pipeline>().delete("p", &Default::default()).await.unwrap();
    lab.pipeline(json!({"pod": {"securityContext": {"runAsNonRoot": false, "runAsUser": 0}}})).await;
    lab.run("root", json!({})).await;
    let refused = lab.until("root", "pods are refused", |run| is_degraded_by(run, "PodsRefused")).await;
    assert!(message(&refused, "Degraded").contains("restricted"), "{}", message(&refused, "Degraded"));
}

async fn pods_that_no_node_takes_are_told_and_go_when_fewer_are_allowed(mode: Mode) {
    let lab = Lab::in_mode("nowhere", mode).await;
    lab.put_many("", 4, |_| "copy".to_owned()).await;
    lab.pipeline(json!({"pod": {"nodeSelector": {"no-such": "node"}}})).await;
    lab.run("r", json!({})).await;
    let waiting = lab.until("r", "no node takes them", |run| is_degraded_by(run, "PodsUnschedulable")).await;
    assert_eq!((counts(&waiting), lab.pods().await.len()), ((4, 0, 0), 4));
    lab.patch("r", json!({"spec": {"execution": {"parallelism": 1}}})).await;
    let one_is_left = async || Ok((lab.pods().await.len() == 1).then_some(()));
    lab.eventually("those that wait for a file go", one_is_left).await;
    assert_eq!(lab.witness.pods_ever("r"), 4, "none comes in their place");
    let pod: Pod = lab.pods().await.remove(0);
    assert_eq!(pod.labels()["filter.plainsight.ai/pipelinerun"], "r");
    assert_eq!(pod.labels()["filter.plainsight.ai/run"], format!("{}.r", lab.namespace.name));
    assert_eq!(
        pod.spec.unwrap().init_containers.unwrap()[0].image.as_deref(),
        Some(reference("claimer").as_str())
    );
}
