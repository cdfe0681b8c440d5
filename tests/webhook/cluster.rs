//! Tests of the real program behind a real API server, with the answers as users read them.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crds::rules::Rule;
use futures::{StreamExt, stream};
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch};
use serde_json::{Value, json};
use testbed::Doing;
use tests::examples::{grant, pipeline, policy, run, with};
use tests::root;
use tests::rule_cases::{Case, cases};

use crate::on_cluster::{Cluster, WAIT};

/// The number of concurrent creates: enough that they compete, and few enough that the API server does not
/// time out on a busy machine.
const AT_ONCE: usize = 100;
/// How soon a changed policy is effective at the latest. Usually it takes a fraction of a second, but this
/// machine also runs the API server.
const SOON: Duration = Duration::from_secs(5);
/// Part of the webhook's answer to all but one of the creates with the same runId.
const TAKEN: &str = "belongs to PipelineRun";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_commit_is_dry_run_first_and_applied_in_an_unlucky_order() {
    let cluster = Cluster::start("commit").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    let (recipe, run) = (cluster.placed(pipeline(), "thumbnails"), cluster.run("monday"));

    // Flux dry-runs everything before it applies anything.
    for object in [&run, &recipe] {
        cluster.create(object, true).await.unwrap();
    }
    // Argo CD may apply the run before its Pipeline, and the Pipeline before its Secret.
    cluster.create(&run, false).await.unwrap();
    let refused = cluster.create(&recipe, false).await.unwrap_err();
    assert!(refused.contains("camera-keys\" does not exist"), "{refused}");
    cluster.create(&cluster.secret(), false).await.unwrap();
    cluster.create(&recipe, false).await.unwrap();

    let bad = with(cluster.run("tuesday"), "/spec/source/prefix", json!("2025/"));
    // On a dry run this is only a warning: the same commit could contain another prefix for the Pipeline.
    cluster.create(&bad, true).await.unwrap();
    let refused = cluster.create(&bad, false).await.unwrap_err();
    assert!(refused.contains("[run-prefix]"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn policies_are_soon_effective_on_all_replicas_and_have_a_status() {
    let cluster = Cluster::start("policy").await;
    let replicas = [cluster.replica().await, cluster.replica().await];
    cluster.route_to(&replicas[0]).await;
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": cluster.namespace.name } });
    let object = with(
        cluster.placed(policy(), &cluster.namespace.name),
        "/spec",
        json!({
            "appliesTo": ["PipelineRun"], "namespaceSelector": selector,
            "rules": [{ "name": "few", "message": "at most 10", "cel": "object.spec.execution.parallelism <= 10" }],
            "defaults": [{ "field": "spec.execution.maxFailedFiles", "value": "7" }]
        }),
    );
    let broken = with(object.clone(), "/spec/rules/0/cel", json!("objekt.spec"));
    let refused = cluster.create(&broken, false).await.unwrap_err();
    assert!(refused.contains("did you mean object?"), "{refused}");

    cluster.create(&object, false).await.unwrap();
    let api = cluster.api(&object);
    for (number, replica) in replicas.iter().enumerate() {
        cluster.route_to(replica).await;
        cluster.until_refused(&cluster.run("monday"), "at most 10").await;
        for round in 0..5 {
            let message = format!("at most 10, says change {number}.{round}.");
            let change = json!({ "spec": { "rules": [with(object["spec"]["rules"][0].clone(), "/message", json!(message))] } });
            api.patch(&cluster.namespace.name, &Default::default(), &Patch::Merge(change)).await.unwrap();
            let changed = Instant::now();
            cluster.until_refused(&cluster.run("monday"), &message).await;
            let elapsed = changed.elapsed();
            assert!(elapsed < SOON, "replica {number} needed {elapsed:?} for change {round}");
        }
    }
    let few = with(cluster.run("few"), "/spec/execution/parallelism", json!(5));
    let stored = cluster.create(&few, false).await.unwrap();
    assert_eq!(stored.data["spec"]["execution"]["maxFailedFiles"], "7");

    let status = async || {
        let found = api.get(&cluster.namespace.name).await.doing(|| "look at the policy".to_owned())?;
        Ok(found.data.pointer("/status/conditions/0/message").and_then(Value::as_str).map(str::to_owned))
    };
    let message = cluster.testbed.eventually("the policy has a status", WAIT, status).await.unwrap();
    assert_eq!(message, "1 rule and 1 default are in force");
    api.delete(&cluster.namespace.name, &Default::default()).await.unwrap();
}

/// This happens after a rollback from a version whose policies had more values.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_policy_that_cannot_be_read_says_so_in_its_status() {
    let cluster = Cluster::start("unreadable").await;
    let place = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/action/enum/-";
    let more = json!([{ "op": "add", "path": place, "value": "Audit" }]).to_string();
    let crd = ["patch", "crd", "pipelinepolicies.filter.plainsight.ai", "--type=json", "--patch", &more];
    let (patched, text) = cluster.kubectl(&crd, &Value::Null);
    assert!(patched, "{text}");
    let object = with(cluster.placed(policy(), &cluster.namespace.name), "/spec/action", json!("Audit"));
    let possible = async || Ok(cluster.create(&object, true).await.ok());
    cluster.testbed.eventually("policies can say more", WAIT, possible).await.unwrap();
    cluster.apply(&object);
    tests::crds_on_cluster::install(&cluster.testbed).await;
    cluster.until_refused(&with(object.clone(), "/metadata/name", json!("another")), "Audit").await;

    let _replica = cluster.replica().await;
    let api = cluster.api(&object);
    let status = async || {
        let found = api.get(&cluster.namespace.name).await.doing(|| "look at the policy".to_owned())?;
        Ok(found.data.pointer("/status/conditions/0").cloned())
    };
    let ready = cluster.testbed.eventually("the policy has a status", WAIT, status).await.unwrap();
    assert_eq!((&ready["type"], &ready["status"]), (&json!("Ready"), &json!("False")));
    assert!(ready["message"].as_str().unwrap().contains("it cannot be read"), "{ready}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn of_a_thousand_concurrent_creates_of_one_run_id_one_is_stored() {
    let cluster = Cluster::start("unique").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    let queue = json!({ "stream": "pr:unique:work", "group": "cg:unique" });
    let objects: Vec<Value> = (0..1000)
        .map(|number| with(cluster.run(&format!("run-{number}")), "/spec/queue", queue.clone()))
        .collect();
    let creates = objects.iter().map(|object| cluster.create(object, false));
    let (created, refused): (Vec<_>, Vec<_>) = stream::iter(creates)
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .partition(Result::is_ok);
    // A create that is refused for another reason, for example a timeout, did not compete.
    let other =
        refused.iter().filter_map(|refused| refused.as_ref().err()).find(|text| !text.contains(TAKEN));
    assert_eq!(other, None, "{} are created", created.len());
    let stored = cluster.api(&objects[0]).list(&Default::default()).await.unwrap().items;
    let names = |runs: &[&DynamicObject]| runs.iter().map(|run| run.name_any()).collect::<Vec<_>>();
    let created: Vec<&DynamicObject> = created.iter().filter_map(|created| created.as_ref().ok()).collect();
    assert_eq!(names(&created), names(&stored.iter().collect::<Vec<_>>()));
    assert_eq!(stored.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn with_the_webhook_down_nothing_is_stored_and_with_it_back_everything_works() {
    let cluster = Cluster::start("down").await;
    let replica = cluster.replica().await;
    cluster.route_to(&replica).await;
    cluster.create(&cluster.run("monday"), false).await.unwrap();
    drop(replica);
    let refused = cluster.create(&cluster.run("tuesday"), false).await.unwrap_err();
    assert!(refused.contains("failed calling webhook"), "{refused}");
    let back = cluster.replica().await;
    cluster.route_to(&back).await;
    let works = async || Ok(cluster.create(&cluster.run("tuesday"), false).await.ok());
    cluster.testbed.eventually("runs are stored again", WAIT, works).await.unwrap();
}

/// Tests every rule as users meet it: with kubectl, and with all other checks of the API server before and
/// after.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn every_rule_refuses_its_mistake_and_kubectl_shows_why() {
    let cluster = Cluster::start("rules").await;
    for name in ["team-a", "shared"] {
        cluster.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
    }
    for object in [with(cluster.secret(), "/metadata/namespace", json!("team-a")), grant(), pipeline()] {
        cluster.apply(&object);
    }
    let replica = cluster.replica().await;
    cluster.route_everything_to(&replica).await;
    let (mut answers, mut stored) = (Answers::default(), vec!["Pipeline", "ReferenceGrant"]);
    let (later, now): (Vec<Case>, Vec<Case>) =
        cases().into_iter().partition(|case| case.rule == Rule::Immutable);
    now.into_iter().for_each(|case| answers.collect(&cluster, case, &stored));
    cluster.apply(&run());
    stored.push("PipelineRun");
    later.into_iter().for_each(|case| answers.collect(&cluster, case, &stored));
    apply_and_patch_are_answered_in_our_words(&cluster);
    let Answers { text, ours, by_api_server } = answers;
    insta::assert_snapshot!(format!(
        "{ours} in our words, {by_api_server} in those of the API server\n{text}"
    ));
}

/// The output of kubectl for mistakes.
#[derive(Default)]
struct Answers {
    text: String,
    ours: usize,
    by_api_server: usize,
}

impl Answers {
    fn collect(
        &mut self,
        cluster: &Cluster,
        Case { rule, object, pointer, bad, good }: Case,
        stored: &[&str],
    ) {
        let kind = object()["kind"].as_str().unwrap().to_owned();
        // Not `apply`, which fills in missing fields from the stored object.
        let verb = if stored.contains(&kind.as_str()) { "replace" } else { "create" };
        let mistake = with(object(), pointer, bad);
        // Not a dry run, because there violations that depend on stored objects are only warnings.
        let (admitted, answer) = cluster.kubectl(&[verb, "-f", "-"], &mistake);
        assert!(!admitted, "{rule}: {pointer} was admitted: {answer}");
        let dry_run = "--dry-run=server";
        let correct = cluster.kubectl(&[verb, dry_run, "-f", "-"], &with(object(), pointer, good));
        assert!(correct.0, "{rule}: the correction of {pointer} was refused: {}", correct.1);

        let judged_alone = ["Pipeline", "PipelineRun"].contains(&kind.as_str());
        let words = words_of_the_webhook(&answer);
        assert!(
            words.is_some() || !judged_alone || rule == Rule::UnknownField,
            "the API server refused {rule}: {pointer} before the webhook could explain it: {answer}"
        );
        *if words.is_some() { &mut self.ours } else { &mut self.by_api_server } += 1;
        writeln!(self.text, "--- {rule}: {pointer}\n{}", sorted(&answer)).unwrap();

        let apply = ["apply", "--server-side", "--force-conflicts", dry_run, "-f", "-"];
        let (admitted, answer) = cluster.kubectl(&apply, &mistake);
        // Included only where it differs, because the API server checks types itself.
        if !admitted && words_of_the_webhook(&answer) != words {
            writeln!(self.text, "with --server-side: {}", sorted(&answer)).unwrap();
        }
    }
}

/// The commands that people type, which send other requests than `create` and `replace`: `kubectl apply` of
/// new and of stored objects, and `kubectl patch`. Everything that is used here is stored already.
fn apply_and_patch_are_answered_in_our_words(cluster: &Cluster) {
    let refused = |arguments: &[&str], object: &Value, title: &str, rule: Rule| {
        let (admitted, answer) = cluster.kubectl(arguments, object);
        let words = words_of_the_webhook(&answer).unwrap_or_default();
        let (title, id) = (format!("{title} is not valid:\n"), format!("[{rule}]"));
        assert!(
            !admitted && words.starts_with(&title) && words.contains(&id),
            "{arguments:?} of {rule}: {answer}"
        );
    };
    let apply = ["apply", "-f", "-"];
    let name = with(run(), "/metadata/name", json!("Monday_Run"));
    refused(&apply, &name, "PipelineRun \"team-a/Monday_Run\"", Rule::ObjectName);
    for (object, pointer, bad, rule) in [
        (pipeline(), "/spec/source/bucket/name", json!("Camera_Images"), Rule::BucketName),
        (pipeline(), "/spec/order", json!("Sequentail"), Rule::UnknownValue),
        (pipeline(), "/spec/source/include", json!("*.jpg"), Rule::WrongType),
        (run(), "/spec/execution/parallelism", json!("20"), Rule::WrongType),
        (run(), "/spec/execution/nonRetryableExitCodes", json!([3, 3]), Rule::ListUnique),
        (run(), "/spec/execution/maxAttempts", json!(5), Rule::Immutable),
    ] {
        let text = |pointer: &str| object.pointer(pointer).unwrap().as_str().unwrap().to_owned();
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        let mistake = with(object.clone(), pointer, bad.clone());
        if rule != Rule::Immutable {
            let new = with(mistake.clone(), "/metadata/name", json!("another"));
            refused(&apply, &new, &format!("{kind} \"team-a/another\""), rule);
        }
        let title = format!("{kind} \"team-a/{name}\"");
        refused(&apply, &mistake, &title, rule);
        let keys = pointer.rsplit('/').filter(|key| !key.is_empty());
        let change = keys.fold(bad, |inner, key| json!({ key: inner })).to_string();
        let patch = ["patch", &kind, &name, "--namespace=team-a", "--type=merge", "--patch", &change];
        for dry_run in ["--dry-run=none", "--dry-run=server"] {
            refused(&[&patch[..], &[dry_run]].concat(), &Value::Null, &title, rule);
        }
    }
}

/// The part of the answer after kubectl's own introduction.
fn words_of_the_webhook(answer: &str) -> Option<&str> {
    answer.split_once("denied the request: ").map(|(_, words)| words.trim_end())
}

/// Sorts the violations of the API server's own rules, which it lists in any order.
fn sorted(answer: &str) -> String {
    let mut lines: Vec<&str> = answer.trim_end().lines().collect();
    lines.sort_by_key(|line| line.starts_with("* ").then_some(*line));
    lines.join("\n")
}

/// Tests the ready-made policies and their equivalents inside the API server, in the namespaces that their
/// examples name.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn the_ready_made_policies_judge_their_examples_through_the_api_server() {
    let cluster = Cluster::start("ready").await;
    let replica = cluster.replica().await;
    cluster.route_everything_to(&replica).await;
    let mut folders: Vec<PathBuf> =
        fs::read_dir(root().join("policies")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let read = |file: &str| -> Vec<Value> {
            let Ok(text) = fs::read_to_string(folder.join(file)) else { return Vec::new() };
            serde_saphyr::from_multiple(&text).unwrap()
        };
        let targets = read("policy.yaml")[0]["spec"]["appliesTo"].clone();
        let examples = |file: &str| -> Vec<Value> {
            let (namespaces, objects): (Vec<Value>, Vec<Value>) =
                read(file).into_iter().partition(|object| object["kind"] == "Namespace");
            let named = objects
                .iter()
                .map(|object| &object["metadata"]["namespace"])
                .map(|name| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
            // Namespaces with labels come last, so that their labels take effect.
            named.chain(namespaces).filter(|object| object["metadata"]["name"] != "default").for_each(
                |namespace| {
                    cluster.apply(&namespace);
                },
            );
            // Objects that the policy does not apply to are needed by those that it does, for example the
            // Pipeline of a run.
            let (judged, others): (Vec<Value>, Vec<Value>) =
                objects.into_iter().partition(|object| targets.as_array().unwrap().contains(&object["kind"]));
            others.iter().for_each(|object| cluster.apply(object));
            judged
        };
        for (engine, policies) in
            [("policy", read("policy.yaml")), ("ValidatingAdmissionPolicy", read("vap.yaml"))]
        {
            policies.iter().for_each(|policy| cluster.apply(policy));
            if policies.is_empty() {
                continue;
            }
            let rejected = examples("reject.yaml");
            for object in &rejected {
                let by = if engine == "policy" {
                    format!("[policy {name}/")
                } else {
                    format!("'openfilter-{name}'")
                };
                let refused = async || {
                    Ok(cluster.create_for_real(object).await?.err().filter(|message| message.contains(&by)))
                };
                let what = format!("{} is refused by {engine} {name}", object["metadata"]["name"]);
                cluster.testbed.eventually(&what, WAIT, refused).await.unwrap();
            }
            let accepted = examples("accept.yaml");
            for object in &accepted {
                let admitted = async || Ok(cluster.create_for_real(object).await?.ok());
                let what = format!("{} is admitted by {engine} {name}", object["metadata"]["name"]);
                cluster.testbed.eventually(&what, WAIT, admitted).await.unwrap();
            }
            for policy in policies.iter().rev() {
                let kind = policy["kind"].as_str().unwrap();
                let gone = cluster
                    .kubectl(&["delete", kind, policy["metadata"]["name"].as_str().unwrap()], &Value::Null);
                assert!(gone.0, "{}", gone.1);
            }
            // Removes the objects that the examples need: the next examples have others of the same names.
            cluster.kubectl(&["delete", "pipelines", "--all", "--all-namespaces"], &Value::Null);
            let forgotten = async || Ok(cluster.create_for_real(&rejected[0]).await?.ok());
            cluster
                .testbed
                .eventually(&format!("{engine} {name} is forgotten"), WAIT, forgotten)
                .await
                .unwrap();
        }
    }
}
