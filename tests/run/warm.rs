//! Pods that process many files: whatever ends, no file is lost, none is counted twice, and only a file whose
//! own filter failed is charged.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use crds::v1alpha1::Phase;
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;
use testbed::services::S3_IP_URL;
use testbed::{Fault, FaultyS3, Rule};

use crate::failures::ForTheCluster;
use crate::harness::{Lab, Mode, condition, counts, is_degraded_by, message, phase, running};

/// A process of a pod, which runs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
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

/// The processes of a run's pods: all of them have the run's id in their environment.
pub fn processes(lab: &Lab, run: &str, process: Process) -> Vec<u32> {
    let id = lab.run_id(run).to_string().into_bytes();
    let is_one = |pid: &u32| {
        let read = |what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
        process.is(&read("cmdline")) && read("environ").windows(id.len()).any(|part| part == id)
    };
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(is_one).collect()
}

/// Kills a process with SIGKILL; returns whether it existed.
pub fn kill(pid: u32) -> bool {
    std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
}

/// Whether a process exists and has not ended.
pub fn lives(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|command| !command.is_empty())
}

async fn one_of(lab: &Lab, run: &str, process: Process) -> u32 {
    let found = async || Ok(processes(lab, run, process).pop());
    lab.eventually(&format!("{run} has a {process:?}"), found).await
}

/// Waits until a request with this beginning has reached a proxy.
async fn is_asked(lab: &Lab, proxy: &FaultyS3, request: &str) {
    let asked = async || Ok(proxy.seen().iter().any(|seen| seen.starts_with(request)).then_some(()));
    lab.eventually(&format!("the storage is asked to {request}"), asked).await;
}

/// How often each file below a prefix was fetched through a proxy.
pub fn fetches(lab: &Lab, proxy: &FaultyS3, prefix: &str) -> BTreeMap<String, usize> {
    requests(lab, proxy, &Method::GET, prefix)
}

/// How often a proxy was asked to do this with each object below a prefix.
pub fn requests(lab: &Lab, proxy: &FaultyS3, method: &Method, prefix: &str) -> BTreeMap<String, usize> {
    let folder = format!("{method} /{}/", lab.bucket);
    let mut requests = BTreeMap::<String, usize>::new();
    for request in proxy.seen() {
        let key = request.strip_prefix(folder.as_str()).and_then(|rest| rest.split('?').next());
        if let Some(key) = key.filter(|key| !key.is_empty() && key.starts_with(prefix)) {
            *requests.entry(key.to_owned()).or_default() += 1;
        }
    }
    requests
}

/// Starts three runs of one file each, and kills something of each while the filter works.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_killed_filter_or_shim_charges_its_file_and_a_killed_worker_charges_none() {
    let lab = Lab::in_mode("victims", Mode::Warm).await;
    lab.put("file", "sleep 8").await;
    lab.pipeline(json!({})).await;
    let victims = [("filter", Process::Filter), ("shim", Process::Shim), ("worker", Process::Worker)];
    for (run, _) in victims {
        lab.run(run, json!({})).await;
    }
    let strike = async |(run, process)| {
        let filters = async || Ok((lab.reports(run, "started").await == 1).then_some(()));
        lab.eventually(&format!("{run}: a filter works"), filters).await;
        assert!(kill(one_of(&lab, run, process).await), "{run}");
    };
    // At once, because each filter works for only eight seconds.
    futures::future::join_all(victims.map(strike)).await;
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

/// Of the files that a pod holds, only the one that its filters work on is charged or disrupted. Those that
/// it has fetched ahead go back as they were.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn files_that_were_fetched_ahead_go_back_unharmed_when_a_shim_or_the_worker_is_killed() {
    let lab = Lab::in_mode("ahead", Mode::Warm).await;
    lab.put_many("", 8, |_| "sleep 4".to_owned()).await;
    lab.pipeline(json!({})).await;
    let victims = [("shim", Process::Shim, (1, 0)), ("worker", Process::Worker, (0, 1))];
    for (run, ..) in victims {
        lab.run(run, json!({"execution": {"parallelism": 1, "maxAttempts": 2}})).await;
    }
    let strike = async |(run, process, charged)| {
        let begun = async || Ok((lab.reports(run, "started").await == 1).then_some(()));
        lab.eventually(&format!("{run}: a filter works"), begun).await;
        let held = lab.queue(run).await.stats().await.unwrap().running;
        assert!(held >= 3, "{run}: the pod holds {held} files");
        assert!(kill(one_of(&lab, run, process).await), "{run}");
        let ended = lab.finished(run).await;
        assert_eq!((counts(&ended), phase(&ended)), ((8, 8, 0), Some(Phase::Succeeded)), "{run}");
        let tallies = (lab.tally(run, "retried").await, lab.tally(run, "disrupted").await);
        assert_eq!(tallies, charged, "{run} was killed");
    };
    futures::future::join_all(victims.map(strike)).await;
    // Only now: both have their pods in one namespace.
    for (run, ..) in victims {
        lab.check_left_nothing(&lab.get(run).await).await;
    }
    lab.witness.check_monotonic();
}

/// The worker is killed while it fetches, while a filter works, while it publishes, and after it reported
/// without an operator.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_worker_that_is_killed_at_any_step_charges_no_file() {
    let mut lab = Lab::in_mode("steps", Mode::Warm).await;
    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    let (source, mut sink) = (lab.bucket_behind(&proxy), lab.bucket_behind(&proxy));
    sink["prefix"] = json!("results/");
    lab.pipeline(json!({"source": {"bucket": source}, "sink": {"bucket": sink}})).await;
    let fetch = format!("/{}/fetching/", lab.bucket);
    let publish = format!("/{}/results/publishing/", lab.bucket);
    proxy.inject(Rule::every(Fault::Stuck, &fetch).method(Method::GET));
    proxy.inject(Rule::every(Fault::Stuck, &publish).method(Method::PUT));
    let with_operator = ["filtering", "fetching", "publishing"];
    for step in with_operator {
        start_step(&lab, step).await;
    }
    // The only one that does not wait for the storage.
    let filters = async || Ok((lab.reports("filtering", "started").await == 1).then_some(()));
    lab.eventually("a filter works", filters).await;
    assert!(kill(one_of(&lab, "filtering", Process::Worker).await), "filtering");
    is_asked(&lab, &proxy, &format!("GET {fetch}")).await;
    assert!(kill(one_of(&lab, "fetching", Process::Worker).await), "fetching");
    is_asked(&lab, &proxy, &format!("PUT {publish}")).await;
    assert!(kill(one_of(&lab, "publishing", Process::Worker).await), "publishing");
    proxy.heal();
    for step in with_operator {
        check_step(&lab, step).await;
    }
    // Of two files, the filters worked on one, and on none.
    assert_eq!(lab.tally("filtering", "disrupted").await, 1);
    assert_eq!(lab.tally("fetching", "disrupted").await, 0);

    start_step(&lab, "reported").await;
    let filters = async || Ok((lab.reports("reported", "started").await == 1).then_some(()));
    lab.eventually("a filter works", filters).await;
    lab.kill_operators().await;
    let reported = async || Ok((lab.reports("reported", "succeeded").await == 1).then_some(()));
    lab.eventually("its end is reported", reported).await;
    assert!(kill(one_of(&lab, "reported", Process::Worker).await), "reported");
    lab.start_operator();
    check_step(&lab, "reported").await;
    let fetched = fetches(&lab, &proxy, "reported/");
    assert!(fetched.len() == 2 && fetched.values().all(|times| *times == 1), "each file once: {fetched:?}");
    lab.witness.check_monotonic();
}

/// Starts a run over its own two files, one at a time.
async fn start_step(lab: &Lab, step: &str) {
    lab.put_many(&format!("{step}/"), 2, |_| "sleep 5".to_owned()).await;
    let execution = json!({"parallelism": 1, "maxAttempts": 1});
    lab.run(step, json!({"source": {"prefix": format!("{step}/")}, "execution": execution})).await;
}

/// Both files succeed, and neither is at fault.
async fn check_step(lab: &Lab, step: &str) {
    let run = lab.finished(step).await;
    assert_eq!((counts(&run), phase(&run)), ((2, 2, 0), Some(Phase::Succeeded)), "{step}");
    assert_eq!(lab.tally(step, "retried").await, 0, "{step}: no file is at fault");
}

/// Results are published while filters work on the next file. Filters that die at that time charge only that
/// file. The worker finishes publishing; if it dies too, that is a disruption.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_shim_that_is_killed_while_an_earlier_file_is_published_charges_only_its_own() {
    let lab = Lab::in_mode("uploads", Mode::Warm).await;
    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    let mut sink = lab.bucket_behind(&proxy);
    sink["prefix"] = json!("results/");
    lab.pipeline(json!({"sink": {"bucket": sink}})).await;
    for (run, worker_dies, charged) in [("finished", false, (1, 0)), ("lost", true, (1, 1))] {
        // Of four files, the only pod gets two at first.
        for (key, content) in
            [("1-published", "copy"), ("2-killed", "sleep 15"), ("3", "copy"), ("4", "copy")]
        {
            lab.put(&format!("{run}/{key}"), content).await;
        }
        proxy.inject(Rule::every(Fault::Stuck, "/results/").method(Method::PUT));
        let execution = json!({"parallelism": 1, "maxAttempts": 2});
        lab.run(run, json!({"source": {"prefix": format!("{run}/")}, "execution": execution})).await;
        is_asked(&lab, &proxy, &format!("PUT /{}/results/{run}/1-published/", lab.bucket)).await;
        let both = async || {
            let filtered = lab.reports(run, "started").await;
            let published = lab.reports(run, "started publishing").await;
            Ok((filtered == 1 && published == 1).then_some(()))
        };
        lab.eventually("one file is published while filters work on the next", both).await;
        assert!(kill(one_of(&lab, run, Process::Shim).await), "the shim");
        if worker_dies {
            // The first failure in a pod decides, and pods' times are whole seconds.
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert!(kill(one_of(&lab, run, Process::Worker).await), "the worker");
        }
        proxy.heal();
        let ended = lab.finished(run).await;
        assert_eq!((counts(&ended), phase(&ended)), ((4, 4, 0), Some(Phase::Succeeded)), "{run}");
        let (retried, disrupted) = (lab.tally(run, "retried").await, lab.tally(run, "disrupted").await);
        assert_eq!((retried, disrupted), charged, "{run}: the filters had one file, the publisher another");
        lab.check_left_nothing(&ended).await;
    }
    lab.witness.check_monotonic();
}

/// The next operator finds that the run has timed out, and that there are reports it has not read.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn what_was_reported_before_the_time_of_a_run_was_up_counts() {
    const TIMEOUT: Duration = Duration::from_secs(60);
    let mut lab = Lab::in_mode("late", Mode::Warm).await;
    lab.put_many("", 40, |_| "sleep 0.5".to_owned()).await;
    lab.pipeline(json!({})).await;
    let execution = json!({"parallelism": 1, "maxAttempts": 1, "timeout": format!("{}s", TIMEOUT.as_secs())});
    lab.run("r", json!({"execution": execution})).await;
    let filters = async || Ok((lab.reports("r", "started").await > 0).then_some(()));
    lab.eventually("a filter works", filters).await;
    lab.kill_operators().await;
    let held =
        async || Ok(Some(lab.queue("r").await.stats().await.unwrap().running).filter(|held| *held > 0));
    let held = lab.eventually("the pod holds files", held).await;
    let all_reported = async || Ok((lab.reports("r", "succeeded").await as u64 == held).then_some(()));
    lab.eventually("all that the pod holds is reported", all_reported).await;
    let before = lab.tally("r", "succeeded").await;
    let time_is_up = async || {
        let age = lab.queue("r").await.stats().await.unwrap().age;
        Ok(age.filter(|age| *age > TIMEOUT).map(|_| ()))
    };
    lab.eventually("the time of the run is up", time_is_up).await;
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!(condition(&run, "Succeeded").1, "TimedOut");
    let succeeded = i64::try_from(before + held).unwrap();
    assert_eq!(counts(&run), (40, succeeded, 40 - succeeded));
    lab.check_left_nothing(&run).await;
}

/// Files that succeeded without an operator, in pods that are gone before the next one starts: none is
/// fetched again.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn what_was_reported_counts_once_although_its_pod_is_gone() {
    let mut lab = Lab::in_mode("reported", Mode::Warm).await;
    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    lab.put_many("", 16, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({"source": {"bucket": lab.bucket_behind(&proxy)}})).await;
    lab.run("r", json!({"execution": {"parallelism": 2, "maxAttempts": 1}})).await;
    let filters = async || Ok((lab.reports("r", "started").await > 0).then_some(()));
    lab.eventually("a filter works", filters).await;
    lab.kill_operators().await;
    // The pods continue until they have nothing left to do.
    let all_reported = async || {
        let held = lab.queue("r").await.stats().await.unwrap().running;
        Ok((held > 0 && lab.reports("r", "succeeded").await as u64 == held).then_some(held))
    };
    let reported = lab.eventually("all that pods hold is reported", all_reported).await;
    let before = lab.tally("r", "succeeded").await;
    for pod in lab.pods().await {
        lab.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((16, 16, 0), Some(Phase::Succeeded)));
    assert!(lab.tally("r", "succeeded").await >= before + reported);
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (0, 0));
    // A report that was read after its pod was judged would send the file to another pod.
    let fetched = fetches(&lab, &proxy, "");
    assert!(fetched.len() == 16 && fetched.values().all(|times| *times == 1), "each file once: {fetched:?}");
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
}

/// A wrong command of a filter is the Pipeline's mistake, and no file's.
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

/// The same for a filter with `protocol: Lines`, in pods that process one file: its shim starts, but its
/// command does not.
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

/// Pods count their files themselves, including those that the operator has not seen.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn pods_are_replaced_after_as_many_files_as_they_may_process_whoever_looks() {
    let mut lab = Lab::in_mode("recycled", Mode::Warm).await;
    lab.put_many("", 40, |_| "sleep 1".to_owned()).await;
    lab.pipeline(json!({"warm": {"maxFilesPerPod": 10}})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    // The status says so up to a second later.
    let is_at_work = async || Ok((lab.reports("r", "started").await > 0).then_some(()));
    lab.eventually("a filter works", is_at_work).await;
    lab.kill_operators().await;
    // Now only the pod counts, and it holds more files than it may process.
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

/// A program with the password of a run's workers writes invalid reports again and again. Another run does
/// not notice.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_whose_reports_are_flooded_again_and_again_ends_with_the_reason() {
    let lab = Lab::in_mode("flood", Mode::Warm).await;
    lab.put_many("flooded/", 60, |_| "sleep 1".to_owned()).await;
    lab.put_many("beside/", 8, |_| "sleep 2".to_owned()).await;
    lab.pipeline(json!({})).await;
    for run in ["flooded", "beside"] {
        let source = json!({"prefix": format!("{run}/")});
        lab.run(run, json!({"source": source, "execution": {"parallelism": 1}})).await;
    }
    lab.until("flooded", "files are processed", |run| running(run) > 0).await;
    let (user, password) = lab.workers_login("flooded").await;
    let mut worker = lab.raw_as(&user, &password).await.unwrap();
    let mut write = redis::cmd("HSET");
    write.arg(lab.run_id("flooded").key("states")).arg("1-1").arg("x".repeat(900 << 10));
    let mut written = 0;
    while phase(&lab.get("flooded").await) == Some(Phase::Running) {
        // The user is removed before the run has ended.
        if write.query_async::<u64>(&mut worker).await.is_err() {
            break;
        }
        written += 1;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(written >= 3, "{written} writes");
    let run = lab.finished("flooded").await;
    assert_eq!(phase(&run), Some(Phase::Failed));
    assert_eq!(condition(&run, "Succeeded").1, "WorkersMisbehaving");
    assert!(message(&run, "Succeeded").contains("who uses its password"));
    let beside = lab.finished("beside").await;
    assert_eq!((counts(&beside), phase(&beside)), ((8, 8, 0), Some(Phase::Succeeded)));
    // Nothing is written after the end, neither over existing connections nor over new ones.
    assert!(write.query_async::<u64>(&mut worker).await.is_err(), "the connection still works");
    let refused = lab.raw_as(&user, &password).await.unwrap_err();
    assert_eq!(refused.kind(), redis::ErrorKind::AuthenticationFailed, "the password: {refused}");
    let traces = lab.traces().await;
    let is_left = |trace: &String| trace.starts_with("openfilter:") || trace.ends_with(":states");
    assert!(!traces.iter().any(is_left), "users and reports are gone: {traces:?}");
    assert!(lab.pods().await.is_empty());
}

/// Filters that run as another user than the worker. What only they may read is published all the same. A
/// link out of their folder is refused, and charges only its own file.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn results_that_only_their_filter_may_read_are_published_and_a_link_that_leads_out_is_refused() {
    let lab = Lab::in_mode("private", Mode::Warm).await;
    let _policy = run_filters_as(&lab, "main", 1_000).await;
    for (key, content) in [("1-link", "point-out"), ("2-private", "hide"), ("3-plain", "sleep 4")] {
        lab.put(&format!("in/{key}"), content).await;
    }
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    lab.pipeline(json!({"source": {"bucket": {"prefix": "in/"}}, "sink": {"bucket": sink}})).await;
    lab.run("r", json!({"execution": {"parallelism": 1, "maxAttempts": 1}})).await;
    let users =
        [Process::Worker, Process::Shim].map(async |process| user_of(one_of(&lab, "r", process).await));
    let users = futures::future::join_all(users).await;
    assert_eq!(users, ["65532", "1000"], "worker and filter");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (3, 2, 1));
    let letter = lab.dead_letters("r").await.remove(0);
    assert_eq!(letter.file, "in/1-link");
    let reason = letter.reason;
    assert!(
        reason.starts_with("PublishIncomplete") && reason.contains("a link out of the folder"),
        "{reason}"
    );
    let results = lab.keys_below("results/").await;
    assert_eq!(results, ["results/2-private/private/copy", "results/3-plain/copy"]);
    let private = lab.services.s3.get(&lab.bucket, &results[0]).await.unwrap();
    assert_eq!(private, "hide");
    assert_eq!(lab.witness.pods_ever("r"), 1, "the pod goes on");
    lab.check_left_nothing(&run).await;
}

/// Gives the containers of this name a user, as an image of its own would: all images of the suite have the
/// same one.
async fn run_filters_as(lab: &Lab, filter: &str, user: u32) -> ForTheCluster {
    let name = lab.namespace.name.as_str();
    let match_pods = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    });
    let security = format!("Object.spec.containers.securityContext{{runAsUser: {user}}}");
    let container = format!("Object.spec.containers{{name: '{filter}', securityContext: {security}}}");
    let expression = format!("Object{{spec: Object.spec{{containers: [{container}]}}}}");
    let mutation =
        json!({"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}});
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name}, "spec": {"matchConstraints": match_pods, "mutations": [mutation],
            "failurePolicy": "Fail", "reinvocationPolicy": "Never"}});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": name}, "spec": {"policyName": name}});
    let policy = ForTheCluster::apply(lab, &[policy, binding]);
    let security = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"},
        "spec": {"containers": [{"name": filter, "image": "i", "securityContext": security}]}});
    let words = ["create", "-n", name, "--dry-run=server", "-o", "jsonpath={..runAsUser}", "-f", "-"];
    let heeded = async || {
        let answer = lab.testbed.kubectl(&words, &pod.to_string()).unwrap();
        Ok((answer == user.to_string()).then_some(()))
    };
    lab.eventually("filters run as another user", heeded).await;
    policy
}

/// The user that a process runs as.
fn user_of(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    users.split_whitespace().next().unwrap().to_owned()
}

/// A hanging filter is ended and charged; its pod continues with the next file. Meanwhile the run needs fewer
/// pods.
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
