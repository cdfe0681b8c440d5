//! A node: containerd, kubelet and kube-proxy in a network namespace, with their own folders, sockets and
//! cgroups.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;

use crate::{
    cgroup,
    error::Result,
    eventually, images, mounts,
    network::{self, DNS_SERVICE_IP, POD_RANGE, REGISTRY},
    paths::{self, Paths, RUN},
    pki::Authority,
    process::{self, Program},
    traces,
};

/// Pods per node: as many as a /24 has addresses for.
const PODS_MAX: u32 = 200;
/// The kubelet renews its lease four times within this time, that is, every second.
const LEASE_SECONDS: u32 = 4;
/// containerd answers within a second, or within a few on a busy machine.
const CONTAINERD_TIMEOUT: Duration = Duration::from_secs(120);
/// The name of the CNI network.
const CNI_NETWORK: &str = "openfilter-testbed";

/// One node of the cluster.
#[derive(Debug, Clone)]
pub struct Node {
    /// The node's number, counted from 1.
    pub number: u8,
    /// `node-<number>`: the name in Kubernetes, of the cgroup and of the folders.
    pub name: String,
    paths: Paths,
}

impl Node {
    /// The node with this number.
    pub fn new(paths: &Paths, number: u8) -> Self {
        Self { number, name: network::node_name(number), paths: paths.clone() }
    }

    /// The folder that records which image archives the node has.
    pub(crate) fn loaded(&self) -> PathBuf {
        self.paths.node(&self.name).join("images")
    }

    /// Its containerd's socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir().join("containerd.sock")
    }

    fn run_dir(&self) -> PathBuf {
        Path::new(RUN).join(&self.name)
    }

    /// Its kubelet's name in records and logs.
    pub(crate) fn kubelet(&self) -> String {
        self.program("kubelet")
    }

    fn program(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    /// Writes its configuration and credentials.
    pub fn configure(&self, authority: &Authority) -> Result<()> {
        let user = format!("system:node:{}", self.name);
        authority.kubeconfig(&self.name, &user, Some("system:nodes"))?;
        let serving = format!("{}-serving", self.name);
        authority.issue_file(
            &serving,
            &user,
            Some("system:nodes"),
            &[&self.name],
            &[network::node_ip(self.number)],
        )?;
        let proxy = self.program("proxy");
        authority.kubeconfig(&proxy, "system:kube-proxy", None)?;
        let folder = self.paths.node(&self.name);
        paths::make_dir(folder.join("kubelet"))?;
        paths::write(folder.join("containerd.toml"), self.containerd_config())?;
        paths::write(self.registries().join(REGISTRY).join("hosts.toml"), registry_config())?;
        paths::write(folder.join("cni/10-testbed.conflist"), format!("{:#}", self.cni_config()))?;
        paths::write(folder.join("kubelet.json"), format!("{:#}", self.kubelet_config(&serving)))?;
        paths::write(folder.join("kube-proxy.json"), format!("{:#}", self.proxy_config(&proxy)))
    }

    /// Starts containerd and waits until it answers, so that images can be loaded.
    pub async fn start_containerd(&self) -> Result<()> {
        cgroup::make(&self.name)?;
        paths::make_dir(self.run_dir())?;
        let config = self.paths.node(&self.name).join("containerd.toml");
        let starts = self.pod_service_starts();
        let name =
            self.start("containerd", vec!["containerd".into(), "--config".into(), display(&config)])?;
        eventually(&self.paths, &format!("{name} answers"), CONTAINERD_TIMEOUT, async || {
            process::check(&self.paths, &name)?;
            let socket = display(&self.socket());
            let answers = crate::command::run("query containerd", &["ctr", "-a", &socket, "version"]).is_ok();
            Ok((answers && self.pod_service_starts() > starts).then_some(()))
        })
        .await
    }

    /// How often the part of containerd that serves the kubelet has started, according to the log. It answers
    /// later than the rest, once it knows the state of its containers, and a kubelet that asks before that
    /// exits.
    fn pod_service_starts(&self) -> usize {
        let log = std::fs::read_to_string(self.paths.log(&self.program("containerd"))).unwrap_or_default();
        log.matches("Start streaming server").count()
    }

    /// A short path to the kubelet's folder: the kubelet creates sockets there, whose paths may have at most
    /// 108 bytes, and the path of a checkout may be longer.
    fn kubelet_root(&self) -> PathBuf {
        self.run_dir().join("kubelet")
    }

    fn mount_kubelet_root(&self) -> Result<()> {
        let (folder, root) = (self.paths.node(&self.name).join("kubelet"), self.kubelet_root());
        paths::make_dir(&root)?;
        if mounts::below(&root)?.is_empty() {
            // Private; otherwise the mounts of its pods would also appear below the checkout.
            let words = ["mount", "--bind", "--make-private", &display(&folder), &display(&root)];
            crate::command::run("mount the folder of a kubelet", &words)?;
        }
        Ok(())
    }

    /// Starts the kubelet and kube-proxy.
    pub fn start_kubelet(&self) -> Result<()> {
        self.mount_kubelet_root()?;
        let folder = self.paths.node(&self.name);
        let bin = |name: &str| display(&self.paths.bin(name));
        let config = |name: &str| format!("--config={}", folder.join(name).display());
        self.start(
            "kubelet",
            vec![
                bin("kubelet"),
                config("kubelet.json"),
                format!(
                    "--kubeconfig={}",
                    self.paths.pki().join(format!("{}.kubeconfig", self.name)).display()
                ),
                format!("--root-dir={}", self.kubelet_root().display()),
                format!("--cert-dir={}", self.kubelet_root().join("pki").display()),
                format!("--node-ip={}", network::node_ip(self.number)),
                format!("--hostname-override={}", self.name),
            ],
        )?;
        self.start("kube-proxy", vec![bin("kube-proxy"), config("kube-proxy.json")])?;
        Ok(())
    }

    fn start(&self, name: &str, words: Vec<String>) -> Result<String> {
        let name = self.program(name);
        let netns = Some(network::netns(self.number));
        Program { name: name.clone(), part: self.name.clone(), netns, words }.start(&self.paths)?;
        Ok(name)
    }

    /// Ends the node's kubelet, containerd and containers at once, as a power cut would.
    pub fn kill(&self) -> Result<()> {
        cgroup::kill(&self.name)
    }

    /// Whether the node's kubelet and containerd run.
    pub fn is_running(&self) -> bool {
        ["containerd", "kubelet"].iter().all(|name| process::Running::find(&self.program(name)).is_some())
    }

    /// Starts a killed node again, as after a reboot: images and volumes are kept, but /run is empty.
    pub async fn restart(&self) -> Result<()> {
        self.kill()?;
        traces::remove_of_containers(&self.paths, &self.name)?;
        mounts::unmount_below(&self.run_dir())?;
        paths::remove(self.run_dir())?;
        cgroup::remove(&self.name)?;
        self.start_containerd().await?;
        // Load images that were loaded into the other nodes while this one was dead.
        images::load_missing(&self.paths, self)?;
        self.start_kubelet()
    }

    /// The programs that should run on the node, for `status`.
    pub fn programs(&self) -> [String; 3] {
        ["containerd", "kubelet", "kube-proxy"].map(|name| self.program(name))
    }

    /// The folder in which containerd looks up how to reach a registry, by its address.
    fn registries(&self) -> PathBuf {
        self.paths.node(&self.name).join("registries")
    }

    fn containerd_config(&self) -> String {
        let (folder, run) = (self.paths.node(&self.name), self.run_dir());
        let (root, cni) = (folder.join("containerd"), folder.join("cni"));
        format!(
            r#"version = 2
root = "{root}"
state = "{run}/containerd"
[grpc]
address = "{run}/containerd.sock"
[ttrpc]
address = "{run}/containerd.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
# Without CAP_SYS_RESOURCE (a machine inside a machine) no sandbox may lower its score below its parent's.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
# Its profile would stay in the kernel of the host.
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{cni}"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{registries}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
Root = "{run}/runc"
"#,
            root = root.display(),
            run = run.display(),
            cni = cni.display(),
            registries = self.registries().display(),
            pause = images::PAUSE,
        )
    }

    /// A routed pair per pod instead of a bridge: the translation of service addresses then applies to every
    /// packet, without the kernel's bridge filter.
    fn cni_config(&self) -> serde_json::Value {
        json!({
            "cniVersion": "1.0.0", "name": CNI_NETWORK,
            "plugins": [
                {"type": "ptp", "ipMasq": false, "ipam": {
                    "type": "host-local", "dataDir": self.run_dir().join("addresses"),
                    "ranges": [[{"subnet": network::pod_range(self.number)}]], "routes": [{"dst": "0.0.0.0/0"}]}},
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        })
    }

    fn kubelet_config(&self, serving: &str) -> serde_json::Value {
        let pki = self.paths.pki();
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": pki.join("ca.crt")}, "webhook": {"enabled": true}, "anonymous": {"enabled": false}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": pki.join(format!("{serving}.crt")), "tlsPrivateKeyFile": pki.join(format!("{serving}.key")),
            "address": network::node_ip(self.number), "healthzPort": 0,
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "cgroupDriver": "cgroupfs", "failCgroupV1": false, "cgroupRoot": format!("/{}/{}", cgroup::ROOT, self.name),
            "clusterDomain": "cluster.local", "clusterDNS": [DNS_SERVICE_IP],
            // Pods use only the cluster's resolver: they could not reach the host's anyway.
            "resolvConf": "",
            "podLogsDir": self.pod_logs(), "volumePluginDir": self.kubelet_root().join("plugins-exec"),
            "failSwapOn": false, "localStorageCapacityIsolation": false, "serializeImagePulls": false,
            "maxPods": PODS_MAX, "nodeLeaseDurationSeconds": LEASE_SECONDS, "nodeStatusUpdateFrequency": "2s",
            // A full disk is the machine's problem, and should not evict the test.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            // Images are loaded by hand, and none could be pulled again.
            "imageMinimumGCAge": "24h", "imageMaximumGCAge": "0s",
            // Otherwise an image that was also pulled from a test's registry would be requested from there
            // under every other name.
            "imagePullCredentialsVerificationPolicy": "NeverVerify",
            "enforceNodeAllocatable": ["pods"], "oomScoreAdj": 0,
        })
    }

    /// The folder with the logs of its pods.
    pub fn pod_logs(&self) -> PathBuf {
        self.paths.logs().join(&self.name)
    }

    fn proxy_config(&self, kubeconfig: &str) -> serde_json::Value {
        json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": "nftables", "clusterCIDR": POD_RANGE, "hostnameOverride": self.name,
            "clientConnection": {"kubeconfig": self.paths.pki().join(format!("{kubeconfig}.kubeconfig"))},
            "bindAddress": network::node_ip(self.number), "healthzBindAddress": "", "metricsBindAddress": "127.0.0.1:10249",
            "oomScoreAdj": 0,
            // These settings would be written to the host's kernel.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        })
    }
}

/// A registry without TLS; at any address but loopback, containerd would expect TLS.
fn registry_config() -> String {
    format!(
        "server = \"http://{REGISTRY}\"\n[host.\"http://{REGISTRY}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
    )
}

fn display(path: &Path) -> String {
    path.display().to_string()
}
