//! The replicas of the webhook: deleting one after the other fails no request. A killed replica loses only
//! the requests that it was answering.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crds::v1alpha1::PipelineRun;
use kube::Api;
use kube::api::PostParams;
use tokio::task::JoinHandle;

use crate::harness::{Cluster, SYSTEM, run};

/// Concurrent requests.
const CLIENTS: usize = 4;
/// How long each client waits between two requests, because the rest of the cluster also needs processor time
/// to notice that a replica ends.
const PAUSE: Duration = Duration::from_millis(10);
/// Requests that must be answered before and after a replica ends.
const ENOUGH: usize = 100;
/// How long requests may fail after a replica was killed. The kubelet checks its containers every second, and
/// then its report must reach kube-proxy through the API server and the endpoints controller. On a busy
/// machine each of them takes its time.
const NOTICED_WITHIN: Duration = Duration::from_secs(30);

/// Deletes each replica, as in a drain of its node: the API server has one connection to one of them, so each
/// must end once.
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

/// Kills each replica without notice. If a connection breaks, the API server does not ask another replica, so
/// those requests fail, and so do all that arrive until the cluster notices. Then it recovers without help.
pub async fn each_is_killed_under_load_and_the_other_goes_on(cluster: &Cluster, namespace: &str) {
    let (load, clients) = Load::start(cluster, namespace);
    let mut outages = Vec::new();
    for pod in replicas(cluster) {
        load.more(cluster).await;
        let container = container_of(cluster, &pod);
        load.assert_none_failed();
        let killed = Instant::now();
        cluster.testbed.kill_container(&container).unwrap();
        // The cluster recovers without help.
        load.more(cluster).await;
        // Until the cluster notices, the Deployment still counts the killed replica.
        let is_another = || container_of(cluster, &pod) != container;
        cluster.eventually("another container is started", is_another).await;
        wait_for_both(cluster);
        load.more(cluster).await;
        let failed = load.take_failures();
        let other = failed.iter().find(|failure| !failure.says.contains("failed calling webhook"));
        assert!(
            other.is_none(),
            "a request fails because nobody answered it, and for no other reason: {other:?}"
        );
        let outage = failed.iter().map(|failure| failure.at.duration_since(killed)).max();
        outages.push(outage.unwrap_or_default());
        println!("{} requests failed within {:.1?} of a kill", failed.len(), outages.last().unwrap());
    }
    load.end(clients).await;
    load.assert_none_failed();
    assert!(outages.iter().all(|outage| *outage <= NOTICED_WITHIN), "requests failed for {outages:.1?}");
}

fn replicas(cluster: &Cluster) -> Vec<String> {
    let pods = cluster.kubectl(&[&PODS[..], &["-o", "name"]].concat());
    assert_eq!(pods.lines().count(), 2, "{pods}");
    pods.lines().map(str::to_owned).collect()
}

/// The ID of a replica's container.
fn container_of(cluster: &Cluster, pod: &str) -> String {
    let id = "jsonpath={.status.containerStatuses[0].containerID}";
    cluster.kubectl(&["-n", SYSTEM, "get", pod, "-o", id])
}

fn wait_for_both(cluster: &Cluster) {
    let rollout = ["rollout", "status", "deployment/openfilter-webhook", "--timeout=120s"];
    cluster.kubectl(&[&["-n", SYSTEM], &rollout[..]].concat());
}

const PODS: [&str; 6] = ["-n", SYSTEM, "get", "pods", "-l", "app.kubernetes.io/name=openfilter-webhook"];

#[derive(Default)]
struct Load {
    answered: AtomicUsize,
    failures: Mutex<Vec<Failure>>,
    enough: AtomicBool,
}

#[derive(Debug)]
struct Failure {
    at: Instant,
    says: String,
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

    /// Creates runs in dry runs, which store nothing, until `enough` is set.
    async fn ask(self: Arc<Self>, api: Api<PipelineRun>, tried: PipelineRun) {
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        while !self.enough.load(Ordering::Relaxed) {
            match api.create(&dry_run, &tried).await {
                Ok(_) => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
                Err(error) => {
                    let failure = Failure { at: Instant::now(), says: error.to_string() };
                    self.failures.lock().unwrap().push(failure);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until [`ENOUGH`] more requests are answered.
    async fn more(&self, cluster: &Cluster) {
        let before = self.answered.load(Ordering::Relaxed);
        let answered = || self.answered.load(Ordering::Relaxed) >= before + ENOUGH;
        cluster.eventually("requests are answered", answered).await;
    }

    /// Takes the failures since the last call, oldest first.
    fn take_failures(&self) -> Vec<Failure> {
        std::mem::take(&mut self.failures.lock().unwrap())
    }

    fn assert_none_failed(&self) {
        let (failures, answered) = (self.failures.lock().unwrap(), self.answered.load(Ordering::Relaxed));
        assert!(
            failures.is_empty(),
            "{} failed and {answered} did not: {:#?}",
            failures.len(),
            failures[0].says
        );
    }

    async fn end(&self, clients: Vec<JoinHandle<()>>) {
        self.enough.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.unwrap();
        }
    }
}
