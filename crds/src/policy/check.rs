//! Checks of one field: a regular expression, a range, presence, absence, a JSON Schema.

use std::collections::HashMap;
use std::time::Duration;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{PatternOptions, ValidationError};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::{REGEX_BYTES_MAX, REGEX_TEXT_MAX, one_line};
use crate::rules::{nearest, parse_duration, parse_quantity, quote};

/// Parts of a JSON Schema with its references followed: each is checked once per value.
const SCHEMA_PARTS_MAX: usize = 5_000;
/// Nested schemas: validation recurses.
const SCHEMA_DEPTH_MAX: usize = 32;

/// A constraint on a field.
#[derive(Debug)]
pub(crate) enum Check {
    Regex(Regex),
    Range { min: Option<Bound>, max: Option<Bound> },
    Required,
    Forbidden,
    Schema(Box<jsonschema::Validator>),
}

/// A bound as written, with its possible meanings: `15m` is 15 minutes or 15 thousandths, depending on the
/// field.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) text: String,
    pub(crate) quantity: Option<i128>,
    pub(crate) duration: Option<Duration>,
}

impl Bound {
    pub(crate) fn new(bound: &IntOrString) -> Self {
        Self::of(match bound {
            IntOrString::Int(number) => number.to_string(),
            IntOrString::String(text) => text.clone(),
        })
    }

    fn of(text: String) -> Self {
        Self { quantity: parse_quantity(&text), duration: parse_duration(&text), text }
    }

    /// Whether this is at most `other`; `None` if the two cannot be compared.
    pub(crate) fn at_most(&self, other: &Self) -> Option<bool> {
        match (self, other) {
            (Self { duration: Some(this), .. }, Self { duration: Some(other), .. }) => Some(this <= other),
            (Self { quantity: Some(this), .. }, Self { quantity: Some(other), .. }) => Some(this <= other),
            _ => None,
        }
    }
}

impl Check {
    /// The problem with a field's value; `None` if there is none. An absent field breaks only `required`: a
    /// rule about a value does not apply to fields that are not set.
    pub(super) fn problem(&self, value: Option<&Value>) -> Option<String> {
        let present = value.filter(|value| !is_empty(value));
        match (self, present) {
            (Self::Required, None) => Some("is missing or empty".to_owned()),
            (Self::Required, Some(_)) | (_, None) => None,
            (Self::Forbidden, Some(Value::Bool(false))) => None,
            (Self::Forbidden, Some(value)) => Some(format!("is {}", shown(value))),
            (Self::Regex(_), Some(Value::String(text))) if text.len() > REGEX_TEXT_MAX => Some(format!(
                "has {} bytes, but a pattern is matched against at most {REGEX_TEXT_MAX}",
                text.len()
            )),
            (Self::Regex(regex), Some(value)) => {
                let matches = match value {
                    Value::String(text) => regex.is_match(text),
                    Value::Number(_) | Value::Bool(_) => regex.is_match(&value.to_string()),
                    Value::Null | Value::Array(_) | Value::Object(_) => false,
                };
                (!matches).then(|| format!("is {}", shown(value)))
            }
            (Self::Range { min, max }, Some(value)) => range_problem(min.as_ref(), max.as_ref(), value),
            (Self::Schema(schema), Some(value)) => {
                let error = schema.iter_errors(value).next()?;
                let at = error.instance_path().to_string();
                let what = one_line(&error.to_string());
                Some(if at.is_empty() {
                    format!("does not match the schema: {what}")
                } else {
                    format!("does not match the schema at {at}: {what}")
                })
            }
        }
    }
}

/// The regular expression must match the whole value, as people expect of "allowed values".
pub(crate) fn compile_regex_whole(pattern: &str) -> Result<Regex, String> {
    compile_regex(pattern)?;
    compile_regex(&format!("^(?:{pattern})$"))
}

pub(super) fn compile_regex(pattern: &str) -> Result<Regex, String> {
    let built = RegexBuilder::new(pattern).size_limit(REGEX_BYTES_MAX).build();
    built.map_err(|error| one_line(&error.to_string()))
}

/// Why a JSON Schema cannot be used, and what to do about it.
#[derive(Debug)]
pub(crate) struct Unusable {
    pub(crate) why: String,
    pub(crate) fix: String,
}

impl Unusable {
    fn new(why: String, fix: impl Into<String>) -> Self {
        Self { why, fix: fix.into() }
    }

    /// What the language of JSON Schema does not allow in this schema.
    fn malformed(error: &ValidationError<'_>) -> Self {
        let at = match error.instance_path().to_string() {
            path if path.is_empty() => String::new(),
            path => format!("at {path}: "),
        };
        let words = allowed_words(error);
        match error.instance().as_str() {
            Some(written) if !words.is_empty() => {
                let why = format!("{at}{} is not one of {}", quote(written), words.join(", "));
                let fix = nearest(written, words.iter().copied()).map(|word| format!("did you mean {word}?"));
                Self::new(why, fix.unwrap_or_else(|| "write one of these".to_owned()))
            }
            _ => Self::new(format!("{at}{}", one_line(&error.to_string())), "correct it"),
        }
    }
}

/// The words of which a value must be one, possibly as one of several forms: `type` is a word or a list.
fn allowed_words<'a>(error: &'a ValidationError<'_>) -> Vec<&'a str> {
    match error.kind() {
        ValidationErrorKind::Enum { options } => {
            options.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
        }
        ValidationErrorKind::AnyOf { context } => context.iter().flatten().flat_map(allowed_words).collect(),
        _ => Vec::new(),
    }
}

/// Compiles a JSON Schema that takes bounded time on any value, and that refers to nothing outside itself.
pub(crate) fn compile_schema(schema: &Value) -> Result<jsonschema::Validator, Unusable> {
    Expansion { root: schema, sizes: HashMap::new() }.size(schema, 0)?;
    // The linear-time engine, because no pattern may stall admission.
    let options =
        jsonschema::options().with_pattern_options(PatternOptions::regex().size_limit(REGEX_BYTES_MAX));
    options.build(schema).map_err(|error| Unusable::malformed(&error))
}

/// Follows references to find the real size of a schema: a few lines that refer to each other twice can mean
/// millions of checks, and a schema that refers to itself never ends.
struct Expansion<'a> {
    root: &'a Value,
    /// The number of parts below a reference; `None` while it is being followed.
    sizes: HashMap<&'a str, Option<usize>>,
}

impl<'a> Expansion<'a> {
    fn size(&mut self, schema: &'a Value, depth: usize) -> Result<usize, Unusable> {
        const SIMPLER: &str = "write a simpler schema";
        if depth > SCHEMA_DEPTH_MAX {
            return Err(Unusable::new(format!("it is more than {SCHEMA_DEPTH_MAX} levels deep"), SIMPLER));
        }
        let mut total = 1_usize;
        match schema {
            Value::Object(fields) => {
                for (key, value) in fields {
                    total += match (key.as_str(), value) {
                        (
                            "$id" | "$anchor" | "$dynamicRef" | "$dynamicAnchor" | "$recursiveRef"
                            | "$recursiveAnchor",
                            _,
                        ) => {
                            let fix = "refer to parts of the schema with $ref: \"#/$defs/…\"";
                            return Err(Unusable::new(format!("{key} is not supported"), fix));
                        }
                        ("$ref", Value::String(reference)) => self.reference(reference, depth)?,
                        // Parts in definitions count where they are used.
                        ("$defs" | "definitions", _) => 0,
                        _ => self.size(value, depth + 1)?,
                    };
                }
            }
            Value::Array(items) => {
                for item in items {
                    total += self.size(item, depth + 1)?;
                }
            }
            _ => {}
        }
        if total > SCHEMA_PARTS_MAX {
            let why = format!("it has more than {SCHEMA_PARTS_MAX} parts once its references are followed");
            return Err(Unusable::new(why, SIMPLER));
        }
        Ok(total)
    }

    fn reference(&mut self, reference: &'a str, depth: usize) -> Result<usize, Unusable> {
        let wrong = |why: &str| {
            let fix = "references must stay within the schema (#/$defs/…) and must not be circular";
            Unusable::new(format!("{} {why}", quote(reference)), fix)
        };
        match self.sizes.get(reference) {
            Some(Some(size)) => return Ok(*size),
            Some(None) => return Err(wrong("refers to itself")),
            None => {}
        }
        let pointer = reference.strip_prefix('#');
        let target = pointer.and_then(|pointer| self.root.pointer(pointer));
        let target = target.ok_or_else(|| wrong("is not a part of the schema"))?;
        self.sizes.insert(reference, None);
        let size = self.size(target, depth + 1)?;
        self.sizes.insert(reference, Some(size));
        Ok(size)
    }
}

fn range_problem(min: Option<&Bound>, max: Option<&Bound>, value: &Value) -> Option<String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => {
            return Some(format!("is {}, which is not a number, quantity or duration", shown(value)));
        }
    };
    let value = Bound::of(text);
    let above = |min: &Bound| min.at_most(&value);
    let below = |max: &Bound| value.at_most(max);
    match (min.map_or(Some(true), above), max.map_or(Some(true), below)) {
        (Some(true), Some(true)) => None,
        (Some(false), _) => {
            Some(format!("is {}, below {}", quote(&value.text), min.map_or("", |min| &min.text)))
        }
        (_, Some(false)) => {
            Some(format!("is {}, above {}", quote(&value.text), max.map_or("", |max| &max.text)))
        }
        (None, _) | (_, None) => {
            Some(format!("is {}, which cannot be compared with the allowed range", quote(&value.text)))
        }
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quote(text),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(fields) => format!("a mapping of {}", fields.len()),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn range(min: Value, max: Value) -> Check {
        let bound = |bound: Value| serde_json::from_value(bound).ok().map(|bound| Bound::new(&bound));
        Check::Range { min: bound(min), max: bound(max) }
    }

    fn problem(check: &Check, value: Value) -> Option<String> {
        check.problem(Some(&value))
    }

    #[test]
    fn a_regex_matches_the_whole_value() {
        let check = Check::Regex(compile_regex_whole("ghcr.io/acme/.*|local").unwrap());
        for good in [json!("ghcr.io/acme/a:1"), json!("local"), json!(""), json!(null)] {
            assert_eq!(problem(&check, good.clone()), None, "{good}");
        }
        for bad in [json!("evil/ghcr.io/acme/a"), json!("local2"), json!(["local"]), json!(5)] {
            assert!(problem(&check, bad.clone()).is_some(), "{bad}");
        }
        let longest = json!(format!("ghcr.io/acme/{}", "a".repeat(REGEX_TEXT_MAX - 13)));
        assert_eq!(problem(&check, longest), None);
        let longer = json!(format!("ghcr.io/acme/{}", "a".repeat(REGEX_TEXT_MAX)));
        assert_eq!(
            problem(&check, longer).as_deref(),
            Some("has 65549 bytes, but a pattern is matched against at most 65536")
        );
        // Brackets in a pattern must not let an alternative escape the anchors.
        assert!(compile_regex_whole("a)|(b").is_err());
    }

    #[test]
    fn ranges_compare_numbers_quantities_and_durations() {
        let parallelism = range(json!(1), json!(50));
        assert_eq!(problem(&parallelism, json!(50)), None);
        assert_eq!(problem(&parallelism, json!(51)), Some("is \"51\", above 50".to_owned()));
        let memory = range(json!("64Mi"), json!("4Gi"));
        assert_eq!(problem(&memory, json!("1G")), None);
        assert_eq!(problem(&memory, json!("5Gi")), Some("is \"5Gi\", above 4Gi".to_owned()));
        assert_eq!(problem(&memory, json!("1Mi")), Some("is \"1Mi\", below 64Mi".to_owned()));
        let timeout = range(json!("15m"), json!("2h"));
        assert_eq!(problem(&timeout, json!("90m")), None);
        assert_eq!(problem(&timeout, json!("1m")), Some("is \"1m\", below 15m".to_owned()));
        assert!(problem(&timeout, json!("4Gi")).is_some_and(|text| text.contains("cannot be compared")));
        assert!(problem(&timeout, json!(true)).is_some());
    }

    #[test]
    fn required_and_forbidden_look_at_what_is_empty() {
        for empty in [json!(null), json!(""), json!([]), json!({})] {
            assert!(problem(&Check::Required, empty.clone()).is_some(), "{empty}");
            assert_eq!(problem(&Check::Forbidden, empty.clone()), None, "{empty}");
        }
        assert!(Check::Required.problem(None).is_some());
        // A rule that forbids a switch accepts one that is off; as a required field, a switch that is off is
        // present.
        assert_eq!(problem(&Check::Required, json!(false)), None);
        assert_eq!(problem(&Check::Forbidden, json!(false)), None);
        assert_eq!(problem(&Check::Forbidden, json!(true)), Some("is true".to_owned()));
    }

    #[test]
    fn schemas_say_where_a_value_breaks_them() {
        let schema = json!({ "properties": { "cpu": { "type": "string", "pattern": "^[0-9]+m$" } }, "required": ["cpu"] });
        let check = Check::Schema(Box::new(compile_schema(&schema).unwrap()));
        assert_eq!(problem(&check, json!({ "cpu": "500m" })), None);
        assert!(problem(&check, json!({ "cpu": "1" })).is_some_and(|text| text.contains("/cpu")));
        assert!(problem(&check, json!({ "memory": "1" })).is_some_and(|text| text.contains("required")));
    }

    #[test]
    fn a_schema_that_is_not_one_is_refused_with_the_place_and_what_is_allowed_there() {
        for (schema, why, fix) in [
            (
                json!({ "properties": { "cpu": { "type": "objekt" } } }),
                "at /properties/cpu/type: \"objekt\" is not one of array, boolean, integer, null, number, object, string",
                "did you mean object?",
            ),
            (
                json!({ "type": "text" }),
                "at /type: \"text\" is not one of array, boolean, integer, null, number, object, string",
                "write one of these",
            ),
            (json!({ "maxLength": "5" }), "at /maxLength: \"5\" is not of type \"integer\"", "correct it"),
        ] {
            let refused = compile_schema(&schema).unwrap_err();
            assert_eq!((refused.why.as_str(), refused.fix.as_str()), (why, fix));
        }
    }

    #[test]
    fn schemas_that_would_never_end_are_refused() {
        let doubling: serde_json::Map<String, Value> = (0..40)
            .map(|level| {
                let next = json!({ "$ref": format!("#/$defs/a{}", level + 1) });
                (format!("a{level}"), json!({ "allOf": [next, next] }))
            })
            .chain([("a40".to_owned(), json!(true))])
            .collect();
        let mut deep = json!({});
        for _ in 0..200 {
            deep = json!({ "not": deep });
        }
        for (hostile, why) in [
            (json!({ "$ref": "#" }), "itself"),
            (
                json!({ "$ref": "#/$defs/a", "$defs": { "a": { "allOf": [{ "$ref": "#/$defs/a" }] } } }),
                "itself",
            ),
            (json!({ "$ref": "#/$defs/a0", "$defs": doubling }), "deep"),
            (deep, "deep"),
            (json!({ "$ref": "https://example.com/s.json" }), "not a part"),
            (json!({ "$dynamicRef": "#a" }), "not supported"),
        ] {
            let refused = compile_schema(&hostile).unwrap_err().why;
            assert!(refused.contains(why), "{refused}");
        }
        // Few levels, but 32,768 ways down.
        let shallow: serde_json::Map<String, Value> = (0..5)
            .map(|level| {
                let next = json!({ "$ref": format!("#/$defs/a{}", level + 1) });
                (format!("a{level}"), json!({ "allOf": vec![next; 8] }))
            })
            .chain([("a5".to_owned(), json!(true))])
            .collect();
        assert!(
            compile_schema(&json!({ "$ref": "#/$defs/a0", "$defs": shallow }))
                .unwrap_err()
                .why
                .contains("parts")
        );
    }
}
