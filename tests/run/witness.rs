//! A witness that sees every status that a run ever has, and every pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use crds::v1alpha1::{Counts, Phase, PipelineRun};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use testbed::{Namespace, Testbed};
use tokio::task::JoinHandle;

pub struct Witness {
    seen: Arc<Mutex<Vec<PipelineRun>>>,
    pods_seen: Arc<Mutex<PodsSeen>>,
    watching: [JoinHandle<()>; 2],
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.watching.iter().for_each(JoinHandle::abort);
    }
}

impl Witness {
    /// Watches a namespace from now on.
    pub fn of(testbed: &Testbed, namespace: &Namespace) -> Self {
        let (seen, pods_seen) = (Arc::default(), Arc::default());
        let runs = Api::namespaced(testbed.client(), &namespace.name);
        let pods = Api::namespaced(testbed.client(), &namespace.name);
        let watching = [
            tokio::spawn(watch_runs(runs, Arc::clone(&seen))),
            tokio::spawn(count_pods(pods, Arc::clone(&pods_seen))),
        ];
        Self { seen, pods_seen, watching }
    }

    /// The most pods that ever existed at once, without those that had ended or were being deleted.
    pub fn most_pods(&self) -> usize {
        self.pods_seen.lock().unwrap().most_alive
    }

    /// The most pods that had ended and were not yet deleted.
    pub fn most_ended_pods(&self) -> usize {
        self.pods_seen.lock().unwrap().most_ended
    }

    /// How many pods a run has had.
    pub fn pods_ever(&self, run: &str) -> usize {
        let seen = self.pods_seen.lock().unwrap();
        seen.ever.iter().filter(|(of, _)| of == run).count()
    }

    /// Checks every status that was seen, at the end of every test: counts always add up, and an end is
    /// final.
    pub fn check_all_statuses(&self) {
        let seen = self.seen.lock().unwrap();
        let mut last: BTreeMap<String, PipelineRun> = BTreeMap::new();
        for run in seen.iter() {
            let Some(status) = &run.status else { continue };
            if let Some(Counts { total_files, queued, running, succeeded, failed, .. }) = status.counts {
                assert_eq!(total_files, queued + running + succeeded + failed, "{status:#?}");
                assert!([queued, running, succeeded, failed].iter().all(|count| *count >= 0), "{status:#?}");
            }
            let before = last.insert(run.uid().unwrap(), run.clone());
            if let Some(before) = before.and_then(|before| before.status)
                && matches!(before.phase, Some(Phase::Succeeded | Phase::Failed))
            {
                assert_eq!(before.counts, status.counts, "an end is an end");
                assert_eq!(before.phase, status.phase, "an end is an end");
            }
        }
        assert!(!last.is_empty(), "no status was seen");
    }

    /// Whether any status that was seen satisfies the condition.
    pub fn was_ever(&self, condition: impl Fn(&PipelineRun) -> bool) -> bool {
        self.seen.lock().unwrap().iter().any(condition)
    }

    /// Checks that `succeeded` never decreases, which it may do only after a loss of data.
    pub fn check_monotonic(&self) {
        let seen = self.seen.lock().unwrap();
        let mut last: BTreeMap<String, Counts> = BTreeMap::new();
        for run in seen.iter() {
            let Some(counts) = run.status.as_ref().and_then(|status| status.counts) else { continue };
            if let Some(before) = last.insert(run.uid().unwrap(), counts) {
                assert!(
                    counts.succeeded >= before.succeeded && counts.failed >= before.failed,
                    "{before:?} then {counts:?}"
                );
            }
        }
    }
}

async fn watch_runs(api: Api<PipelineRun>, seen: Arc<Mutex<Vec<PipelineRun>>>) {
    let events = watcher(api, watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    loop {
        match events.try_next().await {
            Ok(Some(watcher::Event::Apply(run) | watcher::Event::InitApply(run))) => {
                seen.lock().unwrap().push(run)
            }
            Ok(Some(_)) => {}
            Ok(None) => return,
            // The API server is paused or restarted: the watch continues by itself.
            Err(_) => {}
        }
    }
}

/// What was seen of the namespace's pods.
#[derive(Default)]
struct PodsSeen {
    /// By name, whether it has ended; without pods that are being deleted.
    present: BTreeMap<String, bool>,
    most_alive: usize,
    most_ended: usize,
    /// Run and name of every pod that ever existed.
    ever: BTreeSet<(String, String)>,
}

impl PodsSeen {
    fn apply(&mut self, pod: &Pod) {
        let run = pod.labels().get("filter.plainsight.ai/pipelinerun").cloned().unwrap_or_default();
        self.ever.insert((run, pod.name_any()));
        // A busy kubelet takes its time to release a deleted pod.
        if pod.metadata.deletion_timestamp.is_some() {
            self.present.remove(&pod.name_any());
        } else {
            self.present.insert(pod.name_any(), has_ended(pod));
        }
        let ended = self.present.values().filter(|ended| **ended).count();
        self.most_ended = ended.max(self.most_ended);
        self.most_alive = (self.present.len() - ended).max(self.most_alive);
    }
}

/// One failed container is the end of a pod, even while others still run.
fn has_ended(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let failed = |container: &ContainerStatus| {
        let ended = container.state.as_ref().and_then(|state| state.terminated.as_ref());
        ended.is_some_and(|ended| ended.exit_code != 0)
    };
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) || containers.into_iter().any(failed)
}

async fn count_pods(api: Api<Pod>, seen: Arc<Mutex<PodsSeen>>) {
    let events = watcher(api, watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    loop {
        let event = events.try_next().await;
        let mut seen = seen.lock().unwrap();
        match event {
            Ok(Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => seen.apply(&pod),
            Ok(Some(watcher::Event::Delete(pod))) => drop(seen.present.remove(&pod.name_any())),
            Ok(Some(watcher::Event::Init)) => seen.present.clear(),
            Ok(Some(watcher::Event::InitDone)) | Err(_) => {}
            Ok(None) => return,
        }
    }
}
