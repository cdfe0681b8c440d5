//! etcd, the API server, the controller manager and the scheduler, on the host.

use std::{net::Ipv4Addr, path::Path, time::Duration};

use crate::{
    cgroup,
    error::Result,
    network::{API_PORT, API_SERVICE_IP, HOST_IP, SERVICE_RANGE, api_server_url},
    paths::{self, Paths},
    pki::Authority,
    process::Program,
};

/// The cgroup of the control plane.
pub(crate) const PART: &str = "control-plane";
/// The API server's name in records and logs.
pub(crate) const API_SERVER: &str = "kube-apiserver";

/// A loopback port that a real etcd on the machine would not use.
const ETCD: &str = "127.0.0.1:12379";
const ETCD_PEER: &str = "127.0.0.1:12380";

/// A node is NotReady after this long without a heartbeat. The kubelets here renew every second; with fewer
/// seconds, a machine that is also compiling looks dead.
pub const NODE_GRACE: Duration = Duration::from_secs(8);
/// Pods of a NotReady node are replaced after this long.
pub const EVICTION_DELAY: Duration = Duration::from_secs(2);

/// Creates the certificates and kubeconfigs of the control plane and the administrator.
pub(crate) fn credentials(paths: &Paths, authority: &Authority) -> Result<()> {
    let names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    authority.issue_file(
        "apiserver",
        "kube-apiserver",
        Some("system:masters"),
        &names,
        &[HOST_IP, API_SERVICE_IP],
    )?;
    // etcd requires a certificate from everyone, itself included: anyone who reads and writes there controls
    // the cluster.
    authority.issue_file("etcd", "etcd", None, &[], &[Ipv4Addr::LOCALHOST])?;
    authority.service_accounts()?;
    authority.kubeconfig("controller-manager", "system:kube-controller-manager", None)?;
    authority.kubeconfig("scheduler", "system:kube-scheduler", None)?;
    let admin = authority.kubeconfig("admin", "admin", Some("system:masters"))?;
    paths::write_private(paths.kubeconfig(), paths::read(admin)?)
}

/// Starts the control plane; it begins to serve a few seconds later.
pub(crate) fn start(paths: &Paths) -> Result<()> {
    cgroup::make(PART)?;
    start_etcd(paths)?;
    start_api_server(paths)?;
    let pki = paths.pki();
    let grace = NODE_GRACE.as_secs();
    let controllers = [
        kubeconfig(&pki, "controller-manager"),
        format!("--service-account-private-key-file={}", pki.join("service-accounts.key").display()),
        format!("--root-ca-file={}", pki.join("ca.crt").display()),
        format!("--cluster-signing-cert-file={}", pki.join("ca.crt").display()),
        format!("--cluster-signing-key-file={}", pki.join("ca.key").display()),
        format!("--node-monitor-grace-period={grace}s"),
        "--node-monitor-period=1s".to_owned(),
        // React to every node that dies at once, even if half of the cluster dies.
        "--node-eviction-rate=100".to_owned(),
        "--secondary-node-eviction-rate=100".to_owned(),
        "--unhealthy-zone-threshold=1".to_owned(),
        "--use-service-account-credentials=true".to_owned(),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
    ];
    program(paths, "kube-controller-manager", controllers).start(paths)?;
    let scheduling = [
        kubeconfig(&pki, "scheduler"),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
    ];
    program(paths, "kube-scheduler", scheduling).start(paths)?;
    Ok(())
}

fn start_etcd(paths: &Paths) -> Result<()> {
    let pki = paths.pki();
    let file = |name: &str| pki.join(name).display().to_string();
    let flags = [
        "--name=testbed".to_owned(),
        format!("--data-dir={}", paths.data("etcd").display()),
        format!("--listen-client-urls=https://{ETCD}"),
        format!("--advertise-client-urls=https://{ETCD}"),
        format!("--listen-peer-urls=https://{ETCD_PEER}"),
        format!("--initial-advertise-peer-urls=https://{ETCD_PEER}"),
        format!("--initial-cluster=testbed=https://{ETCD_PEER}"),
        "--client-cert-auth".to_owned(),
        format!("--trusted-ca-file={}", file("ca.crt")),
        format!("--cert-file={}", file("etcd.crt")),
        format!("--key-file={}", file("etcd.key")),
        "--peer-client-cert-auth".to_owned(),
        format!("--peer-trusted-ca-file={}", file("ca.crt")),
        format!("--peer-cert-file={}", file("etcd.crt")),
        format!("--peer-key-file={}", file("etcd.key")),
        // A test cluster that loses power is created again; waiting for the disk would slow down every write.
        "--unsafe-no-fsync".to_owned(),
    ];
    program(paths, "etcd", flags).start(paths)?;
    Ok(())
}

fn start_api_server(paths: &Paths) -> Result<()> {
    let pki = paths.pki();
    let file = |name: &str| pki.join(name).display().to_string();
    let eviction = EVICTION_DELAY.as_secs();
    let flags = [
        format!("--etcd-servers=https://{ETCD}"),
        format!("--etcd-cafile={}", file("ca.crt")),
        format!("--etcd-certfile={}", file("etcd.crt")),
        format!("--etcd-keyfile={}", file("etcd.key")),
        format!("--bind-address={HOST_IP}"),
        format!("--advertise-address={HOST_IP}"),
        format!("--secure-port={API_PORT}"),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--tls-cert-file={}", file("apiserver.crt")),
        format!("--tls-private-key-file={}", file("apiserver.key")),
        format!("--kubelet-certificate-authority={}", file("ca.crt")),
        format!("--kubelet-client-certificate={}", file("apiserver.crt")),
        format!("--kubelet-client-key={}", file("apiserver.key")),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        format!("--service-account-key-file={}", file("service-accounts.pub")),
        format!("--service-account-signing-key-file={}", file("service-accounts.key")),
        format!("--service-account-issuer={}", api_server_url()),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        // The API server calls webhooks at pod addresses, because the host has no kube-proxy.
        "--enable-aggregator-routing=true".to_owned(),
        format!("--default-not-ready-toleration-seconds={eviction}"),
        format!("--default-unreachable-toleration-seconds={eviction}"),
    ];
    program(paths, API_SERVER, flags).start(paths)?;
    Ok(())
}

fn kubeconfig(pki: &Path, user: &str) -> String {
    format!("--kubeconfig={}", pki.join(format!("{user}.kubeconfig")).display())
}

/// A program of the control plane from the Kubernetes build.
pub(crate) fn program(paths: &Paths, name: &str, flags: impl IntoIterator<Item = String>) -> Program {
    let words = [paths.bin(name).display().to_string()].into_iter().chain(flags).collect();
    Program { name: name.to_owned(), part: PART.to_owned(), netns: None, words }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn nobody_else_reads_a_key_or_a_kubeconfig() {
        let root = std::env::temp_dir().join(format!("testbed-credentials-{}", std::process::id()));
        let paths = Paths { root: root.clone() };
        credentials(&paths, &Authority::create(&paths).unwrap()).unwrap();
        let secret = |path: &Path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.ends_with(".key") || name.ends_with("kubeconfig")
        };
        let made = fs::read_dir(paths.pki()).unwrap().map(|entry| entry.unwrap().path());
        let secrets: Vec<_> = made.filter(|path| secret(path)).chain([paths.kubeconfig()]).collect();
        assert!(secrets.len() > 5, "{secrets:?}");
        for path in secrets {
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", path.display());
        }
        fs::remove_dir_all(root).unwrap();
    }
}
