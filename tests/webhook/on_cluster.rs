//! A real API server that calls the real program. The webhook runs on the host, where the API server reaches
//! it at 10.87.0.1, and makes its own certificate: every test that uses this module also shows that the API
//! server trusts it.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::gvk::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use testbed::{Doing, Namespace, Testbed};
use tests::examples::{grant, run, with};
use tests::program::{mortal, program};

pub const HOST: &str = "10.87.0.1";
pub const WAIT: Duration = Duration::from_secs(300);

/// A replica of the webhook, which is killed on drop.
pub struct Replica {
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
pub struct Cluster {
    pub testbed: Testbed,
    pub namespace: Namespace,
    configuration: String,
    /// Objects made with [`Self::apply`]. They are removed with the cluster, the last one first.
    made: Mutex<Vec<Vec<String>>>,
}

impl Cluster {
    pub async fn start(prefix: &str) -> Self {
        let testbed = Testbed::start_or_reuse().await.unwrap();
        tests::crds_on_cluster::install(&testbed).await;
        let namespace = testbed.labelled_namespace(prefix, &[("webhook", prefix)]).await.unwrap();
        let configuration = namespace.name.clone();
        Self { testbed, namespace, configuration, made: Mutex::default() }
    }

    pub fn client(&self) -> Client {
        self.testbed.client()
    }

    /// Starts a replica and waits until it is ready.
    pub async fn replica(&self) -> Replica {
        let free = || TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port();
        let (port, health) = (free(), free());
        let log = self.testbed.paths().logs().join(format!("webhook-{port}.log"));
        let process = mortal(program("webhook"))
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

    /// Makes the API server call this replica, for objects of the test's namespace and for policies.
    pub async fn route_to(&self, replica: &Replica) {
        self.route([replica.port; 2], false).await;
    }

    /// Like [`Self::route_to`], but with two ports: one for defaults, and one for validation.
    pub async fn route_to_ports(&self, ports: [u16; 2]) {
        self.route(ports, false).await;
    }

    /// Like [`Self::route_to`], but for objects of all namespaces.
    pub async fn route_everything_to(&self, replica: &Replica) {
        self.route([replica.port; 2], true).await;
    }

    async fn route(&self, [mutating, validating]: [u16; 2], everything: bool) {
        let webhook = |step: &str, kind: &str, resource: &str, operations: &[&str], cluster: bool| {
            let port = if step == "mutate" { mutating } else { validating };
            let mut webhook = json!({
                "name": format!("{resource}.{step}.filter.plainsight.ai"),
                "clientConfig": { "url": format!("https://{HOST}:{port}/{step}/{kind}") },
                "rules": [{ "apiGroups": ["filter.plainsight.ai"], "apiVersions": ["v1alpha1"], "operations": operations, "resources": [resource] }],
                "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 10, "failurePolicy": "Fail"
            });
            if !cluster && !everything {
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
        let all = |step: &str, kinds: &[(&str, &str, bool)], operations: &[&str]| -> Vec<Value> {
            kinds
                .iter()
                .map(|(kind, resource, cluster)| webhook(step, kind, resource, operations, *cluster))
                .collect()
        };
        for (kind, webhooks) in [
            // The same kinds as kustomize/base/admission.yaml.
            ("MutatingWebhookConfiguration", all("mutate", &kinds[..2], &["CREATE", "UPDATE"])),
            ("ValidatingWebhookConfiguration", all("validate", &kinds, &["CREATE", "UPDATE", "DELETE"])),
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
        // The replica would publish its CA within a minute. To save that time, the test does it instead.
        let secret: Secret =
            Api::namespaced(self.client(), &self.namespace.name).get("openfilter-webhook-tls").await.unwrap();
        let bundle = String::from_utf8(secret.data.unwrap()["ca.crt"].0.clone()).unwrap();
        webhook::tls::bundle::publish(&self.client(), &self.configuration, &bundle).await.unwrap();
        // The API server caches each configuration separately: it may not call the replica yet, or do so
        // without the bundle. The first step refuses a malformed glob; only the second step checks grants.
        let glob = with(self.run("on-trial"), "/spec/source/include", json!(["[a"]));
        self.until_refused(&glob, "pipelineruns.mutate.filter.plainsight.ai\" denied").await;
        let useless = with(self.placed(grant(), "on-trial"), "/spec/to", json!([{ "kind": "Pipeline" }]));
        self.until_refused(&useless, "referencegrants.validate.filter.plainsight.ai\" denied").await;
    }

    /// Waits until the creation of this object is refused with these words.
    pub async fn until_refused(&self, object: &Value, words: &str) {
        let refused =
            async || Ok(self.create(object, true).await.err().filter(|message| message.contains(words)));
        let what = format!("{} is refused with {words:?}", object["metadata"]["name"]);
        self.testbed.eventually(&what, WAIT, refused).await.unwrap();
    }

    /// Creates the object, not as a dry run, and deletes it again: on a dry run, violations that depend on
    /// stored objects are only warnings.
    pub async fn create_for_real(&self, object: &Value) -> testbed::Result<Result<(), String>> {
        let created = self.create(object, false).await;
        if let Ok(stored) = &created {
            let taken_back = self.api(object).delete(&stored.name_any(), &Default::default()).await;
            taken_back.doing(|| format!("take {} back", stored.name_any()))?;
        }
        Ok(created.map(|_stored| ()))
    }

    /// The API client for an object, in the namespace that the object names.
    pub fn api(&self, object: &Value) -> Api<DynamicObject> {
        let (version, kind) = (object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
        let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        match object["metadata"]["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(self.client(), namespace, &resource),
            None => Api::all_with(self.client(), &resource),
        }
    }

    pub fn placed(&self, object: Value, name: &str) -> Value {
        let object = with(object, "/metadata/name", json!(name));
        match object["kind"].as_str().unwrap() {
            "PipelinePolicy" => object,
            _ => with(object, "/metadata/namespace", json!(self.namespace.name)),
        }
    }

    pub async fn create(&self, object: &Value, dry_run: bool) -> Result<DynamicObject, String> {
        let params = PostParams { dry_run, field_manager: None };
        let typed = serde_json::from_value(object.clone()).unwrap();
        self.api(object).create(&params, &typed).await.map_err(|error| error.to_string())
    }

    pub fn secret(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "camera-keys", "namespace": self.namespace.name },
            "stringData": { "accessKeyId": "a", "secretAccessKey": "b" }
        })
    }

    pub fn run(&self, name: &str) -> Value {
        with(self.placed(run(), name), "/spec/queue", Value::Null)
    }
}

impl Cluster {
    /// Runs kubectl with this input; returns whether it succeeded, and its whole output.
    pub fn kubectl(&self, arguments: &[&str], input: &Value) -> (bool, String) {
        let output = self.testbed.run_kubectl(arguments, &input.to_string()).unwrap();
        let text = [output.stderr, output.stdout].map(|text| String::from_utf8(text).unwrap()).concat();
        (output.status.success(), text)
    }

    /// Applies an object as it is. It is removed with the cluster.
    pub fn apply(&self, object: &Value) {
        let (applied, text) =
            self.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", "-"], object);
        assert!(applied, "{text}");
        let text =
            |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, name, namespace) = (text("/kind"), text("/metadata/name"), text("/metadata/namespace"));
        let mut made = self.made.lock().unwrap();
        made.push(vec![kind, name, format!("--namespace={namespace}")]);
    }

    /// Removes the applied objects, and waits until they are gone.
    pub fn remove_applied(&self) {
        for object in self.made.lock().unwrap().drain(..).rev() {
            let object = object.iter().map(String::as_str);
            let delete: Vec<&str> = ["delete", "--ignore-not-found"].into_iter().chain(object).collect();
            let _ = self.kubectl(&delete, &Value::Null);
        }
    }

    /// Makes the API server call no webhook any more.
    pub fn unroute(&self) {
        for kind in ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"] {
            let _ = self.kubectl(&["delete", kind, &self.configuration, "--ignore-not-found"], &Value::Null);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.unroute();
        self.remove_applied();
    }
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
