//! The first step refuses what is wrong by itself, before the API server holds it against schema and CEL
//! rules, whose words are terser.

use serde_json::{Value, json};
use tests::examples::{pipeline, run, with};

use crate::harness::{Webhook, dry, path, review, update};

/// What the first step answers.
async fn asked(webhook: &Webhook, review: &Value) -> Value {
    webhook.client().ask(&path("mutate", &review["request"]["object"]), review).await
}

fn message(answer: &Value) -> &str {
    answer["status"]["message"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_mistake_of_an_object_is_explained_at_once_with_the_rule_that_it_breaks() {
    let webhook = Webhook::start();
    let changes = [
        ("/spec/execution/parallelism", json!("five")),
        ("/spec/execution/maxAttempts", json!(0)),
        ("/spec/source/include", json!("*.jpg")),
        ("/spec/pipelineRef", json!({})),
    ];
    let bad = changes.into_iter().fold(run(), |object, (pointer, value)| with(object, pointer, value));
    let answer = asked(&webhook, &review("CREATE", &bad)).await;
    assert_eq!((&answer["allowed"], &answer["status"]["code"]), (&json!(false), &json!(422)));
    assert_eq!(answer.get("patch"), None, "{answer}");
    let lines: Vec<&str> = message(&answer).lines().skip(1).collect();
    assert_eq!(lines.len(), 4, "{lines:#?}");
    for words in ["[wrong-type]", "[number-range]", "[missing-field]"] {
        assert!(lines.iter().any(|line| line.ends_with(words)), "{words}: {lines:#?}");
    }

    let misspelt = with(pipeline(), "/spec/order", json!("Sequentail"));
    let answer = asked(&webhook, &review("CREATE", &misspelt)).await;
    assert!(message(&answer).contains("did you mean Sequential?"), "{answer}");
}

/// `kubectl create` names no object in its URL, and a name may be left to the API server.
#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_an_object_is_explained_and_may_be_generated_or_in_the_request_only() {
    let webhook = Webhook::start();
    let named = |metadata: Value| with(with(run(), "/spec/queue", json!(null)), "/metadata", metadata);
    let bad = asked(&webhook, &review("CREATE", &named(json!({ "name": "Monday_Run" })))).await;
    assert!(message(&bad).contains("for example monday-run [object-name]"), "{bad}");
    let bad = asked(&webhook, &review("CREATE", &named(json!({ "generateName": "Monday_" })))).await;
    assert!(message(&bad).contains("for example monday- [object-name]"), "{bad}");
    let generated = asked(&webhook, &review("CREATE", &named(json!({ "generateName": "monday-" })))).await;
    assert_eq!(generated["allowed"], true, "{generated}");
    let mut applied = review("CREATE", &named(json!({})));
    applied["request"]["name"] = json!("monday");
    let applied = asked(&webhook, &applied).await;
    assert_eq!(applied["allowed"], true, "{applied}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_judged_with_the_defaults_of_policies() {
    let webhook = Webhook::start();
    let no_region = with(pipeline(), "/spec/source/bucket/endpoint", json!(""));
    let answer = asked(&webhook, &review("CREATE", &no_region)).await;
    assert!(message(&answer).contains("[bucket-region]"), "{answer}");
    webhook.policy(&json!({
        "metadata": { "name": "regions" },
        "spec": { "appliesTo": ["Pipeline"], "defaults": [{ "field": "spec.source.bucket.region", "value": "eu-central-1" }] }
    }));
    let answer = asked(&webhook, &review("CREATE", &no_region)).await;
    assert_eq!(answer["allowed"], true, "{answer}");
    assert!(answer["patch"].is_string(), "{answer}");
}

/// Other webhooks may still change the object, and another object of the same commit may be applied
/// meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn policies_secrets_run_ids_and_other_objects_wait_for_the_second_step() {
    let webhook = Webhook::start();
    webhook.pipeline(&pipeline());
    webhook.run(&with(run(), "/metadata/name", json!("tuesday")));
    webhook.policy(&json!({
        "metadata": { "name": "few" },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [{ "name": "one", "message": "one pod", "cel": "object.spec.execution.parallelism < 2" }] }
    }));
    let objects = [
        pipeline(),                                                  // its Secret is missing
        run(), // its runId is taken, and the policy refuses it
        with(run(), "/spec/source/prefix", json!("2025/")), // outside the Pipeline's prefix
        with(run(), "/spec/pipelineRef/namespace", json!("shared")), // without a grant
        with(run(), "/spec/pipelineRef/name", json!("a-pipeline-to-come")),
    ];
    for object in objects {
        let asked = asked(&webhook, &review("CREATE", &object)).await;
        assert_eq!((&asked["allowed"], asked.get("warnings")), (&json!(true), None), "{object}: {asked}");
        let judged = webhook.client().create(&object).await;
        assert!(judged["allowed"] == false || judged["warnings"].is_array(), "{object}: {judged}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_also_says_what_the_pipeline_speaks_against() {
    let webhook = Webhook::start();
    webhook.pipeline(&pipeline());
    let bad = with(with(run(), "/spec/source/prefix", json!("2025/")), "/spec/source/include", json!(["[a"]));
    let real = asked(&webhook, &review("CREATE", &bad)).await;
    for words in ["[glob]", "[run-prefix]"] {
        assert!(message(&real).contains(words), "{real}");
    }
    // A Pipeline with another prefix may be in the same commit.
    let trial = asked(&webhook, &dry(review("CREATE", &bad))).await;
    assert!(message(&trial).contains("[glob]") && !message(&trial).contains("[run-prefix]"), "{trial}");
    assert!(trial["warnings"].to_string().contains("[run-prefix]"), "{trial}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_object_that_breaks_a_newer_rule_can_be_labelled_paused_and_released() {
    let webhook = Webhook::start();
    let stored = with(run(), "/spec/source/include", json!(["[a"]));
    let stored = with(stored, "/metadata/name", json!("Monday_Run"));
    let changes = [
        ("/metadata/labels", json!({ "team": "a" })),
        ("/metadata/annotations", json!({ "team": "a" })),
        ("/metadata/finalizers", json!([])),
        ("/status", json!({ "phase": "Running" })),
        ("/spec/suspend", json!(true)),
    ];
    let leaving = with(stored.clone(), "/metadata/deletionTimestamp", json!("2026-11-16T00:00:00Z"));
    for stored in [&stored, &leaving] {
        for (pointer, value) in &changes {
            let review = update(stored, &with(stored.clone(), pointer, value.clone()));
            for review in [review.clone(), dry(review)] {
                for step in ["mutate", "validate"] {
                    let answer = webhook.client().ask(&path(step, stored), &review).await;
                    assert_eq!(answer["allowed"], true, "{step} {pointer}: {answer}");
                }
            }
        }
    }
    let wider = with(stored.clone(), "/spec/execution/parallelism", json!(7));
    let answer = asked(&webhook, &update(&stored, &wider)).await;
    assert!(message(&answer).contains("[glob]"), "{answer}");
}

/// As `kubectl replace` of the file from which it was created: a policy had filled in what the file leaves
/// out.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_object_that_breaks_a_newer_rule_can_be_written_again_without_its_defaults() {
    let webhook = Webhook::start();
    webhook.policy(&json!({
        "metadata": { "name": "timeouts" },
        "spec": { "appliesTo": ["PipelineRun"], "defaults": [{ "field": "spec.execution.maxFailedFiles", "value": "7" }] }
    }));
    let stored = with(run(), "/spec/source/include", json!(["[a"]));
    let stored = crds::rules::default(crds::rules::Kind::PipelineRun, &stored);
    let filled_in = with(stored.clone(), "/spec/execution/maxFailedFiles", json!("7"));
    let answer = asked(&webhook, &update(&filled_in, &stored)).await;
    assert_eq!(answer["allowed"], true, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_explained_even_if_the_pipeline_cannot_be_read() {
    let webhook = Webhook::start();
    let bad = with(run(), "/spec/source/include", json!(["[a"]));
    let pipeline = ("team-a".to_owned(), "thumbnails".to_owned());
    webhook.live.pipelines.lock().unwrap().insert(pipeline, Err("timed out".to_owned()));
    let answer = asked(&webhook, &review("CREATE", &bad)).await;
    assert!(message(&answer).contains("[glob]"), "{answer}");
}

/// Flux with `force: true` deletes and creates again what is refused as Invalid or Conflict, or with these
/// words.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_change_does_not_make_flux_create_the_object_again() {
    let webhook = Webhook::start();
    let changes = [
        (run(), "/spec/execution/maxAttempts", json!(9), "[immutable]"),
        (run(), "/spec/execution/parallelism", json!(0), "[number-range]"),
        (pipeline(), "/spec/order", json!("Sequentail"), "[unknown-value]"),
    ];
    for (stored, pointer, value, rule) in changes {
        let changed = with(stored.clone(), pointer, value);
        for step in ["mutate", "validate"] {
            let answer = webhook.client().ask(&path(step, &stored), &update(&stored, &changed)).await;
            assert!(message(&answer).contains(rule), "{step}: {answer}");
            assert_eq!(answer["status"]["reason"], "Forbidden", "{step}: {answer}");
            assert_eq!(answer["status"]["code"], 403);
            for words in ["is immutable", "immutable field"] {
                assert!(!message(&answer).contains(words), "{answer}");
            }
        }
    }
}
