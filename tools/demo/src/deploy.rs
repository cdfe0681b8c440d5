//! Operator, webhook and Valkey: applied, awaited and removed again.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{Result, cluster::Cluster, kubectl::Kubectl, step};

/// The namespace of the product.
pub const NAMESPACE: &str = "openfilter-system";
/// The namespace of `examples/demo`.
pub const DEMO_NAMESPACE: &str = "openfilter-demo";
const OVERLAY: &str = "kustomize/overlays/dev";
/// Label on the namespace: the demo deployed this, so it may remove it.
const MARK: &str = "openfilter.demo/deployed";
/// Long enough to pull images.
const ROLLOUT_TIMEOUT: &str = "180s";
/// The API server reaches a webhook only some time after it is ready.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(180);

/// Deploys everything, unless a user's cluster has it already.
pub fn deploy(cluster: &Cluster) -> Result<()> {
    step("Operator, admission webhook and Valkey");
    let kubectl = &cluster.kubectl;
    if cluster.is_foreign() && is_installed(kubectl) && !is_ours(kubectl) {
        println!("OpenFilter Pipelines is already installed here and is used as it is.");
        return Ok(());
    }
    if cluster.is_foreign() {
        let rendered = cluster.adapt(&kubectl.ask(&["kustomize", OVERLAY])?);
        apply(kubectl, &["-f", &cluster.write_copy("openfilter.yaml", &rendered)?])?;
    } else {
        apply(kubectl, &["-k", OVERLAY])?;
    }
    wait(kubectl)
}

/// Applies the deployment. The mark comes first, so that the deployment of an interrupted demo is recognized.
/// Another field manager owns the mark, so that applying the deployment does not remove it.
fn apply(kubectl: &Kubectl, what: &[&str]) -> Result<()> {
    // Forced, because the demo decides about its own deployment, even if someone changed it by hand.
    let apply = ["apply", "--server-side", "--force-conflicts"];
    let marked = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {MARK: "true"}}});
    let mark = ["--field-manager=openfilter-demo", "-f", "-"];
    kubectl.ask_with(&marked.to_string(), &[&apply[..], &mark].concat())?;
    shorten(kubectl, &[&apply[..], what].concat())
}

/// Applies objects, and prints their number instead of each of them.
fn shorten(kubectl: &Kubectl, words: &[&str]) -> Result<()> {
    println!("$ kubectl {}", words.join(" "));
    println!("{} objects applied", kubectl.ask(words)?.lines().count());
    Ok(())
}

/// Waits for every Deployment and StatefulSet.
fn wait(kubectl: &Kubectl) -> Result<()> {
    let names = kubectl.ask(&["get", "statefulsets,deployments", "-n", NAMESPACE, "-o", "name"])?;
    for name in names.lines() {
        let name = name.replace(".apps/", "/");
        let timeout = format!("--timeout={ROLLOUT_TIMEOUT}");
        if let Err(error) = kubectl.show(&["rollout", "status", "-n", NAMESPACE, &name, &timeout]) {
            let pods = kubectl.ask(&["get", "pods", "-n", NAMESPACE, "-o", "json"])?;
            let reasons = reasons(&serde_json::from_str(&pods)?);
            return Err(
                format!("{error}\nwhy pods of {NAMESPACE} are not ready:\n{}", reasons.join("\n")).into()
            );
        }
    }
    Ok(())
}

/// Why pods are not ready, one line per reason.
fn reasons(pods: &Value) -> Vec<String> {
    let mut reasons = Vec::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        let mut say = |who: &str, what: &Value| {
            let text = |field: &str| what[field].as_str().unwrap_or_default().to_owned();
            reasons.push(format!("  {who}: {}: {}", text("reason"), text("message")));
        };
        for condition in pod["status"]["conditions"].as_array().into_iter().flatten() {
            if condition["type"] == "PodScheduled" && condition["status"] == "False" {
                say(name, condition);
            }
        }
        for list in ["initContainerStatuses", "containerStatuses"] {
            for status in pod["status"][list].as_array().into_iter().flatten() {
                let who = format!("{name}, {}", status["name"].as_str().unwrap_or_default());
                let waiting = &status["state"]["waiting"];
                let ended = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
                for what in [waiting].into_iter().chain(ended).filter(|what| what.is_object()) {
                    say(&who, what);
                }
            }
        }
    }
    if reasons.is_empty() {
        reasons.push(
            "  no reason is known; `kubectl get events` and the logs of the pods may tell more".to_owned(),
        );
    }
    reasons
}

/// Waits until the API server can call the webhook: until then it refuses everything.
pub fn wait_for_admission(kubectl: &Kubectl, manifest: &str) -> Result<()> {
    let deadline = Instant::now() + ADMISSION_TIMEOUT;
    loop {
        match kubectl.ask(&["apply", "--dry-run=server", "-f", manifest]) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline || !is_webhook_away(&error.to_string()) => {
                return Err(error);
            }
            Err(_) => thread::sleep(Duration::from_secs(1)),
        }
    }
}

/// Whether the API server could not call the webhook.
fn is_webhook_away(error: &str) -> bool {
    error.contains("failed calling webhook")
}

fn is_installed(kubectl: &Kubectl) -> bool {
    kubectl.ask(&["get", "deployment", "-n", NAMESPACE, "openfilter-operator"]).is_ok()
}

fn is_ours(kubectl: &Kubectl) -> bool {
    let marked = kubectl.ask(&["get", "namespace", "-l", &format!("{MARK}=true"), "-o", "name"]);
    marked.is_ok_and(|names| names.contains(NAMESPACE))
}

/// Removes what the demo created in a user's cluster, and nothing else.
pub fn remove(kubectl: &Kubectl) -> Result<()> {
    // First, while the operator still runs, because it cleans up after its runs.
    kubectl.show(&["delete", "namespace", DEMO_NAMESPACE, "--ignore-not-found"])?;
    if !is_ours(kubectl) {
        println!("OpenFilter Pipelines was not deployed by the demo, so it is not removed.");
        return Ok(());
    }
    let others = runs_of_others(kubectl)?;
    if !others.is_empty() {
        return Err(format!(
            "OpenFilter Pipelines is not removed, because that would also delete these runs: {}. Delete them first, then try again",
            others.join(", ")
        )
        .into());
    }
    kubectl.show(&["delete", "-k", OVERLAY, "--ignore-not-found"])?;
    Ok(())
}

/// Runs in other namespaces. The demo's own runs are gone by then.
fn runs_of_others(kubectl: &Kubectl) -> Result<Vec<String>> {
    let served = kubectl.ask(&[
        "get",
        "crd",
        "pipelineruns.filter.plainsight.ai",
        "--ignore-not-found",
        "-o",
        "name",
    ])?;
    if served.is_empty() {
        return Ok(Vec::new());
    }
    let names = r#"jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name}{"\n"}{end}"#;
    let runs = kubectl.ask(&["get", "pipelineruns", "--all-namespaces", "-o", names])?;
    Ok(runs.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use tempfile::TempDir;

    use super::*;

    /// A kubectl that answers according to these cases of a shell script, in a folder where it records its
    /// calls.
    fn fake(cases: &str) -> (Kubectl, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("#!/bin/sh\necho \"$*\" >>calls\ncase \"$*\" in\n{cases}\n*) ;;\nesac\n");
        // Written by another process, because a file that this one has open for writing cannot be executed.
        let mut write = Command::new("sh");
        write
            .args(["-c", "printf %s \"$0\" >kubectl && chmod +x kubectl", &script])
            .current_dir(folder.path());
        assert!(write.status().unwrap().success());
        (Kubectl::fake(folder.path().join("kubectl"), folder.path()), folder)
    }

    fn calls(folder: &TempDir) -> Vec<String> {
        fs::read_to_string(folder.path().join("calls")).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_demo_that_is_killed_while_it_deploys_has_left_its_mark() {
        let (kubectl, folder) = fake("*-k*) exit 1 ;;");
        apply(&kubectl, &["-k", OVERLAY]).unwrap_err();
        let calls = calls(&folder);
        assert!(
            calls[0].contains("--field-manager=openfilter-demo") && calls[1].contains(OVERLAY),
            "{calls:?}"
        );
    }

    #[test]
    fn a_deployment_that_others_use_stays() {
        let (ours, runs) = ("*namespace*-l*) echo namespace/openfilter-system ;;", "*get*crd*) echo crd ;;");
        let (kubectl, folder) = fake(&format!("{ours}\n{runs}\n*get*pipelineruns*) echo team-a/monday ;;"));
        let refused = remove(&kubectl).unwrap_err().to_string();
        assert!(refused.contains("team-a/monday"), "{refused}");
        let deleted = |folder: &TempDir| calls(folder).iter().any(|call| call.starts_with("delete -k"));
        assert!(!deleted(&folder));
        let (kubectl, folder) = fake(&format!("{ours}\n{runs}"));
        remove(&kubectl).unwrap();
        assert!(deleted(&folder));
    }

    #[test]
    fn pods_that_are_not_ready_say_why() {
        let pods = json!({"items": [
            {"metadata": {"name": "operator-1"}, "status": {"containerStatuses": [{"name": "operator",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {"terminated": {"reason": "Error", "message": "no VALKEY_URL"}}}]}},
            {"metadata": {"name": "valkey-0"}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no volume"}]}},
            {"metadata": {"name": "webhook-1"}, "status": {"containerStatuses": [
                {"name": "webhook", "ready": true, "state": {"running": {}}}]}}
        ]});
        assert_eq!(
            reasons(&pods),
            [
                "  operator-1, operator: CrashLoopBackOff: back-off 10s",
                "  operator-1, operator: Error: no VALKEY_URL",
                "  valkey-0: Unschedulable: no volume",
            ]
        );
        assert_eq!(reasons(&json!({"items": []})).len(), 1);
    }

    #[test]
    fn only_a_webhook_that_is_away_is_waited_for() {
        assert!(is_webhook_away(
            "Internal error occurred: failed calling webhook \"mutate\": connection refused"
        ));
        assert!(!is_webhook_away("admission webhook \"validate\" denied the request: Pipeline is not valid"));
    }
}
