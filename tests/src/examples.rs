//! Valid objects to start from, changes to them, and the changes that the CRDs' own CEL rules check.

use serde_json::{Value, json};

/// A Pipeline that uses most features.
pub fn pipeline() -> Value {
    json!({
        "apiVersion": "filter.plainsight.ai/v1alpha1",
        "kind": "Pipeline",
        "metadata": { "name": "thumbnails", "namespace": "team-a" },
        "spec": {
            "source": {
                "bucket": {
                    "name": "camera-images",
                    "prefix": "2026/",
                    "endpoint": "https://minio.storage.svc:9000",
                    "credentialsSecret": { "name": "camera-keys" }
                },
                "include": ["**/*.jpg"]
            },
            "filters": [
                { "name": "resize", "image": "ghcr.io/acme/resize:1.4", "env": [{ "name": "SIZE", "value": "128" }] },
                {
                    "name": "annotate",
                    "image": "ghcr.io/acme/annotate:2.0",
                    "resources": { "requests": { "cpu": "250m", "memory": "64Mi" }, "limits": { "memory": "128Mi" } }
                }
            ],
            "sink": { "bucket": { "name": "thumbnails", "region": "eu-central-1" }, "from": "annotate" },
            "pod": { "labels": { "acme.example/team": "a" }, "annotations": {} }
        }
    })
}

/// The same Pipeline in Warm mode.
pub fn warm_pipeline() -> Value {
    let mut object = pipeline();
    let spec = &mut object["spec"];
    spec["mode"] = json!("Warm");
    spec["warm"] = json!({ "maxFilesPerPod": 500, "maxPodAge": "30m", "prefetchBytes": "64Mi" });
    spec["filters"][0]["command"] = json!(["/usr/bin/resize"]);
    spec["filters"][1]["command"] = json!(["python3", "-u", "annotate.py"]);
    spec["filters"][1]["protocol"] = json!("Lines");
    object
}

/// A PipelineRun of this Pipeline.
pub fn run() -> Value {
    json!({
        "apiVersion": "filter.plainsight.ai/v1alpha1",
        "kind": "PipelineRun",
        "metadata": { "name": "monday", "namespace": "team-a" },
        "spec": {
            "pipelineRef": { "name": "thumbnails" },
            "source": { "prefix": "2026/11/16/" },
            "execution": { "parallelism": 20, "timeout": "2h", "fileTimeout": "10m" },
            "queue": { "stream": "pr:team-a.monday:work", "group": "cg:team-a.monday" }
        }
    })
}

/// A policy with a rule of each form.
pub fn policy() -> Value {
    json!({
        "apiVersion": "filter.plainsight.ai/v1alpha1",
        "kind": "PipelinePolicy",
        "metadata": { "name": "platform" },
        "spec": {
            "appliesTo": ["Pipeline", "PipelineRun"],
            "rules": [
                { "name": "registry", "message": "use our registry", "field": "spec.filters[*].image", "regex": "^ghcr.io/acme/.*$" },
                { "name": "parallelism", "message": "at most 50", "cel": "object.spec.execution.parallelism <= 50" }
            ],
            "defaults": [{ "field": "spec.execution.timeout", "value": "2h" }]
        }
    })
}

/// A grant for the Pipeline and the run above.
pub fn grant() -> Value {
    json!({
        "apiVersion": "filter.plainsight.ai/v1alpha1",
        "kind": "ReferenceGrant",
        "metadata": { "name": "team-a", "namespace": "shared" },
        "spec": {
            "from": [{ "kind": "PipelineRun", "namespace": "team-a" }, { "kind": "Pipeline", "namespace": "team-a" }],
            "to": [{ "kind": "Pipeline", "name": "thumbnails" }, { "kind": "Secret", "name": "camera-keys" }]
        }
    })
}

/// `object` with `value` at `pointer` (RFC 6901, `-` appends to a list); `Value::Null` removes the current
/// value.
pub fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, last) = pointer.rsplit_once('/').expect("a pointer has a parent");
    let mut target = &mut object;
    for step in parent.split('/').skip(1) {
        let step = step.replace("~1", "/");
        target = match target {
            Value::Array(items) => &mut items[step.parse::<usize>().expect("an index")],
            Value::Object(fields) => fields.entry(step).or_insert_with(|| json!({})),
            other => panic!("{pointer}: {other} has no children"),
        };
    }
    match target {
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => items[last.parse::<usize>().expect("an index")] = value,
        Value::Object(fields) if value.is_null() => {
            fields.remove(last);
        }
        Value::Object(fields) => {
            fields.insert(last.replace("~1", "/"), value);
        }
        other => panic!("{pointer}: {other} has no children"),
    }
    object
}

/// A change that a CEL rule of a CRD refuses, and its correction.
pub struct CelCase {
    /// The object that is changed.
    pub object: fn() -> Value,
    /// The place of the change.
    pub pointer: &'static str,
    /// A value that the rule refuses.
    pub bad: Value,
    /// A value that the rule accepts.
    pub good: Value,
}

/// At least one case for every CEL rule that checks an object by itself.
#[rustfmt::skip]
pub fn cel_cases() -> Vec<CelCase> {
    let case = |object, pointer, bad, good| CelCase { object, pointer, bad, good };
    vec![
        case(pipeline, "/spec/source/bucket/endpoint", json!(null), json!("minio:9000")),
        case(pipeline, "/spec/source/bucket/name", json!("Camera"), json!("camera")),
        case(pipeline, "/spec/source/bucket/endpoint", json!("https://key:secret@host"), json!("https://host:9000/")),
        case(pipeline, "/spec/source/bucket/endpoint", json!("host/path"), json!("host")),
        case(pipeline, "/spec/sink/bucket/region", json!("eu central"), json!("eu-central-1")),
        case(pipeline, "/spec/order", json!("Concurrent"), json!("Sequential")),
        case(pipeline, "/spec/sink/from", json!("other"), json!("resize")),
        case(pipeline, "/spec/filters/0/name", json!("Resize_Image"), json!("resize-image")),
        case(pipeline, "/spec/filters/0/name", json!("claimer"), json!("claim")),
        case(pipeline, "/spec/filters/0/name", json!("publisher"), json!("publish")),
        case(warm_pipeline, "/spec/filters/0/name", json!("install"), json!("installer")),
        case(warm_pipeline, "/spec/filters/0/name", json!("worker"), json!("my-worker")),
        case(warm_pipeline, "/spec/filters/0/name", json!("claimer"), json!("claim")),
        case(warm_pipeline, "/spec/filters/0/command", json!(null), json!(["resize"])),
        case(warm_pipeline, "/spec/filters/1/command", json!([]), json!(["annotate"])),
        case(pipeline, "/spec/mode", json!("Warm"), json!("PodPerFile")),
        case(pipeline, "/spec/filters/0/protocol", json!("Lines"), json!("Exec")),
        case(pipeline, "/spec/warm", json!({}), json!(null)),
        case(warm_pipeline, "/spec/mode", json!(null), json!("Warm")),
        case(warm_pipeline, "/spec/warm/maxPodAge", json!("59s"), json!("60s")),
        case(warm_pipeline, "/spec/warm/maxPodAge", json!("8761h"), json!("8760h")),
        case(warm_pipeline, "/spec/warm/maxPodAge", json!("1d"), json!("24h")),
        case(warm_pipeline, "/spec/warm/prefetchBytes", json!("1023Ki"), json!("1Mi")),
        case(warm_pipeline, "/spec/warm/prefetchBytes", json!(1_048_575), json!(1_048_576)),
        case(warm_pipeline, "/spec/warm/prefetchBytes", json!("64MB"), json!("64M")),
        case(pipeline, "/spec/source/bucket/name", json!("a..b"), json!("a.b")),
        case(pipeline, "/spec/pod/labels", json!({ "filter.plainsight.ai/run": "x" }), json!({ "acme.example/run": "x" })),
        case(pipeline, "/spec/pod/annotations", json!({ "filter.plainsight.ai/run": "x" }), json!({ "acme.example/run": "x" })),
        case(pipeline, "/spec/source/bucket/prefix", json!("s3://camera-images/2026/"), json!("/s3:/2026/")),
        case(run, "/spec/source/prefix", json!("s3://camera-images/2026/"), json!("2026/s3://")),
        case(pipeline, "/spec/source/include", json!(["*.jpg", "/tmp/*"]), json!(["*.jpg", "[/]tmp/*"])),
        case(pipeline, "/spec/source/exclude", json!(["/tmp/*"]), json!(["tmp/*"])),
        case(run, "/spec/source/include", json!(["/tmp/*"]), json!(["tmp/*"])),
        case(run, "/spec/source/exclude", json!(["/tmp/*"]), json!(["**/tmp/*"])),
        case(pipeline, "/spec/source/bucket/credentialsSecret/name", json!("Camera_Keys"), json!("camera.keys-1")),
        case(pipeline, "/spec/source/bucket/credentialsSecret/name", json!("a..b"), json!("a.b")),
        case(pipeline, "/spec/source/bucket/credentialsSecret/namespace", json!("team.b"), json!("team-b")),
        case(pipeline, "/spec/sink/bucket/credentialsSecret", json!({ "name": "keys-" }), json!({ "name": "keys" })),
        case(pipeline, "/spec/pod/serviceAccountName", json!("-worker"), json!("worker")),
        case(pipeline, "/spec/pod/priorityClassName", json!("High"), json!("high")),
        case(pipeline, "/spec/pod/runtimeClassName", json!("g visor"), json!("gvisor")),
        case(run, "/spec/pipelineRef/name", json!("Thumbnails"), json!("thumbnails.v2")),
        case(run, "/spec/pipelineRef/namespace", json!("-shared"), json!("shared")),
        case(grant, "/spec/from/0/namespace", json!("team.a"), json!("0-team-a")),
        case(grant, "/spec/to/1/name", json!(".keys"), json!("a-1.b-2")),
        case(pipeline, "/spec/filters/0/env/0/name", json!("1SIZE"), json!("_1-SIZE.x")),
        case(pipeline, "/spec/filters/0/env/0/name", json!(".."), json!(".a.")),
        case(pipeline, "/spec/filters/0/env/0/name", json!("."), json!("-")),
        case(run, "/spec/env", json!([{ "name": "LOG LEVEL", "value": "x" }]), json!([{ "name": "LOG_LEVEL", "value": "x" }])),
        case(run, "/spec/env", json!([{ "name": "" }]), json!([{ "name": "E".repeat(128) }])),
        case(run, "/spec/env", json!([{ "name": "A", "value": "b", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }]), json!([{ "name": "A", "value": "", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }])),
        case(pipeline, "/spec/filters/0/env/0", json!({ "name": "KEY", "valueFrom": {} }), json!({ "name": "KEY", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } })),
        case(pipeline, "/spec/filters/0/env/0", json!({ "name": "KEY", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" }, "configMapKeyRef": { "name": "c", "key": "k" } } }), json!({ "name": "KEY", "valueFrom": { "configMapKeyRef": { "name": "c", "key": "k" } } })),
        case(run, "/spec/execution/retryBackoff", json!({ "initial": "8761h", "max": "8761h" }), json!({ "initial": "8760h", "max": "8760h" })),
        case(run, "/spec/execution/retryBackoff", json!({ "max": "9000h" }), json!({ "initial": "0s", "max": "0s" })),
        case(run, "/spec/execution/retryBackoff", json!({ "initial": "fast" }), json!({ "initial": "1.5s" })),
        case(run, "/spec/execution/retryBackoff", json!({ "max": "2 m" }), json!({ "max": "2m" })),
        case(run, "/spec/execution/pendingTimeout", json!("1s"), json!("10s")),
        case(run, "/spec/execution/pendingTimeout", json!("15"), json!("15m")),
        case(run, "/spec/execution/timeout", json!("soon"), json!("2h")),
        case(run, "/spec/execution/fileTimeout", json!(""), json!("1h")),
        case(run, "/spec/execution/timeout", json!("9000h"), json!("8000h")),
        case(run, "/spec/execution/fileTimeout", json!("10ms"), json!("1s")),
        case(run, "/spec/execution/maxFailedFiles", json!(3_000_000_000_u64), json!(999_999_999)),
        case(policy, "/spec/rules/0", json!({ "name": "r", "message": "m", "field": "spec.sink", "range": { "min": 5_000_000_000_u64 } }), json!({ "name": "r", "message": "m", "field": "spec.sink", "range": { "min": "5G" } })),
        case(policy, "/spec/rules/0", json!({ "name": "r", "message": "m", "field": "spec.sink", "range": { "max": "5000000000" } }), json!({ "name": "r", "message": "m", "field": "spec.sink", "range": { "max": 500_000_000 } })),
        case(run, "/spec/execution/retryBackoff", json!({ "initial": "1h" }), json!({ "initial": "1m30s" })),
        case(run, "/spec/execution/fileTimeout", json!("3h"), json!("1h")),
        case(run, "/spec/execution/maxFailedFiles", json!("101%"), json!("10%")),
        case(run, "/spec/execution/maxFailedFiles", json!(-1), json!(5)),
        case(run, "/spec/queue/group", json!(null), json!("cg:team-a.monday")),
        case(run, "/spec/queue/group", json!("cg:other"), json!("cg:team-a.monday")),
        case(run, "/spec/queue", json!({ "stream": "pr:-x:work", "group": "cg:-x" }), json!({ "stream": "pr:{x}:work", "group": "cg:{x}" })),
        case(policy, "/spec", json!({ "appliesTo": ["Pipeline"] }), policy()["spec"].clone()),
        case(policy, "/spec/rules/0/name", json!("Registry"), json!("registry")),
        case(policy, "/spec/rules/0/cel", json!("true"), json!(null)),
        case(policy, "/spec/rules/1/cel", json!(null), json!("true")),
        case(policy, "/spec/rules/0/regex", json!(null), json!("x")),
        case(policy, "/spec/rules/0/required", json!(true), json!(null)),
        case(policy, "/spec/rules/1/regex", json!("x"), json!(null)),
        case(policy, "/spec/rules/0", json!({ "name": "r", "message": "m", "field": "spec.sink", "forbidden": false }), json!({ "name": "r", "message": "m", "field": "spec.sink", "forbidden": true })),
        case(policy, "/spec/rules/0", json!({ "name": "r", "message": "m", "field": "spec.sink", "required": false }), json!({ "name": "r", "message": "m", "field": "spec.sink", "required": true })),
        case(policy, "/spec/rules/0", json!({ "name": "r", "message": "m", "field": "spec.sink", "range": {} }), json!({ "name": "r", "message": "m", "field": "spec.sink", "range": { "max": 3 } })),
    ]
}

/// A field of an object and a value for it.
pub type Change = (&'static str, Value);

/// Changes to a stored run that are allowed.
pub fn allowed_updates() -> Vec<Change> {
    vec![
        ("/spec/execution/parallelism", json!(50)),
        ("/spec/execution/maxFailedFiles", json!("5%")),
        ("/spec/execution/maxFailedFiles", json!("5")),
        ("/spec/suspend", json!(true)),
        // An empty list says the same as none.
        ("/spec/env", json!([])),
        ("/spec/execution/nonRetryableExitCodes", json!([])),
    ]
}

/// Changes to a stored run that are refused.
pub fn refused_updates() -> Vec<Change> {
    vec![
        ("/spec/pipelineRef/name", json!("other")),
        ("/spec/source/prefix", json!("other")),
        ("/spec/source", json!(null)),
        ("/spec/env", json!([{ "name": "A", "value": "b" }])),
        ("/spec/execution/maxAttempts", json!(5)),
        ("/spec/execution/pendingTimeout", json!("20m")),
        ("/spec/execution/retryBackoff", json!({ "initial": "2s" })),
        ("/spec/execution/fileTimeout", json!(null)),
        ("/spec/execution/timeout", json!("3h")),
        ("/spec/execution/nonRetryableExitCodes", json!([3])),
        ("/spec/queue", json!(null)),
    ]
}
