//! Fake nodes for scale: KWOK acts for them, and pods on them "run" without a container.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::{
    command,
    control_plane::{NODE_GRACE, PART},
    error::{Doing, Result},
    gobuild, network,
    paths::{self, Paths},
    process::Program,
};

/// Pods per fake node: the default of a real node.
const PODS_MAX: u32 = 110;

/// The taint, label and annotation of a fake node; pods for fake nodes tolerate and select it.
pub const MARK: &str = "kwok.x-k8s.io/node";

/// The life of fake nodes and pods: Ready at once, and a Job's pods complete at once. These files come from
/// the KWOK that is built.
const STAGES: [&str; 5] = [
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
];

/// Starts KWOK and creates the nodes.
pub(crate) async fn start(paths: &Paths, client: &Client, nodes: u32) -> Result<()> {
    let words = vec![
        gobuild::KWOK.program(paths)?.display().to_string(),
        format!("--kubeconfig={}", paths.kubeconfig().display()),
        format!("--manage-nodes-with-annotation-selector={MARK}=fake"),
        format!("--node-ip={}", network::HOST_IP),
        // Renew as rarely as the control plane allows, because every renewal is a write.
        format!("--node-lease-duration-seconds={}", NODE_GRACE.as_secs()),
        format!("--config={}", stages(paths)?.display()),
        format!("--cidr={}", network::KWOK_RANGE),
    ];
    Program { name: "kwok".to_owned(), part: PART.to_owned(), netns: None, words }.start(paths)?;
    let api: Api<ApiNode> = Api::all(client.clone());
    for number in 1..=nodes {
        let name = format!("kwok-{number}");
        let resources = json!({"cpu": "32", "memory": "256Gi", "pods": PODS_MAX});
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "annotations": {MARK: "fake"}, "labels": {
                MARK: "fake", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
            "spec": {"taints": [{"key": MARK, "value": "fake", "effect": "NoSchedule"}]},
            "status": {"allocatable": resources, "capacity": resources},
        });
        let manager = PatchParams::apply("testbed").force();
        api.patch(&name, &manager, &Patch::Apply(&node)).await.doing(|| format!("create the node {name}"))?;
        api.patch_status(&name, &manager, &Patch::Apply(&node))
            .await
            .doing(|| format!("set the size of the node {name}"))?;
    }
    Ok(())
}

/// Joins the stages from KWOK's source into one file.
fn stages(paths: &Paths) -> Result<PathBuf> {
    let doing = "find the source of KWOK";
    let mut go = Command::new("go");
    go.args(["mod", "download", "-json", "sigs.k8s.io/kwok"]).current_dir(paths.testbed("go/kwok"));
    let module: serde_json::Value =
        serde_json::from_str(&command::finish(doing, &mut go)?).doing(|| doing.to_owned())?;
    let folder = Path::new(module["Dir"].as_str().unwrap_or_default()).join("kustomize/stage");
    let texts = STAGES.iter().map(|stage| paths::read(folder.join(stage))).collect::<Result<Vec<_>>>()?;
    let file = paths.state().join("kwok-stages.yaml");
    paths::write(&file, texts.join("\n---\n"))?;
    Ok(file)
}
