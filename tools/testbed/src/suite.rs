//! The interface for suites: a running cluster, actions in it, and faults.

use std::{
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Namespace as ApiNamespace, Pod};
use kube::{Api, Client, api::PostParams};
use serde_json::json;

use crate::{
    cgroup, cluster, command,
    control_plane::API_SERVER,
    error::{Doing, Error, Result},
    eventually,
    images::{self, Set},
    network,
    node::Node,
    paths::Paths,
    pki::Authority,
    process::Running,
    programs::Profile,
    services::Services,
};

/// A running cluster.
#[derive(Clone)]
pub struct Testbed {
    paths: Paths,
    client: Client,
    nodes: u8,
}

impl std::fmt::Debug for Testbed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Testbed").field("root", &self.paths.root).field("nodes", &self.nodes).finish()
    }
}

impl Testbed {
    /// Uses the cluster of this checkout, or starts it with one node.
    pub async fn start_or_reuse() -> Result<Self> {
        Self::with_nodes(1).await
    }

    /// Uses the cluster of this checkout with at least this many nodes. Replaces a smaller one, and starts
    /// nodes again that an earlier test left dead.
    pub async fn with_nodes(nodes: u8) -> Result<Self> {
        let paths = Paths::find()?;
        // A test that was killed may have left programs paused; a running program ignores this signal.
        let _ = signal(API_SERVER, "CONT");
        for number in 1..=network::NODES_MAX {
            let _ = signal(&Node::new(&paths, number).kubelet(), "CONT");
        }
        let record = cluster::up_at_least(&paths, nodes).await?;
        Ok(Self { client: cluster::client(&paths).await?, nodes: record.nodes, paths })
    }

    /// A client with the administrator's rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The paths of the cluster's files.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Creates a namespace for a test; it is deleted when the value is dropped, even by a panic.
    pub async fn namespace(&self, prefix: &str) -> Result<Namespace> {
        self.labelled_namespace(prefix, &[]).await
    }

    /// Does the same as [`Self::namespace`], with labels.
    pub async fn labelled_namespace(&self, prefix: &str, labels: &[(&str, &str)]) -> Result<Namespace> {
        let labels: serde_json::Map<_, _> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        let wanted = json!({"metadata": {"generateName": format!("{prefix}-"), "labels": labels}});
        let doing = || format!("create a namespace {prefix}-…");
        let wanted: ApiNamespace = serde_json::from_value(wanted).doing(doing)?;
        let api: Api<ApiNamespace> = Api::all(self.client());
        let made = api.create(&PostParams::default(), &wanted).await.doing(doing)?;
        let name = made.metadata.name.unwrap_or_default();
        // The API server refuses pods until the namespace has its service account.
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(self.client(), &name);
        let account =
            async || accounts.get_opt("default").await.doing(|| "look for the service account".to_owned());
        self.eventually(&format!("{name} has a service account"), Duration::from_secs(120), account).await?;
        Ok(Namespace { name, paths: self.paths.clone() })
    }

    /// Waits until something is true; the error names the logs.
    pub async fn eventually<T>(
        &self,
        what: &str,
        timeout: Duration,
        probe: impl AsyncFnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        eventually(&self.paths, what, timeout, probe).await
    }

    /// The output of kubectl, or its error message if it fails.
    pub fn kubectl(&self, words: &[&str], input: &str) -> std::result::Result<String, String> {
        let output = self.run_kubectl(words, input).map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr) + &text(&output.stdout))
        }
    }

    /// Runs kubectl with input.
    pub fn run_kubectl(&self, words: &[&str], input: &str) -> Result<Output> {
        let doing = || format!("run kubectl {}", words.join(" "));
        let mut command = Command::new(self.paths.bin("kubectl"));
        command.arg(format!("--kubeconfig={}", self.paths.kubeconfig().display())).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().doing(doing)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A kubectl that ends without reading reports the reason itself.
            let _ = stdin.write_all(input.as_bytes());
        }
        child.wait_with_output().doing(doing)
    }

    /// Loads an image archive into every node.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        self.running_nodes().try_for_each(|node| images::load(&node, archive))
    }

    /// Builds images of the table, and loads them into every node that lacks them, because several suites ask
    /// for the same ones.
    pub fn load_images(&self, sets: &[Set]) -> Result<()> {
        for archive in images::build(&self.paths, sets, Profile::own())? {
            self.running_nodes().try_for_each(|node| images::load_if_missing(&node, &archive))?;
        }
        Ok(())
    }

    /// The backing services, which are started if necessary.
    pub async fn services(&self) -> Result<Services> {
        Services::start(self).await
    }

    /// The cluster's certificate authority, for webhooks, which must serve TLS.
    pub fn authority(&self) -> Result<Authority> {
        Authority::load(&self.paths)
    }

    /// Applies manifests with server-side apply.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        cluster::apply(&self.paths, manifests)
    }

    /// Ends a node's kubelet, containerd and containers at once, as a power cut would.
    pub fn kill_node(&self, name: &str) -> Result<()> {
        self.node(name)?.kill()?;
        // The rules of a dead kube-proxy stay as they were, so the host switches to a living one.
        match self.all_nodes().iter().find(|node| node.is_running()) {
            Some(living) => network::route_services(living.number),
            None => Ok(()),
        }
    }

    /// Ends a container as a crash would; `id` is its id in the status of its pod. The pod stays, and the
    /// kubelet starts the container again.
    pub fn kill_container(&self, id: &str) -> Result<()> {
        let id = id.rsplit('/').next().unwrap_or(id);
        cgroup::signal("KILL", &cgroup::container_processes(id)?);
        Ok(())
    }

    /// Starts a killed node again and waits until it is Ready.
    pub async fn restart_node(&self, name: &str) -> Result<()> {
        cluster::restart(&self.paths, &self.client, &self.node(name)?).await
    }

    fn node(&self, name: &str) -> Result<Node> {
        let nodes = self.all_nodes();
        let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
        let found = nodes.into_iter().find(|node| node.name == name);
        found.ok_or_else(|| {
            Error::Refused(format!("no node is called {name}; there are {}", names.join(", ")))
        })
    }

    fn all_nodes(&self) -> Vec<Node> {
        (1..=self.nodes).map(|number| Node::new(&self.paths, number)).collect()
    }

    fn running_nodes(&self) -> impl Iterator<Item = Node> {
        self.all_nodes().into_iter().filter(Node::is_running)
    }

    /// Freezes the API server: connections stay open and nothing answers.
    pub fn pause_api_server(&self) -> Result<PausedApiServer> {
        signal(API_SERVER, "STOP")?;
        Ok(PausedApiServer(()))
    }

    /// Freezes a node's kubelet, as a partition would: the node's containers keep running, and nothing ends
    /// them.
    pub fn pause_node(&self, name: &str) -> Result<PausedNode> {
        let node = self.node(name)?;
        signal(&node.kubelet(), "STOP")?;
        Ok(PausedNode(node))
    }

    /// The log of a container.
    pub async fn logs(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        let params = kube::api::LogParams { container: Some(container.to_owned()), ..Default::default() };
        let pods: Api<Pod> = Api::namespaced(self.client(), namespace);
        pods.logs(pod, &params).await.doing(|| format!("read the log of {namespace}/{pod}/{container}"))
    }
}

/// The API server is paused until this is dropped.
#[derive(Debug)]
#[must_use = "the API server continues as soon as this is dropped"]
pub struct PausedApiServer(());

impl PausedApiServer {
    /// Resumes the API server.
    pub fn resume(self) {}
}

impl Drop for PausedApiServer {
    fn drop(&mut self) {
        let _ = signal(API_SERVER, "CONT");
    }
}

/// The kubelet of a node is paused until this is dropped.
#[derive(Debug)]
#[must_use = "the kubelet continues as soon as this is dropped"]
pub struct PausedNode(Node);

impl PausedNode {
    /// Resumes the kubelet.
    pub fn resume(self) {}
}

impl Drop for PausedNode {
    fn drop(&mut self) {
        let _ = signal(&self.0.kubelet(), "CONT");
    }
}

/// Sends a signal to a program of the cluster, by its name in records and logs.
fn signal(program: &str, name: &str) -> Result<()> {
    let running =
        Running::find(program).ok_or_else(|| Error::Refused(format!("{program} is not running")))?;
    cgroup::signal(name, &[running.pid]);
    Ok(())
}

/// A temporary namespace.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    paths: Paths,
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let kubectl = |words: &[&str]| {
            let (program, config) = (self.paths.bin("kubectl"), self.paths.kubeconfig());
            let start = [
                program.display().to_string(),
                format!("--kubeconfig={}", config.display()),
                // A test may have left the API server paused.
                "--request-timeout=10s".to_owned(),
            ];
            let own = ["--namespace", self.name.as_str()].into_iter().chain(words.iter().copied());
            let words: Vec<String> = start.into_iter().chain(own.map(str::to_owned)).collect();
            command::run("read a namespace", &words).unwrap_or_else(|error| error.to_string())
        };
        if std::thread::panicking() {
            eprintln!("--- {}: state at the time of the failure ---", self.name);
            eprintln!("{}", kubectl(&["get", "pods,jobs", "-o", "wide"]));
            eprintln!("{}", kubectl(&["get", "events", "--sort-by=.lastTimestamp"]));
            eprintln!("logs of every component and pod: {}", self.paths.logs().display());
        }
        // Not waited for: the next test has its own namespace.
        kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
    }
}
