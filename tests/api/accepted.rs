//! What the rules accept, the API server accepts too: otherwise it would refuse, in its own words, what
//! `openfilter validate` has called valid. Its part is played by the schemas of the CRDs, by their CEL rules,
//! and by what Kubernetes demands of names and of lists that are sets or maps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use crds::rules::{Context, Kind, check, default};
use kube_cel::{CompiledSchema, Validator};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Map, Value, json};
use tests::examples::{grant, pipeline, policy, run, warm_pipeline};

use super::schema::{SCHEMAS, schema};

/// Random objects, unless the environment variable of this name overrides it.
const OBJECTS: u32 = 1_500;

/// Texts at the edge of what one of the fields accepts. Each is tried in every field.
#[rustfmt::skip]
const TEXTS: &[&str] = &[
    "", "a", "A", "ab", "abc", "aBc", "-a", "a-", "a.b", "a..b", ".a", "a.", "a_b", "a b", " abc", "abc ", "abc\n", "ä", "0", "a\u{0}b",
    "999.1.1.1", "10.0.0.1", "010.0.0.1", "1.2.3", "1.2.3.4.5", "1..2.3", "a.2.3.4",
    "s3://bucket/key", "S3://bucket", "/a", "//a", "[/]a", "[a", "{a,b", "{a,b}", "**", "**.jpg", "a/b", "a\\",
    "http://host", "HTTPS://host:9000/", "https://host/path", "https://", "http:host", "https:host", "https:///host", "https:/host",
    "host:9000", "host:99999", "host:", "user@host", "http://[2001:db8::1]", "[2001:db8::1]:9000", "host\\path", "host?x", "host#", "ftp://host", "host//", "h\tost",
    "eu-central-1", "EU_central", "claimer", "publisher", "install", "worker", "resize", "annotate",
    "0s", "1s", "999ms", "59.9s", "1.5h", "1.h", ".5h", "1h1h", "8760h", "8760h1ms", "8761h", "31536000001ms", "1d", "-1s", "+1s", "1e3s", "1 h", "0001h",
    "5", "05", "+5", "-5", "5.0", "7%", "07%", "007%", "100%", "0100%", "101%", "%", "000000005", "0000000005", "999999999", "1000000000",
    "1Mi", "1023Ki", "1.5Mi", "1e6", "1E7", "1E", "5.", ".5Gi", "+1Mi", "-1Mi", "1048576", "1048575", "1048576000m", "1MiB", "1e99",
    "pr:a:work", "cg:a", "pr:team-a.monday:work", "cg:{team-a.monday}", "filter.plainsight.ai/a",
];

/// A step from a value to a part of it.
#[derive(Clone, Debug)]
enum Step {
    Field(String),
    /// The first entry of a list.
    First,
}

/// A part that an object can have.
struct Place {
    steps: Vec<Step>,
    schema: &'static Value,
}

/// All places below a value with this schema.
fn places(schema: &'static Value, steps: &[Step], found: &mut Vec<Place>) {
    let mut below = |step: Step, schema| places(schema, &[steps, &[step]].concat(), found);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        below(Step::Field(name.clone()), property);
    }
    if schema["items"].is_object() {
        below(Step::First, &schema["items"]);
    }
    if schema["additionalProperties"].is_object() {
        below(Step::Field("cpu".to_owned()), &schema["additionalProperties"]);
    }
    found.push(Place { steps: steps.to_vec(), schema });
}

fn places_of(object: &Value) -> Vec<Place> {
    let mut found = Vec::new();
    places(&schema(object)["properties"]["spec"], &[Step::Field("spec".to_owned())], &mut found);
    found
}

/// Puts a value at a place. Parts that are not there yet, are made with as little as their schemas demand.
fn put(object: &mut Value, schema: &Value, steps: &[Step], value: Value) {
    let Some((step, rest)) = steps.split_first() else {
        *object = value;
        return;
    };
    let (part, schema) = match (step, object) {
        (Step::Field(name), Value::Object(fields)) => {
            let known = &schema["properties"][name];
            let schema = if known.is_null() { &schema["additionalProperties"] } else { known };
            (fields.entry(name).or_insert_with(|| least(schema)), schema)
        }
        (Step::First, Value::Array(items)) => {
            let schema = &schema["items"];
            if items.is_empty() {
                items.push(least(schema));
            }
            (&mut items[0], schema)
        }
        // An earlier change has put something else here.
        _ => return,
    };
    put(part, schema, rest, value);
}

/// The smallest value with this schema.
fn least(schema: &Value) -> Value {
    let number = |key: &str| schema[key].as_u64();
    match schema["type"].as_str() {
        Some("object") => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            required.map(|name| (name.to_owned(), least(&schema["properties"][name]))).collect()
        }
        Some("array") => (0..number("minItems").unwrap_or(0)).map(|_| least(&schema["items"])).collect(),
        Some("string") if schema["enum"].is_array() => schema["enum"][0].clone(),
        Some("string") => json!("a".repeat(number("minLength").unwrap_or(1) as usize)),
        Some("boolean") => json!(true),
        _ => json!(number("minimum").unwrap_or(1)),
    }
}

/// A value that belongs to a place, or nearly so. `choice` is any number.
fn near(schema: &Value, choice: usize) -> Value {
    let bound = |key: &str, least: i64| {
        let bound = schema[key].as_i64().unwrap_or(least);
        [bound - 1, bound, bound + 1][choice / 16 % 3].max(0)
    };
    let copies = |value: Value, key: &str| vec![value; bound(key, 2) as usize];
    let numbers = [-1, 0, 1, 255, 256, 1 << 20, i64::from(i32::MAX), i64::from(i32::MAX) + 1, i64::MAX];
    match (schema["type"].as_str(), choice % 16) {
        (_, 0) => Value::Null,
        (_, 1) => {
            [json!(true), json!("a"), json!(1), json!([]), json!({}), json!(1.5)][choice / 16 % 6].clone()
        }
        (Some("object"), 2) if schema["additionalProperties"].is_object() => {
            let value = least(&schema["additionalProperties"]);
            let keys = 0..bound("maxProperties", 2);
            keys.map(|key| (format!("key-{key}"), value.clone())).collect()
        }
        (Some("object"), 3) if schema["additionalProperties"].is_object() => {
            let key = TEXTS[choice / 16 % TEXTS.len()].to_owned();
            Value::Object(Map::from_iter([(key, least(&schema["additionalProperties"]))]))
        }
        (Some("array"), 2..6) => copies(least(&schema["items"]), "maxItems").into(),
        (Some("array"), 6..10) => {
            let items =
                (0..bound("maxItems", 2)).map(|number| near(&schema["items"], number as usize * 16 + 7));
            items.collect()
        }
        (Some("string"), 2..4) => json!("a".repeat(bound("maxLength", 64) as usize)),
        (Some("string"), 4) => json!("a".repeat(bound("minLength", 1) as usize)),
        (Some("string"), 5..7) if schema["enum"].is_array() => {
            let allowed = schema["enum"].as_array().unwrap();
            allowed[choice / 16 % allowed.len()].clone()
        }
        (Some("string"), _) => json!(TEXTS[choice / 16 % TEXTS.len()]),
        (Some("integer"), 2..5) => json!(bound("minimum", 1)),
        (Some("integer"), 5..8) => json!(bound("maximum", 1)),
        (Some("integer" | "number"), _) => json!(numbers[choice / 16 % numbers.len()]),
        (Some("boolean"), _) => json!((choice / 16).is_multiple_of(2)),
        (None, 2..8) if schema["x-kubernetes-int-or-string"] == true => {
            json!(numbers[choice / 16 % numbers.len()])
        }
        (None, _) if schema["x-kubernetes-int-or-string"] == true => json!(TEXTS[choice / 16 % TEXTS.len()]),
        _ => least(schema),
    }
}

/// A schema of the API server in the language of JSON Schema.
fn structure(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let mut fields: Map<String, Value> =
                fields.iter().map(|(key, value)| (key.clone(), structure(value))).collect();
            if fields.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
                fields.insert("type".to_owned(), json!(["integer", "string"]));
            }
            if fields.get("format") == Some(&json!("int32")) {
                for (key, bound) in [("minimum", i32::MIN), ("maximum", i32::MAX)] {
                    fields.entry(key).or_insert(json!(bound));
                }
            }
            Value::Object(fields)
        }
        Value::Array(items) => items.iter().map(structure).collect(),
        other => other.clone(),
    }
}

/// The API server drops nulls, except in lists, before it does anything else.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(_, value)| !value.is_null());
            kept.map(|(key, value)| (key.clone(), without_nulls(value))).collect()
        }
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        other => other.clone(),
    }
}

/// Entries that are twice in a list that is a set or a map.
fn doubled(schema: &Value, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                doubled(&schema["properties"][name], value, found);
            }
        }
        Value::Array(items) => {
            let keys = schema["x-kubernetes-list-map-keys"].as_array();
            let mut seen = BTreeSet::new();
            for item in items {
                let key = match (schema["x-kubernetes-list-type"].as_str(), keys) {
                    (Some("set"), _) => Some(item.to_string()),
                    (Some("map"), Some(keys)) => {
                        Some(keys.iter().map(|key| item[key.as_str().unwrap()].to_string()).collect())
                    }
                    _ => None,
                };
                found
                    .extend(key.filter(|key| !seen.insert(key.clone())).map(|key| format!("{key} is twice")));
                doubled(&schema["items"], item, found);
            }
        }
        _ => {}
    }
}

fn is_subdomain(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let label = |label: &str| {
        label.starts_with(letter) && label.ends_with(letter) && label.chars().all(|c| letter(c) || c == '-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Why the API server would refuse an object.
fn refused(object: &Value) -> Vec<String> {
    type OfKind<T> = LazyLock<BTreeMap<String, T>>;
    static STRUCTURES: OfKind<jsonschema::Validator> = LazyLock::new(|| {
        let of = |(kind, schema): (&String, &Value)| {
            (kind.clone(), jsonschema::validator_for(&structure(schema)).unwrap())
        };
        SCHEMAS.iter().map(of).collect()
    });
    static CEL: OfKind<CompiledSchema> = LazyLock::new(|| {
        SCHEMAS.iter().map(|(kind, schema)| (kind.clone(), kube_cel::compile_schema(schema))).collect()
    });
    thread_local!(static VALIDATOR: Validator = Validator::new());
    let kind = object["kind"].as_str().unwrap();
    let stored = default(Kind::of(object).unwrap(), &without_nulls(object));
    let errors = STRUCTURES[kind].iter_errors(&stored);
    let mut found: Vec<String> = errors.map(|error| format!("{}: {error}", error.instance_path())).collect();
    doubled(&SCHEMAS[kind], &stored, &mut found);
    if let Some(name) = stored["metadata"]["name"].as_str().filter(|name| !is_subdomain(name)) {
        found.push(format!("metadata.name: {name:?}"));
    }
    // The API server evaluates CEL rules only if the structure is right.
    if found.is_empty()
        && let Err(errors) =
            VALIDATOR.with(|validator| validator.validate_compiled(&CEL[kind], &stored, None))
    {
        found.extend(errors.into_vec().iter().map(ToString::to_string));
    }
    found
}

/// Whether the rules accept an object. If the API server would refuse it all the same, the error says why.
fn accepted(object: &Value) -> Result<bool, String> {
    if check(object, &Context::default()) != Some(Vec::new()) {
        return Ok(false);
    }
    match refused(object).as_slice() {
        [] => Ok(true),
        refused => Err(format!("the rules accept what the API server does not: {refused:#?} in {object}")),
    }
}

#[test]
fn no_text_in_any_field_is_accepted_by_the_rules_alone() {
    // Fields for whose texts the CRDs have no rules.
    #[rustfmt::skip]
    const FREE: [&str; 13] = [
        "affinity", "args", "cel", "command", "message", "messageExpression", "regex", "resources", "schema",
        "securityContext", "tolerations", "value", "valueFrom",
    ];
    let bare = |kind: &str, spec: Value| json!({ "apiVersion": "filter.plainsight.ai/v1alpha1", "kind": kind, "metadata": { "name": "a" }, "spec": spec });
    let source = json!({ "bucket": { "name": "abc", "region": "eu-central-1" } });
    let recipe = json!({ "source": source, "filters": [{ "name": "resize", "image": "a" }] });
    let warm = json!({ "source": source, "mode": "Warm", "warm": {}, "filters": [{ "name": "resize", "image": "a", "command": ["a"] }] });
    let execution =
        json!({ "pipelineRef": { "name": "a" }, "queue": { "stream": "pr:a:work", "group": "cg:a" } });
    // As small as possible, because most of the time is spent on the fields that do not change.
    let objects =
        [bare("Pipeline", recipe), bare("Pipeline", warm), bare("PipelineRun", execution), policy(), grant()];
    let (mut number, mut disputed) = (0, Vec::new());
    for object in objects {
        let is_free = |step: &Step| matches!(step, Step::Field(name) if FREE.contains(&name.as_str()));
        let is_text = |place: &Place| {
            (place.schema["type"] == "string" || place.schema["x-kubernetes-int-or-string"] == true)
                && !place.steps.iter().any(is_free)
        };
        let mut texts = places_of(&object);
        texts.retain(is_text);
        texts.push(Place { steps: named(), schema: &Value::Null });
        for Place { steps, .. } in &texts {
            for text in TEXTS {
                let mut changed = object.clone();
                put(&mut changed, schema(&object), steps, json!(text));
                match accepted(&changed) {
                    Ok(accepted) => number += usize::from(accepted),
                    Err(why) => disputed.push(format!("{steps:?} {text:?}: {why}")),
                }
            }
        }
    }
    assert!(disputed.is_empty(), "{disputed:#?}");
    println!("{number} texts were accepted");
    assert!(number > 1_000, "only {number} were accepted, so that this shows little");
}

/// The steps to an object's name.
fn named() -> Vec<Step> {
    ["metadata", "name"].map(|name| Step::Field(name.to_owned())).to_vec()
}

#[test]
fn no_random_change_is_accepted_by_the_rules_alone() {
    let cases =
        std::env::var("OBJECTS").map_or(OBJECTS, |number| number.parse().expect("OBJECTS is a number"));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let examples = [pipeline(), warm_pipeline(), run(), policy(), grant()].map(|object| {
        let places = places_of(&object);
        (object, places)
    });
    let number = std::cell::Cell::new(0u32);
    let changes = (0..examples.len(), vec(any::<(prop::sample::Index, u16)>(), 1..4));
    let outcome = TestRunner::new(config).run(&changes, |(example, changes)| {
        let (object, places) = &examples[example];
        let mut changed = object.clone();
        for (place, choice) in changes {
            let Place { steps, schema: at } = place.get(places);
            put(&mut changed, schema(object), steps, near(at, choice.into()));
        }
        let accepted = accepted(&changed).map_err(TestCaseError::fail)?;
        number.set(number.get() + u32::from(accepted));
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let number = number.get();
    println!("{number} of {cases} objects were accepted");
    assert!(number > cases / 20, "only {number} of {cases} were accepted, so that this shows little");
}
