//! `make bench`, many runs and many pods: 300 runs that start together, the writes of 500 active runs, and
//! how fast pods come and go. Pods are played, or run on nodes of KWOK.

use std::time::{Duration, Instant};

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource};
use serde_json::{Value, json};
use testbed::{Doing, KWOK_MARK, Namespace, Testbed};
use tests::fake::Fake;
use tests::listing::{Folder, serve};

use crate::figures::{Writes, api_writes, metric, metrics};
use crate::harness::{Lab, Mode, counts, filter, phase};
use crate::player::{Player, Playing};

/// Runs per namespace: one namespace with far more than the others must not starve them.
const RUNS: [usize; 4] = [180, 40, 40, 40];
/// Files per run.
const FILES: usize = 20;
/// Active runs, and the most that they may write per second together.
const ACTIVE: usize = 500;
const WRITES_MAX: f64 = 150.0;
/// How long writes are counted.
const COUNTED: Duration = Duration::from_secs(60);
/// How long their pods work on a file: at least a second, so that a run without a budget would report each
/// file separately.
const WORK: Duration = Duration::from_secs(2);
/// Pods of one run, and the nodes of KWOK that they need: each takes 110.
const PODS: usize = 1_000;
const FAKE_NODES: usize = 10;
/// The API server applies a new policy within a second or two. A pod that started before would be stuck in
/// KWOK: its end is refused, and KWOK does not retry.
const POLICY_WORKS_AFTER: Duration = Duration::from_secs(5);
const CREATED: &str = "openfilter_pods_created_total";
const DELETED: &str = "openfilter_pods_deleted_total";

/// Namespaces of one operator, whose pods are played.
struct Teams {
    lab: Lab,
    names: Vec<String>,
    _others: Vec<Namespace>,
    bucket: Fake,
    _playing: Vec<Playing>,
}

impl Teams {
    async fn new(name: &str, count: usize, files: usize, mode: Mode, work: Duration) -> Self {
        let mut lab = Lab::alone(name).await;
        let bucket = serve(vec![Folder::new("f/", files)], 1_000).await;
        let mut others = Vec::new();
        for _ in 1..count {
            others.push(lab.testbed.namespace(name).await.unwrap());
        }
        let others_named = others.iter().map(|other| other.name.clone());
        let names: Vec<String> = [lab.namespace.name.clone()].into_iter().chain(others_named).collect();
        lab.set("NAMESPACES", &names.join(","));
        lab.set("LOG", "info");
        lab.set("ALLOWED_ENDPOINT_NETWORKS", "127.0.0.0/8");
        lab.restart_with("LISTEN", "127.0.0.1:18080").await;
        let mut teams = Self { lab, names, _others: others, bucket, _playing: Vec::new() };
        for name in &teams.names {
            teams.equip(name, mode).await;
        }
        let play = |name: &String| Player::start(teams.api(name), teams.lab.server(), work, 0);
        teams._playing = teams.names.iter().map(play).collect();
        teams
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.lab.testbed.client(), namespace)
    }

    /// Keys and a Pipeline.
    async fn equip(&self, namespace: &str, mode: Mode) {
        let data = json!({"accessKeyId": "id", "secretAccessKey": "secret"});
        let keys: Secret =
            serde_json::from_value(json!({"metadata": {"name": "bench"}, "stringData": data})).unwrap();
        self.api(namespace).create(&PostParams::default(), &keys).await.unwrap();
        let mut bucket = self.lab.bucket();
        bucket["endpoint"] = json!(format!("http://{}", self.bucket.address));
        bucket["credentialsSecret"] = json!({"name": "bench"});
        bucket["prefix"] = json!("f/");
        let mut main = filter("main", &["copy"]);
        main["command"] = json!(["/probe"]);
        let spec = json!({"mode": format!("{mode:?}"), "pod": {"nodeSelector": {"played-by": "bench"}},
            "source": {"bucket": bucket}, "filters": [main]});
        let pipeline = Pipeline::new("p", serde_json::from_value(spec).unwrap());
        self.api(namespace).create(&PostParams::default(), &pipeline).await.unwrap();
    }

    /// Creates runs in each namespace, as fast as the API server accepts them.
    async fn create(&self, runs: &[usize], execution: &Value) {
        let of_team = |(name, count): (&String, &usize)| {
            (0..*count).map(|number| (name.clone(), number)).collect::<Vec<_>>()
        };
        let all: Vec<_> = self.names.iter().zip(runs).flat_map(of_team).collect();
        let create = |(namespace, number): (String, usize)| async move {
            let spec = json!({"pipelineRef": {"name": "p"}, "execution": execution});
            let run = PipelineRun::new(&format!("r{number}"), serde_json::from_value(spec).unwrap());
            self.api(&namespace).create(&PostParams::default(), &run).await.unwrap();
        };
        futures::stream::iter(all).map(create).buffer_unordered(16).collect::<Vec<()>>().await;
    }

    async fn runs(&self, namespace: &str) -> Vec<PipelineRun> {
        self.api::<PipelineRun>(namespace).list(&ListParams::default()).await.unwrap().items
    }

    /// Runs of all namespaces in a phase.
    async fn in_phase(&self, wanted: Phase) -> usize {
        let mut found = 0;
        for name in &self.names {
            found += self.runs(name).await.iter().filter(|run| phase(run) == Some(wanted)).count();
        }
        found
    }

    /// Deletes all runs, and waits until they are gone while there is still an operator for their finalizers.
    async fn clear(&self) {
        for name in &self.names {
            let (delete, all) = (DeleteParams::default(), ListParams::default());
            self.api::<PipelineRun>(name).delete_collection(&delete, &all).await.unwrap();
        }
        let gone = async || {
            for name in &self.names {
                if !self.runs(name).await.is_empty() {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        };
        self.lab.eventually("all runs are gone", gone).await;
    }
}

/// None of them times out, and no namespace waits for the one with the most runs.
pub async fn many_runs_at_once() {
    let teams = Teams::new("many", RUNS.len(), FILES, Mode::PodPerFile, Duration::ZERO).await;
    let start = Instant::now();
    teams.create(&RUNS, &json!({"parallelism": 2})).await;
    println!("{} runs of {FILES} files created in {:.0?}:", RUNS.iter().sum::<usize>(), start.elapsed());
    let mut ended: Vec<Vec<Duration>> = vec![Vec::new(); RUNS.len()];
    while ended.iter().map(Vec::len).sum::<usize>() < RUNS.iter().sum() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let so_far: Vec<usize> = ended.iter().map(Vec::len).collect();
        assert!(start.elapsed() < crate::harness::LONG, "{so_far:?} have ended");
        for (name, ended) in teams.names.iter().zip(&mut ended) {
            let runs = teams.runs(name).await;
            let failed = runs.iter().find(|run| phase(run) == Some(Phase::Failed));
            assert!(failed.is_none(), "{failed:?}");
            let done = runs.iter().filter(|run| phase(run) == Some(Phase::Succeeded)).count();
            ended.resize(done, start.elapsed());
        }
    }
    println!("| namespace with | half of its runs ended after | all after |\n|---|---|---|");
    for (runs, ended) in RUNS.iter().zip(&ended) {
        println!("| {runs} runs | {:.0?} | {:.0?} |", ended[runs / 2], ended[runs - 1]);
    }
    let files = (RUNS.iter().sum::<usize>() * FILES) as f64;
    println!("{:.0} files a second", files / start.elapsed().as_secs_f64());
    assert_eq!(errors().await, 0.0, "calls of Valkey failed");
    let [large, small @ ..] = &ended[..] else { panic!("some namespaces") };
    let last = |ended: &Vec<Duration>| *ended.last().unwrap();
    for small in small {
        assert!(last(small) < last(large), "a namespace with few runs waits for the one with most");
    }
    for name in &teams.names {
        let all = FILES as i64;
        assert!(teams.runs(name).await.iter().all(|run| counts(run) == (all, all, 0)));
    }
    teams.clear().await;
}

/// Statuses and Jobs that the operator writes while many runs are active. It uses Warm pods: with a pod per
/// file, the API server would limit the settled files, and so the writes, to fewer than the budget.
pub async fn writes_of_many_active_runs() {
    // Enough files that all runs are active for longer than the measurement.
    let teams = Teams::new("active", 4, 1_000, Mode::Warm, WORK).await;
    teams.create(&[ACTIVE / 4; 4], &json!({"parallelism": 1})).await;
    let active = async || Ok((teams.in_phase(Phase::Running).await >= ACTIVE).then_some(()));
    teams.lab.eventually("all runs are active", active).await;
    // Every run has had its first files.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let (writes_before, settled_before, start) = (writes(&teams.lab), settled().await, Instant::now());
    tokio::time::sleep(COUNTED).await;
    let (writes, settled) = (writes(&teams.lab) - writes_before, settled().await - settled_before);
    let seconds = start.elapsed().as_secs_f64();
    let (rate, demand) = (writes / seconds, settled / seconds);
    println!(
        "{ACTIVE} active runs write {rate:.0} statuses and Jobs a second (aim: < {WRITES_MAX}), and settle {demand:.0} files"
    );
    assert_eq!(teams.in_phase(Phase::Running).await, ACTIVE, "all of them are still active");
    teams.clear().await;
    assert!(rate < WRITES_MAX);
    // Each of them changes the counts of a run: otherwise there would be few writes even without a budget.
    assert!(demand > WRITES_MAX, "{demand:.0} files a second need no budget");
}

/// How fast the pods of one run come and go, on nodes of KWOK: first all at once, then one after the other.
pub async fn pods_come_and_go() {
    let mut lab = Lab::alone("pods").await;
    let of_kwok = ListParams::default().labels(&format!("{KWOK_MARK}=fake"));
    let nodes = Api::<Node>::all(lab.testbed.client()).list(&of_kwok).await.unwrap().items.len();
    assert!(nodes >= FAKE_NODES, "{nodes} fake nodes: start the cluster with --nodes 2 --kwok {FAKE_NODES}");
    let bucket = serve(vec![Folder::new("f/", 3 * PODS)], 1_000).await;
    lab.set("LOG", "info");
    lab.set("ALLOWED_ENDPOINT_NETWORKS", "127.0.0.0/8");
    lab.restart_with("LISTEN", "127.0.0.1:18080").await;
    let source = json!({"bucket": {"endpoint": format!("http://{}", bucket.address), "prefix": "f/"}});
    let fake = json!({"nodeSelector": {KWOK_MARK: "fake"}, "tolerations": [{"key": KWOK_MARK, "operator": "Exists"}]});
    lab.pipeline(json!({"pod": fake, "source": source, "filters": [filter("main", &["copy"])]})).await;

    let kept_pending = KeptPending::pods_of(&lab);
    tokio::time::sleep(POLICY_WORKS_AFTER).await;
    let began = Instant::now();
    lab.run("r", json!({"execution": {"parallelism": PODS}})).await;
    let created = rate_of(&lab, CREATED, 0.0).await;
    let exist = async || Ok((metric(CREATED).await - metric(DELETED).await >= PODS as f64).then_some(()));
    lab.eventually("all pods exist", exist).await;
    until_none(&lab, "no pod waits for a node", ListParams::default().fields("spec.nodeName=")).await;
    let placed = PODS as f64 / began.elapsed().as_secs_f64();

    let suspended = Instant::now();
    lab.patch("r", json!({"spec": {"suspend": true}})).await;
    until_none(&lab, "no pod is left", ListParams::default()).await;
    let deleted = PODS as f64 / suspended.elapsed().as_secs_f64();
    // Not earlier: a pod that has begun a file is not deleted.
    drop(kept_pending);

    // From now on KWOK completes each pod as soon as it has a node.
    let before = metric(DELETED).await;
    lab.patch("r", json!({"spec": {"suspend": false}})).await;
    let replaced = rate_of(&lab, DELETED, before).await;
    println!("| {PODS} pods of one run, on {nodes} nodes of KWOK | pods/s |\n|---|---|");
    println!("| created, until all exist | {created:.0} |");
    println!("| placed on nodes, by the scheduler, from the creation of the run | {placed:.0} |");
    println!("| deleted, from `suspend` until none is left | {deleted:.0} |");
    println!(
        "| replaced, each ends at once: created, placed, ended, settled and deleted | {replaced:.0} |\n"
    );
    lab.delete("r").await;
}

/// Pods per second, from the first to the last of [`PODS`] that a counter gains.
async fn rate_of(lab: &Lab, counter: &str, before: f64) -> f64 {
    let reaches = async |count: f64| {
        let reached = async || Ok(Some(metric(counter).await).filter(|found| *found >= count));
        let found = lab.eventually(&format!("{counter} is {count}"), reached).await;
        (found, Instant::now())
    };
    let (first, start) = reaches(before + 1.0).await;
    let (last, end) = reaches(before + PODS as f64).await;
    (last - first) / end.duration_since(start).as_secs_f64()
}

/// Waits until no such pods are left.
async fn until_none(lab: &Lab, what: &str, which: ListParams) {
    let (pods, which) = (lab.api::<Pod>(), which.limit(1));
    let none = async || {
        let found = pods.list_metadata(&which).await.doing(|| "list the pods".to_owned())?;
        Ok(found.items.is_empty().then_some(()))
    };
    lab.eventually(what, none).await;
}

/// Keeps the pods of a namespace pending until it is dropped. KWOK would complete a Job's pods at once, so
/// that a thousand would never exist together. It does not retry what the API server refuses.
struct KeptPending {
    testbed: Testbed,
    name: String,
}

impl KeptPending {
    fn pods_of(lab: &Lab) -> Self {
        let (testbed, namespace) = (lab.testbed.clone(), &lab.namespace.name);
        let (api, name) = ("admissionregistration.k8s.io/v1", format!("kept-pending-{namespace}"));
        let statuses = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
            "resources": ["pods/status"]});
        let policy = json!({"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
            "spec": {"matchConstraints": {"resourceRules": [statuses]},
                "validations": [{"expression": "object.status.phase == 'Pending'"}]}});
        let selector = json!({"matchLabels": {"kubernetes.io/metadata.name": namespace}});
        let binding = json!({"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": selector}}});
        for object in [policy, binding] {
            testbed.apply(&object.to_string()).unwrap();
        }
        Self { testbed, name }
    }
}

impl Drop for KeptPending {
    fn drop(&mut self) {
        for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
            let words = ["delete", kind, &self.name, "--ignore-not-found", "--wait=false"];
            // A policy that stays affects only a namespace that is about to be deleted.
            let _ = self.testbed.kubectl(&words, "");
        }
    }
}

/// Writes of runs and Jobs that the API server accepted, except the creation of runs.
fn writes(lab: &Lab) -> f64 {
    let is_counted = |write: &Writes| match write.resource.as_str() {
        "pipelineruns" => write.verb != "POST",
        resource => resource == "jobs",
    };
    api_writes(lab).iter().filter(|write| is_counted(write)).map(|write| write.count).sum()
}

/// Valkey's failed calls, which would include timeouts.
async fn errors() -> f64 {
    metrics("openfilter_valkey_errors_total").await.iter().sum()
}

/// Attempts at files that the operator has settled.
async fn settled() -> f64 {
    metrics("openfilter_files_settled_total").await.iter().sum()
}
