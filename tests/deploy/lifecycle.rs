//! From an empty cluster to a run and back to an empty cluster: docs/install.md, followed on a real cluster.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tests::root;

use crate::harness::{Cluster, SYSTEM, build, pipeline, run};
use crate::manifests::{INSTALL, overlay};
use crate::replicas;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn dev_is_installed_runs_a_pipeline_and_goes_without_what_users_have() {
    let cluster = Cluster::start().await;
    every_overlay_is_valid_to_the_api_server(&cluster);

    cluster.install("kustomize/overlays/dev");
    what_is_applied_again_changes_nothing(&cluster).await;
    policies_are_judged_by_the_webhook(&cluster);

    let restricted = [("pod-security.kubernetes.io/enforce", "restricted")];
    let user = cluster.testbed.labelled_namespace("user", &restricted).await.unwrap();
    cluster.prepare_user(&user.name, 3).await;
    mistakes_are_refused_with_a_message(&cluster, &user.name).await;
    cluster.apply(&[run(&user.name, "first")], &[]).unwrap();
    cluster.wait_for(&user.name, "first", "condition=Succeeded");
    let shown =
        cluster.kubectl(&["-n", &user.name, "get", "plr", "first", "-o", "jsonpath={.status.counts}"]);
    let counts: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&counts["totalFiles"], &counts["succeeded"]), (&json!(3), &json!(3)), "{shown}");

    people_have_the_rights_of_their_roles(&cluster, &user.name).await;
    replicas::each_goes_under_load_and_no_request_fails(&cluster, &user.name).await;
    replicas::each_is_killed_under_load_and_the_other_goes_on(&cluster, &user.name).await;
    a_running_run_is_changed_and_deleted(&cluster, &user.name).await;
    without_the_webhook_nothing_is_created_and_everything_can_go(&cluster, &user.name).await;
    a_run_is_deleted_while_valkey_is_away(&cluster, &user.name).await;
    cluster.assert_nothing_was_forbidden(&["openfilter-operator", "openfilter-webhook"]);

    // In the order of docs/install.md: runs while their operator still works, then everything else.
    cluster.kubectl(&["delete", "pipelineruns", "--all", "--all-namespaces", "--timeout=120s"]);
    let dev = overlay("dev");
    cluster.kubectl(&["delete", "--kustomize", dev.to_str().unwrap(), "--timeout=180s"]);
    nothing_of_ours_is_left(&cluster);
    users_have_what_is_theirs(&cluster, &user.name).await;
}

fn every_overlay_is_valid_to_the_api_server(cluster: &Cluster) {
    cluster.kubectl(&["apply", "--server-side", "--kustomize", root().join("crds").to_str().unwrap()]);
    // Only the CRDs of cert-manager and the Prometheus operator, without their controllers.
    let others = testbed::definitions(cluster.testbed.paths()).unwrap();
    let others = ["--filename", others.to_str().unwrap()];
    cluster.kubectl(&[&["apply", "--server-side"], &others[..]].concat());
    let ours = "--selector=app.kubernetes.io/part-of=openfilter";
    for crds in [&["crd", ours][..], &others] {
        cluster.kubectl(&[&["wait", "--for=condition=Established", "--timeout=60s"], crds].concat());
    }
    let folders = ["dev", "staging", "prod"].map(|name| (name, overlay(name)));
    for (name, folder) in folders.into_iter().chain([(INSTALL, root().join(INSTALL))]) {
        let objects = build(&cluster.testbed, &folder);
        // A dry run does not create the namespace that the other objects need.
        let namespace = objects.iter().find(|object| object["kind"] == "Namespace").unwrap();
        cluster.apply(std::slice::from_ref(namespace), &[]).unwrap();
        let tried = cluster.apply(&objects, &["--dry-run=server", "--validate=strict"]);
        let tried = tried.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            tried.lines().filter(|line| line.contains("dry run")).count(),
            objects.len(),
            "{name}: {tried}"
        );
    }
    cluster.kubectl(&[&["delete", "--timeout=60s"], &others[..]].concat());
}

/// Applying again neither reverts `caBundle`, which the webhook wrote meanwhile, nor reports it as a
/// difference.
async fn what_is_applied_again_changes_nothing(cluster: &Cluster) {
    let bundle = || {
        let path = "jsonpath={.webhooks[*].clientConfig.caBundle}";
        let kinds = ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"];
        kinds.map(|kind| cluster.kubectl(&["get", kind, "openfilter-webhook", "-o", path]))
    };
    cluster
        .eventually("the API server trusts the webhook", || bundle().iter().all(|text| !text.is_empty()))
        .await;
    let before = bundle();
    let dev = overlay("dev");
    // `kubectl diff` exits with 1 if there is a difference.
    cluster.kubectl(&["diff", "--server-side", "--kustomize", dev.to_str().unwrap()]);
    cluster.kubectl(&["apply", "--server-side", "--kustomize", dev.to_str().unwrap()]);
    assert_eq!(bundle(), before);
}

fn policies_are_judged_by_the_webhook(cluster: &Cluster) {
    for name in ["staging", "prod"] {
        let mut policies = build(&cluster.testbed, &overlay(name));
        policies.retain(|object| object["kind"] == "PipelinePolicy");
        cluster.apply(&policies, &["--dry-run=server"]).unwrap_or_else(|error| panic!("{name}: {error}"));
        policies[0]["spec"]["rules"] =
            json!([{"name": "typo", "message": "m", "cel": "objekt.spec != null"}]);
        let refused = cluster.apply(&policies[..1], &["--dry-run=server"]).unwrap_err();
        assert!(refused.contains("admission webhook \"pipelinepolicies.validate."), "{refused}");
    }
}

async fn mistakes_are_refused_with_a_message(cluster: &Cluster, namespace: &str) {
    let mut keyless = pipeline(namespace);
    keyless["spec"]["source"]["bucket"]["credentialsSecret"]["name"] = json!("no-such-keys");
    let refused = cluster.apply(&[keyless], &[]).unwrap_err();
    assert!(refused.contains("no-such-keys\" does not exist; create it first"), "{refused}");
    cluster.apply(&[pipeline(namespace)], &[]).unwrap();
    let mut outside = run(namespace, "outside");
    outside["spec"]["source"] = json!({"prefix": "elsewhere/"});
    // Refused at once, even if the watch of the answering replica has not delivered the Pipeline yet.
    let refused = cluster.apply(&[outside], &[]).unwrap_err();
    assert!(refused.contains("[run-prefix]"), "{refused}");
}

async fn people_have_the_rights_of_their_roles(cluster: &Cluster, namespace: &str) {
    for role in ["view", "edit", "admin"] {
        let (cluster_role, user) = (format!("--clusterrole={role}"), format!("--user=test-{role}"));
        cluster.kubectl(&[
            "-n",
            namespace,
            "create",
            "rolebinding",
            &format!("test-{role}"),
            &cluster_role,
            &user,
        ]);
    }
    let may = |role: &str, verb: &str, resource: &str| {
        let user = format!("--as=test-{role}");
        cluster.try_kubectl(&["-n", namespace, "auth", "can-i", verb, resource, &user]).is_ok()
    };
    // Controllers aggregate our rights into the default roles of every cluster.
    cluster.eventually("view may see runs", || may("view", "list", "pipelineruns")).await;
    cluster.eventually("edit may start runs", || may("edit", "create", "pipelineruns")).await;
    cluster.eventually("admin may grant", || may("admin", "create", "referencegrants")).await;
    assert!(!may("view", "create", "pipelineruns") && !may("edit", "create", "referencegrants"));
    assert!(may("admin", "delete", "pipelines") && !may("admin", "create", "pipelinepolicies"));
}

/// Covers rights that an uneventful run never uses.
async fn a_running_run_is_changed_and_deleted(cluster: &Cluster, namespace: &str) {
    cluster.services.s3.put(namespace, "in/slow", "sleep 600").await.unwrap();
    cluster.apply(&[run(namespace, "slow")], &[]).unwrap();
    cluster.wait_for(namespace, "slow", "jsonpath={.status.counts.running}=1");
    cluster.kubectl(&[
        "-n",
        namespace,
        "patch",
        "plr",
        "slow",
        "--type=merge",
        "--patch",
        r#"{"spec":{"execution":{"parallelism":1}}}"#,
    ]);
    let job = ["-n", namespace, "get", "job", "slow-job", "-o", "jsonpath={.spec.parallelism}"];
    cluster.eventually("the Job has the new parallelism", || cluster.kubectl(&job) == "1").await;
    cluster.kubectl(&["-n", namespace, "delete", "plr", "slow", "--timeout=60s"]);
    let pods = ["-n", namespace, "get", "pods", "-l", "filter.plainsight.ai/pipelinerun=slow", "-o", "name"];
    cluster.eventually("its pods are gone", || cluster.kubectl(&pods).is_empty()).await;
}

/// The conditions and rules of base/admission.yaml exist for these cases.
async fn without_the_webhook_nothing_is_created_and_everything_can_go(cluster: &Cluster, namespace: &str) {
    let short = |name: &str| {
        let mut run = run(namespace, name);
        run["spec"]["source"] = json!({"prefix": "in/0"});
        run
    };
    cluster.apply(&[short("short")], &[]).unwrap();
    cluster.wait_for(namespace, "short", "condition=Succeeded");
    let scale = |replicas: &str| {
        cluster.kubectl(&["-n", SYSTEM, "scale", "deployment/openfilter-webhook", "--replicas", replicas]);
    };
    let mut held = pipeline(namespace);
    held["metadata"]["name"] = json!("held");
    held["metadata"]["finalizers"] = json!(["example.com/held"]);
    cluster.apply(&[held], &[]).unwrap();
    cluster.assert_nothing_was_forbidden(&["openfilter-webhook"]);
    scale("0");
    let pods = ["-n", SYSTEM, "get", "pods", "-l", "app.kubernetes.io/name=openfilter-webhook", "-o", "name"];
    cluster.eventually("the webhook is away", || cluster.kubectl(&pods).is_empty()).await;
    let refused = cluster.apply(&[short("late")], &[]).unwrap_err();
    assert!(refused.contains("failed calling webhook"), "{refused}");
    // GitOps engines do this all day.
    cluster.apply(&[pipeline(namespace)], &[]).unwrap();
    // Removing the finalizer is a change of an object that is being deleted.
    cluster.kubectl(&["-n", namespace, "delete", "plr", "short", "--timeout=60s"]);
    // An object held by a finalizer can be released, but not changed past the rules.
    cluster.kubectl(&["-n", namespace, "delete", "pipelines", "held", "--wait=false"]);
    let patch = |patch: Value| {
        let patch = patch.to_string();
        cluster.try_kubectl(&["-n", namespace, "patch", "pipelines", "held", "--type=merge", "-p", &patch])
    };
    patch(json!({"metadata": {"labels": {"a": "b"}}})).unwrap();
    let refused = patch(json!({"spec": {"source": {"bucket": {"prefix": "elsewhere/"}}}})).unwrap_err();
    assert!(refused.contains("failed calling webhook"), "{refused}");
    patch(json!({"metadata": {"finalizers": null}})).unwrap();
    scale("2");
    cluster.kubectl(&["-n", SYSTEM, "rollout", "status", "deployment/openfilter-webhook", "--timeout=120s"]);
}

/// If the operator cannot remove something from Valkey, it records that in its namespace and removes it
/// later.
async fn a_run_is_deleted_while_valkey_is_away(cluster: &Cluster, namespace: &str) {
    let scale = |replicas: &str| {
        cluster.kubectl(&["-n", SYSTEM, "scale", "statefulset/openfilter-valkey", "--replicas", replicas]);
    };
    scale("0");
    let valkey =
        ["-n", SYSTEM, "get", "pods", "-l", "app.kubernetes.io/name=openfilter-valkey", "-o", "name"];
    cluster.eventually("Valkey is away", || cluster.kubectl(&valkey).is_empty()).await;
    cluster.kubectl(&["-n", namespace, "delete", "plr", "first", "--timeout=120s"]);
    let note = ["-n", SYSTEM, "get", "configmap", "openfilter-operator-cleanup", "-o", "jsonpath={.data}"];
    assert!(cluster.kubectl(&note).contains("pr:"), "what is left to do is written down");
    scale("1");
    cluster.eventually("what was left is done", || !cluster.kubectl(&note).contains("pr:")).await;
}

fn nothing_of_ours_is_left(cluster: &Cluster) {
    let kinds = "namespaces,crds,clusterroles,clusterrolebindings,validatingwebhookconfigurations,mutatingwebhookconfigurations";
    let left = cluster.kubectl(&["get", kinds, "-o", "name"]);
    let ours: Vec<&str> = left
        .lines()
        .filter(|name| name.contains("openfilter") || name.contains("filter.plainsight.ai"))
        .collect();
    assert_eq!(ours, Vec::<&str>::new());
}

async fn users_have_what_is_theirs(cluster: &Cluster, namespace: &str) {
    let left =
        cluster.kubectl(&["-n", namespace, "get", "secrets,jobs,pods,controllerrevisions", "-o", "name"]);
    assert_eq!(
        left.lines().collect::<BTreeSet<_>>(),
        ["secret/keys"].into(),
        "the user's, and nothing of the runs"
    );
    for number in 0..3 {
        for key in [format!("in/{number}"), format!("out/{number}/copy")] {
            cluster.services.s3.get(namespace, &key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
        }
    }
}
