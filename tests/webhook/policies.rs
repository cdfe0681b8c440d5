//! Policies in force: changed at once, selected by namespace, and harmless when they are hostile.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::examples::{pipeline, run, with};
use webhook::admit::Settings;
use webhook::server::Limits;

use crate::harness::{Webhook, over, review};

fn policy(name: &str, cel: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [{ "name": "r", "message": "no", "cel": cel }] }
    })
}

/// Trap 26.
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
    // Of two policies each has its say.
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

/// A namespace and what is in it may come in one commit, faster than any watch.
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
    // Not knowing is not a way around a policy.
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

/// Hostile requests at once.
const FLOOD: u32 = 20;

/// Trap 27: the worst expression that is admitted at all, and everybody else.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_policy_is_stopped_denies_and_holds_up_nobody_else() {
    let settings =
        Settings { policy_timeout: Duration::from_millis(200), evaluations: 2, ..Settings::default() };
    // Slow or not, everybody has an answer.
    let webhook = Webhook::with(settings, Limits { answer: Duration::from_secs(60), ..Limits::default() });
    let slow = "lists.range(40).all(a, lists.range(40).all(b, lists.range(40).all(c, object.spec.source.prefix.matches('(a|b|[c-z])*' + string(a) + string(b) + string(c)) || true)))";
    webhook.policy(&with(
        policy("slow", slow),
        "/spec/namespaceSelector",
        json!({ "matchLabels": { "slow": "yes" } }),
    ));
    webhook.namespace("slow", &[("slow", "yes")]);
    let client = webhook.client();

    let hostile = with(run(), "/metadata/namespace", json!("slow"));
    let started = Instant::now();
    let answer = client.create(&hostile).await;
    let alone = started.elapsed();
    assert_eq!(answer["allowed"], false);
    assert!(alone < Duration::from_secs(10), "it was stopped after {alone:?}");

    let started = Instant::now();
    let flood: Vec<_> = (0..FLOOD)
        .map(|number| {
            let (client, object) =
                (client.clone(), with(hostile.clone(), "/metadata/name", json!(format!("n{number}"))));
            tokio::spawn(async move { client.create(&object).await["allowed"].clone() })
        })
        .collect();
    let mut connection = client.http2().await;
    let body = serde_json::to_vec(&review("CREATE", &run())).unwrap();
    let mut worst = Duration::ZERO;
    for _ in 0..20 {
        let started = Instant::now();
        assert_eq!(over(&mut connection, "/validate/pipelinerun", body.clone()).await.unwrap().0, 200);
        worst = worst.max(started.elapsed());
    }
    for answer in flood {
        assert_eq!(answer.await.unwrap(), false);
    }
    let all = started.elapsed();
    println!(
        "one hostile request took {alone:?}, {FLOOD} took {all:?}, and others waited {worst:?} meanwhile"
    );
    assert!(worst < all / 3, "others waited {worst:?} of the {all:?} that {FLOOD} hostile requests took");
}
