//! Argo CD: its repo server and its two controllers as processes of this machine.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testbed::{ARGOCD, KUSTOMIZE};
use tests::program::mortal;
use tests::root;
use tests::valkey::{Flavor, TestServer, free_port};
use tokio::process::Command;

use crate::engine::{Engine, Managed, Report, list, text};
use crate::lab::Lab;

/// What every installation of Argo CD has, beside the settings of kustomize/gitops/argocd.
const INSTALLATION: &str = "
apiVersion: v1
kind: ConfigMap
metadata: { name: argocd-rbac-cm, namespace: argocd, labels: { app.kubernetes.io/part-of: argocd } }
---
apiVersion: v1
kind: ConfigMap
metadata: { name: argocd-cmd-params-cm, namespace: argocd, labels: { app.kubernetes.io/part-of: argocd } }
---
apiVersion: v1
kind: Secret
metadata: { name: argocd-secret, namespace: argocd, labels: { app.kubernetes.io/part-of: argocd } }
stringData: { server.secretkey: of-this-test }
---
apiVersion: argoproj.io/v1alpha1
kind: AppProject
metadata: { name: default, namespace: argocd }
spec: {}
";

pub async fn start(lab: &Lab) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    let program = ARGOCD.program(lab.testbed.paths()).unwrap();
    lab.testbed.apply("apiVersion: v1\nkind: Namespace\nmetadata: { name: argocd }\n").unwrap();
    let definitions = program.with_file_name("manifests/crds");
    lab.apply_kinds(&["--kustomize", definitions.to_str().unwrap()]).await;
    lab.testbed.apply(INSTALLATION).unwrap();
    let settings = fs::read_to_string(root().join("kustomize/gitops/argocd/argocd-cm.yaml")).unwrap();
    lab.testbed.apply(&settings).unwrap();
    prepare(lab, folder.path(), program.parent().unwrap());

    let redis = TestServer::start(Flavor::Redis).await;
    let redis_address = format!("127.0.0.1:{}", redis.port());
    let (repositories, listen) = (free_port().to_string(), || format!("127.0.0.1:{}", free_port()));
    let repository_server = format!("127.0.0.1:{repositories}");
    let start = |name: &str, words: &[&str]| {
        let mut command = Command::from(mortal(&program));
        command.env_clear().envs(environment(folder.path())).env("ARGOCD_BINARY_NAME", name).args(words);
        lab.start(name, &mut command)
    };
    let port = || free_port().to_string();
    let programs = vec![
            start(
                "argocd-repo-server",
                &[
                    &[
                        "--address",
                        "127.0.0.1",
                        "--port",
                        &repositories,
                        "--disable-tls",
                        "--client-ca-path=",
                    ][..],
                    &["--metrics-address", "127.0.0.1", "--metrics-port", &port(), "--redis", &redis_address],
                ]
                .concat(),
            ),
            start(
                "argocd-application-controller",
                &[
                    &[
                        "--namespace",
                        "argocd",
                        "--repo-server",
                        &repository_server,
                        "--repo-server-plaintext",
                    ][..],
                    &["--metrics-port", &port(), "--redis", &redis_address, "--persist-resource-health"],
                ]
                .concat(),
            ),
            start(
                "argocd-applicationset-controller",
                &[
                    &[
                        "--namespace",
                        "argocd",
                        "--argocd-repo-server",
                        &repository_server,
                        "--repo-server-plaintext",
                    ][..],
                    &["--metrics-addr", &listen(), "--probe-addr", &listen(), "--webhook-addr", &listen()],
                ]
                .concat(),
            ),
        ];
    lab.apply_glue("argocd/dev");
    let application = ApiResource::from_gvk(&GroupVersionKind::gvk("argoproj.io", "v1alpha1", "Application"));
    Engine {
        name: "Argo CD",
        namespace: "argocd",
        told: vec![application.clone()],
        application,
        manager: "argocd-controller",
        read,
        refresh: |_| json!({"metadata": {"annotations": {"argocd.argoproj.io/refresh": "normal"}}}),
        // Exactly what `argocd app sync` writes.
        again: |now| {
            let sync = json!({"prune": true, "syncOptions": ["ServerSideApply=true"]});
            json!({"operation": {"info": [{"name": "asked", "value": now}], "sync": sync}})
        },
        _programs: programs,
        _belongings: vec![Box::new(folder), Box::new(redis)],
    }
}

/// The tools that it calls, its kubeconfig, and the folders that it expects.
fn prepare(lab: &Lab, folder: &Path, build: &Path) {
    for name in ["bin", "home", "tls", "ssh", "gpg"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    symlink(KUSTOMIZE.program(lab.testbed.paths()).unwrap(), folder.join("bin/kustomize")).unwrap();
    for script in ["git-verify-wrapper.sh", "gpg-wrapper.sh"] {
        let copy = folder.join("bin").join(script);
        fs::copy(build.join("hack").join(script), &copy).unwrap();
        fs::set_permissions(copy, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let text = fs::read_to_string(lab.testbed.paths().kubeconfig()).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["contexts"][0]["context"]["namespace"] = json!("argocd");
    fs::write(folder.join("kubeconfig"), config.to_string()).unwrap();
}

fn environment(folder: &Path) -> Vec<(&'static str, String)> {
    let own = |name: &str| folder.join(name).display().to_string();
    vec![
        ("KUBECONFIG", own("kubeconfig")),
        ("HOME", own("home")),
        ("TMPDIR", own("home")),
        ("PATH", format!("{}:/usr/bin:/bin", own("bin"))),
        ("ARGOCD_TLS_DATA_PATH", own("tls")),
        ("ARGOCD_SSH_DATA_PATH", own("ssh")),
        ("ARGOCD_GPG_DATA_PATH", own("gpg")),
        ("ARGOCD_GNUPGHOME", own("gpg")),
        ("ARGOCD_PLUGINSOCKFILEPATH", own("home")),
        ("ARGOCD_GPG_ENABLED", "false".to_owned()),
        // The kubeconfig's cluster is the one that it runs in.
        ("ARGOCD_FAKE_IN_CLUSTER", "true".to_owned()),
        ("ARGOCD_RECONCILIATION_TIMEOUT", "5s".to_owned()),
        ("ARGOCD_RECONCILIATION_JITTER", "0s".to_owned()),
    ]
}

fn read(application: &Value) -> Report {
    let state = |pointer: &str| text(application, &format!("/status/{pointer}"));
    let results = list(application, "/status/operationState/syncResult/resources");
    let resources = || list(application, "/status/resources");
    let healths = resources().map(|object| text(object, "/health/message"));
    let told = results.map(|result| text(result, "/message")).chain(healths);
    let told =
        told.chain(list(application, "/status/conditions").map(|condition| text(condition, "/message")));
    let is_settled = state("sync/status") == "Synced" && state("operationState/phase") == "Succeeded";
    Report {
        revision: state("sync/revision"),
        healthy: is_settled && state("health/status") == "Healthy",
        message: [state("operationState/message")].into_iter().chain(told).collect::<Vec<_>>().join("\n"),
        asked: state("operationState/operation/info/0/value"),
        objects: resources().map(managed).collect(),
    }
}

fn managed(object: &Value) -> Managed {
    let part = |name: &str| text(object, &format!("/{name}"));
    Managed {
        group: part("group"),
        version: part("version"),
        kind: part("kind"),
        namespace: part("namespace"),
        name: part("name"),
    }
}
