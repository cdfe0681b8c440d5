//! Plays for pods that no kubelet runs, so that the machine's processors are left to what is measured.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use protocol::RunId;
use queue::{Server, Worker};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// More than there are ever pods.
const AT_ONCE: usize = 2_000;
/// The label of every pod that names its run.
const RUN_LABEL: &str = "filter.plainsight.ai/run";

/// Plays claimer, filter and kubelet for every pod.
pub struct Player {
    pods: Api<Pod>,
    server: Server,
    work: Duration,
    exit_code: i32,
    seen: Mutex<PodsSeen>,
}

/// The player of a namespace stops when this is dropped.
pub struct Playing {
    pub player: Arc<Player>,
    task: JoinHandle<()>,
}

impl Drop for Playing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Default)]
struct PodsSeen {
    played: HashSet<String>,
    /// How often each file was claimed.
    claimed: BTreeMap<String, usize>,
    /// When the API server had taken its end.
    ended: HashMap<String, Timestamp>,
}

impl Player {
    /// Plays for all pods of a namespace. The work takes about this long for each file, and its filter ends with this code.
    pub fn start(pods: Api<Pod>, server: Server, work: Duration, exit_code: i32) -> Playing {
        let player = Arc::new(Self { pods, server, work, exit_code, seen: Mutex::default() });
        Playing { task: tokio::spawn(Arc::clone(&player).play()), player }
    }

    async fn play(self: Arc<Self>) {
        let events =
            watcher(self.pods.clone(), watcher::Config::default()).default_backoff().applied_objects();
        let each = |pod: Pod| {
            let player = Arc::clone(&self);
            async move {
                player.end(&pod).await;
                Ok(())
            }
        };
        events.try_for_each_concurrent(AT_ONCE, each).await.unwrap();
    }

    async fn end(&self, pod: &Pod) {
        let name = &pod.name_any();
        let Some(run) = pod.labels().get(RUN_LABEL).and_then(|run| run.parse::<RunId>().ok()) else { return };
        let number = {
            let mut seen = self.seen.lock().unwrap();
            if !seen.played.insert(name.clone()) {
                return;
            }
            seen.played.len()
        };
        let running = json!({"status": {"phase": "Pending", "initContainerStatuses": [{"name": "claimer",
            "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"running": {}}}]}});
        let started = self.pods.patch_status(name, &PatchParams::default(), &Patch::Merge(running)).await;
        if started.is_err() {
            return;
        }
        let mut worker = Worker::new(self.server.clone(), &run.key("work"), name);
        let claim = loop {
            match worker.claim(Duration::from_secs(30)).await {
                Ok(Some(claim)) => break claim,
                // The operator hands out files as long as there are any.
                Ok(None) => {}
                Err(_) => return,
            }
        };
        *self.seen.lock().unwrap().claimed.entry(claim.file.key).or_default() += 1;
        // Half as long to one and a half times as long: pods do not end all at once.
        tokio::time::sleep(self.work / 2 + self.work / 100 * (number * 37 % 100) as u32).await;
        let ended = |name: &str, exit_code: i32| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": exit_code}}})
        };
        let phase = if self.exit_code == 0 { "Succeeded" } else { "Failed" };
        let status: Value = json!({"status": {"phase": phase, "initContainerStatuses": [ended("claimer", 0)],
            "containerStatuses": [ended("main", self.exit_code)]}});
        let _ = self.pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await;
        self.seen.lock().unwrap().ended.insert(name.clone(), Timestamp::now());
    }

    /// How often each file was claimed.
    pub fn claimed(&self) -> BTreeMap<String, usize> {
        self.seen.lock().unwrap().claimed.clone()
    }

    /// How long after its end each pod was settled, by the operator's log, in order. The operator may have heard of an end before
    /// this process had the answer.
    #[allow(dead_code, reason = "only the bench asks")]
    pub fn latencies(&self, log: &str) -> Vec<Duration> {
        let ended = &self.seen.lock().unwrap().ended;
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let settled = lines.filter(|line| line["message"] == "settled").filter_map(|line| {
            let at: Timestamp = line["timestamp"].as_str()?.parse().ok()?;
            let ended = ended.get(line["pod"].as_str()?)?;
            Some(Duration::try_from(at.duration_since(*ended)).unwrap_or_default())
        });
        let mut latencies: Vec<Duration> = settled.collect();
        latencies.sort();
        latencies
    }
}
