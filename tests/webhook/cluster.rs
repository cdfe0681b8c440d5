//! A real API server calls the real program. The webhook runs on the host, where the API server reaches it at 10.87.0.1,
//! and makes its certificate itself: these tests also show that the API server is told to trust it.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::gvk::GroupVersionKind;
use kube::{Api, Client};
use serde_json::{Value, json};
use testbed::{Doing, Namespace, Testbed};
use tests::examples::{pipeline, policy, run, with};
use tests::generated::root;

const HOST: &str = "10.87.0.1";
const WAIT: Duration = Duration::from_secs(60);

/// One replica; it ends when this is dropped.
struct Replica {
    process: Child,
    port: u16,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A cluster with the CRDs, a namespace, and replicas that its API server calls.
struct Cluster {
    testbed: Testbed,
    namespace: Namespace,
    configuration: String,
}

impl Cluster {
    async fn start(prefix: &str) -> Self {
        let testbed = Testbed::start_or_reuse().await.unwrap();
        tests::crds_on_cluster::install(&testbed).await;
        let namespace = testbed.labelled_namespace(prefix, &[("webhook", prefix)]).await.unwrap();
        let configuration = namespace.name.clone();
        Self { testbed, namespace, configuration }
    }

    fn client(&self) -> Client {
        self.testbed.client()
    }

    /// Starts a replica and waits until it is ready.
    async fn replica(&self) -> Replica {
        let free = || TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port();
        let (port, health) = (free(), free());
        let log = self.testbed.paths().logs().join(format!("webhook-{port}.log"));
        let process = Command::new(program())
            .env("KUBECONFIG", self.testbed.paths().kubeconfig())
            .args(["--listen", &format!("{HOST}:{port}"), "--health-listen", &format!("{HOST}:{health}")])
            .args(["--namespace", &self.namespace.name, "--configuration", &self.configuration])
            .args(["--name", HOST, "--shutdown-delay", "1s", "--log", "info,webhook=debug"])
            .stderr(fs::File::create(log).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let replica = Replica { process, port };
        let ready = async || {
            let answer = http_get(&format!("{HOST}:{health}"), "/readyz").await;
            Ok(answer.is_some_and(|text| text.contains("200 OK")).then_some(()))
        };
        self.testbed.eventually("the webhook is ready", WAIT, ready).await.unwrap();
        replica
    }

    /// Lets the API server call this replica, for objects of the test's namespace and for policies.
    async fn route_to(&self, replica: &Replica) {
        let webhook = |step: &str, kind: &str, resource: &str, operations: &[&str], cluster: bool| {
            let mut webhook = json!({
                "name": format!("{resource}.{step}.filter.plainsight.ai"),
                "clientConfig": { "url": format!("https://{HOST}:{}/{step}/{kind}", replica.port) },
                "rules": [{ "apiGroups": ["filter.plainsight.ai"], "apiVersions": ["v1alpha1"], "operations": operations, "resources": [resource] }],
                "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 10, "failurePolicy": "Fail"
            });
            if !cluster {
                webhook["namespaceSelector"] =
                    json!({ "matchLabels": { "kubernetes.io/metadata.name": self.namespace.name } });
            }
            webhook
        };
        let kinds = [
            ("pipeline", "pipelines", false),
            ("pipelinerun", "pipelineruns", false),
            ("pipelinepolicy", "pipelinepolicies", true),
            ("referencegrant", "referencegrants", false),
        ];
        let all = |step: &str, operations: &[&str]| -> Vec<Value> {
            kinds
                .iter()
                .map(|(kind, resource, cluster)| webhook(step, kind, resource, operations, *cluster))
                .collect()
        };
        for (kind, webhooks) in [
            ("MutatingWebhookConfiguration", all("mutate", &["CREATE", "UPDATE"])),
            ("ValidatingWebhookConfiguration", all("validate", &["CREATE", "UPDATE", "DELETE"])),
        ] {
            let object = json!({
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
                "metadata": { "name": self.configuration }, "webhooks": webhooks
            });
            self.api(&object)
                .patch(&self.configuration, &PatchParams::apply("test").force(), &Patch::Apply(&object))
                .await
                .unwrap();
        }
        // The replica notices within a minute; a test does not want to wait, so it does what the replica would.
        let secret: Secret =
            Api::namespaced(self.client(), &self.namespace.name).get("openfilter-webhook-tls").await.unwrap();
        let bundle = String::from_utf8(secret.data.unwrap()["ca.crt"].0.clone()).unwrap();
        webhook::tls::bundle::publish(&self.client(), &self.configuration, &bundle).await.unwrap();
    }

    fn api(&self, object: &Value) -> Api<DynamicObject> {
        let (version, kind) = (object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
        let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        match kind {
            "Pipeline" | "PipelineRun" | "ReferenceGrant" | "Secret" => {
                Api::namespaced_with(self.client(), &self.namespace.name, &resource)
            }
            _ => Api::all_with(self.client(), &resource),
        }
    }

    fn placed(&self, object: Value, name: &str) -> Value {
        let object = with(object, "/metadata/name", json!(name));
        match object["kind"].as_str().unwrap() {
            "PipelinePolicy" => object,
            _ => with(object, "/metadata/namespace", json!(self.namespace.name)),
        }
    }

    async fn create(&self, object: &Value, dry_run: bool) -> Result<DynamicObject, String> {
        let params = PostParams { dry_run, field_manager: None };
        let typed = serde_json::from_value(object.clone()).unwrap();
        self.api(object).create(&params, &typed).await.map_err(|error| error.to_string())
    }

    fn secret(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "camera-keys", "namespace": self.namespace.name },
            "stringData": { "accessKeyId": "a", "secretAccessKey": "b" }
        })
    }

    fn run(&self, name: &str) -> Value {
        with(self.placed(run(), name), "/spec/queue", Value::Null)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let kubectl = |kind: &str| {
            let _ = Command::new(self.testbed.paths().bin("kubectl"))
                .arg(format!("--kubeconfig={}", self.testbed.paths().kubeconfig().display()))
                .args(["delete", kind, &self.configuration, "--ignore-not-found"])
                .output();
        };
        kubectl("validatingwebhookconfiguration");
        kubectl("mutatingwebhookconfiguration");
    }
}

/// The program itself, built once.
fn program() -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let built = Command::new(cargo)
        .args(["build", "--locked", "-p", "webhook", "--message-format=json"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let text = String::from_utf8(built.stdout).unwrap();
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.rfind(|path| path.ends_with("webhook")).expect("cargo names the program")
}

async fn http_get(address: &str, path: &str) -> Option<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    Some(text)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_commit_is_dry_run_first_and_applied_in_an_unlucky_order() {
    let cluster = Cluster::start("commit").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    let (recipe, run) = (cluster.placed(pipeline(), "thumbnails"), cluster.run("monday"));

    // As Flux does: everything on trial before anything is applied.
    for object in [&run, &recipe] {
        cluster.create(object, true).await.unwrap();
    }
    // As Argo CD may: the run before its Pipeline, the Pipeline before its Secret.
    cluster.create(&run, false).await.unwrap();
    let refused = cluster.create(&recipe, false).await.unwrap_err();
    assert!(refused.contains("camera-keys\" does not exist"), "{refused}");
    cluster.create(&cluster.secret(), false).await.unwrap();
    cluster.create(&recipe, false).await.unwrap();

    let bad = with(cluster.run("tuesday"), "/spec/source/prefix", json!("2025/"));
    let known = async || {
        Ok(cluster.create(&bad, true).await.err().filter(|message| message.contains("[run-prefix]")))
    };
    cluster.testbed.eventually("the run is held against its Pipeline", WAIT, known).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn policies_are_effective_on_all_replicas_within_a_second_and_have_a_status() {
    let cluster = Cluster::start("policy").await;
    let replicas = [cluster.replica().await, cluster.replica().await];
    cluster.route_to(&replicas[0]).await;
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": cluster.namespace.name } });
    let object = with(
        cluster.placed(policy(), &cluster.namespace.name),
        "/spec",
        json!({
            "appliesTo": ["PipelineRun"], "namespaceSelector": selector,
            "rules": [{ "name": "few", "message": "at most 10", "cel": "object.spec.execution.parallelism <= 10" }],
            "defaults": [{ "field": "spec.execution.maxFailedFiles", "value": "7" }]
        }),
    );
    let broken = with(object.clone(), "/spec/rules/0/cel", json!("objekt.spec"));
    let refused = cluster.create(&broken, false).await.unwrap_err();
    assert!(refused.contains("did you mean object?"), "{refused}");

    cluster.create(&object, false).await.unwrap();
    for replica in &replicas {
        cluster.route_to(replica).await;
        let since = Instant::now();
        let enforced = async || Ok(cluster.create(&cluster.run("monday"), true).await.err());
        let message = cluster.testbed.eventually("the policy is enforced", WAIT, enforced).await.unwrap();
        assert!(message.contains("at most 10"), "{message}");
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
    }
    let few = with(cluster.run("few"), "/spec/execution/parallelism", json!(5));
    let stored = cluster.create(&few, false).await.unwrap();
    assert_eq!(stored.data["spec"]["execution"]["maxFailedFiles"], "7");

    let api = cluster.api(&object);
    let status = async || {
        let found = api.get(&cluster.namespace.name).await.doing(|| "look at the policy".to_owned())?;
        Ok(found.data.pointer("/status/conditions/0/message").and_then(Value::as_str).map(str::to_owned))
    };
    let message = cluster.testbed.eventually("the policy has a status", WAIT, status).await.unwrap();
    assert_eq!(message, "1 rules and 1 defaults are in force");
    api.delete(&cluster.namespace.name, &Default::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn of_a_thousand_concurrent_creates_of_one_run_id_one_is_stored() {
    let cluster = Cluster::start("unique").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    let queue = json!({ "stream": "pr:unique:work", "group": "cg:unique" });
    let objects: Vec<Value> = (0..1000)
        .map(|number| with(cluster.run(&format!("run-{number}")), "/spec/queue", queue.clone()))
        .collect();
    let created = join_all(objects.iter().map(|object| cluster.create(object, false))).await;
    assert_eq!(created.iter().filter(|created| created.is_ok()).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn with_the_webhook_down_nothing_is_stored_and_with_it_back_everything_works() {
    let cluster = Cluster::start("down").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    cluster.create(&cluster.run("monday"), false).await.unwrap();
    drop(replica);
    let refused = cluster.create(&cluster.run("tuesday"), false).await.unwrap_err();
    assert!(refused.contains("failed calling webhook"), "{refused}");
    let back = cluster.replica().await;
    cluster.route_to(&back).await;
    let works = async || Ok(cluster.create(&cluster.run("tuesday"), false).await.ok());
    cluster.testbed.eventually("runs are stored again", WAIT, works).await.unwrap();
}

/// The messages of the ready-made policies, and of their equivalents inside the API server.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn the_ready_made_policies_judge_their_examples_through_the_api_server() {
    let cluster = Cluster::start("ready").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    let mut folders: Vec<PathBuf> =
        fs::read_dir(root().join("policies")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        // These look at the name or the labels of namespaces that the examples bring along; the offline test has them.
        if ["max-parallelism", "own-buckets", "no-default-namespace", "own-run-ids", "gpu-parallelism"]
            .contains(&name)
        {
            continue;
        }
        let read = |file: &str| -> Vec<Value> {
            serde_saphyr::from_multiple(&fs::read_to_string(folder.join(file)).unwrap()).unwrap()
        };
        let mut policy = read("policy.yaml").remove(0);
        policy["spec"]["namespaceSelector"] =
            json!({ "matchLabels": { "kubernetes.io/metadata.name": cluster.namespace.name } });
        cluster.create(&policy, false).await.unwrap();
        let examples = |file: &str| -> Vec<Value> {
            read(file)
                .into_iter()
                .map(|object| {
                    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
                    cluster.placed(object, &name)
                })
                .collect()
        };
        let (rejected, accepted) = (examples("reject.yaml"), examples("accept.yaml"));
        let refused = async || Ok(cluster.create(&rejected[0], true).await.err());
        cluster.testbed.eventually(&format!("{name} is enforced"), WAIT, refused).await.unwrap();
        for object in &rejected {
            let message = cluster.create(object, true).await.expect_err(name);
            assert!(message.contains(&format!("[policy {name}/")), "{message}");
        }
        for object in &accepted {
            cluster.create(object, true).await.unwrap_or_else(|message| panic!("{name}: {message}"));
        }
        cluster.api(&policy).delete(name, &Default::default()).await.unwrap();
    }
}
