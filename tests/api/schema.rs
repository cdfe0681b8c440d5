//! The CRDs as an API server sees them: what the schema and its CEL rules refuse, their defaults, and their
//! shape.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crds::definitions;
use crds::rules::{Context, Kind, Rule, check, default};
use crds::v1alpha1::{Mode, Pipeline, PipelineRun, Protocol};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube_cel::{ValidationError, Validator};
use serde_json::{Value, json};
use strum::IntoEnumIterator;
use tests::examples::{
    CelCase, allowed_updates, cel_cases, pipeline, refused_updates, run, warm_pipeline, with,
};

/// Schemas by kind. Created once, because that takes longer than judging by them.
pub(super) static SCHEMAS: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    let of = |crd: CustomResourceDefinition| {
        let schema = &crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema;
        (crd.spec.names.kind.clone(), serde_json::to_value(schema).unwrap())
    };
    definitions::all().into_iter().map(of).collect()
});

pub(super) fn schema(object: &Value) -> &'static Value {
    &SCHEMAS[object["kind"].as_str().unwrap()]
}

fn cel_errors(object: &Value, old: Option<&Value>) -> Vec<ValidationError> {
    match Validator::new().validate_with_defaults(schema(object), object, old) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_vec(),
    }
}

#[test]
fn every_cel_rule_compiles() {
    fn rules(schema: &Value) -> usize {
        let own = schema["x-kubernetes-validations"].as_array().map_or(0, Vec::len);
        let properties = schema["properties"].as_object().into_iter().flatten().map(|(_, child)| child);
        own + properties.chain(schema.get("items")).map(rules).sum::<usize>()
    }
    for (kind, schema) in SCHEMAS.iter() {
        let compiled = kube_cel::compile_schema(schema);
        assert!(!compiled.has_errors(), "{kind}: {:?}", compiled.compilation_errors());
        assert!(rules(schema) > 0, "{kind} lost its CEL rules");
    }
}

#[test]
fn cel_rules_refuse_a_mistake_and_accept_its_correction() {
    for CelCase { object, pointer, bad, good } in cel_cases() {
        let refused = cel_errors(&with(object(), pointer, bad.clone()), None);
        assert!(!refused.is_empty(), "{pointer} = {bad} was accepted");
        assert!(refused.iter().all(|error| error.message.len() > 10), "{refused:?}");
        let accepted = cel_errors(&with(object(), pointer, good.clone()), None);
        assert!(accepted.is_empty(), "{pointer} = {good}: {accepted:?}");
    }
}

/// With the webhook down these are the only words that the user reads: one message, and none about how CEL
/// failed.
#[test]
fn a_text_that_is_no_duration_is_reported_once_with_an_example() {
    let fields = [
        ("/spec/execution/pendingTimeout", json!("soon")),
        ("/spec/execution/fileTimeout", json!("soon")),
        ("/spec/execution/timeout", json!("2 h")),
        ("/spec/execution/retryBackoff", json!({ "initial": "1" })),
        ("/spec/execution/retryBackoff", json!({ "max": "" })),
    ];
    let runs = fields.map(|(pointer, bad)| with(run(), pointer, bad));
    let aged = with(warm_pipeline(), "/spec/warm", json!({ "maxPodAge": "a day" }));
    for object in runs.into_iter().chain([aged]) {
        let errors = cel_errors(&object, None);
        let messages: Vec<&str> = errors.iter().map(|error| error.message.as_str()).collect();
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(messages[0].ends_with("for example 90s, 15m or 1h30m [duration]"), "{messages:?}");
    }
}

/// The id of the rule that a message ends with.
fn id(message: &str) -> Option<&str> {
    message.strip_suffix(']')?.rsplit_once(" [").map(|(_, id)| id)
}

#[test]
fn every_message_of_cel_ends_with_the_id_of_a_rule() {
    fn messages(schema: &Value) -> Vec<&str> {
        let own = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
        let own = own.map(|rule| rule["message"].as_str().unwrap());
        let properties = schema["properties"].as_object().into_iter().flatten().map(|(_, child)| child);
        own.chain(properties.chain(schema.get("items")).flat_map(messages)).collect()
    }
    let ids: Vec<String> = Rule::iter().map(|rule| rule.to_string()).collect();
    for schema in SCHEMAS.values() {
        for message in messages(schema) {
            assert!(id(message).is_some_and(|id| ids.iter().any(|known| known == id)), "{message}");
        }
    }
}

#[test]
fn what_cel_refuses_the_rules_refuse_too_with_the_same_id() {
    // These mistakes have two sides: an integer that is too large for any field, and a runId within a key.
    const OTHER_SIDE: [Rule; 2] = [Rule::NumberRange, Rule::RunId];
    for CelCase { object, pointer, bad, good } in cel_cases() {
        let mistake = with(object(), pointer, bad.clone());
        let refused = check(&mistake, &Context::default()).unwrap();
        let errors = cel_errors(&mistake, None);
        let ids: Vec<&str> = errors.iter().filter_map(|error| id(&error.message)).collect();
        let agrees = |rule: Rule| ids.contains(&rule.to_string().as_str()) || OTHER_SIDE.contains(&rule);
        assert!(
            refused.iter().any(|violation| agrees(violation.rule)),
            "{pointer} = {bad}: {ids:?} {refused:?}"
        );
        assert_eq!(check(&with(object(), pointer, good), &Context::default()).unwrap(), []);
    }
}

#[test]
fn a_stored_run_changes_only_in_its_three_mutable_fields() {
    let old = default(Kind::PipelineRun, &run());
    for (pointer, value) in allowed_updates() {
        let errors = cel_errors(&with(run(), pointer, value), Some(&old));
        assert!(errors.is_empty(), "{pointer}: {errors:?}");
    }
    for (pointer, value) in refused_updates() {
        let errors = cel_errors(&with(run(), pointer, value), Some(&old));
        assert!(
            errors.iter().any(|error| error.message.contains("immutable")),
            "{pointer} could change: {errors:?}"
        );
    }
}

#[test]
fn defaults_are_those_of_the_api_and_filling_them_in_twice_changes_nothing() {
    let bare = json!({
        "apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun",
        "metadata": { "name": "monday", "namespace": "team-a" }, "spec": { "pipelineRef": { "name": "p" }, "execution": null }
    });
    let once = default(Kind::PipelineRun, &bare);
    assert_eq!(
        once["spec"],
        json!({
            "pipelineRef": { "name": "p" },
            "execution": { "parallelism": 10, "maxAttempts": 3, "pendingTimeout": "15m", "retryBackoff": { "initial": "1s", "max": "5m" } },
            "suspend": false
        })
    );
    assert_eq!(default(Kind::PipelineRun, &once), once);
    let recipe = default(Kind::Pipeline, &pipeline());
    assert_eq!(
        (&recipe["spec"]["order"], &recipe["spec"]["mode"]),
        (&json!("Sequential"), &json!("PodPerFile"))
    );
    assert_eq!(recipe["spec"].get("warm"), None, "it is only for mode: Warm");
}

#[test]
fn the_types_and_the_schema_default_alike() {
    let bare = with(run(), "/spec/execution", json!(null));
    let read: PipelineRun = serde_json::from_value(bare.clone()).unwrap();
    let defaulted: PipelineRun = serde_json::from_value(default(Kind::PipelineRun, &bare)).unwrap();
    assert_eq!(read, defaulted);
    for object in [pipeline(), with(warm_pipeline(), "/spec/warm", json!({}))] {
        let read: Pipeline = serde_json::from_value(object.clone()).unwrap();
        let defaulted: Pipeline = serde_json::from_value(default(Kind::Pipeline, &object)).unwrap();
        assert_eq!(read, defaulted);
    }
}

#[test]
fn warm_pods_have_limits_also_where_a_pipeline_names_none() {
    let defaults = json!({ "maxFilesPerPod": 10_000, "maxPodAge": "1h", "prefetchBytes": "256Mi" });
    let some = default(Kind::Pipeline, &with(warm_pipeline(), "/spec/warm", json!({ "maxFilesPerPod": 7 })));
    assert_eq!(some["spec"]["warm"], with(defaults.clone(), "/maxFilesPerPod", json!(7)));
    let files = |number: i64| {
        check(&with(warm_pipeline(), "/spec/warm/maxFilesPerPod", json!(number)), &Context::default())
    };
    assert_eq!(files(1_000_000), Some(vec![]));
    assert_eq!(files(1_000_001).unwrap().len(), 1, "a pod is replaced at some time");
    let limits = |object: Value| serde_json::from_value::<Pipeline>(object).unwrap().spec.warm_limits();
    let none = limits(with(warm_pipeline(), "/spec/warm", json!(null)));
    assert_eq!(none, limits(with(warm_pipeline(), "/spec/warm", defaults)));
}

/// Stored Pipelines, and every snapshot that a run has taken of one, were written without a mode.
#[test]
fn a_pipeline_that_is_older_than_warm_mode_reads_and_stays_as_it_was() {
    let mut older = default(Kind::Pipeline, &pipeline());
    older["spec"]["filters"][0]["name"] = json!("worker");
    older["spec"]["filters"][1]["name"] = json!("install");
    older["spec"]["sink"]["from"] = json!("install");
    older["spec"].as_object_mut().unwrap().remove("mode");
    let read: Pipeline = serde_json::from_value(older.clone()).unwrap();
    assert_eq!((read.spec.mode, read.spec.filters[0].protocol), (Mode::PodPerFile, Protocol::Exec));
    let written = serde_json::to_value(&read.spec).unwrap();
    assert_eq!(written["filters"], older["spec"]["filters"], "a default in a list would be drift");
    assert!(written.get("warm").is_none());

    // Its filters may keep names that only Warm pods reserve, and everything else in it can be changed.
    let edited = with(older.clone(), "/spec/filters/0/image", json!("ghcr.io/acme/resize:1.5"));
    assert_eq!(check(&edited, &Context::default()).unwrap(), []);
    assert!(cel_errors(&edited, Some(&older)).is_empty());
}

/// Only the command is missing, so a single violation reports it.
#[test]
fn a_missing_command_is_reported_once_per_filter_and_names_it() {
    let bare = with(
        with(warm_pipeline(), "/spec/filters/0/command", json!(null)),
        "/spec/filters/1/command",
        json!(null),
    );
    let found = check(&bare, &Context::default()).unwrap();
    let fields: Vec<&str> = found.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(fields, ["spec.filters[0].command", "spec.filters[1].command"]);
    assert!(
        found[0].message.contains("\"resize\"") && found[1].message.contains("\"annotate\""),
        "{found:#?}"
    );
}

/// The API server's demands on a structural schema, and those of its CEL cost estimate: a bound on every list
/// and text that a rule walks over.
#[test]
fn schemas_are_structural_and_bounded_where_rules_look() {
    fn visit(path: &str, schema: &Value) {
        assert!(schema.get("nullable").is_none(), "{path} is nullable");
        assert!(schema.get("$ref").is_none() && schema.get("oneOf").is_none(), "{path} is not structural");
        let any = schema["x-kubernetes-preserve-unknown-fields"] == true
            || schema["x-kubernetes-int-or-string"] == true;
        assert!(any || schema["type"].is_string(), "{path} has no type");
        if schema["x-kubernetes-list-type"] == "map" {
            let required = schema["items"]["required"].as_array().unwrap();
            for key in schema["x-kubernetes-list-map-keys"].as_array().unwrap() {
                assert!(required.contains(key), "{path}: the map key {key} must be required");
            }
        }
        if schema.get("x-kubernetes-validations").is_some() && schema["type"] == "string" {
            assert!(schema["maxLength"].is_u64(), "{path} has a rule and no maxLength");
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            visit(&format!("{path}.{name}"), property);
        }
        for child in ["items", "additionalProperties"] {
            if schema[child].is_object() {
                visit(&format!("{path}.{child}"), &schema[child]);
            }
        }
    }
    for (kind, schema) in SCHEMAS.iter() {
        visit(kind, &schema["properties"]["spec"]);
    }
}

/// The name and path of each column; a plus marks columns that only `-o wide` shows.
type Columns = &'static [(&'static str, &'static str)];

#[test]
fn short_names_categories_and_columns_are_those_that_people_know() {
    const READY: &str = ".status.conditions[?(@.type=='Ready')].status";
    const AGE: &str = ".metadata.creationTimestamp";
    let pipeline: Columns = &[
        ("Bucket", ".spec.source.bucket.name"),
        ("Order", ".spec.order"),
        ("Ready", READY),
        ("Last Run", ".status.lastRun.name"),
        ("Age", AGE),
        ("+Mode", ".spec.mode"),
        ("+Reason", ".status.conditions[?(@.type=='Ready')].reason"),
    ];
    let run: Columns = &[
        ("Pipeline", ".spec.pipelineRef.name"),
        ("Phase", ".status.phase"),
        ("Progress", ".status.progress"),
        ("Succeeded", ".status.counts.succeeded"),
        ("Failed", ".status.counts.failed"),
        ("Age", AGE),
        ("+Queued", ".status.counts.queued"),
        ("+Running", ".status.counts.running"),
        ("+Rate", ".status.rate"),
        ("+ETA", ".status.estimatedCompletionTime"),
        ("+Job", ".status.jobName"),
        ("+Duration", ".status.duration"),
    ];
    let policy: Columns =
        &[("Action", ".spec.action"), ("Applies To", ".spec.appliesTo"), ("Ready", READY), ("Age", AGE)];
    let grant: Columns = &[("From", ".spec.from[*].namespace"), ("To", ".spec.to[*].kind"), ("Age", AGE)];
    let table: [(&str, &[&str], Columns); 4] = [
        ("Pipeline", &["pl"], pipeline),
        ("PipelineRun", &["plr"], run),
        ("PipelinePolicy", &["plpol"], policy),
        ("ReferenceGrant", &[], grant),
    ];
    for (crd, (kind, short, columns)) in definitions::all().into_iter().zip(table) {
        let names = crd.spec.names;
        assert_eq!(names.kind, kind);
        assert_eq!(names.short_names.unwrap_or_default(), short, "{kind}");
        assert_eq!(names.categories.unwrap_or_default(), ["openfilter"], "{kind}");
        let printed: Vec<(String, String)> = crd.spec.versions[0]
            .additional_printer_columns
            .iter()
            .flatten()
            .map(|column| {
                let wide = if column.priority.unwrap_or(0) > 0 { "+" } else { "" };
                (format!("{wide}{}", column.name), column.json_path.clone())
            })
            .collect();
        let expected: Vec<(String, String)> =
            columns.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect();
        assert_eq!(printed, expected, "{kind}");
    }
}

#[test]
fn kubectl_explains_a_field_in_the_words_of_the_field() {
    let explained =
        |object: Value, field: &str| schema(&object).pointer(field).unwrap()["description"].clone();
    assert_eq!(
        explained(run(), "/properties/status/properties/phase"),
        "The state of the run in one word. Tools should read the conditions instead."
    );
    assert_eq!(
        explained(pipeline(), "/properties/status/properties/lastRun/properties/phase"),
        "Phase of the run when this status was written."
    );
}

/// A choice is explained by its field: kubectl shows its values without their own descriptions.
#[test]
fn kubectl_explains_each_mode_and_protocol_and_the_limits_of_warm_pods() {
    let spec = &schema(&pipeline())["properties"]["spec"]["properties"];
    let filter = &spec["filters"]["items"]["properties"];
    for choice in [&spec["mode"], &filter["protocol"]] {
        let (words, values) = (choice["description"].as_str().unwrap(), choice["enum"].as_array().unwrap());
        assert_eq!(values.len(), 2, "{values:?}");
        for value in values {
            let value = format!("`{}`", value.as_str().unwrap());
            assert!(words.contains(&value), "no {value} in {words:?}");
        }
    }
    for limit in ["maxFilesPerPod", "maxPodAge", "prefetchBytes"] {
        let limit = &spec["warm"]["properties"][limit];
        assert!(limit["description"].is_string() && !limit["default"].is_null(), "{limit}");
    }
}
