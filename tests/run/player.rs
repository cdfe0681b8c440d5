//! Plays for pods that nobody runs, so that the machine's processors are left to what is measured.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use queue::{Server, Worker};
use serde_json::{Value, json};

/// More than there are ever pods.
const AT_ONCE: usize = 200;

/// Plays claimer, filter and kubelet for every pod.
pub struct Player {
    pods: Api<Pod>,
    server: Server,
    stream: String,
    group: String,
    work: Duration,
    seen: Mutex<PodsSeen>,
}

#[derive(Default)]
struct PodsSeen {
    played: HashSet<String>,
    /// When the API server had taken its end.
    ended: HashMap<String, Timestamp>,
}

impl Player {
    /// Plays for all pods of a namespace, with the work of one run, which takes about this long for each file.
    pub fn new(pods: Api<Pod>, server: Server, stream: String, group: String, work: Duration) -> Self {
        Self { pods, server, stream, group, work, seen: Mutex::default() }
    }

    pub async fn play(self: Arc<Self>) {
        let events =
            watcher(self.pods.clone(), watcher::Config::default()).default_backoff().applied_objects();
        let each = |pod: Pod| {
            let player = Arc::clone(&self);
            async move {
                player.end(&pod.name_any()).await;
                Ok(())
            }
        };
        events.try_for_each_concurrent(AT_ONCE, each).await.unwrap();
    }

    async fn end(&self, name: &str) {
        let number = {
            let mut seen = self.seen.lock().unwrap();
            if !seen.played.insert(name.to_owned()) {
                return;
            }
            seen.played.len()
        };
        let mut worker = Worker::new(self.server.clone(), &self.stream, &self.group, name);
        if !matches!(worker.claim(Duration::from_secs(30)).await, Ok(Some(_))) {
            return;
        }
        // Half as long to one and a half times as long: pods do not end all at once.
        tokio::time::sleep(self.work / 2 + self.work / 100 * (number * 37 % 100) as u32).await;
        let ended = |name: &str| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": 0}}})
        };
        let status: Value = json!({"status": {"phase": "Succeeded", "initContainerStatuses": [ended("claimer")],
            "containerStatuses": [ended("main")]}});
        let _ = self.pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await;
        self.seen.lock().unwrap().ended.insert(name.to_owned(), Timestamp::now());
    }

    /// How long after its end each pod was settled, by the operator's log, in order. The operator may have heard of an end before
    /// this process had the answer.
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
