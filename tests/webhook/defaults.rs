//! Tests of defaults: they change as little as possible, and nothing the second time.

use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tests::examples::{grant, pipeline, policy, run, with};

use crate::harness::{Webhook, path, review, update};

/// Sends a review to the mutating endpoint; returns the patch and the patched object.
async fn mutated(webhook: &Webhook, review: &Value) -> (Vec<Value>, Value) {
    let object = review["request"]["object"].clone();
    let answer = webhook.client().ask(&path("mutate", &object), review).await;
    assert_eq!(answer["allowed"], true);
    let Some(encoded) = answer.get("patch") else { return (Vec::new(), object) };
    assert_eq!(answer["patchType"], "JSONPatch");
    let ByteString(text) = serde_json::from_value(encoded.clone()).unwrap();
    let patch: json_patch::Patch = serde_json::from_slice(&text).unwrap();
    let mut patched = object;
    json_patch::patch(&mut patched, &patch).unwrap();
    (serde_json::from_slice(&text).unwrap(), patched)
}

fn timeouts() -> Value {
    json!({
        "metadata": { "name": "timeouts" },
        "spec": { "appliesTo": ["PipelineRun"], "defaults": [{ "field": "spec.execution.timeout", "value": "2h" }] }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn defaulting_twice_changes_nothing_the_second_time() {
    let webhook = Webhook::start();
    webhook.policy(&timeouts());
    let bare = with(run(), "/spec/execution", Value::Null);
    for object in [pipeline(), run(), bare, policy(), grant()] {
        let (_, once) = mutated(&webhook, &review("CREATE", &object)).await;
        let (patch, twice) = mutated(&webhook, &review("CREATE", &once)).await;
        assert_eq!(patch, Vec::<Value>::new(), "{once}");
        assert_eq!(twice, once);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_holds_what_is_filled_in_and_nothing_else() {
    let webhook = Webhook::start();
    webhook.policy(&timeouts());
    // The API server sends objects with the schema's defaults already filled in.
    let object = crds::rules::default(
        crds::rules::Kind::PipelineRun,
        &with(run(), "/spec/execution", json!({ "maxAttempts": 5 })),
    );
    let (patch, _) = mutated(&webhook, &review("CREATE", &object)).await;
    assert_eq!(patch, [json!({ "op": "add", "path": "/spec/execution/timeout", "value": "2h" })]);
    let complete = with(object, "/spec/execution/timeout", json!("1h"));
    assert_eq!(mutated(&webhook, &review("CREATE", &complete)).await.0, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_run_gets_no_default_that_it_did_not_have() {
    let webhook = Webhook::start();
    let stored =
        crds::rules::default(crds::rules::Kind::PipelineRun, &with(run(), "/spec/execution", json!({})));
    webhook.policy(&timeouts());
    let paused = with(stored.clone(), "/spec/suspend", json!(true));
    assert_eq!(mutated(&webhook, &update(&stored, &paused)).await.0, Vec::<Value>::new());
    // If a file without the default is applied again, the stored value returns, so that nothing immutable
    // changes.
    let with_default = with(stored.clone(), "/spec/execution/timeout", json!("2h"));
    assert_eq!(mutated(&webhook, &update(&with_default, &stored)).await.1, with_default);
    // This also holds if the default has changed since.
    let older = with(stored.clone(), "/spec/execution/timeout", json!("5h"));
    assert_eq!(mutated(&webhook, &update(&older, &stored)).await.1, older);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_being_deleted_is_left_alone_unless_its_spec_changes() {
    let webhook = Webhook::start();
    let images = json!({
        "metadata": { "name": "images" },
        "spec": { "appliesTo": ["Pipeline"], "defaults": [{ "field": "spec.pod.serviceAccountName", "value": "worker" }] }
    });
    webhook.policy(&images);
    let going = with(pipeline(), "/metadata/deletionTimestamp", json!("2026-11-16T00:00:00Z"));
    let released = with(going.clone(), "/metadata/labels", json!({ "a": "b" }));
    assert_eq!(mutated(&webhook, &update(&going, &released)).await.0, Vec::<Value>::new());
    let changed = with(going.clone(), "/spec/source/bucket/prefix", json!("2025/"));
    assert_eq!(
        mutated(&webhook, &update(&going, &changed)).await.1["spec"]["pod"]["serviceAccountName"],
        "worker"
    );
    // A new object is not being deleted, even if it carries a deletionTimestamp.
    assert_ne!(mutated(&webhook, &review("CREATE", &going)).await.0, Vec::<Value>::new());
}
