//! The replicas of the webhook: one after the other goes, and nobody notices. One that is killed takes with it what it was
//! answering, and nothing more.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crds::v1alpha1::PipelineRun;
use kube::Api;
use kube::api::PostParams;
use tokio::task::JoinHandle;

use crate::harness::{Cluster, SYSTEM, run};

/// Requests at once.
const CLIENTS: usize = 4;
/// Each waits so long between two of them: the rest of the cluster needs processors too, to hear that a replica goes.
const PAUSE: Duration = Duration::from_millis(10);
/// Requests that must have been answered before, and after, a replica goes.
const ENOUGH: usize = 100;

/// As in a drain of its node: the API server has one connection to one of the replicas, so each of them goes once.
pub async fn each_goes_under_load_and_no_request_fails(cluster: &Cluster, namespace: &str) {
    let (load, clients) = Load::start(cluster, namespace);
    for pod in replicas(cluster) {
        load.more(cluster).await;
        cluster.kubectl(&["-n", SYSTEM, "delete", &pod, "--wait=true"]);
        wait_for_both(cluster);
        load.assert_none_failed();
    }
    load.more(cluster).await;
    load.assert_none_failed();
    load.end(clients).await;
}

/// Without a word to anybody. The API server asks no other replica about a request whose connection breaks, so those fail, and
/// so do those that come until the cluster has noticed; then it goes on by itself.
pub async fn each_is_killed_under_load_and_the_other_goes_on(cluster: &Cluster, namespace: &str) {
    let (load, clients) = Load::start(cluster, namespace);
    for pod in replicas(cluster) {
        load.more(cluster).await;
        let id = "jsonpath={.status.containerStatuses[0].containerID}";
        let container = cluster.kubectl(&["-n", SYSTEM, "get", &pod, "-o", id]);
        cluster.testbed.kill_container(&container).unwrap();
        // Nobody does anything about it.
        load.more(cluster).await;
        wait_for_both(cluster);
    }
    load.end(clients).await;
    let failures = load.failures.lock().unwrap();
    let other = failures.iter().find(|failure| !failure.contains("failed calling webhook"));
    assert_eq!(other, None, "a request fails because nobody answered it, and for no other reason");
    println!("{} requests failed, {} did not", failures.len(), load.answered.load(Ordering::Relaxed));
}

fn replicas(cluster: &Cluster) -> Vec<String> {
    let pods = cluster.kubectl(&[&PODS[..], &["-o", "name"]].concat());
    assert_eq!(pods.lines().count(), 2, "{pods}");
    pods.lines().map(str::to_owned).collect()
}

fn wait_for_both(cluster: &Cluster) {
    let rollout = ["rollout", "status", "deployment/openfilter-webhook", "--timeout=120s"];
    cluster.kubectl(&[&["-n", SYSTEM], &rollout[..]].concat());
}

const PODS: [&str; 6] = ["-n", SYSTEM, "get", "pods", "-l", "app.kubernetes.io/name=openfilter-webhook"];

#[derive(Default)]
struct Load {
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
    enough: AtomicBool,
}

impl Load {
    fn start(cluster: &Cluster, namespace: &str) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let load = Arc::new(Self::default());
        let clients = (0..CLIENTS).map(|client| {
            let api = Api::namespaced(cluster.testbed.client(), namespace);
            let tried = serde_json::from_value(run(namespace, &format!("load-{client}"))).unwrap();
            tokio::spawn(Arc::clone(&load).ask(api, tried))
        });
        let clients = clients.collect();
        (load, clients)
    }

    /// Creates runs that nobody stores, until it is enough.
    async fn ask(self: Arc<Self>, api: Api<PipelineRun>, tried: PipelineRun) {
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        while !self.enough.load(Ordering::Relaxed) {
            match api.create(&dry_run, &tried).await {
                Ok(_) => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
                Err(error) => self.failures.lock().unwrap().push(error.to_string()),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until more requests were answered.
    async fn more(&self, cluster: &Cluster) {
        let before = self.answered.load(Ordering::Relaxed);
        let answered = || self.answered.load(Ordering::Relaxed) >= before + ENOUGH;
        cluster.eventually("requests are answered", answered).await;
    }

    fn assert_none_failed(&self) {
        let (failures, answered) = (self.failures.lock().unwrap(), self.answered.load(Ordering::Relaxed));
        assert!(failures.is_empty(), "{} failed and {answered} did not: {:#?}", failures.len(), failures[0]);
    }

    async fn end(&self, clients: Vec<JoinHandle<()>>) {
        self.enough.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.unwrap();
        }
    }
}
