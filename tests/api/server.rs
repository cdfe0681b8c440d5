//! The CRDs on a real API server: it accepts them, including the cost of their CEL rules, and its rules judge
//! as ours do.

use std::collections::BTreeSet;

use crds::definitions;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::core::gvk::GroupVersionKind;
use kube::{Api, Client};
use serde_json::{Value, json};
use testbed::Testbed;
use tests::crds_on_cluster;
use tests::examples::{
    CelCase, allowed_updates, cel_cases, grant, pipeline, policy, refused_updates, run, warm_pipeline, with,
};

fn api(client: Client, namespace: &str, object: &Value) -> Api<DynamicObject> {
    let kind = object["kind"].as_str().unwrap();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("filter.plainsight.ai", "v1alpha1", kind));
    match kind {
        "PipelinePolicy" => Api::all_with(client, &resource),
        _ => Api::namespaced_with(client, namespace, &resource),
    }
}

/// The object in this namespace and with this name.
fn placed(object: Value, namespace: &str, name: &str) -> Value {
    with(with(object, "/metadata/namespace", json!(namespace)), "/metadata/name", json!(name))
}

/// Creates an object for real; the error is the API server's own message.
async fn create(client: &Client, namespace: &str, object: Value) -> Result<DynamicObject, String> {
    let typed: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    let created = api(client.clone(), namespace, &object).create(&PostParams::default(), &typed).await;
    created.map_err(|error| error.to_string())
}

/// The messages of all CEL rules of all CRDs.
fn cel_messages() -> BTreeSet<String> {
    fn collect(schema: &JSONSchemaProps, messages: &mut BTreeSet<String>) {
        for rule in schema.x_kubernetes_validations.iter().flatten() {
            messages.insert(rule.message.clone().expect("every rule has a message"));
        }
        for child in schema.properties.iter().flat_map(|properties| properties.values()) {
            collect(child, messages);
        }
        if let Some(items) = &schema.items {
            let items: JSONSchemaProps =
                serde_json::from_value(serde_json::to_value(items).unwrap()).unwrap();
            collect(&items, messages);
        }
    }
    let mut messages = BTreeSet::new();
    for crd in definitions::all() {
        collect(
            crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap(),
            &mut messages,
        );
    }
    messages
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn every_cel_rule_refuses_its_mistake_and_accepts_the_correction_on_a_real_api_server() {
    let testbed = Testbed::start_or_reuse().await.unwrap();
    crds_on_cluster::install(&testbed).await;
    let namespace = testbed.namespace("crds").await.unwrap();
    let (client, space) = (testbed.client(), namespace.name.as_str());

    for object in [pipeline(), run(), policy(), grant()] {
        let created = create(&client, space, placed(object.clone(), space, &format!("{space}-valid"))).await;
        assert!(created.is_ok(), "{}: {created:?}", object["kind"]);
    }
    let mut refusals = Vec::new();
    for (number, CelCase { object, pointer, bad, good }) in cel_cases().into_iter().enumerate() {
        let name = format!("{space}-{number}");
        match create(&client, space, placed(with(object(), pointer, bad.clone()), space, &name)).await {
            Ok(_) => panic!("{pointer} = {bad} was accepted"),
            Err(message) => refusals.push(message),
        }
        let accepted =
            create(&client, space, placed(with(object(), pointer, good.clone()), space, &name)).await;
        assert!(accepted.is_ok(), "{pointer} = {good}: {accepted:?}");
    }

    let stored = create(&client, space, placed(run(), space, "stored")).await.unwrap();
    let runs = api(client.clone(), space, &run());
    let changed = |pointer: &str, value: Value| {
        let mut object = with(placed(run(), space, "stored"), pointer, value);
        object["metadata"]["resourceVersion"] = json!(stored.metadata.resource_version);
        serde_json::from_value::<DynamicObject>(object).unwrap()
    };
    let dry_run = PostParams { dry_run: true, field_manager: None };
    for (pointer, value) in allowed_updates() {
        let replaced = runs.replace("stored", &dry_run, &changed(pointer, value)).await;
        assert!(replaced.is_ok(), "{pointer}: {replaced:?}");
    }
    for (pointer, value) in refused_updates() {
        match runs.replace("stored", &PostParams::default(), &changed(pointer, value)).await {
            Ok(_) => panic!("{pointer} could be changed"),
            Err(error) => refusals.push(error.to_string()),
        }
    }
    let silent: Vec<String> = cel_messages()
        .into_iter()
        .filter(|message| !refusals.iter().any(|refusal| refusal.contains(message)))
        .collect();
    assert!(silent.is_empty(), "no example is refused by these rules: {silent:#?}");

    let policies = api(client.clone(), space, &policy());
    for object in policies.list(&Default::default()).await.unwrap() {
        let name = object.metadata.name.unwrap();
        if name.starts_with(space) {
            policies.delete(&name, &Default::default()).await.unwrap();
        }
    }
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn the_api_server_defaults_as_the_rules_do() {
    let testbed = Testbed::start_or_reuse().await.unwrap();
    crds_on_cluster::install(&testbed).await;
    let namespace = testbed.namespace("defaults").await.unwrap();
    for (number, (kind, object)) in [
        (crds::rules::Kind::Pipeline, pipeline()),
        (crds::rules::Kind::Pipeline, with(warm_pipeline(), "/spec/warm", json!({}))),
        (
            crds::rules::Kind::PipelineRun,
            with(run(), "/spec/execution", json!({ "timeout": null, "maxAttempts": 5 })),
        ),
        (crds::rules::Kind::ReferenceGrant, grant()),
    ]
    .into_iter()
    .enumerate()
    {
        let placed = placed(object.clone(), &namespace.name, &format!("defaulted-{number}"));
        let stored = create(&testbed.client(), &namespace.name, placed).await;
        assert_eq!(stored.unwrap().data["spec"], crds::rules::default(kind, &object)["spec"], "{kind}");
    }
}
