//! Removes what containerd, the CNI plugins and the kubelet leave in folders of the machine that cannot be
//! moved.
//!
//! A record of our own nodes leads to each trace, so that another cluster's files in the same folders stay.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    image::sha256,
    paths::{self, Paths, RUN},
};

/// A kubelet's socket for device plugins. All kubelets use this path, and remove what they find there.
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins/kubelet.sock";

/// Refuses to start on a machine with another kubelet, which would lose its device plugins.
pub(crate) fn refuse_other_kubelet() -> Result<()> {
    if !Path::new(DEVICE_PLUGINS).exists() {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{DEVICE_PLUGINS} exists: this machine is a Kubernetes node already, and the testbed's kubelets would take its \
         device plugins away. If no kubelet runs here, `testbed down` in the checkout whose cluster crashed, or remove it"
    )))
}

/// Removes all traces. This happens before the nodes' own folders are removed, because those show which
/// traces are ours. Traces that have the same name in every cluster are removed only if one of our clusters
/// is `known` to have run here.
pub(crate) fn remove(paths: &Paths, known: bool) -> Result<()> {
    for node in children(&paths.state().join("nodes")).iter().filter_map(|folder| folder.file_name()) {
        remove_of_containers(paths, &node.to_string_lossy())?;
    }
    for link in children(Path::new("/var/log/containers")) {
        if fs::read_link(&link).is_ok_and(|target| target.starts_with(paths.logs())) {
            paths::remove(link)?;
        }
    }
    if known {
        paths::remove(DEVICE_PLUGINS)?;
    }
    // Only empty folders are removed: others belong to something else.
    for folder in [
        "/var/lib/cni/results",
        "/var/lib/cni",
        "/var/log/containers",
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet",
        "/run/containerd/s",
        "/run/containerd",
    ] {
        let _ = fs::remove_dir(folder);
    }
    Ok(())
}

/// Removes the traces of one node's containers: the sockets of their shims and the cached results of their
/// networks.
pub(crate) fn remove_of_containers(paths: &Paths, node: &str) -> Result<()> {
    let sandboxes = children(&paths.node(node).join("containerd/io.containerd.grpc.v1.cri/sandboxes"));
    let ids: Vec<_> = sandboxes.iter().filter_map(|folder| folder.file_name()?.to_str()).collect();
    for id in &ids {
        // A shim's socket is named after the hash of its containerd's socket, namespace and sandbox.
        let hashed = Path::new(RUN).join(node).join("containerd.sock/k8s.io").join(id);
        let name = sha256(hashed.display().to_string().as_bytes());
        paths::remove(Path::new("/run/containerd/s").join(name))?;
    }
    // Every living shim also records where it listens.
    for bundle in children(&Path::new(RUN).join(node).join("containerd/io.containerd.runtime.v2.task/k8s.io"))
    {
        let address = fs::read_to_string(bundle.join("address")).unwrap_or_default();
        if let Some(socket) = address.trim().strip_prefix("unix://") {
            paths::remove(socket)?;
        }
    }
    for result in children(Path::new("/var/lib/cni/results")) {
        let name = result.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if ids.iter().any(|id| name.contains(id)) {
            paths::remove(result)?;
        }
    }
    Ok(())
}

fn children(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
