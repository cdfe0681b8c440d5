//! Flux: source-controller and kustomize-controller as processes of this machine.

use std::path::Path;

use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testbed::{KUSTOMIZE_CONTROLLER, Module, SOURCE_CONTROLLER};
use tests::program::mortal;
use tests::valkey::free_port;
use tokio::process::Command;

use crate::engine::{Engine, Managed, Report, list, text};
use crate::lab::Lab;

pub async fn start(lab: &Lab) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    let listen = || format!("127.0.0.1:{}", free_port());
    lab.testbed.apply("apiVersion: v1\nkind: Namespace\nmetadata: { name: flux-system }\n").unwrap();
    for module in [SOURCE_CONTROLLER, KUSTOMIZE_CONTROLLER] {
        let definitions = module.program(lab.testbed.paths()).unwrap().with_file_name("config/crd/bases");
        lab.apply_kinds(&["--filename", definitions.to_str().unwrap()]).await;
    }
    let mut programs = Vec::new();
    let mut start = |module: &Module, words: &[String]| {
        let program = module.program(lab.testbed.paths()).unwrap();
        let own = folder.path().join(module.name);
        std::fs::create_dir(&own).unwrap();
        let mut command = Command::from(mortal(&program));
        command.env_clear().envs(environment(lab, &own)).args(words);
        command.args([
            "--events-addr=",
            &format!("--metrics-addr={}", listen()),
            &format!("--health-addr={}", listen()),
        ]);
        programs.push(lab.start(module.name, &mut command));
    };
    let storage = listen();
    start(
        &SOURCE_CONTROLLER,
        &[
            format!("--storage-path={}", folder.path().display()),
            format!("--storage-addr={storage}"),
            format!("--storage-adv-addr={storage}"),
        ],
    );
    // As kustomize/gitops/flux requires: a commit does not wait for the runs of the previous one.
    let gates = "--feature-gates=CancelHealthCheckOnNewRevision=true".to_owned();
    start(&KUSTOMIZE_CONTROLLER, &[gates, "--requeue-dependency=2s".to_owned()]);
    lab.apply_glue("flux/dev");
    let kind = |group: &str, kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    let kustomization = kind("kustomize.toolkit.fluxcd.io", "Kustomization");
    Engine {
        name: "Flux",
        namespace: "flux-system",
        told: vec![
            ApiResource {
                plural: "gitrepositories".to_owned(),
                ..kind("source.toolkit.fluxcd.io", "GitRepository")
            },
            kustomization.clone(),
        ],
        application: kustomization,
        manager: "kustomize-controller",
        read,
        refresh: request,
        again: request,
        _programs: programs,
        _belongings: vec![Box::new(folder)],
    }
}

fn request(now: &str) -> Value {
    json!({"metadata": {"annotations": {"reconcile.fluxcd.io/requestedAt": now}}})
}

fn environment(lab: &Lab, own: &Path) -> Vec<(&'static str, String)> {
    let own = own.display().to_string();
    vec![
        ("KUBECONFIG", lab.testbed.paths().kubeconfig().display().to_string()),
        ("RUNTIME_NAMESPACE", "flux-system".to_owned()),
        ("HOME", own.clone()),
        ("TMPDIR", own),
        ("PATH", "/usr/bin:/bin".to_owned()),
    ]
}

fn read(kustomization: &Value) -> Report {
    let ready = list(kustomization, "/status/conditions").find(|condition| condition["type"] == "Ready");
    let ready = ready.cloned().unwrap_or_default();
    let current =
        kustomization.pointer("/status/observedGeneration") == kustomization.pointer("/metadata/generation");
    // main@sha1:…
    let revision = text(kustomization, "/status/lastAppliedRevision");
    Report {
        revision: revision.rsplit(':').next().unwrap_or_default().to_owned(),
        healthy: current && ready["status"] == "True",
        message: text(&ready, "/message"),
        asked: text(kustomization, "/status/lastHandledReconcileAt"),
        objects: list(kustomization, "/status/inventory/entries").map(managed).collect(),
    }
}

/// `<namespace>_<name>_<group>_<kind>`; only names of RBAC objects could contain more underscores.
fn managed(entry: &Value) -> Managed {
    let id = text(entry, "/id");
    let [namespace, name, group, kind] = id.split('_').collect::<Vec<_>>().try_into().unwrap();
    Managed {
        group: group.to_owned(),
        version: text(entry, "/v"),
        kind: kind.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}
