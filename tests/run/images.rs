//! Images that take long to pull: a stalled registry keeps pods waiting, but costs no file an attempt and
//! replaces no pod.

use std::time::Duration;

use serde_json::json;
use testbed::network::REGISTRY;
use testbed::{Fault, FaultyS3, Rule};
use tests::fake::Fake;
use tests::registry;

use crate::harness::{Lab, counts, filter, running};

const START_TIMEOUT: Duration = Duration::from_secs(3);

/// A registry with the images of the nodes, behind a proxy that can stall it.
struct Registry {
    proxy: FaultyS3,
    _server: Fake,
}

impl Registry {
    async fn start(lab: &Lab, names: &[&'static str]) -> Self {
        let server = registry::serve(&lab.testbed.paths().images(), names).await;
        let proxy = FaultyS3::listen(REGISTRY, &format!("http://{}", server.address)).await.unwrap();
        Self { proxy, _server: server }
    }

    /// Makes it stop answering.
    fn stall(&self) {
        self.proxy.inject(Rule::every(Fault::Stuck, "/v2/"));
    }

    /// Waits until a node has requested an image.
    async fn is_asked(&self, lab: &Lab, image: &str) {
        let asked = async || Ok(self.proxy.seen().iter().any(|path| path.contains(image)).then_some(()));
        lab.eventually(&format!("a node pulls {image}"), asked).await;
    }
}

/// The name of an image in the registry.
fn image_of(name: &str) -> String {
    format!("{REGISTRY}/{name}:slow")
}

/// A run waits for several times the timeout, and succeeds once the registry answers. A pod whose claimer
/// does not start does not keep a file from other pods meanwhile.
async fn waits_and_succeeds(lab: &Lab, registry: &Registry, run: &str, image: &str, held: i64) {
    lab.run(run, json!({"execution": {"maxAttempts": 1}})).await;
    registry.is_asked(lab, image).await;
    tokio::time::sleep(START_TIMEOUT * 5).await;
    assert_eq!(lab.witness.pods_ever(run), 1, "{run}: the pod is not replaced");
    assert_eq!(lab.pods().await.len(), 1, "{run}: the pod is still there");
    lab.until(run, &format!("the pod holds {held} files"), |run| running(run) == held).await;
    for charge in ["retried", "disrupted", "reclaimed"] {
        assert_eq!(lab.tally(run, charge).await, 0, "{run}: {charge}");
    }
    registry.proxy.heal();
    assert_eq!(counts(&lab.finished(run).await), (1, 1, 0));
    assert_eq!(lab.witness.pods_ever(run), 1, "{run}: one pod was enough");
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn an_image_whose_pull_takes_longer_than_the_start_timeout_replaces_and_charges_nothing() {
    let mut lab = Lab::new("pulling").await;
    lab.restart_with("START_TIMEOUT", &format!("{}s", START_TIMEOUT.as_secs())).await;
    lab.put("a", "copy").await;
    let registry = Registry::start(&lab, &["probe", "claimer"]).await;
    let mut slow = filter("main", &["obey"]);
    slow["image"] = json!(image_of("probe"));
    slow["imagePullPolicy"] = json!("Always");
    lab.pipeline(json!({"filters": [slow]})).await;
    registry.stall();
    waits_and_succeeds(&lab, &registry, "filter", "probe", 1).await;
    // It ended before it had a file: nothing was claimed.
    lab.set("CLAIMER_IMAGE_PULL_POLICY", "Always");
    lab.restart_with("CLAIMER_IMAGE", &image_of("claimer")).await;
    registry.stall();
    waits_and_succeeds(&lab, &registry, "claimer", "claimer", 0).await;
}
