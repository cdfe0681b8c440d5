//! Objects of one commit arrive together: dry-run first, in any order, and applied repeatedly.

use futures::future::join_all;
use serde_json::{Value, json};
use tests::examples::{grant, pipeline, run, with};

use crate::harness::{Webhook, dry, over, path, review, update};

fn warnings(answer: &Value) -> String {
    answer["warnings"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect::<Vec<_>>()
        .join("\n")
}

fn message(answer: &Value) -> String {
    answer["status"]["message"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_secret_is_a_warning_on_a_dry_run_and_refused_for_real() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let question = review("CREATE", &pipeline());
    let trial = client.ask("/validate/pipeline", &dry(question.clone())).await;
    assert_eq!(trial["allowed"], true);
    assert!(warnings(&trial).contains("team-a/camera-keys\" does not exist"), "{trial}");
    let real = client.ask("/validate/pipeline", &question).await;
    assert_eq!(real["allowed"], false);
    assert!(message(&real).contains("create it first"), "{real}");
    assert!(message(&real).ends_with("[credentials-secret]"), "{real}");

    webhook.secret("team-a", "camera-keys", &["accessKeyId"]);
    assert_eq!(client.ask("/validate/pipeline", &dry(question.clone())).await["allowed"], true);
    let malformed = client.ask("/validate/pipeline", &question).await;
    assert!(message(&malformed).contains("has no secretAccessKey"), "{malformed}");

    webhook.secret("team-a", "camera-keys", &["accessKeyId", "secretAccessKey"]);
    let good = client.ask("/validate/pipeline", &question).await;
    assert_eq!((&good["allowed"], warnings(&good).as_str()), (&json!(true), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_whose_secret_is_gone_can_still_be_changed_elsewhere() {
    let webhook = Webhook::start();
    let newer = with(pipeline(), "/spec/filters/0/image", json!("ghcr.io/acme/resize:1.5"));
    let client = webhook.client();
    assert_eq!(client.ask("/validate/pipeline", &update(&pipeline(), &newer)).await["allowed"], true);
    let other = with(newer, "/spec/source/bucket/credentialsSecret/name", json!("other-keys"));
    assert_eq!(client.ask("/validate/pipeline", &update(&pipeline(), &other)).await["allowed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_cannot_be_looked_at_is_a_warning() {
    let webhook = Webhook::start();
    webhook
        .live
        .secrets
        .lock()
        .unwrap()
        .insert(("team-a".into(), "camera-keys".into()), Err("timed out".into()));
    let answer = webhook.client().create(&pipeline()).await;
    assert_eq!(answer["allowed"], true);
    assert!(warnings(&answer).contains("timed out"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_before_its_pipeline_is_admitted_with_a_warning() {
    let webhook = Webhook::start();
    let early = webhook.client().create(&run()).await;
    assert_eq!(early["allowed"], true);
    assert!(warnings(&early).contains("the run waits for it"), "{early}");
    webhook.pipeline(&pipeline());
    assert_eq!(warnings(&webhook.client().create(&run()).await), "");
    // Once the Pipeline exists, the run is checked against it.
    let outside = with(run(), "/spec/source/prefix", json!("2025/"));
    assert!(message(&webhook.client().create(&outside).await).contains("[run-prefix]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_namespace_is_reached_with_a_grant_only() {
    let webhook = Webhook::start();
    let foreign = with(run(), "/spec/pipelineRef/namespace", json!("shared"));
    let refused = webhook.client().create(&foreign).await;
    assert!(message(&refused).contains("[reference-grant]"), "{refused}");
    webhook.grant(&grant());
    assert_eq!(webhook.client().create(&foreign).await["allowed"], true);
}

/// A Pipeline may wait for its finalizers as long as its owner likes.
#[tokio::test(flavor = "multi_thread")]
async fn the_spec_of_a_pipeline_that_is_being_deleted_is_judged_when_it_changes() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let going = with(pipeline(), "/metadata/deletionTimestamp", json!("2026-11-16T00:00:00Z"));
    let ask = async |new: &Value| client.ask("/validate/pipeline", &update(&going, new)).await;
    let released = with(going.clone(), "/metadata/finalizers", json!([]));
    assert_eq!(ask(&released).await["allowed"], true);
    let endpoint = with(going.clone(), "/spec/source/bucket/endpoint", json!("http://169.254.169.254"));
    assert!(message(&ask(&endpoint).await).contains("[endpoint"), "{}", ask(&endpoint).await);
}

/// A commit changes the prefix of a Pipeline and adds a run below the new prefix; on its dry run, the old
/// prefix is still stored.
#[tokio::test(flavor = "multi_thread")]
async fn what_only_stored_objects_speak_against_is_a_warning_on_a_dry_run_and_refused_for_real() {
    let webhook = Webhook::start();
    webhook.pipeline(&pipeline());
    let client = webhook.client();
    let elsewhere = json!({ "name": "camera-keys", "namespace": "shared" });
    for (object, words) in [
        (with(run(), "/spec/source/prefix", json!("2025/")), "lies outside the Pipeline's prefix"),
        (with(run(), "/spec/pipelineRef/namespace", json!("shared")), "no ReferenceGrant in namespace"),
        (
            with(pipeline(), "/spec/source/bucket/credentialsSecret", elsewhere),
            "no ReferenceGrant in namespace",
        ),
    ] {
        let question = review("CREATE", &object);
        let trial = client.ask(&path("validate", &object), &dry(question.clone())).await;
        assert_eq!(trial["allowed"], true, "{trial}");
        assert!(warnings(&trial).contains(words), "{trial}");
        let real = client.ask(&path("validate", &object), &question).await;
        assert!(message(&real).contains(words), "{real}");
        // The object's own mistakes are refused at once.
        let wrong = with(object, "/spec/paralelism", json!(5));
        let trial = client.ask(&path("validate", &wrong), &dry(review("CREATE", &wrong))).await;
        assert!(message(&trial).contains("[unknown-field]") && !message(&trial).contains(words), "{trial}");
        assert!(warnings(&trial).contains(words), "{trial}");
    }
}

/// Every commit with both objects breaks a policy that wants the Pipeline first, as long as nothing of it is
/// applied.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_over_the_pipeline_warns_on_a_dry_run_and_any_other_rule_denies() {
    let webhook = Webhook::start();
    let client = webhook.client();
    webhook.policy(&json!({
        "metadata": { "name": "strict" },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [
            { "name": "first", "message": "the Pipeline comes first", "cel": "pipeline != null" },
            { "name": "few", "message": "too many pods", "cel": "object.spec.execution.parallelism < 100" }
        ] }
    }));
    let question = review("CREATE", &run());
    let trial = client.ask("/validate/pipelinerun", &dry(question.clone())).await;
    assert!(trial["allowed"] == true && warnings(&trial).contains("the Pipeline comes first"), "{trial}");
    let real = client.ask("/validate/pipelinerun", &question).await;
    assert!(message(&real).contains("the Pipeline comes first"), "{real}");
    let many = with(run(), "/spec/execution/parallelism", json!(100));
    let trial = client.ask("/validate/pipelinerun", &dry(review("CREATE", &many))).await;
    assert!(message(&trial).contains("too many pods") && !message(&trial).contains("first"), "{trial}");
}

/// Not the Pipeline's prefix, not its Secret, and not even whether they exist.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_grant_nothing_is_told_of_what_another_namespace_has() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let foreign = with(run(), "/spec/pipelineRef/namespace", json!("shared"));
    let foreign = with(foreign, "/spec/source/prefix", json!("2025/"));
    let elsewhere = json!({ "name": "camera-keys", "namespace": "shared" });
    let keys = with(pipeline(), "/spec/source/bucket/credentialsSecret", elsewhere);
    webhook.policy(&json!({
        "metadata": { "name": "curious" },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [{ "name": "r", "message": "m", "cel": "pipeline == null" }] }
    }));
    let ask = async |object: &Value| {
        let question = review("CREATE", object);
        let endpoint = path("validate", object);
        (client.ask(&endpoint, &question).await, client.ask(&endpoint, &dry(question)).await)
    };
    let before = [ask(&foreign).await, ask(&keys).await];
    webhook.pipeline(&with(pipeline(), "/metadata/namespace", json!("shared")));
    webhook.secret("shared", "camera-keys", &["accessKeyId", "secretAccessKey"]);
    assert_eq!([ask(&foreign).await, ask(&keys).await], before);
    let (real, trial) = &before[0];
    assert!(!message(real).contains("run-prefix") && warnings(real).is_empty(), "{real}");
    assert!(trial["allowed"] == true && warnings(trial).lines().count() == 1, "{trial}");
    webhook.grant(&grant());
    assert!(message(&ask(&foreign).await.0).contains("[run-prefix]"));
}

/// A run uses its Pipeline as it was when the run started.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_there_is_not_held_against_a_pipeline_that_has_changed() {
    let webhook = Webhook::start();
    webhook.pipeline(&with(pipeline(), "/spec/source/bucket/prefix", json!("2027/")));
    let more = with(run(), "/spec/execution/parallelism", json!(30));
    let client = webhook.client();
    let answer = client.ask("/validate/pipelinerun", &update(&run(), &more)).await;
    assert_eq!(answer["allowed"], true, "{answer}");
    assert_eq!(client.create(&more).await["allowed"], false);
}

/// The keys are copied into the run's namespace, and their owners must permit that.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_pipeline_has_its_keys_from_elsewhere_needs_a_grant_for_them() {
    let webhook = Webhook::start();
    webhook.pipeline(&with(pipeline(), "/spec/source/bucket/credentialsSecret/namespace", json!("shared")));
    let refused = webhook.client().create(&run()).await;
    assert!(message(&refused).contains("use Secret \"camera-keys\""), "{refused}");
    webhook.grant(&grant());
    assert_eq!(webhook.client().create(&run()).await["allowed"], true);
    // The same for the Pipeline's own namespace, if the run is in another.
    let webhook = Webhook::start();
    webhook.pipeline(&with(pipeline(), "/metadata/namespace", json!("shared")));
    let foreign = with(run(), "/spec/pipelineRef/namespace", json!("shared"));
    webhook.grant(&with(grant(), "/spec/to", json!([{ "kind": "Pipeline" }])));
    let refused = webhook.client().create(&foreign).await;
    assert!(message(&refused).contains("use Secret \"camera-keys\""), "{refused}");
    webhook.grant(&grant());
    assert_eq!(webhook.client().create(&foreign).await["allowed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_thousand_concurrent_creates_with_one_run_id_one_is_admitted() {
    let webhook = Webhook::start();
    let connection = webhook.client().http2().await;
    let asks = (0..1000).map(|number| {
        let object = with(run(), "/metadata/name", json!(format!("run-{number}")));
        let body = serde_json::to_vec(&review("CREATE", &object)).unwrap();
        let mut connection = connection.clone();
        async move {
            let (_, answer) = over(&mut connection, "/validate/pipelinerun", body).await.unwrap();
            serde_json::from_slice::<Value>(&answer).unwrap()["response"]["allowed"] == true
        }
    });
    assert_eq!(join_all(asks).await.into_iter().filter(|allowed| *allowed).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_id_that_is_taken_is_refused_with_its_owner_and_the_owner_may_come_again() {
    let webhook = Webhook::start();
    webhook.run(&run());
    let other = with(run(), "/metadata/name", json!("tuesday"));
    let refused = webhook.client().create(&other).await;
    assert!(message(&refused).contains("belongs to PipelineRun \"team-a/monday\""), "{refused}");
    assert!(message(&refused).ends_with("[run-id-unique]"), "{refused}");
    // An engine deleted the run and created it again: it is the same run.
    assert_eq!(webhook.client().create(&run()).await["allowed"], true);
    // A dry run reserves nothing.
    let fresh = with(run(), "/spec/queue", json!({ "stream": "pr:new:work", "group": "cg:new" }));
    let tried = webhook.client().ask("/validate/pipelinerun", &dry(review("CREATE", &fresh))).await;
    assert_eq!(tried["allowed"], true);
    let renamed = with(fresh, "/metadata/name", json!("wednesday"));
    assert_eq!(webhook.client().create(&renamed).await["allowed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_admitted_stays_changeable_where_nothing_is_judged() {
    let webhook = Webhook::start();
    let strict = json!({
        "metadata": { "name": "strict" },
        "spec": { "appliesTo": ["PipelineRun"], "rules": [{ "name": "never", "message": "never", "cel": "false" }] }
    });
    webhook.policy(&strict);
    let client = webhook.client();
    let ask =
        async |new: &Value| client.ask(&path("validate", new), &update(&run(), new)).await["allowed"].clone();
    assert_eq!(ask(&with(run(), "/metadata/finalizers", json!(["a/b"]))).await, true);
    assert_eq!(ask(&with(run(), "/spec/suspend", json!(true))).await, true);
    // kubectl records what it has applied.
    let note = json!({ "kubectl.kubernetes.io/last-applied-configuration": "{}" });
    let paused = with(run(), "/spec/suspend", json!(true));
    assert_eq!(ask(&with(paused, "/metadata/annotations", note)).await, true);
    let going = with(run(), "/metadata/deletionTimestamp", json!("2026-11-16T00:00:00Z"));
    assert_eq!(ask(&with(going.clone(), "/metadata/labels", json!({ "a": "b" }))).await, true);
    assert_eq!(ask(&with(going.clone(), "/spec/suspend", json!(true))).await, true);
    assert_eq!(ask(&with(going.clone(), "/spec/execution/parallelism", json!(1))).await, false);
    assert_eq!(client.create(&going).await["allowed"], false, "what is created stays");
    assert_eq!(ask(&with(run(), "/spec/execution/parallelism", json!(1))).await, false);
    assert_eq!(ask(&with(run(), "/metadata/annotations", json!({ "a": "b" }))).await, false);
    assert_eq!(ask(&with(run(), "/metadata/labels", json!({ "a": "b" }))).await, false);
    assert_eq!(client.create(&run()).await["allowed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_what_is_in_use_warns_and_is_never_refused() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let delete = async |object: &Value| {
        let answer = client.ask(&path("validate", object), &review("DELETE", object)).await;
        assert_eq!(answer["allowed"], true);
        warnings(&answer)
    };
    assert_eq!(delete(&pipeline()).await, "");
    assert_eq!(delete(&grant()).await, "");
    let foreign = with(run(), "/spec/pipelineRef/namespace", json!("shared"));
    webhook.run(&run());
    webhook.run(&with(foreign, "/metadata/name", json!("borrowed")));
    webhook.grant(&grant());
    assert!(delete(&pipeline()).await.contains("1 runs of this Pipeline are not finished (team-a/monday)"));
    assert!(delete(&run()).await.contains("not finished"));
    // Deletes all runs at once: the request names none of them.
    let mut with_others = review("DELETE", &run());
    with_others["request"]["name"] = json!("");
    assert!(warnings(&client.ask("/validate/pipelinerun", &with_others).await).contains("not finished"));
    assert!(
        delete(&grant()).await.contains("1 runs that are not finished lose their Pipeline (team-a/borrowed)")
    );
    // The keys of that Pipeline are copied for the run, which also needs the grant.
    webhook.pipeline(&with(pipeline(), "/metadata/namespace", json!("shared")));
    let warned = delete(&grant()).await;
    assert!(
        warned.contains("1 runs that are not finished lose the keys of their bucket (team-a/borrowed)"),
        "{warned}"
    );
    assert!(!warned.contains("Pipelines lose"), "a Pipeline needs no grant for its own namespace: {warned}");
    // Removing an entry of a grant warns too, and adding one does not.
    let less =
        with(grant(), "/spec/to", json!([{ "kind": "Pipeline", "name": "other" }, { "kind": "Secret" }]));
    let answer = client.ask("/validate/referencegrant", &update(&grant(), &less)).await;
    assert!(warnings(&answer).contains("lose their Pipeline"), "{answer}");
    let more = with(grant(), "/spec/to/-", json!({ "kind": "Pipeline", "name": "other" }));
    assert_eq!(warnings(&client.ask("/validate/referencegrant", &update(&grant(), &more)).await), "");
}
