//! Runs that use another namespace's Pipelines and keys: only with its grant, and only as long as the grant
//! exists.

use std::time::Duration;

use crds::v1alpha1::{Phase, Pipeline, ReferenceGrant};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use testbed::Namespace;

use crate::harness::{Lab, Mode, counts, filter, is_degraded_by, message, phase, running};

in_both_modes! {
    another_namespaces_pipeline_and_keys_need_grants
    keys_that_are_taken_away_before_a_result_is_published_blame_no_file
}

/// Another namespace, with keys and a Pipeline, and an operator for both namespaces.
struct Neighbour {
    namespace: Namespace,
}

impl Neighbour {
    /// Its Pipeline `lib` reads the bucket of the laboratory with its own keys, and writes to this sink with
    /// them.
    async fn new(lab: &mut Lab, sink: Option<Value>) -> Self {
        let neighbour = Self { namespace: lab.testbed.namespace("owner").await.unwrap() };
        lab.restart_with("NAMESPACES", &format!("{},{}", lab.namespace.name, neighbour.namespace.name)).await;
        let (id, secret) = lab.services.s3.keys();
        let keys = json!({"metadata": {"name": "theirs"}, "stringData": {"accessKeyId": id, "secretAccessKey": secret}});
        let keys: Secret = serde_json::from_value(keys).unwrap();
        neighbour.api(lab).create(&PostParams::default(), &keys).await.unwrap();
        let with_keys = |mut bucket: Value| {
            bucket["credentialsSecret"] = json!({"name": "theirs"});
            json!({"bucket": bucket})
        };
        let mut spec = json!({"source": with_keys(lab.bucket()), "filters": [filter("main", &["obey"])]});
        if let Some(sink) = sink {
            spec["sink"] = with_keys(sink);
        }
        lab.set_mode(&mut spec);
        let pipeline = Pipeline::new("lib", serde_json::from_value(spec).unwrap());
        neighbour.api(lab).create(&PostParams::default(), &pipeline).await.unwrap();
        neighbour
    }

    fn api<K>(&self, lab: &Lab) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    {
        Api::namespaced(lab.testbed.client(), &self.namespace.name)
    }

    /// Lets the laboratory's runs use its objects of a kind.
    async fn grant(&self, lab: &Lab, kind: &str) {
        let from = json!([{"kind": "PipelineRun", "namespace": lab.namespace.name}]);
        let spec = serde_json::from_value(json!({"from": from, "to": [{"kind": kind}]})).unwrap();
        let grant = ReferenceGrant::new(&kind.to_lowercase(), spec);
        self.api(lab).create(&PostParams::default(), &grant).await.unwrap();
    }

    async fn take_back(&self, lab: &Lab, kind: &str) {
        let grants = self.api::<ReferenceGrant>(lab);
        grants.delete(&kind.to_lowercase(), &DeleteParams::default()).await.unwrap();
    }

    /// A run of its Pipeline, one file at a time.
    async fn run(&self, lab: &Lab) {
        let pipeline = json!({"name": "lib", "namespace": self.namespace.name});
        let execution = json!({"parallelism": 1, "maxAttempts": 1});
        lab.run("r", json!({"pipelineRef": pipeline, "execution": execution})).await;
    }
}

/// The keys are copied, and the copy is deleted with the run.
async fn another_namespaces_pipeline_and_keys_need_grants(mode: Mode) {
    let mut lab = Lab::in_mode("tenant", mode).await;
    lab.put_many("", 3, |_| "sleep 4".to_owned()).await;
    let neighbour = Neighbour::new(&mut lab, None).await;
    neighbour.run(&lab).await;
    let refused = lab.until("r", "it is refused", |run| is_degraded_by(run, "ReferenceNotGranted")).await;
    assert!(message(&refused, "Degraded").contains("ReferenceGrant"), "{}", message(&refused, "Degraded"));
    neighbour.grant(&lab, "Pipeline").await;
    let refused =
        lab.until("r", "its keys are refused", |run| message(run, "Degraded").contains("Secret")).await;
    assert!(is_degraded_by(&refused, "ReferenceNotGranted"));
    neighbour.grant(&lab, "Secret").await;
    lab.until("r", "it is processed", |run| running(run) > 0).await;
    let copy = lab.api::<Secret>().get("r-source").await.unwrap();
    assert_eq!(copy.data.unwrap()["accessKeyId"].0, lab.services.s3.keys().0.as_bytes());

    // The grant is revoked: files in progress are finished, nothing else is started, and the copy is deleted.
    neighbour.take_back(&lab, "Secret").await;
    lab.until("r", "it is refused again", |run| is_degraded_by(run, "ReferenceNotGranted")).await;
    let stopped = lab.until("r", "nothing runs", |run| running(run) == 0).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let later = lab.get("r").await;
    assert_eq!((counts(&later), phase(&later)), (counts(&stopped), Some(Phase::Running)));
    assert!(is_degraded_by(&later, "ReferenceNotGranted") && counts(&later).1 < 3);
    assert!(lab.api::<Secret>().get_opt("r-source").await.unwrap().is_none(), "the keys are taken away");
    neighbour.grant(&lab, "Secret").await;
    assert_eq!(counts(&lab.finished("r").await), (3, 3, 0));
    assert!(lab.api::<Secret>().get_opt("r-source").await.unwrap().is_none(), "the copy goes with the run");
}

/// A container that cannot start because the keys were taken away says nothing about its file. A pod that
/// stays up got its keys when it started: it publishes the file that it has begun, and gets no other.
async fn keys_that_are_taken_away_before_a_result_is_published_blame_no_file(mode: Mode) {
    let mut lab = Lab::in_mode("withdrawn", mode).await;
    lab.set("START_TIMEOUT", "5s");
    lab.put("a", "sleep 10").await;
    let files = if mode == Mode::Warm { 2 } else { 1 };
    if mode == Mode::Warm {
        lab.put("b", "copy").await;
    }
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    let neighbour = Neighbour::new(&mut lab, Some(sink)).await;
    for kind in ["Pipeline", "Secret"] {
        neighbour.grant(&lab, kind).await;
    }
    neighbour.run(&lab).await;
    lab.until("r", "it is processed", |run| running(run) > 0).await;
    match mode {
        Mode::PodPerFile => {
            lab.pod_that("its filter runs", |pod| {
                let first = pod.status.as_ref()?.init_container_statuses.as_ref()?.first()?;
                first.state.as_ref()?.terminated.as_ref().map(|_| ())
            })
            .await;
        }
        Mode::Warm => drop(lab.filters_work("r", 1).await),
    }
    neighbour.take_back(&lab, "Secret").await;
    // Without the keys the publisher of a pod cannot be created, and the pod is given up.
    lab.until("r", "nothing runs", |run| running(run) == 0).await;
    let waiting = lab.get("r").await;
    let published = files - 1;
    assert_eq!(
        (counts(&waiting), phase(&waiting)),
        ((files, published, 0), Some(Phase::Running)),
        "it waits"
    );
    assert_eq!(lab.keys_below("results/").await.len() as i64, published);
    neighbour.grant(&lab, "Secret").await;
    assert_eq!(counts(&lab.finished("r").await), (files, files, 0));
    assert_eq!(lab.tally("r", "retried").await, 0, "no file is blamed");
    assert_eq!(lab.keys_below("results/").await.len() as i64, files);
}
