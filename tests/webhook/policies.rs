//! Policies in force: they change at once, select namespaces, and do no harm if they are hostile.

use std::time::Duration;

use serde_json::{Value, json};
use tests::examples::{pipeline, run, with};
use webhook::admit::Settings;
use webhook::server::Limits;

use crate::harness::Webhook;

fn policy(name: &str, cel: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [{ "name": "r", "message": "no", "cel": cel }] }
    })
}

/// No replica may judge by policies that are no longer in force.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_enforced_changed_and_withdrawn_at_once() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let allowed = async || client.create(&run()).await["allowed"] == true;
    assert!(allowed().await);
    webhook.policy(&policy("p", "object.spec.execution.parallelism <= 10"));
    assert!(!allowed().await);
    webhook.policy(&policy("p", "object.spec.execution.parallelism <= 20"));
    assert!(allowed().await);
    // Each of the two policies can deny.
    webhook.policy(&policy("q", "false"));
    assert!(!allowed().await);
    std::sync::Arc::make_mut(&mut webhook.world.write().policies).remove("q");
    assert!(allowed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_holds_in_the_namespaces_it_selects() {
    let webhook = Webhook::start();
    webhook.policy(&with(
        policy("p", "false"),
        "/spec/namespaceSelector",
        json!({ "matchLabels": { "env": "prod" } }),
    ));
    assert_eq!(webhook.client().create(&run()).await["allowed"], true);
    webhook.namespace("team-a", &[("env", "prod")]);
    assert_eq!(webhook.client().create(&run()).await["allowed"], false);
}

/// A namespace and its objects may arrive in one commit, faster than any watch.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_no_watch_has_brought_is_asked_for() {
    let webhook = Webhook::start();
    webhook.policy(&with(
        policy("p", "false"),
        "/spec/namespaceSelector",
        json!({ "matchLabels": { "env": "prod" } }),
    ));
    let labels = std::collections::BTreeMap::from([("env".to_owned(), "prod".to_owned())]);
    webhook.live.namespaces.lock().unwrap().insert("team-a".to_owned(), Ok(labels));
    assert_eq!(webhook.client().create(&run()).await["allowed"], false);
    // A failed lookup must not be a way around a policy.
    webhook.live.namespaces.lock().unwrap().insert("team-a".to_owned(), Err("timed out".to_owned()));
    let answer = webhook.client().create(&run()).await;
    assert!(answer["status"]["message"].as_str().unwrap().contains("try again"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn expressions_see_the_pipeline_of_a_run_and_who_asks() {
    let webhook = Webhook::start();
    webhook.policy(&policy("p", "pipeline == null || size(pipeline.spec.filters) < 2"));
    webhook.policy(&policy(
        "q",
        "request.userInfo.username == 'kim' && namespaceObject.metadata.name == 'team-a'",
    ));
    assert_eq!(webhook.client().create(&run()).await["allowed"], true);
    webhook.pipeline(&pipeline());
    assert_eq!(webhook.client().create(&run()).await["allowed"], false);
}

/// A run may follow its Pipeline faster than any watch.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_no_watch_has_brought_is_asked_for() {
    let webhook = Webhook::start();
    webhook.policy(&policy("p", "pipeline == null || size(pipeline.spec.filters) < 2"));
    let key = ("team-a".to_owned(), "thumbnails".to_owned());
    webhook.live.pipelines.lock().unwrap().insert(key.clone(), Ok(pipeline()));
    let client = webhook.client();
    assert_eq!(client.create(&run()).await["status"]["reason"], "Forbidden");
    // The rules know the Pipeline too.
    let outside = client.create(&with(run(), "/spec/source/prefix", json!("2025/"))).await;
    assert!(outside["status"]["message"].as_str().unwrap().contains("[run-prefix]"), "{outside}");
    // A failed lookup must not be a way around a policy.
    webhook.live.pipelines.lock().unwrap().insert(key, Err("timed out".to_owned()));
    let answer = client.create(&run()).await;
    assert!(answer["status"]["message"].as_str().unwrap().contains("try again"), "{answer}");
}

/// Concurrent hostile requests, each of which takes a second.
const FLOOD: u32 = 20;

/// The worst expression that is accepted at all, among other requests. The tests of the slots show that
/// others find one; this tests the same over the wire.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_policy_is_stopped_denies_and_holds_up_nobody_else() {
    let settings = Settings { policy_timeout: Duration::from_secs(1), evaluations: 2, ..Settings::default() };
    // The limit is so high that everyone gets an answer, however slowly.
    let webhook = Webhook::with(settings, Limits { answer: Duration::from_secs(600), ..Limits::default() });
    let slow = "lists.range(40).all(a, lists.range(40).all(b, lists.range(40).all(c, object.spec.source.prefix.matches('(a|b|[c-z])*' + string(a) + string(b) + string(c)) || true)))";
    for (name, cel) in [("slow", slow), ("polite", "object.spec.execution.parallelism <= 20")] {
        let selector = json!({ "matchLabels": { "policy": name } });
        webhook.policy(&with(policy(name, cel), "/spec/namespaceSelector", selector));
        webhook.namespace(name, &[("policy", name)]);
    }
    let client = webhook.client();
    let of = |namespace: &str| {
        let object = with(run(), "/metadata/namespace", json!(namespace));
        with(object, "/spec/queue", Value::Null)
    };
    assert_eq!(client.create(&of("slow")).await["allowed"], false);

    let flood: Vec<_> = (0..FLOOD)
        .map(|number| {
            let (client, object) =
                (client.clone(), with(of("slow"), "/metadata/name", json!(format!("n{number}"))));
            tokio::spawn(async move { client.create(&object).await["allowed"].clone() })
        })
        .collect();
    let flooded = || async { webhook.metrics.in_flight.get() == i64::from(FLOOD) };
    tests::eventually("all hostile requests are there", flooded).await;
    for _ in 0..5 {
        assert_eq!(client.create(&of("polite")).await["allowed"], true);
    }
    assert!(flood.iter().any(|hostile| !hostile.is_finished()), "others waited for the whole flood");
    flood.iter().for_each(tokio::task::JoinHandle::abort);
}

fn quota(limit: u32) -> Value {
    policy("quota", &format!("usage.activeRuns < {limit}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_counts_the_runs_that_are_active_in_the_namespace() {
    let webhook = Webhook::start();
    webhook.policy(&quota(2));
    let named = |name: &str| with(with(run(), "/metadata/name", json!(name)), "/spec/queue", Value::Null);
    webhook.run(&named("active"));
    webhook.run(&with(named("ended"), "/status", json!({ "phase": "Succeeded" })));
    webhook.run(&with(named("elsewhere"), "/metadata/namespace", json!("team-b")));
    let client = webhook.client();
    assert_eq!(client.create(&named("second")).await["allowed"], true);
    assert_eq!(client.create(&named("third")).await["allowed"], false);
    assert_eq!(client.create(&named("second")).await["allowed"], true, "it is no other of itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_runs_that_come_at_once_as_many_are_admitted_as_a_quota_has_room_for() {
    let webhook =
        Webhook::with(Settings::default(), Limits { answer: Duration::from_secs(600), ..Limits::default() });
    webhook.policy(&quota(3));
    // Holds requests between the reservation of the runId and the count.
    webhook.live.gate.close();
    let asked: Vec<_> = (0..8)
        .map(|number| {
            let object = with(run(), "/metadata/name", json!(format!("n{number}")));
            let (client, object) = (webhook.client(), with(object, "/spec/queue", Value::Null));
            tokio::spawn(async move { client.create(&object).await["allowed"] == true })
        })
        .collect();
    webhook.live.gate.holds(8).await;
    webhook.live.gate.open();
    let mut admitted = 0;
    for answer in asked {
        admitted += u32::from(answer.await.unwrap());
    }
    assert_eq!(admitted, 3);
}
