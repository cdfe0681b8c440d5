//! Compares an object, as a person wrote it, with the schema of its CRD: unknown fields, missing fields,
//! wrong types, disallowed words, bounds, duplicates in sets. The schema is the installed one, so this cannot
//! disagree with the API server.
//!
//! CEL rules of the schema are not evaluated here: each of them has a rule with a better message, and
//! `tests/api/accepted.rs` compares the two.

use std::collections::HashMap;
use std::sync::LazyLock;

use kube::CustomResourceExt;
use serde_json::{Map, Value};
use strum::{Display, EnumString, VariantNames};

use super::path::Path;
use super::pipeline_run::FAILURES_FORM;
use super::rule::Rule;
use super::suggest;
use super::violation::{Findings, quote};
use crate::definitions::definition;
use crate::v1alpha1::{Pipeline, PipelinePolicy, PipelineRun, ReferenceGrant};

/// The kinds of this API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, EnumString, VariantNames)]
#[allow(missing_docs)]
pub enum Kind {
    Pipeline,
    PipelineRun,
    PipelinePolicy,
    ReferenceGrant,
}

const API_VERSION: &str = "filter.plainsight.ai/v1alpha1";

impl Kind {
    /// The kind of an object; `None` if it is not a kind of this API.
    pub fn of(object: &Value) -> Option<Self> {
        (object.get("apiVersion")?.as_str()? == API_VERSION).then_some(())?;
        object.get("kind")?.as_str()?.parse().ok()
    }

    pub(crate) fn schema(self) -> &'static Value {
        static PIPELINE: LazyLock<Value> = LazyLock::new(schema_of::<Pipeline>);
        static PIPELINE_RUN: LazyLock<Value> = LazyLock::new(schema_of::<PipelineRun>);
        static PIPELINE_POLICY: LazyLock<Value> = LazyLock::new(schema_of::<PipelinePolicy>);
        static REFERENCE_GRANT: LazyLock<Value> = LazyLock::new(schema_of::<ReferenceGrant>);
        match self {
            Self::Pipeline => &PIPELINE,
            Self::PipelineRun => &PIPELINE_RUN,
            Self::PipelinePolicy => &PIPELINE_POLICY,
            Self::ReferenceGrant => &REFERENCE_GRANT,
        }
    }
}

fn schema_of<K: CustomResourceExt>() -> Value {
    let versions = definition::<K>().spec.versions;
    let schema = versions.into_iter().next().and_then(|version| version.schema?.open_api_v3_schema);
    serde_json::to_value(schema).unwrap_or_default()
}

/// Fills in the defaults of the API server. A repetition changes nothing.
pub fn default(kind: Kind, object: &Value) -> Value {
    kube_cel::apply_defaults(kind.schema(), &without_nulls(object))
}

/// The API server drops nulls before it defaults, because no field of this API is nullable.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(
            fields
                .iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key.clone(), without_nulls(value)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

/// Reports the parts of an object that do not fit the schema of its kind.
pub(super) fn shape(kind: Kind, object: &Value, out: &mut Findings) {
    if let Value::Object(fields) = object {
        let schema = kind.schema();
        let known = ["apiVersion", "kind", "metadata", "spec", "status"];
        for name in fields.keys().filter(|name| !known.contains(&name.as_str())) {
            unknown_field(&Path::root(), name, &known, out);
        }
        let spec = Path::root().field("spec");
        match fields.get("spec") {
            Some(value) => walk(&spec, &schema["properties"]["spec"], value, out),
            None => out.add(&spec, Rule::MissingField, "it is missing", "add it"),
        }
    }
}

/// Reports the parts of a value that do not fit its schema.
pub(super) fn walk(at: &Path, schema: &Value, value: &Value, out: &mut Findings) {
    if out.is_full() {
        return;
    }
    let free = schema["x-kubernetes-preserve-unknown-fields"] == true;
    if schema["x-kubernetes-int-or-string"] == true {
        walk_int_or_string(at, schema, value, out);
        return;
    }
    match (schema["type"].as_str(), value) {
        (Some("object"), Value::Object(_)) if free => {}
        (Some("object"), Value::Object(fields)) => walk_object(at, schema, fields, out),
        (Some("array"), Value::Array(items)) => {
            check_bounds(
                at,
                schema,
                ("minItems", "maxItems"),
                items.len() as f64,
                "entries",
                Rule::ListLength,
                out,
            );
            // The rest of a list that is far too long explains nothing.
            if is_oversized(schema, "maxItems", items.len()) {
                return out.note_oversized();
            }
            // Lists of objects are maps, whose duplicates have rules of their own.
            let is_set = schema["x-kubernetes-list-type"] == "set";
            let mut seen = HashMap::new();
            for (index, item) in items.iter().enumerate() {
                walk(&at.index(index), &schema["items"], item, out);
                if is_set && let Some(other) = seen.insert(item.to_string(), index) {
                    let message = format!("{item} is in the list already, at {}", at.index(other));
                    out.add(&at.index(index), Rule::ListUnique, message, "remove it");
                }
            }
        }
        (Some("string"), Value::String(text)) => check_text(at, schema, text, out),
        (Some("integer"), Value::Number(number)) if number.is_i64() || number.is_u64() => {
            check_bounds(
                at,
                schema,
                ("minimum", "maximum"),
                number.as_f64().unwrap_or(f64::MAX),
                "",
                Rule::NumberRange,
                out,
            );
        }
        (Some("number"), Value::Number(_)) | (Some("boolean"), Value::Bool(_)) => {}
        (Some(expected), other) => wrong_type(at, expected, other, out),
        (None, _) => {}
    }
}

/// A count or percentage, a quantity, or a bound.
fn walk_int_or_string(at: &Path, schema: &Value, value: &Value, out: &mut Findings) {
    let is_percentage = schema["description"].as_str().is_some_and(|text| text.contains('%'));
    match value {
        Value::Number(number) if number.as_i64().is_some_and(|number| i32::try_from(number).is_err()) => {
            let message = format!("{value} is too large for this field");
            let fix = if is_percentage { FAILURES_FORM } else { "write it with a unit, for example \"5G\"" };
            out.add(at, Rule::NumberRange, message, fix);
        }
        Value::Number(number) if number.is_i64() => {}
        Value::String(text) => check_text(at, schema, text, out),
        other => {
            let message = format!("it is {}, but a whole number or text is needed", named_value(other));
            let example = if is_percentage { "10%" } else { "5G" };
            out.add(at, Rule::WrongType, message, format!("write for example 5 or {example:?}"));
        }
    }
}

fn walk_object(at: &Path, schema: &Value, fields: &Map<String, Value>, out: &mut Findings) {
    let properties = schema["properties"].as_object();
    let present = || fields.iter().filter(|(_, value)| !value.is_null());
    let number = present().count() as f64;
    check_bounds(at, schema, ("minProperties", "maxProperties"), number, "entries", Rule::ListLength, out);
    for (name, value) in present() {
        match (properties.and_then(|known| known.get(name)), &schema["additionalProperties"]) {
            (Some(property), _) => walk(&at.field(name), property, value, out),
            (None, Value::Object(_)) => walk(&at.field(name), &schema["additionalProperties"], value, out),
            (None, _) => unknown_field(at, name, &field_names(schema), out),
        }
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if fields.get(name).is_none_or(Value::is_null) {
            let what = properties
                .and_then(|known| known.get(name)?.get("description")?.as_str())
                .unwrap_or_default();
            let what = what.split('\n').next().unwrap_or_default().trim_end_matches('.');
            let message = match what {
                "" => "it is missing".to_owned(),
                what => format!("it is missing ({})", uncapitalized(what)),
            };
            out.add(&at.field(name), Rule::MissingField, message, "add it");
        }
    }
}

/// The text as part of a sentence: `Name of …` → `name of …`, but `URL of …` as it is.
fn uncapitalized(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.as_str()) {
        (Some(first), rest) if !rest.starts_with(char::is_uppercase) => {
            first.to_lowercase().collect::<String>() + rest
        }
        _ => text.to_owned(),
    }
}

fn check_text(at: &Path, schema: &Value, text: &str, out: &mut Findings) {
    let allowed: Vec<&str> =
        schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !allowed.is_empty() && !allowed.contains(&text) {
        let message = match suggest::nearest(text, allowed.iter().copied()) {
            Some(_) => format!("{} is not one of {}", quote(text), allowed.join(", ")),
            // The fix lists them.
            None => format!("{} is not a value of this field", quote(text)),
        };
        out.add(at, Rule::UnknownValue, message, suggest::fix(text, &allowed));
        return;
    }
    // Characters, as in the schema: a text within its bounds must never count as oversized.
    let length = text.chars().count();
    if is_oversized(schema, "maxLength", length) {
        out.note_oversized();
    }
    check_bounds(at, schema, ("minLength", "maxLength"), length as f64, "characters", Rule::TextLength, out);
}

/// Whether something is so much larger than it may be that it is no mistake of a person: the API server would
/// refuse it before it asks the rules, and their time and memory are bounded only for what it accepts.
fn is_oversized(schema: &Value, key: &str, actual: usize) -> bool {
    const FACTOR: u64 = 2;
    schema[key].as_u64().is_some_and(|max| actual as u64 > max.saturating_mul(FACTOR))
}

fn check_bounds(
    at: &Path,
    schema: &Value,
    keys: (&str, &str),
    actual: f64,
    unit: &str,
    rule: Rule,
    out: &mut Findings,
) {
    let (min, max) = (schema[keys.0].as_f64(), schema[keys.1].as_f64());
    if min.is_some_and(|min| actual < min) || max.is_some_and(|max| actual > max) {
        let range = match (min, max) {
            (Some(min), Some(max)) => format!("{min} to {max}"),
            (Some(min), None) => format!("at least {min}"),
            (None, max) => format!("at most {}", max.unwrap_or_default()),
        };
        let small = min.is_some_and(|min| actual < min);
        let message = match (unit, small) {
            ("", true) => format!("{actual} is too small"),
            ("", false) => format!("{actual} is too large"),
            (unit, true) => format!("it has {actual} {unit}, which is too few"),
            (unit, false) => format!("it has {actual} {unit}, which is too many"),
        };
        let fix = match (unit, min, max) {
            ("", Some(_), Some(_)) => format!("write a number from {range}"),
            ("", _, _) => format!("write {range}"),
            (unit, _, _) => format!("write {range} {unit}"),
        };
        out.add(at, rule, message, fix);
    }
}

fn wrong_type(at: &Path, expected: &str, value: &Value, out: &mut Findings) {
    let named = |name: &str| match name {
        "object" => "a mapping".to_owned(),
        "array" => "a list".to_owned(),
        "string" => "text".to_owned(),
        "integer" => "a whole number".to_owned(),
        "number" => "a number".to_owned(),
        "boolean" => "true or false".to_owned(),
        other => other.to_owned(),
    };
    let actual = named_value(value);
    let fix = match (expected, value) {
        ("string", Value::Bool(_) | Value::Number(_)) => format!("put it in quotes: \"{value}\""),
        ("integer" | "boolean", Value::String(text))
            if text.parse::<i64>().is_ok() || text.parse::<bool>().is_ok() =>
        {
            format!("write it without quotes: {text}")
        }
        ("array", _) => "write it as a list, each entry after a hyphen".to_owned(),
        _ => format!("write {}", named(expected)),
    };
    out.add(at, Rule::WrongType, format!("it is {actual}, but {} is needed", named(expected)), fix);
}

fn named_value(value: &Value) -> String {
    match value {
        Value::Null => "empty".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the text {}", quote(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
    }
}

fn unknown_field(at: &Path, name: &str, known: &[&str], out: &mut Findings) {
    if out.is_full() {
        return;
    }
    out.add(&at.field(name), Rule::UnknownField, "there is no such field", suggest::fix(name, known));
}

/// The fields of an object with this schema.
pub(crate) fn field_names(schema: &Value) -> Vec<&str> {
    schema["properties"].as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect()
}
