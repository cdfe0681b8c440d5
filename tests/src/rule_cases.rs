//! A case for every rule: a change to a valid object that breaks the rule, and a change that corrects it.

use crds::rules::Rule;
use serde_json::{Value, json};

use crate::examples::{grant, pipeline, policy, run, warm_pipeline, with};

/// One mistake, and its correction.
pub struct Case {
    /// The rule that refuses it.
    pub rule: Rule,
    /// The valid object.
    pub object: fn() -> Value,
    /// The place of the change.
    pub pointer: &'static str,
    /// The mistake.
    pub bad: Value,
    /// The correction.
    pub good: Value,
}

fn case(rule: Rule, object: fn() -> Value, pointer: &'static str, bad: Value, good: Value) -> Case {
    Case { rule, object, pointer, bad, good }
}

/// Rules that no object breaks alone: they depend on what else is stored, and the webhook's own suite has
/// their cases.
pub const ABOUT_STORED_OBJECTS: [Rule; 2] = [Rule::CredentialsSecret, Rule::RunIdUnique];

/// All cases.
#[rustfmt::skip]
pub fn cases() -> Vec<Case> {
    let no_grant = json!({ "name": "camera-keys", "namespace": "other" });
    let granted = json!({ "name": "camera-keys", "namespace": "shared" });
    let labels = |number: usize| (0..number).map(|key| (key.to_string(), json!("a"))).collect();
    let rule = |fields: Value| with(with(fields, "/name", json!("r")), "/message", json!("m"));
    vec![
        case(Rule::UnknownField, run, "/spec/execution/paralelism", json!(5), json!(null)),
        case(Rule::UnknownField, pipeline, "/spec/source/bucket/credentials", json!("x"), json!(null)),
        case(Rule::UnknownField, pipeline, "/specs", json!({}), json!(null)),
        case(Rule::MissingField, pipeline, "/spec/source/bucket/name", json!(null), json!("camera-images")),
        case(Rule::MissingField, run, "/spec/pipelineRef", json!(null), json!({ "name": "thumbnails" })),
        case(Rule::WrongType, run, "/spec/execution/parallelism", json!("20"), json!(20)),
        case(Rule::WrongType, pipeline, "/spec/filters/0/env/0/value", json!(128), json!("128")),
        case(Rule::WrongType, pipeline, "/spec/source/include", json!("*.jpg"), json!(["*.jpg"])),
        case(Rule::WrongType, run, "/spec/execution/maxFailedFiles", json!(true), json!(3)),
        case(Rule::UnknownValue, pipeline, "/spec/filters/0/imagePullPolicy", json!("ifnotpresent"), json!("IfNotPresent")),
        case(Rule::UnknownValue, pipeline, "/spec/order", json!("Sequentail"), json!("Sequential")),
        case(Rule::UnknownValue, pipeline, "/spec/order", json!("Random"), json!("Sequential")),
        case(Rule::UnknownValue, pipeline, "/spec/mode", json!("warm"), json!("PodPerFile")),
        case(Rule::UnknownValue, pipeline, "/spec/filters/0/protocol", json!("Line"), json!("Exec")),
        case(Rule::UnknownValue, policy, "/spec/action", json!("deny"), json!("Deny")),
        case(Rule::NumberRange, run, "/spec/execution/parallelism", json!(0), json!(1)),
        case(Rule::NumberRange, run, "/spec/execution/maxAttempts", json!(101), json!(100)),
        case(Rule::NumberRange, run, "/spec/execution/nonRetryableExitCodes", json!([0]), json!([1, 255])),
        case(Rule::NumberRange, warm_pipeline, "/spec/warm/maxFilesPerPod", json!(0), json!(1)),
        case(Rule::TextLength, policy, "/spec/rules/0/message", json!("a".repeat(1025)), json!("a")),
        case(Rule::ListLength, pipeline, "/spec/source/include", json!(vec!["*"; 65]), json!(vec!["*"; 64])),
        case(Rule::ListLength, pipeline, "/spec/filters", json!([]), json!([{ "name": "annotate", "image": "a" }])),
        case(Rule::ListLength, pipeline, "/spec/pod/labels", labels(33), labels(32)),
        case(Rule::ListUnique, run, "/spec/execution/nonRetryableExitCodes", json!([3, 3]), json!([3, 4])),
        case(Rule::ObjectLabel, run, "/metadata/labels", json!({ "team": "a b" }), json!({ "team": "a-b" })),

        case(Rule::BucketName, pipeline, "/spec/source/bucket/name", json!("Camera_Images"), json!("camera-images")),
        case(Rule::BucketName, pipeline, "/spec/source/bucket/name", json!("s3://camera/2026"), json!("camera")),
        case(Rule::BucketName, pipeline, "/spec/source/bucket/name", json!("a..b"), json!("a.b")),
        case(Rule::BucketName, pipeline, "/spec/source/bucket/name", json!("10.0.0.1"), json!("ten.0.0.1")),
        case(Rule::BucketName, pipeline, "/spec/source/bucket/name", json!("999.1.1.1"), json!("999.1.1")),
        case(Rule::BucketRegion, pipeline, "/spec/source/bucket/endpoint", json!(""), json!("minio:9000")),
        case(Rule::BucketRegion, pipeline, "/spec/sink/bucket/region", json!("eu central"), json!("eu-central-1")),
        case(Rule::Endpoint, pipeline, "/spec/source/bucket/endpoint", json!("https://s3.example.com/bucket"), json!("https://s3.example.com")),
        case(Rule::Endpoint, pipeline, "/spec/source/bucket/endpoint", json!("ftp://s3.example.com"), json!("s3.example.com:443")),
        case(Rule::EndpointCredentials, pipeline, "/spec/source/bucket/endpoint", json!("https://key:secret@s3.example.com"), json!("https://s3.example.com")),
        case(Rule::EndpointAddress, pipeline, "/spec/source/bucket/endpoint", json!("http://169.254.169.254"), json!("http://10.0.0.9")),
        case(Rule::Prefix, pipeline, "/spec/source/bucket/prefix", json!("s3://camera-images/2026/"), json!("2026/")),
        case(Rule::Prefix, pipeline, "/spec/source/bucket/prefix", json!("ä".repeat(513)), json!("ä".repeat(512))),
        case(Rule::Glob, pipeline, "/spec/source/include/0", json!("[a-.jpg"), json!("[ab].jpg")),
        case(Rule::Glob, run, "/spec/source/exclude", json!(["/tmp/*"]), json!(["tmp/*"])),

        case(Rule::FilterName, pipeline, "/spec/filters/0/name", json!("Resize_Image"), json!("resize-image")),
        case(Rule::FilterNameReserved, pipeline, "/spec/filters/0/name", json!("claimer"), json!("my-claimer")),
        case(Rule::FilterNameReserved, pipeline, "/spec/filters/0/name", json!("publisher"), json!("publish")),
        case(Rule::FilterNameReserved, warm_pipeline, "/spec/filters/0/name", json!("worker"), json!("my-worker")),
        case(Rule::FilterNameReserved, warm_pipeline, "/spec/filters/0/name", json!("install"), json!("installer")),
        case(Rule::FilterNameUnique, pipeline, "/spec/filters/0/name", json!("annotate"), json!("annotate-1")),
        case(Rule::Image, pipeline, "/spec/filters/0/image", json!("ghcr.io/Acme/Resize:1.4"), json!("ghcr.io/acme/resize:1.4")),
        case(Rule::Image, pipeline, "/spec/filters/0/image", json!("https://ghcr.io/acme/resize"), json!("ghcr.io/acme/resize")),
        case(Rule::Image, pipeline, "/spec/filters/0/image", json!("resize:1.4 "), json!("resize:1.4")),
        case(Rule::Image, pipeline, "/spec/filters/0/image", json!(format!("resize@sha256:{}", "a".repeat(32))), json!(format!("resize@sha256:{}", "a".repeat(64)))),
        case(Rule::EnvName, pipeline, "/spec/filters/0/env/0/name", json!("1SIZE"), json!("SIZE1")),
        case(Rule::EnvName, run, "/spec/env", json!([{ "name": "LOG LEVEL", "value": "x" }]), json!([{ "name": "LOG_LEVEL", "value": "x" }])),
        case(Rule::EnvUnique, pipeline, "/spec/filters/0/env/-", json!({ "name": "SIZE", "value": "64" }), json!({ "name": "WIDTH", "value": "64" })),
        case(Rule::EnvSource, pipeline, "/spec/filters/0/env/0/valueFrom", json!({ "fieldRef": { "fieldPath": "metadata.name" } }), json!(null)),
        case(Rule::EnvSource, pipeline, "/spec/filters/0/env/0", json!({ "name": "KEY", "valueFrom": {} }), json!({ "name": "KEY", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } })),
        case(Rule::ResourceName, pipeline, "/spec/filters/1/resources/limits/memroy", json!("1Gi"), json!(null)),
        case(Rule::RequestsWithinLimits, pipeline, "/spec/filters/1/resources", json!({ "requests": { "nvidia.com/gpu": 1 }, "limits": { "nvidia.com/gpu": "2" } }), json!({ "requests": { "nvidia.com/gpu": "2" }, "limits": { "nvidia.com/gpu": 2 } })),
        case(Rule::EnvName, pipeline, "/spec/filters/0/env/0/name", json!(".."), json!("a.b")),
        case(Rule::NumberRange, run, "/spec/execution/maxFailedFiles", json!(3_000_000_000_u64), json!(999_999_999)),
        case(Rule::MaxFailedFiles, run, "/spec/execution/maxFailedFiles", json!(1_000_000_000), json!("999999999")),
        case(Rule::PodLabel, pipeline, "/spec/pod/nodeSelector", json!({ "disk": "ssd!" }), json!({ "disk": "ssd" })),
        case(Rule::PolicySelector, policy, "/spec/namespaceSelector", json!({ "matchExpressions": [{ "key": "env", "operator": "in", "values": ["prod"] }] }), json!({ "matchExpressions": [{ "key": "env", "operator": "In", "values": ["prod"] }] })),
        case(Rule::PolicySelector, policy, "/spec/namespaceSelector", json!({ "matchExpressions": [{ "key": "env", "operator": "In" }] }), json!({ "matchExpressions": [{ "key": "env", "operator": "Exists" }] })),
        case(Rule::PolicySelector, policy, "/spec/namespaceSelector", json!({ "matchLabels": { "env": "a b" } }), json!({ "matchLabels": { "env": "a-b" } })),
        case(Rule::PolicyField, policy, "/spec/rules/0/field", json!("metadata.labels[acme.example/team]"), json!("metadata.labels[\"acme.example/team\"]")),
        case(Rule::Quantity, pipeline, "/spec/filters/1/resources/requests/memory", json!("64MB"), json!("64M")),
        case(Rule::Quantity, pipeline, "/spec/filters/1/resources/requests/cpu", json!("-1"), json!("1")),
        case(Rule::RequestsWithinLimits, pipeline, "/spec/filters/1/resources/requests/memory", json!("1Gi"), json!("128Mi")),
        case(Rule::Quantity, warm_pipeline, "/spec/warm/prefetchBytes", json!("64MB"), json!("64M")),
        case(Rule::Quantity, warm_pipeline, "/spec/warm/prefetchBytes", json!("512Ki"), json!("1Mi")),
        case(Rule::WarmCommand, warm_pipeline, "/spec/filters/0/command", json!(null), json!(["resize"])),
        case(Rule::WarmCommand, warm_pipeline, "/spec/filters/1/command", json!([]), json!(["annotate"])),
        case(Rule::WarmMode, warm_pipeline, "/spec/mode", json!("PodPerFile"), json!("Warm")),
        case(Rule::LinesCommand, pipeline, "/spec/filters/1/protocol", json!("Lines"), json!("Exec")),
        case(Rule::SinkOrder, pipeline, "/spec/order", json!("Concurrent"), json!("Sequential")),
        case(Rule::SinkFrom, pipeline, "/spec/sink/from", json!("anotate"), json!("annotate")),
        case(Rule::ObjectName, run, "/metadata/name", json!("Monday_Run"), json!("monday-run")),
        case(Rule::ObjectName, pipeline, "/spec/source/bucket/credentialsSecret/name", json!("Camera_Keys"), json!("camera-keys")),
        case(Rule::ObjectName, pipeline, "/spec/pod/serviceAccountName", json!("-worker"), json!("worker")),
        case(Rule::ObjectName, run, "/spec/pipelineRef/name", json!("Thumbnails"), json!("thumbnails")),
        case(Rule::ObjectName, grant, "/spec/from/0/namespace", json!("team.a"), json!("team-a")),
        case(Rule::PodLabel, pipeline, "/spec/pod/labels/team", json!("a b"), json!("a-b")),
        case(Rule::PodLabel, pipeline, "/spec/pod/annotations/a~1b~1c", json!("x"), json!(null)),
        case(Rule::PodLabelReserved, pipeline, "/spec/pod/labels/filter.plainsight.ai~1run", json!("x"), json!(null)),

        case(Rule::ReferenceGrant, pipeline, "/spec/source/bucket/credentialsSecret", no_grant, granted),
        case(Rule::ReferenceGrant, run, "/spec/pipelineRef/namespace", json!("other"), json!("shared")),
        case(Rule::RunPrefix, run, "/spec/source/prefix", json!("2025/12/31/"), json!("2026/12/31/")),
        case(Rule::Duration, run, "/spec/execution/pendingTimeout", json!("15 minutes"), json!("15m")),
        case(Rule::Duration, run, "/spec/execution/pendingTimeout", json!("1s"), json!("10s")),
        case(Rule::Duration, warm_pipeline, "/spec/warm/maxPodAge", json!("30s"), json!("1m")),
        case(Rule::BackoffOrder, run, "/spec/execution/retryBackoff", json!({ "initial": "10m" }), json!({ "initial": "5m" })),
        case(Rule::FileTimeout, run, "/spec/execution/fileTimeout", json!("3h"), json!("2h")),
        case(Rule::MaxFailedFiles, run, "/spec/execution/maxFailedFiles", json!("101%"), json!("100%")),
        case(Rule::MaxFailedFiles, run, "/spec/execution/maxFailedFiles", json!(-1), json!(0)),
        case(Rule::MaxFailedFiles, run, "/spec/execution/maxFailedFiles", json!("007%"), json!("07%")),
        case(Rule::MaxFailedFiles, run, "/spec/execution/maxFailedFiles", json!("0000000005"), json!("000000005")),
        case(Rule::QueueKeysBoth, run, "/spec/queue/group", json!(null), json!("cg:team-a.monday")),
        case(Rule::QueueKey, run, "/spec/queue/stream", json!("team-a.monday"), json!("pr:team-a.monday:work")),
        case(Rule::QueueKeysRunId, run, "/spec/queue/group", json!("cg:team-a.tuesday"), json!("cg:team-a.monday")),
        case(Rule::RunId, run, "/spec/queue", json!({ "stream": "pr:-x:work", "group": "cg:-x" }), json!({ "stream": "pr:{x}:work", "group": "cg:{x}" })),

        case(Rule::PolicyEmpty, policy, "/spec", json!({ "appliesTo": ["Pipeline"] }), policy()["spec"].clone()),
        case(Rule::PolicyRuleName, policy, "/spec/rules/0/name", json!("parallelism"), json!("registries")),
        case(Rule::PolicyRuleName, policy, "/spec/rules/0/name", json!("Registry Rule"), json!("registry-rule")),
        case(Rule::PolicyRuleForm, policy, "/spec/rules/0/cel", json!("true"), json!(null)),
        case(Rule::PolicyRuleForm, policy, "/spec/rules/1/cel", json!(null), json!("true")),
        case(Rule::PolicyRuleForm, policy, "/spec/rules/0/required", json!(true), json!(null)),
        case(Rule::PolicyRuleForm, policy, "/spec/rules/0", rule(json!({ "field": "spec.sink", "forbidden": false })), rule(json!({ "field": "spec.sink", "forbidden": true }))),
        case(Rule::PolicyRuleForm, policy, "/spec/rules/1/regex", json!("x"), json!(null)),
        case(Rule::PolicyCel, policy, "/spec/rules/1/cel", json!("object.spec.execution. <= 50"), json!("object.spec.execution.parallelism <= 50")),
        case(Rule::PolicyCel, policy, "/spec/rules/1/cel", json!("objekt.spec.execution.parallelism <= 50"), json!("object.spec.execution.parallelism <= 50")),
        case(Rule::PolicyCel, policy, "/spec/rules/1/cel", json!("object.kind.isShouting()"), json!("object.kind.startsWith('P')")),
        case(Rule::PolicyCel, policy, "/spec/rules/1/cel", json!("[1].all(a, [1].all(b, [1].all(c, [1].all(d, true))))"), json!("[1].all(a, [1].all(b, [1].all(c, true)))")),
        case(Rule::PolicySchema, policy, "/spec/rules/0", rule(json!({ "field": "spec", "schema": { "$ref": "#" } })), rule(json!({ "field": "spec", "schema": { "$ref": "#/$defs/a", "$defs": { "a": { "type": "object" } } } }))),
        case(Rule::PolicyField, policy, "/spec/defaults/-", json!({ "field": "metadata.name", "value": "x" }), json!({ "field": "metadata.labels.team", "value": "x" })),
        case(Rule::PolicyRegex, policy, "/spec/rules/0/regex", json!("(?!docker)"), json!("^ghcr")),
        case(Rule::PolicyRegex, policy, "/spec/rules/0/regex", json!("(a{1000}){1000}"), json!("a{10}")),
        case(Rule::PolicySchema, policy, "/spec/rules/0", rule(json!({ "field": "spec", "schema": { "type": "objekt" } })), rule(json!({ "field": "spec", "schema": { "type": "object" } }))),
        case(Rule::PolicySchema, policy, "/spec/rules/0", rule(json!({ "field": "spec", "schema": { "$ref": "https://example.com/s.json" } })), rule(json!({ "field": "spec", "schema": { "$ref": "#/$defs/a", "$defs": { "a": true } } }))),
        case(Rule::PolicyField, policy, "/spec/rules/0/field", json!("filters[].image"), json!("spec.filters[*].image")),
        case(Rule::PolicyField, policy, "/spec/rules/0/field", json!("spec.filters[*].imige"), json!("spec.filters[*].image")),
        case(Rule::PolicyField, policy, "/spec/defaults/-", json!({ "field": "spec.execution.filetimeout", "value": "1h" }), json!({ "field": "spec.execution.fileTimeout", "value": "1h" })),
        case(Rule::WrongType, policy, "/spec/defaults/-", json!({ "field": "spec.execution.parallelism", "value": "8" }), json!({ "field": "spec.execution.parallelism", "value": 8 })),
        case(Rule::PolicyField, policy, "/spec/defaults/-", json!({ "field": "spec.execution.timeout", "value": "1h" }), json!({ "field": "spec.execution.fileTimeout", "value": "1h" })),
        case(Rule::PolicyRange, policy, "/spec/rules/0", rule(json!({ "field": "spec.execution.parallelism", "range": { "min": 10, "max": 1 } })), rule(json!({ "field": "spec.execution.parallelism", "range": { "min": 1, "max": 10 } }))),
        case(Rule::PolicyRange, policy, "/spec/rules/0", rule(json!({ "field": "spec.execution.timeout", "range": { "min": "1Gi", "max": "2h" } })), rule(json!({ "field": "spec.execution.timeout", "range": { "min": "15m", "max": "2h" } }))),
        case(Rule::PolicyRange, policy, "/spec/rules/0", rule(json!({ "field": "spec.execution.timeout", "range": {} })), rule(json!({ "field": "spec.execution.timeout", "range": { "max": "4Gi" } }))),
        case(Rule::PolicyRange, policy, "/spec/rules/0", rule(json!({ "field": "spec.execution.timeout", "range": { "max": "soon" } })), rule(json!({ "field": "spec.execution.timeout", "range": { "max": "500m" } }))),

        case(Rule::GrantUseless, grant, "/spec/to", json!([{ "kind": "Pipeline" }]), json!([{ "kind": "Pipeline" }, { "kind": "Secret" }])),
        case(Rule::GrantUseless, grant, "/spec", json!({ "from": [{ "kind": "Pipeline", "namespace": "team-a" }], "to": [{ "kind": "Pipeline" }] }), json!({ "from": [{ "kind": "PipelineRun", "namespace": "team-a" }], "to": [{ "kind": "Secret" }] })),

        case(Rule::Immutable, run, "/spec/pipelineRef/name", json!("other"), json!("thumbnails")),
        case(Rule::Immutable, run, "/spec/source/prefix", json!("2026/12/"), json!("2026/11/16/")),
        case(Rule::Immutable, run, "/spec/execution/timeout", json!(null), json!("2h")),
        case(Rule::Immutable, run, "/spec/execution/maxAttempts", json!(5), json!(3)),
        case(Rule::Immutable, run, "/spec/execution/nonRetryableExitCodes", json!([3]), json!(null)),
        case(Rule::Immutable, run, "/spec/queue", json!(null), run()["spec"]["queue"].clone()),
        case(Rule::Immutable, run, "/spec/env", json!([{ "name": "A", "value": "b" }]), json!(null)),
    ]
}
