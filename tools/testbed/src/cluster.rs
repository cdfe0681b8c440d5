//! Up, down and status: the order in which a cluster's parts start and stop.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant, SystemTime},
};

use futures::future::try_join_all;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Node as ApiNode};
use kube::{Api, Client};

use crate::{
    cgroup, command, control_plane,
    error::{Doing, Error, Result},
    eventually, gobuild, images, kwok, mounts, network,
    node::Node,
    paths::{self, Paths, RUN},
    pki::Authority,
    process::{self, Running},
    programs::Profile,
    services::Credentials,
    state::{self, Found, Record},
    traces,
};

/// The API server answers within seconds; a machine that is also compiling needs more.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The Debian packages of the programs that the testbed calls. A package is not installed if the program of
/// its name, or of the name after the colon, already exists, wherever it came from.
const PACKAGES: [&str; 10] = [
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iproute2",
    "nftables",
    "conntrack",
    "util-linux",
    // Any busybox will do: an image includes the libraries of its program.
    "busybox-static:busybox",
    "valkey-server",
    "procps",
];

/// The result of `up`.
#[derive(Debug)]
pub enum Up {
    /// A cluster was started.
    Started(Record),
    /// A cluster was already up, and is unchanged.
    Already(Record),
}

impl Up {
    fn into_record(self) -> Record {
        match self {
            Self::Started(record) | Self::Already(record) => record,
        }
    }
}

/// Whose cluster `down` may take down while it runs. A crashed one may always be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// One of this checkout, of its clone for the README test, or of a checkout that no longer exists.
    Ours,
    /// Any cluster.
    Anyone,
}

/// Starts a cluster, unless this checkout's is already up.
pub async fn up(paths: &Paths, nodes: u8, kwok: u32) -> Result<Up> {
    check_nodes(nodes)?;
    let _lock = state::lock()?;
    up_locked(paths, nodes, kwok).await
}

fn check_nodes(nodes: u8) -> Result<()> {
    if (1..=network::NODES_MAX).contains(&nodes) {
        return Ok(());
    }
    Err(Error::Refused(format!("a cluster has 1 to {} nodes, not {nodes}", network::NODES_MAX)))
}

/// Does the same, but replaces a cluster with fewer nodes, and starts killed nodes again.
pub(crate) async fn up_at_least(paths: &Paths, nodes: u8) -> Result<Record> {
    check_nodes(nodes)?;
    let _lock = state::lock()?;
    let record = match up_locked(paths, nodes, 0).await? {
        Up::Already(record) if record.nodes < nodes => {
            let kwok = record.kwok;
            remove(paths, &Known::All(record))?;
            up_locked(paths, nodes, kwok).await?.into_record()
        }
        up => up.into_record(),
    };
    let all: Vec<Node> = (1..=record.nodes).map(|number| Node::new(paths, number)).collect();
    // A failed test may have left a node dead, and the next test should not pay for that.
    let dead: Vec<&Node> = all.iter().filter(|node| !node.is_running()).collect();
    if !dead.is_empty() {
        let client = client(paths).await?;
        try_join_all(dead.iter().map(|node| restart(paths, &client, node))).await?;
    }
    Ok(record)
}

async fn up_locked(paths: &Paths, nodes: u8, kwok: u32) -> Result<Up> {
    let found = state::find();
    match &found {
        Found::Up(record) if record.root == paths.root => return Ok(Up::Already(record.clone())),
        Found::Up(record) if is_gone(record) => {
            println!("removing the cluster of {}, which no longer exists ...", record.root.display())
        }
        Found::Up(record) => return Err(another(record)),
        Found::Stale(_) => println!("removing the remains of an unfinished or crashed cluster ..."),
        Found::Nothing => {}
    }
    install_packages(paths)?;
    // After a reboot /run holds no record, but much may be left elsewhere.
    let known = known(paths, found);
    if known == Known::Nothing {
        traces::refuse_other_kubelet()?;
    }
    remove(paths, &known)?;
    paths::remove(paths.logs())?;
    let kubernetes = gobuild::KUBERNETES.program(paths)?;
    images::build(paths, &[images::Set::Base], Profile::own())?;
    if kwok > 0 {
        gobuild::KWOK.program(paths)?;
    }
    let record = Record::begin(&paths.root, nodes, kwok)?;
    for name in [
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kube-proxy",
        "kubelet",
        "etcd",
        "kubectl",
    ] {
        paths::make_dir(paths.state().join("bin"))?;
        symlink(&kubernetes, paths.bin(name)).doing(|| format!("link {name}"))?;
    }
    network::create(nodes, kwok > 0)?;
    let authority = Authority::create(paths)?;
    control_plane::credentials(paths, &authority)?;
    Credentials::create(paths)?;
    control_plane::start(paths)?;
    let all: Vec<Node> = (1..=nodes).map(|number| Node::new(paths, number)).collect();
    for node in &all {
        node.configure(&authority)?;
    }
    try_join_all(all.iter().map(Node::start_containerd)).await?;
    for node in &all {
        images::load_missing(paths, node)?;
        node.start_kubelet()?;
    }
    wait(paths, nodes, kwok).await?;
    Ok(Up::Started(record.finish()?))
}

/// Whether the cluster's checkout no longer exists, so that nobody can want it.
fn is_gone(record: &Record) -> bool {
    !record.root.join("Makefile").exists()
}

fn is_ours(paths: &Paths, record: &Record) -> bool {
    record.root == paths.root || record.root == paths.readme_clone() || is_gone(record)
}

fn another(record: &Record) -> Error {
    Error::Refused(format!(
        "a cluster of {} is up, and a machine can have only one: run `testbed down` there, or `testbed down --any` \
         here",
        record.root.display()
    ))
}

/// What is known about a cluster that is not up, or is about to be taken down.
#[derive(Debug, PartialEq, Eq)]
enum Known {
    /// Its record.
    All(Record),
    /// There was one, but its record is lost.
    Some,
    /// Nothing, not even whether there was one.
    Nothing,
}

impl Known {
    fn record(&self) -> Option<&Record> {
        match self {
            Self::All(record) => Some(record),
            Self::Some | Self::Nothing => None,
        }
    }
}

fn known(paths: &Paths, found: Found) -> Known {
    match found {
        Found::Up(record) | Found::Stale(Some(record)) => Known::All(record),
        Found::Stale(None) => Record::copy(paths).map_or(Known::Some, Known::All),
        Found::Nothing => Record::copy(paths).map_or(Known::Nothing, Known::All),
    }
}

fn install_packages(paths: &Paths) -> Result<()> {
    let script = paths.root.join("tools/packages.sh");
    let doing = || format!("install the packages with {}", script.display());
    // Its output is shown, because a first installation takes a while and reports progress.
    let status = Command::new(&script).args(PACKAGES).status().doing(doing)?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Refused(format!("cannot {}: it ended with {status}", doing())))
    }
}

/// Waits for the API server, starts the workloads inside the cluster, and waits for those.
async fn wait(paths: &Paths, nodes: u8, kwok: u32) -> Result<()> {
    let client = client(paths).await?;
    eventually(paths, "the API server answers", START_TIMEOUT, async || {
        process::check(paths, "etcd")?;
        process::check(paths, control_plane::API_SERVER)?;
        let ready = http::Request::get("/readyz").body(Vec::new()).map_err(kube::Error::HttpError);
        let ready = ready.doing(|| "query the API server".to_owned())?;
        client.request_text(ready).await.map(Some).doing(|| "query the API server".to_owned())
    })
    .await?;
    apply(paths, &paths::read(paths.testbed("manifests/dns.yaml"))?)?;
    if kwok > 0 {
        kwok::start(paths, &client, kwok).await?;
    }
    wait_for_nodes(paths, &client, usize::from(nodes) + kwok as usize).await?;
    let system: Api<Deployment> = Api::namespaced(client, "kube-system");
    eventually(paths, "cluster DNS is available", START_TIMEOUT, async || {
        let dns = system.get("coredns").await.doing(|| "read the state of cluster DNS".to_owned())?;
        Ok(dns.status.and_then(|status| status.available_replicas).filter(|available| *available > 0))
    })
    .await?;
    Ok(())
}

/// Waits until this many nodes are Ready.
pub(crate) async fn wait_for_nodes(paths: &Paths, client: &Client, count: usize) -> Result<()> {
    let api: Api<ApiNode> = Api::all(client.clone());
    eventually(paths, &format!("{count} nodes are Ready"), START_TIMEOUT, async || {
        for name in process::recorded() {
            process::check(paths, &name)?;
        }
        let listed = api.list(&Default::default()).await.doing(|| "list the nodes".to_owned())?;
        Ok((listed.items.iter().filter(|node| is_ready(node)).count() >= count).then_some(()))
    })
    .await
}

/// Starts a killed node again, and waits until it is Ready.
pub(crate) async fn restart(paths: &Paths, client: &Client, node: &Node) -> Result<()> {
    node.restart().await?;
    let (started, name) = (Instant::now(), &node.name);
    let api: Api<ApiNode> = Api::all(client.clone());
    eventually(paths, &format!("{name} is Ready"), START_TIMEOUT, async || {
        for program in node.programs() {
            process::check(paths, &program)?;
        }
        let node = api.get(name).await.doing(|| format!("read the state of {name}"))?;
        // A node that died a moment ago is still Ready in the API: only heartbeats after the start count.
        let fresh = started.elapsed() > control_plane::NODE_GRACE || heard_since(&node, started);
        Ok((is_ready(&node) && fresh).then_some(()))
    })
    .await
}

/// Whether the node's last heartbeat came after `since`.
fn heard_since(node: &ApiNode, since: Instant) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let last =
        conditions.into_iter().flatten().filter_map(|condition| condition.last_heartbeat_time.as_ref()).max();
    let began = SystemTime::now() - since.elapsed();
    last.is_some_and(|time| SystemTime::from(time.0) > began)
}

/// Whether a node reports that it is Ready.
pub(crate) fn is_ready(node: &ApiNode) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// A client with the administrator's rights.
pub async fn client(paths: &Paths) -> Result<Client> {
    let doing = || format!("read {}", paths.kubeconfig().display());
    let invalid = |error: kube::config::KubeconfigError| std::io::Error::other(error);
    let file = kube::config::Kubeconfig::read_from(paths.kubeconfig()).map_err(invalid).doing(doing)?;
    let config = kube::Config::from_custom_kubeconfig(file, &Default::default())
        .await
        .map_err(invalid)
        .doing(doing)?;
    Client::try_from(config).doing(|| "create a client".to_owned())
}

/// Applies manifests with the administrator's rights.
pub(crate) fn apply(paths: &Paths, manifests: &str) -> Result<()> {
    // Tests apply the same manifests concurrently, each from its own file.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let file = paths.state().join(format!("apply-{}-{number}.yaml", std::process::id()));
    paths::write(&file, manifests)?;
    let words = [
        paths.bin("kubectl").display().to_string(),
        format!("--kubeconfig={}", paths.kubeconfig().display()),
        "apply".to_owned(),
        "--server-side".to_owned(),
        "--force-conflicts".to_owned(),
        "--field-manager=testbed".to_owned(),
        format!("--filename={}", file.display()),
    ];
    command::run("apply manifests", &words)?;
    paths::remove(file)
}

/// Takes down the cluster of this machine, and returns its record. Refuses one of another checkout that runs,
/// unless `whose` allows any.
pub fn down(paths: &Paths, whose: Whose) -> Result<Option<Record>> {
    let _lock = state::lock()?;
    let found = state::find();
    if let Found::Up(record) = &found
        && whose == Whose::Ours
        && !is_ours(paths, record)
    {
        return Err(another(record));
    }
    let known = known(paths, found);
    remove(paths, &known)?;
    let record = known.record().cloned();
    let owner = record.as_ref().map_or_else(|| paths.clone(), |record| Paths { root: record.root.clone() });
    paths::remove(owner.images())?;
    Ok(record)
}

/// Ends every process of this machine's cluster at once, as a power cut would, and changes nothing else.
pub fn cut_power() -> Result<()> {
    cgroup::kill("")
}

/// Removes everything that [`leftovers`] would find. It assumes nothing: each part may exist or not.
fn remove(paths: &Paths, known: &Known) -> Result<()> {
    let record = known.record();
    let owner = Paths { root: record.map_or_else(|| paths.root.clone(), |record| record.root.clone()) };
    // Recorded processes first, by pid and start time; then everything else in our cgroups: containers and
    // their shims.
    for name in process::recorded() {
        if let Some(running) = Running::find(&name) {
            running.stop(Duration::ZERO)?;
        }
        process::forget(&name)?;
    }
    cgroup::kill("")?;
    traces::remove(&owner, *known != Known::Nothing)?;
    mounts::unmount_below(&owner.state())?;
    mounts::unmount_below(Path::new(RUN))?;
    network::remove()?;
    cgroup::remove("")?;
    if let Some(record) = record {
        record.restore_kernel();
    }
    // The logs stay until the next start, because they are all there is to read after a failed test. Images
    // may have been built for the next cluster.
    let kept = fs::read_dir(owner.state()).into_iter().flatten().flatten();
    for entry in kept.filter(|entry| entry.file_name() != "logs" && entry.file_name() != "images") {
        paths::remove(entry.path())?;
    }
    paths::remove(RUN)?;
    match leftovers(&owner)?.as_slice() {
        [] => Ok(()),
        left => Err(Error::Refused(format!("still present after `down`: {}", left.join(", ")))),
    }
}

/// Everything of a cluster on this machine: processes, mounts, namespaces, interfaces, routes, cgroups,
/// state.
pub fn leftovers(paths: &Paths) -> Result<Vec<String>> {
    let mut left: Vec<String> = Vec::new();
    left.extend(cgroup::processes("")?.iter().map(|pid| format!("process {pid}")));
    for folder in [paths.state(), RUN.into()] {
        left.extend(mounts::below(&folder)?.iter().map(|path| format!("mount {}", path.display())));
    }
    left.extend(network::namespaces().iter().map(|name| format!("network namespace {name}")));
    left.extend(network::links()?.iter().map(|name| format!("interface {name}")));
    left.extend(network::routes()?.iter().map(|route| format!("route {route}")));
    left.extend(cgroup::leftovers()?.iter().map(|path| format!("cgroup {}", path.display())));
    for path in [RUN.into(), paths.kubeconfig(), paths.pki(), paths.state().join("nodes")] {
        left.extend(path.exists().then(|| format!("state {}", path.display())));
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_ours_if_it_is_of_this_checkout_its_clone_or_nobody() {
        let (here, elsewhere) = (Paths::find().unwrap(), Paths { root: "/somewhere/else".into() });
        assert!(is_ours(&here, &Record::of(&here.root)));
        assert!(is_ours(&here, &Record::of(&here.readme_clone())));
        assert!(!is_ours(&elsewhere, &Record::of(&here.root)));
        assert!(is_ours(&here, &Record::of(&elsewhere.root)) && is_gone(&Record::of(&elsewhere.root)));
    }
}
