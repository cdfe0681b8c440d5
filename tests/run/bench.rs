//! `make bench`, operator part, on the real cluster: a run against a bare Job of the same pods, how soon a finished pod is
//! settled, and what a file costs in requests and memory as files grow: it must stay constant. Ratios are asserted: machines are
//! shared and noisy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "harness.rs"]
mod harness;
#[path = "player.rs"]
mod player;
#[path = "scale.rs"]
mod scale;
#[path = "warm_bench.rs"]
mod warm_bench;

use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use futures::StreamExt;
use harness::{Lab, counts, filter, phase};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use player::Player;
use serde_json::json;
use testbed::Doing;
use testbed::images::reference;

/// Pods at once in a comparison with a bare Job.
const PARALLELISM: usize = 15;
/// Of these files one in so many is bad, if any is.
const ONE_BAD_IN: usize = 10;
/// Attempts of a bad file, and of a pod of a bare Job.
const ATTEMPTS: usize = 3;
/// Files of the two runs that show whether cost per file is constant.
const SIZES: [usize; 2] = [1_000, 10_000];
/// Cost per file may differ by this much between them.
const GROWTH_MAX: f64 = 1.2;
/// Bytes by which the operator may grow between them: nothing that it remembers is a matter of files.
const MEMORY_GROWTH_MAX: f64 = 16.0 * 1_048_576.0;
/// 99 of 100 files are settled this soon after their pod ended: of these files, with so many pods that work so long.
const SETTLED_WITHIN: Duration = Duration::from_millis(500);
const SETTLED: (usize, usize, Duration) = (500, PODS, Duration::from_secs(2));
const PODS: usize = 50;

fn main() {
    // `cargo test --benches` asks for tests, of which there are none.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    // As with other benches, words select parts: `cargo bench --bench run -- settled`.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wanted = |part: &str| words.is_empty() || words.iter().any(|word| part.contains(word.as_str()));
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        // What takes least first, so that it is not measured on a cluster that has just removed thousands of pods.
        if wanted("settled") {
            settled_in_time().await;
        }
        if wanted("bare-job") {
            no_slower_than_a_bare_job().await;
        }
        if wanted("warm") {
            warm_bench::warm_beats_a_pod_per_file().await;
        }
        if wanted("growth") {
            as_much_for_each_of_many_files().await;
        }
        if wanted("pods") {
            scale::pods_come_and_go().await;
        }
        if wanted("many-runs") {
            scale::many_runs_at_once().await;
        }
        if wanted("writes") {
            scale::writes_of_many_active_runs().await;
        }
    });
}

/// The better of two tries: a machine that stands still for a second is no matter of the operator.
async fn settled_in_time() {
    let (files, pods, work) = SETTLED;
    println!("| {pods} pods that work {work:?} | p50 | p99 | within {SETTLED_WITHIN:?} |\n|---|---|---|---|");
    let mut best = 0.0_f64;
    for _ in 0..2 {
        let settled = cost_of(files, pods, work).await;
        let in_time = settled.settled_within(SETTLED_WITHIN);
        let (p50, p99) = (settled.quantile(0.5), settled.quantile(0.99));
        println!("| ended to settled | {p50:.0?} | {p99:.0?} | {:.1} % |", in_time * 100.0);
        best = best.max(in_time);
    }
    assert!(best >= 0.99, "the aim is p99 ≤ {SETTLED_WITHIN:?}");
}

async fn no_slower_than_a_bare_job() {
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

async fn as_much_for_each_of_many_files() {
    println!("as fast as the API server takes it:");
    println!("| files | requests per file | Valkey calls per file | operator memory | files/s |");
    println!("|---|---|---|---|---|");
    let mut costs = Vec::new();
    for files in SIZES {
        let cost = cost_of(files, PODS, Duration::ZERO).await;
        let Cost { requests, calls, memory, rate, .. } = &cost;
        println!("| {files} | {requests:.2} | {calls:.2} | {:.1} MiB | {rate:.0} |", memory / 1_048_576.0);
        costs.push(cost);
    }
    let [few, many] = &costs[..] else { panic!("two sizes") };
    for (what, few, many) in
        [("requests", few.requests, many.requests), ("Valkey calls", few.calls, many.calls)]
    {
        assert!(many / few <= GROWTH_MAX, "{what} per file grow from {few:.2} to {many:.2}");
    }
    let grown = many.memory - few.memory;
    assert!(grown <= MEMORY_GROWTH_MAX, "the operator grows by {grown} bytes with ten times as many files");
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

    /// The most that a run may take of the time of a bare Job. Without failures it costs hardly more than its pods. With
    /// failures it is a matter of back-off, each with its default: ours begins with a second, that of Kubernetes with ten.
    fn ratio_max(self) -> f64 {
        match self {
            Self::None => 1.1,
            Self::Once => 0.9,
            Self::Always => 0.7,
        }
    }

    /// Where some are bad they are few, so that the time of two processors for so many pods does not hide everything else.
    fn files(self) -> usize {
        match self {
            Self::None => 60,
            Self::Once | Self::Always => 20,
        }
    }

    /// How often each of the two is tried twice. Two tries of the same kind differ by a quarter on a machine with two
    /// processors, which is more than what is looked for where nothing fails.
    fn rounds(self) -> usize {
        match self {
            Self::None => 3,
            Self::Once | Self::Always => 1,
        }
    }

    /// Files that fail in the end.
    fn failures(self) -> usize {
        match self {
            Self::None | Self::Once => 0,
            Self::Always => self.files() / ONE_BAD_IN,
        }
    }

    /// What the filter is told by the file.
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

/// Seconds of a run and of a bare Job: the median of some tries each, which take turns in being first, so that neither a noisy
/// nor a lucky moment decides.
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

/// Of an even number of tries.
fn median(mut tries: Vec<f64>) -> f64 {
    tries.sort_by(f64::total_cmp);
    let upper = tries.len() / 2;
    f64::midpoint(tries[upper - 1], tries[upper])
}

/// Waits until nothing of an earlier measurement is left to be removed, which costs the nodes as much as pods that start.
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

/// As many pods by the built-in controller. Where some fail, in the way that Kubernetes has for work items that fail one by
/// one, which is a back-off for each of them.
async fn seconds_of_a_bare_job(mut lab: Lab, bad: Bad) -> f64 {
    // More than there are pods: another attempt is another pod, which claims another file.
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
    // So that nothing of it stays in Valkey.
    lab.start_operator();
    lab.delete("twin").await;
    took.as_secs_f64()
}

/// The very pods of a run: they claim the files of one that is suspended, and whose operator has gone.
async fn pod_of_a_run(lab: &mut Lab) -> PodSpec {
    lab.run("twin", json!({"suspend": true})).await;
    let run = lab.until("twin", "it waits", |run| phase(run) == Some(Phase::Suspended)).await;
    lab.kill_operators().await;
    let job = lab.api::<Job>().get(&run.status.unwrap().job_name.unwrap()).await.unwrap();
    job.spec.unwrap().template.spec.unwrap()
}

/// A script in the place of the filter, which would need the operator to know of another attempt.
fn run_instead(pod: &mut PodSpec, script: String) {
    let failures = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']";
    let failures = json!({"name": "FAILURES", "valueFrom": {"fieldRef": {"fieldPath": failures}}});
    let filter = &mut pod.containers[0];
    filter.image = Some(reference("busybox"));
    filter.command = Some(vec!["sh".to_owned(), "-c".to_owned(), script]);
    filter.args = None;
    filter.env = Some(vec![serde_json::from_value(failures).unwrap()]);
}

async fn timed<T>(what: impl Future<Output = T>) -> (T, Duration) {
    let start = Instant::now();
    (what.await, start.elapsed())
}

struct Cost {
    requests: f64,
    calls: f64,
    memory: f64,
    rate: f64,
    /// Of each file, in order: from the end of its pod, as the API server has it, until the operator says that it is settled.
    latencies: Vec<Duration>,
}

impl Cost {
    /// The share of files that were settled this soon.
    fn settled_within(&self, limit: Duration) -> f64 {
        self.latencies.partition_point(|latency| *latency <= limit) as f64 / self.latencies.len() as f64
    }

    fn quantile(&self, share: f64) -> Duration {
        self.latencies[((self.latencies.len() - 1) as f64 * share) as usize]
    }
}

/// What a file costs the operator, and how soon it is settled. Nobody runs these pods: this process claims their files and ends
/// them, so that the machine's two processors are left to what is measured.
async fn cost_of(files: usize, parallelism: usize, work: Duration) -> Cost {
    let mut lab = Lab::alone("cost").await;
    lab.set("LOG", "info,operator::run::settle=debug");
    lab.set("LOG_FORMAT", "json");
    lab.restart_with("LISTEN", "127.0.0.1:18080").await;
    let put = |number: usize| {
        let lab = &lab;
        async move { lab.put(&format!("{number:06}"), "").await }
    };
    futures::stream::iter(0..files).map(put).buffer_unordered(16).collect::<Vec<()>>().await;
    let nowhere = json!({"nodeSelector": {"played-by": "bench"}});
    lab.pipeline(json!({"pod": nowhere, "filters": [filter("main", &["copy"])]})).await;
    let before = (metric("openfilter_kubernetes_requests_total").await, valkey_calls(&lab).await);
    lab.run("r", json!({"execution": {"parallelism": parallelism}})).await;
    let playing = Player::start(lab.api(), lab.server(), work, 0);
    let (run, took) = timed(lab.finished("r")).await;
    assert_eq!(counts(&run), (files as i64, files as i64, 0));
    let latencies = playing.player.latencies(&lab.operator_log());
    assert!(latencies.len() >= files, "{} of {files} are known to be settled", latencies.len());
    let requests = metric("openfilter_kubernetes_requests_total").await - before.0;
    // The claims are this process's own.
    let calls = valkey_calls(&lab).await - before.1;
    Cost {
        requests: requests / files as f64,
        calls: calls / files as f64,
        memory: lab.operator_memory() as f64,
        rate: files as f64 / took.as_secs_f64(),
        latencies,
    }
}

/// A figure of the operator.
async fn metric(name: &str) -> f64 {
    let values = metrics(name).await;
    *values.first().unwrap_or_else(|| panic!("no {name}"))
}

/// A figure of the operator, for each of its labels.
async fn metrics(name: &str) -> Vec<f64> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for _ in 0..100 {
        if let Ok(mut stream) = tokio::net::TcpStream::connect("127.0.0.1:18080").await {
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
            return lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the operator does not answer")
}

/// Commands that Valkey was sent from outside, without the claims.
async fn valkey_calls(lab: &Lab) -> f64 {
    let stats: String =
        redis::cmd("INFO").arg("commandstats").query_async(&mut lab.raw().await).await.unwrap();
    let calls = |name: &str| {
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
        line.and_then(|rest| rest.split(',').next()?.parse::<f64>().ok()).unwrap_or_default()
    };
    // Scripts, and what is sent beside them. The server counts a command inside of a script like one from outside, so this
    // is a little more than what was sent.
    calls("evalsha") + calls("eval") + calls("acl|getuser") + calls("acl|setuser") + calls("xpending")
}
