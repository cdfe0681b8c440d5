//! The webhook configurations: narrow, consistent with what the webhook serves, and irrelevant to all other
//! kinds.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use testbed::Testbed;
use tests::root;

use crate::harness::{build, text};
use crate::manifests::overlay;

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn the_api_server_asks_about_our_kinds_only_and_a_deletion_waits_for_nobody() {
    let testbed = Testbed::with_nodes(2).await.unwrap();
    let objects = build(&testbed, &overlay("dev"));
    let mut asked: BTreeSet<(String, String)> = BTreeSet::new();
    for object in objects.iter().filter(|object| text(object, "/kind").ends_with("WebhookConfiguration")) {
        assert_eq!(text(object, "/metadata/name"), webhook::args::CONFIGURATION);
        for webhook in object["webhooks"].as_array().unwrap() {
            let title = text(webhook, "/name");
            // In Git it would be drift against the program that owns it.
            assert_eq!(webhook.pointer("/clientConfig/caBundle"), None, "{title}");
            assert_eq!(webhook["sideEffects"], "None", "{title}");
            let [rule] = webhook["rules"].as_array().unwrap().as_slice() else { panic!("{title}") };
            assert_eq!(rule["apiGroups"], json!(["filter.plainsight.ai"]), "{title}");
            assert_eq!(rule["apiVersions"], json!(["v1alpha1"]), "{title}");
            let operations: Vec<&str> =
                rule["operations"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            if operations == ["DELETE"] {
                assert_eq!(webhook["failurePolicy"], "Ignore", "{title}: a deletion is never refused");
            } else {
                assert_eq!(operations, ["CREATE", "UPDATE"], "{title}");
                assert_eq!(webhook["failurePolicy"], "Fail", "{title}");
                assert_eq!(webhook["matchConditions"].as_array().map(Vec::len), Some(2), "{title}");
                // The webhook gives up after 8 s, so that the reason comes from the webhook and not from the
                // API server.
                assert!(webhook["timeoutSeconds"].as_u64() > Some(8), "{title}");
            }
            let [resource] = rule["resources"].as_array().unwrap().as_slice() else { panic!("{title}") };
            let path = text(webhook, "/clientConfig/service/path").to_owned();
            asked.insert((path, resource.as_str().unwrap().to_owned()));
        }
    }
    let kinds = crds::definitions::all();
    let names = kinds.iter().map(|crd| (crd.spec.names.kind.to_lowercase(), crd.spec.names.plural.clone()));
    let mut expected: BTreeSet<(String, String)> = BTreeSet::new();
    for (kind, plural) in names {
        expected.insert((format!("/validate/{kind}"), plural.clone()));
        // Policies fill in defaults for these kinds.
        if ["pipeline", "pipelinerun"].contains(&kind.as_str()) {
            expected.insert((format!("/mutate/{kind}"), plural));
        }
    }
    assert_eq!(asked, expected);
}

/// The webhook owns `caBundle` of every entry. Therefore an entry that is no longer applied is not removed:
/// the webhook's half of it remains, and the API server refuses the whole configuration. docs/install.md
/// describes how to remove an entry.
#[test]
fn no_entry_of_the_configurations_was_renamed_or_removed() {
    let text = fs::read_to_string(root().join("kustomize/base/admission.yaml")).unwrap();
    let configurations: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let entries = |kind: &str| -> BTreeSet<String> {
        let found = configurations.iter().filter(|configuration| configuration["kind"] == kind);
        let webhooks = found.flat_map(|configuration| configuration["webhooks"].as_array().unwrap());
        webhooks.map(|webhook| webhook["name"].as_str().unwrap().to_owned()).collect()
    };
    let (mutating, validating) =
        (entries("MutatingWebhookConfiguration"), entries("ValidatingWebhookConfiguration"));
    for name in ["pipelines.mutate", "pipelineruns.mutate"] {
        assert!(mutating.contains(&format!("{name}.filter.plainsight.ai")), "{name}");
    }
    for name in [
        "pipelines.validate",
        "pipelineruns.validate",
        "pipelinepolicies.validate",
        "referencegrants.validate",
        "pipelines.delete",
        "pipelineruns.delete",
        "referencegrants.delete",
    ] {
        assert!(validating.contains(&format!("{name}.filter.plainsight.ai")), "{name}");
    }
}
