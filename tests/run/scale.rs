//! `make bench`, many runs and many pods: 300 runs that start together, what 500 active ones write, and how fast pods come and go.
//! Pods are played, or never start.

use std::time::{Duration, Instant};

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource};
use serde_json::{Value, json};
use testbed::Namespace;
use tests::fake::Fake;
use tests::listing::{Folder, serve};

use crate::figures::{Writes, api_writes, metric, metrics};
use crate::harness::{Lab, counts, filter, phase};
use crate::player::{Player, Playing};

/// Runs of each namespace: one that has far more than the others must not starve them.
const RUNS: [usize; 4] = [180, 40, 40, 40];
/// Files of each of these runs.
const FILES: usize = 20;
/// Active runs, and the most that they may write in a second together.
const ACTIVE: usize = 500;
const WRITES_MAX: f64 = 150.0;
/// How long writes are counted.
const COUNTED: Duration = Duration::from_secs(60);
/// Pods of one run.
const PODS: usize = 1_000;

/// Namespaces of one operator, whose pods are played.
struct Teams {
    lab: Lab,
    names: Vec<String>,
    _others: Vec<Namespace>,
    bucket: Fake,
    _playing: Vec<Playing>,
}

impl Teams {
    async fn new(name: &str, count: usize, files: usize, work: Duration) -> Self {
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
            teams.equip(name).await;
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
    async fn equip(&self, namespace: &str) {
        let data = json!({"accessKeyId": "id", "secretAccessKey": "secret"});
        let keys: Secret =
            serde_json::from_value(json!({"metadata": {"name": "bench"}, "stringData": data})).unwrap();
        self.api(namespace).create(&PostParams::default(), &keys).await.unwrap();
        let mut bucket = self.lab.bucket();
        bucket["endpoint"] = json!(format!("http://{}", self.bucket.address));
        bucket["credentialsSecret"] = json!({"name": "bench"});
        bucket["prefix"] = json!("f/");
        let spec = json!({"pod": {"nodeSelector": {"played-by": "bench"}}, "source": {"bucket": bucket},
            "filters": [filter("main", &["copy"])]});
        let pipeline = Pipeline::new("p", serde_json::from_value(spec).unwrap());
        self.api(namespace).create(&PostParams::default(), &pipeline).await.unwrap();
    }

    /// Creates runs in each namespace, as fast as they are taken.
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

    /// Deletes all runs and waits until they are gone, while there still is an operator for their finalizers.
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

/// None of them times out, and no namespace waits for the one that has most.
pub async fn many_runs_at_once() {
    let teams = Teams::new("many", RUNS.len(), FILES, Duration::ZERO).await;
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

/// Statuses and Jobs that the operator writes while many runs are active.
pub async fn writes_of_many_active_runs() {
    // So much work that all of them are active, and so many files that all are for longer than writes are counted.
    let teams = Teams::new("active", 4, 1_000, Duration::from_secs(15)).await;
    teams.create(&[ACTIVE / 4; 4], &json!({"parallelism": 1})).await;
    let active = async || Ok((teams.in_phase(Phase::Running).await >= ACTIVE).then_some(()));
    teams.lab.eventually("all runs are active", active).await;
    // Every run has had its first files.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let (before, start) = (writes(&teams.lab), Instant::now());
    tokio::time::sleep(COUNTED).await;
    let rate = (writes(&teams.lab) - before) / start.elapsed().as_secs_f64();
    println!("{ACTIVE} active runs write {rate:.0} statuses and Jobs a second (aim: < {WRITES_MAX})");
    assert_eq!(teams.in_phase(Phase::Running).await, ACTIVE, "all of them are still active");
    teams.clear().await;
    assert!(rate < WRITES_MAX);
}

/// How fast the pods of one run come and go.
pub async fn pods_come_and_go() {
    let mut lab = Lab::alone("pods").await;
    let bucket = serve(vec![Folder::new("f/", 2 * PODS)], 1_000).await;
    lab.set("LOG", "info");
    lab.set("ALLOWED_ENDPOINT_NETWORKS", "127.0.0.0/8");
    lab.restart_with("LISTEN", "127.0.0.1:18080").await;
    let source = json!({"bucket": {"endpoint": format!("http://{}", bucket.address), "prefix": "f/"}});
    let nowhere = json!({"nodeSelector": {"played-by": "bench"}});
    lab.pipeline(json!({"pod": nowhere, "source": source, "filters": [filter("main", &["copy"])]})).await;
    lab.run("r", json!({"execution": {"parallelism": PODS}})).await;
    let created = rate_of(&lab, "openfilter_pods_created_total").await;
    let suspend = Instant::now();
    lab.patch("r", json!({"spec": {"suspend": true}})).await;
    let deleted = rate_of(&lab, "openfilter_pods_deleted_total").await;
    println!(
        "| {PODS} pods of one run | pods/s |\n|---|---|\n| created | {created:.0} |\n| deleted | {deleted:.0} |"
    );
    println!("suspended within {:.0?}", suspend.elapsed());
    lab.delete("r").await;
}

/// Pods a second, from the first to the last of [`PODS`].
async fn rate_of(lab: &Lab, name: &str) -> f64 {
    let reaches = async |count: f64| {
        let reached = async || Ok(Some(metric(name).await).filter(|found| *found >= count));
        let found = lab.eventually(&format!("{name} is {count}"), reached).await;
        (found, Instant::now())
    };
    let (first, start) = reaches(1.0).await;
    let (last, end) = reaches(PODS as f64).await;
    (last - first) / end.duration_since(start).as_secs_f64()
}

/// Writes of runs and Jobs that the API server has taken, but for the creation of runs.
fn writes(lab: &Lab) -> f64 {
    let is_counted = |write: &Writes| match write.resource.as_str() {
        "pipelineruns" => write.verb != "POST",
        resource => resource == "jobs",
    };
    api_writes(lab).iter().filter(|write| is_counted(write)).map(|write| write.count).sum()
}

/// Calls of Valkey that failed: one that times out would be among them.
async fn errors() -> f64 {
    metrics("openfilter_valkey_errors_total").await.iter().sum()
}
