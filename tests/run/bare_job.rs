//! `make bench`: a run against a bare Job of the same pods by the built-in controller, with and without
//! failing files.

use std::time::Duration;

use crds::v1alpha1::Phase;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use testbed::Doing;
use testbed::images::reference;

use crate::harness::{self, Lab, counts, phase};
use crate::timed;

/// Concurrent pods in a comparison with a bare Job.
const PARALLELISM: usize = 15;
/// If any files are bad, one in this many is.
const ONE_BAD_IN: usize = 10;
/// Attempts of a bad file, and of a pod of a bare Job.
const ATTEMPTS: usize = 3;

pub async fn no_slower_than_a_bare_job() {
    println!("| files, {PARALLELISM} at once | run | bare Job | ratio | aim |\n|---|---|---|---|---|");
    let mut ratios = Vec::new();
    for bad in [Bad::None, Bad::Once, Bad::Always] {
        let (run, bare) = against_a_bare_job(bad).await;
        let (files, words, most) = (bad.files(), bad.in_words(), bad.ratio_max());
        println!("| {files}, {words} | {run:.1} s | {bare:.1} s | {:.2} | ≤ {most} |", run / bare);
        ratios.push((bad, run / bare));
    }
    for (bad, ratio) in ratios {
        assert!(ratio <= bad.ratio_max(), "{}: a run takes {ratio:.2} of a bare Job", bad.in_words());
    }
}

/// What is wrong with one file in [`ONE_BAD_IN`].
#[derive(Clone, Copy)]
enum Bad {
    None,
    /// Its first attempt fails.
    Once,
    /// Every attempt fails.
    Always,
}

impl Bad {
    fn in_words(self) -> &'static str {
        match self {
            Self::None => "all succeed",
            Self::Once => "one in ten fails once",
            Self::Always => "one in ten is bad for good",
        }
    }

    /// The most that a run may take of a bare Job's time. Without failures it costs hardly more than its
    /// pods. With failures the default back-off decides: ours begins with a second, Kubernetes' with ten.
    fn ratio_max(self) -> f64 {
        match self {
            Self::None => 1.1,
            Self::Once => 0.9,
            Self::Always => 0.7,
        }
    }

    /// If some files are bad, there are few, so that the time two processors need for so many pods does not
    /// hide everything else.
    fn files(self) -> usize {
        match self {
            Self::None => 60,
            Self::Once | Self::Always => 20,
        }
    }

    /// How often each of the two is tried. Two tries of the same kind differ by a quarter on a machine with
    /// two processors, which is more than the difference to be found without failures.
    fn rounds(self) -> usize {
        match self {
            Self::None => 3,
            Self::Once | Self::Always => 1,
        }
    }

    /// Files that fail permanently.
    fn failures(self) -> usize {
        match self {
            Self::None | Self::Once => 0,
            Self::Always => self.files() / ONE_BAD_IN,
        }
    }

    /// The file's instruction to the filter.
    fn content(self, number: usize) -> String {
        let bad = match self {
            Self::None => "copy",
            Self::Once => "fail-times 1",
            Self::Always => "exit 1",
        };
        if number.is_multiple_of(ONE_BAD_IN) { bad } else { "copy" }.to_owned()
    }

    /// The same as a script of a bare Job, whose index is the file.
    fn script(self) -> Option<String> {
        let good = format!("test $((JOB_COMPLETION_INDEX % {ONE_BAD_IN})) -ne 0");
        match self {
            Self::None => None,
            Self::Once => Some(format!("{good} || test $FAILURES -gt 0")),
            Self::Always => Some(good),
        }
    }
}

/// Seconds of a run and of a bare Job: the median of several tries each, which take turns in going first, so
/// that neither a noisy nor a lucky moment decides.
async fn against_a_bare_job(bad: Bad) -> (f64, f64) {
    let (mut run, mut bare) = (Vec::new(), Vec::new());
    for is_run in [false, true, true, false].repeat(bad.rounds()) {
        let lab = Lab::alone("bench").await;
        lab.pipeline(json!({})).await;
        quiet(&lab).await;
        let (tries, what) = if is_run { (&mut run, "run") } else { (&mut bare, "bare Job") };
        let took =
            if is_run { seconds_of_a_run(&lab, bad).await } else { seconds_of_a_bare_job(lab, bad).await };
        eprintln!("{}: {what} {took:.1} s", bad.in_words());
        tries.push(took);
    }
    (median(run), median(bare))
}

/// The median of an even number of tries.
fn median(mut tries: Vec<f64>) -> f64 {
    tries.sort_by(f64::total_cmp);
    let upper = tries.len() / 2;
    f64::midpoint(tries[upper - 1], tries[upper])
}

/// Waits until no remains of an earlier measurement are being removed, because removal costs the nodes as
/// much as starting pods.
async fn quiet(lab: &Lab) {
    let pods: Api<Pod> = Api::all(lab.testbed.client());
    let removed = async || {
        let listed = pods.list(&ListParams::default()).await.doing(|| "list all pods".to_owned())?;
        let theirs = |pod: &Pod| pod.namespace().is_some_and(|namespace| namespace.starts_with("bench-"));
        Ok((!listed.items.iter().any(theirs)).then_some(()))
    };
    lab.eventually("the pods before are gone", removed).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
}

async fn seconds_of_a_run(lab: &Lab, bad: Bad) -> f64 {
    let files = bad.files();
    lab.put_many("", files, |number| bad.content(number)).await;
    let default = json!({"initial": "1s", "max": "5m"});
    let execution = json!({"parallelism": PARALLELISM, "maxAttempts": ATTEMPTS, "retryBackoff": default});
    lab.run("r", json!({"execution": execution})).await;
    let (run, took) = timed(lab.finished("r")).await;
    let failed = bad.failures();
    assert_eq!(counts(&run), (files as i64, (files - failed) as i64, failed as i64));
    took.as_secs_f64()
}

/// The same number of pods by the built-in controller. If some fail, it uses Kubernetes' feature for work
/// items that fail individually, which is a back-off for each of them.
async fn seconds_of_a_bare_job(mut lab: Lab, bad: Bad) -> f64 {
    // More than there are pods, because another attempt is another pod, which claims another file.
    lab.put_many("", 2 * bad.files(), |_| "copy".to_owned()).await;
    let mut pod = pod_of_a_run(&mut lab).await;
    let mut spec = json!({"completions": bad.files(), "parallelism": PARALLELISM});
    if let Some(script) = bad.script() {
        run_instead(&mut pod, script);
        let of_each = json!({"completionMode": "Indexed", "backoffLimitPerIndex": ATTEMPTS - 1, "maxFailedIndexes": bad.files()});
        harness::merge(&mut spec, of_each);
    }
    spec["template"] = json!({"spec": pod});
    lab.create::<Job>(json!({"metadata": {"name": "bare"}, "spec": spec})).await;
    let ended = async || {
        let status = lab.api::<Job>().get("bare").await.unwrap().status.unwrap_or_default();
        let last = |type_: &str| matches!(type_, "Complete" | "Failed");
        let has_ended = status.conditions.iter().flatten().any(|condition| last(&condition.type_));
        Ok(has_ended.then_some(status))
    };
    let (status, took) = timed(lab.eventually("the bare Job ends", ended)).await;
    assert_eq!(status.succeeded, Some((bad.files() - bad.failures()) as i32), "{status:?}");
    lab.api::<Job>().delete("bare", &DeleteParams::background()).await.unwrap();
    // So that nothing of it remains in Valkey.
    lab.start_operator();
    lab.delete("twin").await;
    took.as_secs_f64()
}

/// Exactly the pods of a run: they claim files of a suspended run without an operator.
async fn pod_of_a_run(lab: &mut Lab) -> PodSpec {
    lab.run("twin", json!({"suspend": true})).await;
    let run = lab.until("twin", "it waits", |run| phase(run) == Some(Phase::Suspended)).await;
    lab.kill_operators().await;
    let job = lab.api::<Job>().get(&run.status.unwrap().job_name.unwrap()).await.unwrap();
    job.spec.unwrap().template.spec.unwrap()
}

/// A script instead of the filter, which could learn of another attempt only from the operator.
fn run_instead(pod: &mut PodSpec, script: String) {
    let failures = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']";
    let failures = json!({"name": "FAILURES", "valueFrom": {"fieldRef": {"fieldPath": failures}}});
    let filter = &mut pod.containers[0];
    filter.image = Some(reference("busybox"));
    filter.command = Some(vec!["sh".to_owned(), "-c".to_owned(), script]);
    filter.args = None;
    filter.env = Some(vec![serde_json::from_value(failures).unwrap()]);
}
