//! The replicas of the webhook: one after the other goes, and nobody notices.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crds::v1alpha1::PipelineRun;
use kube::Api;
use kube::api::PostParams;

use crate::harness::{Cluster, SYSTEM, run};

/// Requests at once.
const CLIENTS: usize = 4;
/// Each waits so long between two of them: the rest of the cluster needs processors too, to hear that a replica goes.
const PAUSE: Duration = Duration::from_millis(10);
/// Requests that must have been answered before, and after, a replica goes.
const ENOUGH: usize = 100;

/// As in a drain of its node: the API server has one connection to one of the replicas, so each of them goes once.
pub async fn each_goes_under_load_and_no_request_fails(cluster: &Cluster, namespace: &str) {
    let load = Arc::new(Load::default());
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let api = Api::namespaced(cluster.testbed.client(), namespace);
            let tried = serde_json::from_value(run(namespace, &format!("load-{client}"))).unwrap();
            tokio::spawn(Arc::clone(&load).ask(api, tried))
        })
        .collect();
    let pods = cluster.kubectl(&[&PODS[..], &["-o", "name"]].concat());
    assert_eq!(pods.lines().count(), 2, "{pods}");
    for pod in pods.lines() {
        load.more(cluster).await;
        cluster.kubectl(&["-n", SYSTEM, "delete", pod, "--wait=true"]);
        let rollout = ["rollout", "status", "deployment/openfilter-webhook", "--timeout=120s"];
        cluster.kubectl(&[&["-n", SYSTEM], &rollout[..]].concat());
    }
    load.more(cluster).await;
    load.enough.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let (failures, answered) = (load.failures.lock().unwrap(), load.answered.load(Ordering::Relaxed));
    assert!(failures.is_empty(), "{} failed and {answered} did not: {:#?}", failures.len(), failures[0]);
}

const PODS: [&str; 6] = ["-n", SYSTEM, "get", "pods", "-l", "app.kubernetes.io/name=openfilter-webhook"];

#[derive(Default)]
struct Load {
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
    enough: AtomicBool,
}

impl Load {
    /// Creates runs that nobody stores, until it is enough or one fails.
    async fn ask(self: Arc<Self>, api: Api<PipelineRun>, tried: PipelineRun) {
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        while !self.enough.load(Ordering::Relaxed) {
            match api.create(&dry_run, &tried).await {
                Ok(_) => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
                Err(error) => return self.failures.lock().unwrap().push(error.to_string()),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until more requests were answered.
    async fn more(&self, cluster: &Cluster) {
        let before = self.answered.load(Ordering::Relaxed);
        let answered = || {
            let failed = !self.failures.lock().unwrap().is_empty();
            failed || self.answered.load(Ordering::Relaxed) >= before + ENOUGH
        };
        cluster.eventually("requests are answered", answered).await;
    }
}
