//! kubectl, the output of kustomize, and a deployment that belongs to one test at a time.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::Testbed;
use testbed::images::Set;
use testbed::services::{S3_IP_URL, Services};
use tests::root;
use tokio::sync::{Mutex, MutexGuard};

/// How long anything may take on a busy machine.
pub const LONG: Duration = Duration::from_secs(240);
/// The namespace of the deployment.
pub const SYSTEM: &str = "openfilter-system";

/// The cluster has only one namespace for the deployment and one set of CRDs.
static ONE: Mutex<()> = Mutex::const_new(());

/// A cluster to deploy to. Tests take turns.
pub struct Cluster {
    pub testbed: Testbed,
    pub services: Services,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    pub async fn start() -> Self {
        let turn = ONE.lock().await;
        let testbed = Testbed::with_nodes(2).await.unwrap();
        let services = testbed.services().await.unwrap();
        testbed.load_images(&[Set::Worker, Set::Product, Set::Tests]).unwrap();
        let cluster = Self { testbed, services, _turn: turn };
        cluster.remove_traces();
        cluster
    }

    /// Removes the remains of a killed test or of another suite, which would be mistaken for ours or be in
    /// our way. The CRDs may be of another version, whose fields another manager owns.
    fn remove_traces(&self) {
        let runs = r#"jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\n"}{end}"#;
        // Without CRDs there are no runs. The operator that would remove their finalizers is not running.
        let left =
            self.try_kubectl(&["get", "pipelineruns", "--all-namespaces", "-o", runs]).unwrap_or_default();
        for (namespace, run) in left.lines().filter_map(|line| line.split_once(' ')) {
            let patch = r#"--patch={"metadata":{"finalizers":null}}"#;
            self.kubectl(&["-n", namespace, "patch", "pipelinerun", run, "--type=merge", patch]);
        }
        let dev = root().join("kustomize/overlays/dev");
        let gone = ["delete", "--ignore-not-found", "--timeout=180s"];
        self.kubectl(&[&gone[..], &["--kustomize", dev.to_str().unwrap()]].concat());
        self.kubectl(&[&gone[..], &["namespace", "team-a", "team-b"]].concat());
    }

    /// Runs kubectl; returns its output, or why it failed.
    pub fn try_kubectl(&self, words: &[&str]) -> Result<String, String> {
        self.testbed.kubectl(words, "")
    }

    /// Runs kubectl, which must succeed; returns its output.
    pub fn kubectl(&self, words: &[&str]) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("kubectl {}: {error}", words.join(" ")))
    }

    /// Applies objects, as `kubectl apply -f -`, with `words` as further arguments.
    pub fn apply(&self, objects: &[Value], words: &[&str]) -> Result<String, String> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let words = [&["apply", "--server-side", "--filename=-"], words].concat();
        self.testbed.kubectl(&words, &list)
    }

    /// Installs as docs/install.md describes, and waits until everything runs.
    pub fn install(&self, folder: &str) {
        let folder = root().join(folder);
        self.kubectl(&["apply", "--server-side", "--kustomize", folder.to_str().unwrap()]);
        for workload in [
            "statefulset/openfilter-valkey",
            "deployment/openfilter-operator",
            "deployment/openfilter-webhook",
        ] {
            self.kubectl(&["-n", SYSTEM, "rollout", "status", workload, "--timeout=900s"]);
        }
    }

    /// Makes a bucket with files, and a namespace's Secret, as a user would.
    pub async fn prepare_user(&self, namespace: &str, files: usize) {
        let s3 = &self.services.s3;
        s3.make_bucket(namespace).await.unwrap();
        for number in 0..files {
            s3.put(namespace, &format!("in/{number}"), "copy").await.unwrap();
        }
        let (id, secret) = s3.keys();
        let keys = json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "keys", "namespace": namespace},
            "stringData": {"accessKeyId": id, "secretAccessKey": secret}});
        self.apply(&[keys], &[]).unwrap();
    }

    /// Waits until a run meets a condition of `kubectl wait --for`.
    pub fn wait_for(&self, namespace: &str, run: &str, what: &str) {
        let (what, run) = (format!("--for={what}"), format!("pipelinerun/{run}"));
        let waited = self.try_kubectl(&["-n", namespace, "wait", &what, &run, "--timeout=900s"]);
        waited.unwrap_or_else(|error| {
            let shown =
                self.kubectl(&["-n", namespace, "get", "pipelineruns,jobs,pods,events", "-o", "wide"]);
            panic!("{error}\n{shown}\n{}", self.logs("openfilter-operator"))
        });
    }

    /// The logs of all replicas of a program.
    pub fn logs(&self, name: &str) -> String {
        let selector = format!("app.kubernetes.io/name={name}");
        self.kubectl(&["-n", SYSTEM, "logs", "--selector", &selector, "--tail=-1", "--prefix"])
    }

    /// A program that was refused a request has too few rights.
    pub fn assert_nothing_was_forbidden(&self, programs: &[&str]) {
        for program in programs {
            let log = self.logs(program);
            assert!(!log.is_empty(), "{program} has said nothing at all");
            let refused: Vec<&str> =
                log.lines().filter(|line| line.to_lowercase().contains("forbidden")).collect();
            assert!(refused.is_empty(), "{program} was refused:\n{}", refused.join("\n"));
        }
    }

    pub async fn eventually(&self, what: &str, mut so: impl FnMut() -> bool) {
        let probe = async || testbed::Result::Ok(so().then_some(()));
        self.testbed.eventually(what, LONG, probe).await.unwrap();
    }
}

/// A Pipeline that copies `in/` to `out/`.
pub fn pipeline(namespace: &str) -> Value {
    let bucket = |prefix: &str| {
        json!({"name": namespace, "prefix": prefix, "endpoint": S3_IP_URL, "usePathStyle": true,
            "credentialsSecret": {"name": "keys"}})
    };
    let filter = json!({"name": "copy", "image": testbed::images::reference("probe"), "args": ["obey"],
        "imagePullPolicy": "Never"});
    json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "Pipeline",
        "metadata": {"name": "copy", "namespace": namespace},
        "spec": {"source": {"bucket": bucket("in/")}, "filters": [filter], "sink": {"bucket": bucket("out/")}}})
}

/// A run of that Pipeline.
pub fn run(namespace: &str, name: &str) -> Value {
    json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"pipelineRef": {"name": "copy"}, "execution": {"parallelism": 2}}})
}

/// The objects that kustomize builds from a folder.
pub fn build(testbed: &Testbed, folder: &Path) -> Vec<Value> {
    let built = testbed.kubectl(&["kustomize", folder.to_str().unwrap()], "");
    let built = built.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    serde_saphyr::from_multiple(&built).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// The string at a pointer, or an empty one.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}
