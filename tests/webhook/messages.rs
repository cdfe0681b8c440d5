//! Tests of the messages that users read. Look at the snapshot: would you know what to change?

use std::fmt::Write as _;

use serde_json::{Value, json};
use tests::examples::{grant, pipeline, policy, run, with};

use crate::harness::{Webhook, path, review};

#[tokio::test(flavor = "multi_thread")]
async fn rejections_and_warnings_say_what_to_change() {
    let webhook = Webhook::start();
    webhook.secret("team-a", "camera-keys", &["accessKeyId", "secretAccessKey"]);
    webhook.pipeline(&pipeline());
    webhook.run(&run());
    let rule = |name: &str, fields: Value| {
        with(with(fields, "/name", json!(name)), "/message", json!("ask the platform team"))
    };
    let mut rules = json!({
        "metadata": { "name": "platform" },
        "spec": { "appliesTo": ["Pipeline", "PipelineRun"], "rules": [
            rule("registry", json!({ "field": "spec.filters[*].image", "regex": "ghcr.io/acme/.*" })),
            rule("no-sink-region", json!({ "field": "spec.sink.bucket.region", "forbidden": true })),
            rule("attempts", json!({ "field": "spec.execution.maxAttempts", "range": { "max": 5 } })),
            rule("team", json!({ "field": "metadata.labels[\"acme.example/team\"]", "required": true })),
            rule("order", json!({ "field": "spec.order", "schema": { "const": "Sequential" } })),
            rule("name", json!({ "cel": "object.metadata.name != 'forbidden'" })),
            rule("broken", json!({ "cel": "object.kind != 'PipelineRun' || object.spec.nothing > 1" })),
        ] }
    });
    webhook.policy(&rules);
    rules["metadata"]["name"] = json!("advice");
    rules["spec"]["action"] = json!("Warn");
    webhook.policy(&rules);

    let objects = [
        ("a misspelt field", with(run(), "/spec/execution/paralelism", json!(5))),
        (
            "several mistakes",
            with(
                with(run(), "/spec/execution/timeout", json!("soon")),
                "/spec/pipelineRef/name",
                json!("Thumb"),
            ),
        ),
        ("a runId that is taken", with(run(), "/metadata/name", json!("tuesday"))),
        (
            "a Secret that is missing",
            with(pipeline(), "/spec/source/bucket/credentialsSecret/name", json!("keys")),
        ),
        ("a namespace without a grant", with(run(), "/spec/pipelineRef/namespace", json!("shared"))),
        (
            "policies about a Pipeline",
            with(with(pipeline(), "/spec/filters/0/image", json!("docker.io/x")), "/spec/sink", Value::Null),
        ),
        ("policies about a run", with(run(), "/spec/execution/maxAttempts", json!(50))),
        (
            "a policy that does not compile",
            with(policy(), "/spec/rules/1/cel", json!("objekt.spec.execution")),
        ),
        ("a useless grant", with(grant(), "/spec/to", json!([{ "kind": "Pipeline" }]))),
    ];
    let mut text = String::new();
    for (title, object) in objects {
        // Like the API server, ask the second step only about objects that the first one admits.
        let (client, question) = (webhook.client(), review("CREATE", &object));
        let first = client.ask(&path("mutate", &object), &question).await;
        let refused = first["allowed"] == false;
        let answer = if refused { first } else { client.ask(&path("validate", &object), &question).await };
        writeln!(text, "--- {title}: {}", if answer["allowed"] == true { "admitted" } else { "refused" })
            .unwrap();
        if let Some(status) = answer.get("status") {
            writeln!(text, "({}) {}", status["code"], status["message"].as_str().unwrap()).unwrap();
        }
        for warning in answer["warnings"].as_array().into_iter().flatten() {
            writeln!(text, "Warning: {}", warning.as_str().unwrap()).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}
