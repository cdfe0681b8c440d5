//! Pods that process many files: whatever ends, no file is lost, none is counted twice, and only a file whose own filter ended
//! is charged.

use std::fs;
use std::time::Duration;

use crds::v1alpha1::Phase;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;

use testbed::{Fault, FaultyS3, Rule};

use crate::harness::{Lab, Mode, condition, counts, is_degraded_by, message, phase, running};

/// A process of a pod, which runs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Process {
    Worker,
    Shim,
    Filter,
}

impl Process {
    fn is(self, command: &[u8]) -> bool {
        let begins = |with: &[u8]| command.starts_with(with);
        match self {
            Self::Worker => begins(b"/claimer\0serve"),
            Self::Shim => begins(b"/.openfilter/bin/shim\0"),
            Self::Filter => begins(b"/probe\0"),
        }
    }
}

/// The processes of a run's pods: all of them have its id in their environment.
fn processes(lab: &Lab, run: &str, process: Process) -> Vec<u32> {
    let id = lab.run_id(run).to_string().into_bytes();
    let is_one = |pid: &u32| {
        let read = |what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
        process.is(&read("cmdline")) && read("environ").windows(id.len()).any(|part| part == id)
    };
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(is_one).collect()
}

/// Ends a process as nothing else does; whether it was there.
fn kill(pid: u32) -> bool {
    std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
}

async fn one_of(lab: &Lab, run: &str, process: Process) -> u32 {
    let found = async || Ok(processes(lab, run, process).pop());
    lab.eventually(&format!("{run} has a {process:?}"), found).await
}

/// Three runs of one file each, of which something is killed while the filter works.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_killed_filter_or_shim_charges_its_file_and_a_killed_worker_charges_none() {
    let lab = Lab::in_mode("victims", Mode::Warm).await;
    lab.put("file", "sleep 3").await;
    lab.pipeline(json!({})).await;
    let victims = [("filter", Process::Filter), ("shim", Process::Shim), ("worker", Process::Worker)];
    for (run, _) in victims {
        lab.run(run, json!({})).await;
    }
    for (run, process) in victims {
        one_of(&lab, run, Process::Filter).await;
        // What has begun is reported at once, but not before it has.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(kill(one_of(&lab, run, process).await), "{run}");
    }
    for (run, process) in victims {
        let ended = lab.finished(run).await;
        assert_eq!((counts(&ended), phase(&ended)), ((1, 1, 0), Some(Phase::Succeeded)), "{run}");
        let (retried, disrupted) = (lab.tally(run, "retried").await, lab.tally(run, "disrupted").await);
        let expected = if process == Process::Worker { (0, 1) } else { (1, 0) };
        assert_eq!((retried, disrupted), expected, "{run} was killed");
    }
    for (run, _) in victims {
        lab.check_left_nothing(&lab.get(run).await).await;
    }
    lab.witness.check_monotonic();
}

/// Files that succeeded while no operator looked, in pods that are gone before one does.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn what_was_reported_counts_once_although_its_pod_is_gone() {
    let mut lab = Lab::in_mode("reported", Mode::Warm).await;
    lab.put_many("", 40, |_| "sleep 0.2".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    lab.kill_operators().await;
    let mut reported = 0;
    // The pods go on until they have nothing more to do.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        reported = lab.reports("r", "succeeded").await;
        if processes(&lab, "r", Process::Filter).is_empty() && reported > 0 {
            break;
        }
    }
    assert!(reported > 0, "something was reported");
    let before = lab.tally("r", "succeeded").await;
    for pod in lab.pods().await {
        lab.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((40, 40, 0), Some(Phase::Succeeded)));
    assert!(lab.tally("r", "succeeded").await >= before + reported as u64);
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// The command of a filter is the Pipeline's mistake, and no file's.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_command_that_cannot_be_executed_is_told_and_blames_no_file() {
    let lab = Lab::in_mode("command", Mode::Warm).await;
    lab.put_many("", 3, |_| "copy".to_owned()).await;
    let filter = json!([{"name": "main", "image": testbed::images::reference("probe"), "command": ["/missing"],
        "imagePullPolicy": "Never"}]);
    lab.pipeline(json!({"filters": filter})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    let told = lab
        .until("r", "it says what is wrong", |run| {
            condition(run, "Degraded").0 == "True" && message(run, "Degraded").contains("/missing")
        })
        .await;
    assert_eq!((counts(&told), running(&told)), ((3, 0, 0), 0), "no file is at fault");
    lab.delete("r").await;
}

/// The same for a filter that wants lines, in pods that process one file: its shim starts, and its command does not.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_command_that_wants_lines_and_cannot_be_executed_blames_no_file_either() {
    let lab = Lab::in_mode("lines", Mode::PodPerFile).await;
    lab.put_many("", 3, |_| "copy".to_owned()).await;
    let filter = json!([{"name": "main", "image": testbed::images::reference("probe"), "command": ["/missing"],
        "protocol": "Lines", "imagePullPolicy": "Never"}]);
    lab.pipeline(json!({"filters": filter})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    let told = lab
        .until("r", "it says what is wrong", |run| {
            is_degraded_by(run, "ContainerStartFailed") && message(run, "Degraded").contains("/missing")
        })
        .await;
    assert_eq!(counts(&told), (3, 0, 0), "no file is at fault");
    lab.delete("r").await;
}

/// Pods count their files themselves: those that the operator has not seen count, too.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn pods_are_replaced_after_as_many_files_as_they_may_process_whoever_looks() {
    let mut lab = Lab::in_mode("recycled", Mode::Warm).await;
    lab.put_many("", 40, |_| "sleep 0.2".to_owned()).await;
    lab.pipeline(json!({"warm": {"maxFilesPerPod": 10}})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    lab.kill_operators().await;
    // Only the pod counts now, and it holds more files than it may process.
    let has_stopped = async || Ok((lab.reports("r", "released").await > 0).then_some(()));
    lab.eventually("the pod gives files back", has_stopped).await;
    let settled = lab.tally("r", "succeeded").await as usize;
    assert_eq!(settled + lab.reports("r", "succeeded").await, 10, "as many as it may process");
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((40, 40, 0), Some(Phase::Succeeded)));
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (0, 0));
    assert!(lab.witness.pods_ever("r") >= 4, "no pod has processed more than ten");
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// A program with the password of a run's workers writes what is no report, again and again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_whose_reports_are_flooded_again_and_again_ends_with_the_reason() {
    let lab = Lab::in_mode("flood", Mode::Warm).await;
    lab.put_many("", 200, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 1}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    let (states, mut raw) = (lab.run_id("r").key("states"), lab.raw().await);
    let flood = "x".repeat(900 << 10);
    while phase(&lab.get("r").await) == Some(Phase::Running) {
        redis::cmd("HSET").arg(&states).arg("1-1").arg(&flood).query_async::<u64>(&mut raw).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let run = lab.finished("r").await;
    assert_eq!(phase(&run), Some(Phase::Failed));
    assert_eq!(condition(&run, "Succeeded").1, "WorkersMisbehaving");
    assert!(message(&run, "Succeeded").contains("who uses its password"));
    let traces = lab.traces().await;
    assert!(!traces.iter().any(|trace| trace.starts_with("openfilter:")), "the user is gone: {traces:?}");
    // This test does not write as that user, so that it may have written after the end.
    redis::cmd("DEL").arg(&states).query_async::<u64>(&mut raw).await.unwrap();
    assert!(lab.pods().await.is_empty());
}

/// Pods have the keys that they were started with, so those whose keys are refused make way for new ones.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn keys_that_are_refused_and_accepted_again_cost_no_file_an_attempt() {
    let lab = Lab::in_mode("keys", Mode::Warm).await;
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    lab.put_many("", 20, |_| "sleep 0.5".to_owned()).await;
    let mut bucket = lab.bucket();
    bucket["endpoint"] = json!(proxy.url);
    lab.pipeline(json!({"source": {"bucket": bucket}})).await;
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    lab.until("r", "some are done", |run| running(run) > 0).await;
    proxy.inject(Rule::every(Fault::Forbidden, &format!("/{}/", lab.bucket)));
    lab.until("r", "the keys are reported", |run| is_degraded_by(run, "CredentialsInvalid")).await;
    proxy.heal();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((20, 20, 0), Some(Phase::Succeeded)));
    assert_eq!(lab.tally("r", "retried").await, 0);
    assert!(lab.witness.pods_ever("r") > 2, "new pods have the new keys");
    lab.check_left_nothing(&run).await;
}

/// A filter that hangs is ended and charged; its pod goes on with the next file. Fewer pods are wanted while it does.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_filter_that_hangs_is_ended_and_a_pod_too_many_finishes_its_file() {
    let lab = Lab::in_mode("hangs", Mode::Warm).await;
    lab.put("hangs", "sleep 600").await;
    lab.put_many("good/", 20, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({})).await;
    let execution = json!({"parallelism": 2, "maxAttempts": 2, "fileTimeout": "10s"});
    lab.run("r", json!({"execution": execution})).await;
    lab.filters_work("r", 2).await;
    lab.patch("r", json!({"spec": {"execution": {"parallelism": 1}}})).await;
    let one_is_left = async || Ok((lab.pods().await.len() == 1).then_some(()));
    lab.eventually("one pod is left", one_is_left).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (21, 20, 1));
    let failure = &run.status.as_ref().unwrap().recent_failures[0];
    assert!(failure.attempts == 2 && failure.reason.starts_with("FileTimeout"), "{failure:?}");
    assert_eq!(lab.tally("r", "retried").await, 1, "no other file is at fault");
    assert_eq!(lab.witness.pods_ever("r"), 2, "no pod is replaced");
    lab.check_left_nothing(&run).await;
}

/// Everything is killed again and again, at any moment.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn five_hundred_files_survive_fifty_kills() {
    let mut lab = Lab::in_mode("storm", Mode::Warm).await;
    lab.put_many("", 500, |_| "sleep 0.2".to_owned()).await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({"execution": {"parallelism": 4, "maxAttempts": 20}})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    let (mut kills, mut charging, mut round) = (0, 0, 0_u64);
    while !phase(&lab.get("r").await).is_some_and(|phase| matches!(phase, Phase::Succeeded | Phase::Failed)) {
        round += 1;
        // A different moment and another victim each time, and the same ones in every run of the test.
        tokio::time::sleep(Duration::from_millis(100 + round * 37 % 250)).await;
        let victim = match round % 10 {
            0 => {
                lab.kill_operators().await;
                lab.start_operator();
                kills += 1;
                continue;
            }
            1 => Process::Worker,
            5 => Process::Shim,
            _ => Process::Filter,
        };
        let found = processes(&lab, "r", victim);
        if let Some(pid) = found.get(round as usize % found.len().max(1))
            && kill(*pid)
        {
            kills += 1;
            charging += u64::from(victim != Process::Worker);
        }
        assert!(round < 2_000, "it ends");
    }
    let run = lab.finished("r").await;
    println!("{kills} kills in {round} rounds");
    assert!(kills >= 50, "only {kills} kills");
    assert_eq!((counts(&run), phase(&run)), ((500, 500, 0), Some(Phase::Succeeded)));
    let retried = lab.tally("r", "retried").await;
    assert!(
        retried <= charging,
        "{retried} attempts were charged, and {charging} filters or shims were killed"
    );
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}
