//! Field paths: `spec.filters[*].image`, `metadata.labels["acme.example/team"]`, `spec.filters[0].name`.

use std::fmt::Write as _;
use std::str::FromStr;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value, json};

use crate::rules::{constant_regex, field_names};

/// A parsed path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldPath(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Name(String),
    Index(usize),
    Every,
}

/// The error for a text that is not a field path.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("it is not a field path")]
pub(crate) struct NotAPath;

/// The metadata fields that people write rules about; of these, only labels and annotations may have
/// defaults.
static METADATA: LazyLock<Value> = LazyLock::new(|| {
    let text = json!({"type": "string"});
    let texts = json!({"type": "object", "additionalProperties": text});
    let list = json!({"type": "array", "items": {"x-kubernetes-preserve-unknown-fields": true}});
    json!({"properties": {"metadata": {"properties": {"name": text, "generateName": text, "namespace": text, "labels": texts,
        "annotations": texts, "finalizers": list, "ownerReferences": list}}}})
});

/// The error for a name that a kind does not have after this many steps, with the names that it has.
#[derive(Debug, PartialEq)]
pub(crate) struct NoSuchField<'a> {
    pub(crate) name: String,
    pub(crate) steps: usize,
    pub(crate) known: Vec<&'a str>,
}

/// A place that a path leads to, with its value.
#[derive(Debug, PartialEq)]
pub(super) struct Place<'a> {
    pub(super) path: String,
    pub(super) value: Option<&'a Value>,
}

static STEP: LazyLock<Regex> =
    LazyLock::new(|| constant_regex(r#"^(?:(?:^|\.)([A-Za-z0-9_-]+)|\[(\*|[0-9]{1,9}|"[^"\\\[\]]+")\])"#));

impl FromStr for FieldPath {
    type Err = NotAPath;

    fn from_str(text: &str) -> Result<Self, NotAPath> {
        let mut steps = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            // A name after another step needs its dot, and the first name has none.
            let found = STEP.captures(rest).ok_or(NotAPath)?;
            let step = match (found.get(1), found.get(2)) {
                (Some(name), _) if steps.is_empty() == rest.starts_with('.') => {
                    let _ = name;
                    return Err(NotAPath);
                }
                (Some(name), _) => Step::Name(name.as_str().to_owned()),
                (None, Some(subscript)) => match subscript.as_str() {
                    "*" => Step::Every,
                    quoted if quoted.starts_with('"') => Step::Name(quoted.trim_matches('"').to_owned()),
                    index => Step::Index(index.parse().map_err(|_| NotAPath)?),
                },
                (None, None) => return Err(NotAPath),
            };
            steps.push(step);
            rest = &rest[found.get(0).map_or(rest.len(), |whole| whole.end())..];
        }
        match steps.first() {
            Some(Step::Name(first)) if first == "spec" || first == "metadata" => Ok(Self(steps)),
            _ => Err(NotAPath),
        }
    }
}

impl FieldPath {
    /// Whether a default may be written there: names and namespaces are decided before any default.
    pub(crate) fn is_writable(&self) -> bool {
        match self.0.as_slice() {
            [Step::Name(first), _, ..] if first == "spec" => true,
            [Step::Name(_), Step::Name(map), _, ..] => map == "labels" || map == "annotations",
            _ => false,
        }
    }

    /// The part of a kind's schema that the path leads to, or why there is no such field.
    pub(crate) fn within<'a>(&self, schema: &'a Value) -> Result<&'a Value, NoSuchField<'a>> {
        let mut here = self.root(schema);
        for (steps, step) in self.0.iter().enumerate() {
            here = child(here, step).ok_or_else(|| {
                let (name, known) = match step {
                    Step::Name(name) => (name.clone(), field_names(here)),
                    Step::Index(index) => (format!("[{index}]"), Vec::new()),
                    Step::Every => ("[*]".to_owned(), Vec::new()),
                };
                NoSuchField { name, steps, known }
            })?;
        }
        Ok(here)
    }

    /// How many of the path's steps must exist before a default can be filled in; the remaining ones are
    /// created. Entries of lists are never created, and neither are objects that would lack a field required
    /// by their schema, because the API server would refuse them.
    pub(super) fn steps_needed(&self, schema: &Value) -> usize {
        let (mut here, mut needed) = (self.root(schema), 0);
        for (before, step) in self.0.iter().enumerate() {
            match step {
                Step::Name(name) => {
                    let mut required = here["required"].as_array().into_iter().flatten();
                    if required.any(|field| field != name) {
                        needed = before;
                    }
                }
                Step::Index(_) | Step::Every => needed = before + 1,
            }
            here = child(here, step).unwrap_or(&ANYTHING);
        }
        needed
    }

    fn root<'a>(&self, schema: &'a Value) -> &'a Value {
        match self.0.first() {
            // The schema of a kind leaves metadata to the API server.
            Some(Step::Name(first)) if first == "metadata" => &METADATA,
            _ => schema,
        }
    }

    /// Every place that the path leads to. An absent list has no places; an absent field has one, without a
    /// value.
    pub(super) fn places<'a>(&self, object: &'a Value) -> Vec<Place<'a>> {
        let mut places = vec![Place { path: String::new(), value: Some(object) }];
        for step in &self.0 {
            places = places.into_iter().flat_map(|place| place.step(step)).collect();
        }
        places
    }

    /// Writes `value` wherever the field is absent but the needed steps towards it exist, and creates the
    /// objects on the rest of the way. A repetition changes nothing.
    pub(super) fn fill(&self, object: &mut Value, value: &Value, needed: usize) {
        fill(object, &self.0, value, self.0.len().saturating_sub(needed));
    }
}

impl FieldPath {
    /// Fills in fields that a stored run has and its new version omits; `default` is the current default.
    pub(super) fn keep(&self, object: &mut Value, stored: &Value, default: &Value, needed: usize) {
        for Place { path, value } in self.places(stored) {
            let Some(value) = value.filter(|value| !self.may_change_in_a_run() || *value == default) else {
                continue;
            };
            // The path to a single place can be parsed, unless a key has characters that no path can express.
            if let Ok(path) = path.parse::<Self>() {
                path.fill(object, value, needed);
            }
        }
    }

    /// Whether the owner of a run may change the field; see the rules of a PipelineRun.
    fn may_change_in_a_run(&self) -> bool {
        let name = |index: usize| match self.0.get(index) {
            Some(Step::Name(name)) => name.as_str(),
            _ => "",
        };
        name(0) == "metadata"
            || name(1) == "suspend"
            || name(1) == "execution" && matches!(name(2), "parallelism" | "maxFailedFiles")
    }
}

impl<'a> Place<'a> {
    fn step(self, step: &Step) -> Vec<Self> {
        let Self { mut path, value } = self;
        match step {
            Step::Name(name) => {
                let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                let written = match (plain, path.is_empty()) {
                    (true, true) => write!(path, "{name}"),
                    (true, false) => write!(path, ".{name}"),
                    (false, _) => write!(path, "[{name:?}]"),
                };
                debug_assert!(written.is_ok(), "a string can be written to");
                vec![Self {
                    path,
                    value: value.and_then(|value| value.get(name)).filter(|value| !value.is_null()),
                }]
            }
            Step::Index(index) => {
                let value = value.and_then(|value| value.get(index));
                vec![Self { path: format!("{path}[{index}]"), value }]
            }
            Step::Every => match value {
                Some(Value::Array(items)) => items
                    .iter()
                    .enumerate()
                    .map(|(index, item)| Self { path: format!("{path}[{index}]"), value: Some(item) })
                    .collect(),
                Some(Value::Object(fields)) => fields
                    .iter()
                    .map(|(key, item)| Self { path: format!("{path}[{key:?}]"), value: Some(item) })
                    .collect(),
                _ => Vec::new(),
            },
        }
    }
}

/// `made`: how many of the last steps may be created.
fn fill(target: &mut Value, steps: &[Step], value: &Value, made: usize) {
    let Some((step, rest)) = steps.split_first() else {
        if target.is_null() {
            *target = value.clone();
        }
        return;
    };
    match (step, target) {
        (Step::Name(name), Value::Object(fields)) => fill_field(fields, name, rest, value, made),
        (Step::Name(name), target @ Value::Null) if steps.len() < made => {
            let mut fields = Map::new();
            fill_field(&mut fields, name, rest, value, made);
            *target = Value::Object(fields);
        }
        (Step::Index(index), Value::Array(items)) => {
            if let Some(item) = items.get_mut(*index) {
                fill(item, rest, value, made);
            }
        }
        (Step::Every, Value::Array(items)) => items.iter_mut().for_each(|item| fill(item, rest, value, made)),
        (Step::Every, Value::Object(fields)) => {
            fields.values_mut().for_each(|item| fill(item, rest, value, made));
        }
        // A value of another type stays: the schema reports it.
        _ => {}
    }
}

fn fill_field(fields: &mut Map<String, Value>, name: &str, rest: &[Step], value: &Value, made: usize) {
    let mut child = fields.remove(name).unwrap_or_default();
    fill(&mut child, rest, value, made);
    if !child.is_null() {
        fields.insert(name.to_owned(), child);
    }
}

/// A schema without constraints.
static ANYTHING: Value = Value::Null;

/// The schema one step further; `None` if there is no such step.
fn child<'a>(here: &'a Value, step: &Step) -> Option<&'a Value> {
    if here.is_null() {
        return Some(&ANYTHING);
    }
    let (items, values) = (&here["items"], &here["additionalProperties"]);
    match step {
        Step::Name(name) => match here["properties"].get(name) {
            Some(field) => Some(field),
            None if values.is_object() => Some(values),
            None => (here["x-kubernetes-preserve-unknown-fields"] == true).then_some(&ANYTHING),
        },
        Step::Index(_) | Step::Every if items.is_object() => Some(items),
        Step::Every if values.is_object() => Some(values),
        Step::Index(_) | Step::Every => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> FieldPath {
        text.parse().unwrap_or_else(|_| panic!("{text} is a path"))
    }

    fn places(text: &str, object: &Value) -> Vec<(String, Value)> {
        let found = path(text).places(object);
        found.into_iter().map(|place| (place.path, place.value.cloned().unwrap_or_default())).collect()
    }

    #[test]
    fn paths_of_every_form_are_read_and_others_refused() {
        for good in
            ["spec", "spec.filters[*].image", "spec.filters[0].env[*].name", "metadata.labels[\"a.b/c\"]"]
        {
            assert!(good.parse::<FieldPath>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "status.phase",
            ".spec",
            "spec.",
            "spec..a",
            "spec.filters[]",
            "spec[a]",
            "spec.a b",
            "specs",
            "spec[*",
            "spec[\"\"]",
        ] {
            assert_eq!(bad.parse::<FieldPath>(), Err(NotAPath), "{bad}");
        }
    }

    #[test]
    fn a_step_that_a_kind_does_not_have_is_named_as_it_was_written() {
        let schema = json!({ "properties": { "spec": { "properties": { "order": { "type": "string" } } } } });
        for (text, name) in [("spec.order[0]", "[0]"), ("spec.order[*]", "[*]"), ("spec.odor", "odor")] {
            let missing = path(text).within(&schema).map_err(|missing| missing.name);
            assert_eq!(missing, Err(name.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_star_goes_over_a_list_and_names_each_place() {
        let object = json!({ "spec": { "filters": [{ "image": "a" }, {}] } });
        let found = places("spec.filters[*].image", &object);
        assert_eq!(
            found,
            [
                ("spec.filters[0].image".to_owned(), json!("a")),
                ("spec.filters[1].image".to_owned(), json!(null)),
            ]
        );
        assert_eq!(places("spec.none[*].image", &object), []);
        assert_eq!(places("spec.none.image", &object), [("spec.none.image".to_owned(), json!(null))]);
        assert_eq!(
            places("spec.filters[7].image", &object),
            [("spec.filters[7].image".to_owned(), json!(null))]
        );
    }

    #[test]
    fn a_default_fills_what_is_absent_and_nothing_else_and_doing_it_again_changes_nothing() {
        let mut object = json!({ "spec": { "filters": [{ "image": "a" }, { "image": "b", "policy": "Never" }], "text": "x" } });
        let fill = |object: &mut Value| {
            let mut fill = |text: &str, value: Value| {
                path(text).fill(object, &value, path(text).steps_needed(&json!({})));
            };
            fill("spec.filters[*].policy", json!("Always"));
            fill("spec.execution.timeout", json!("2h"));
            fill("spec.sinks[*].policy", json!("Always"));
            fill("spec.text.inner", json!(1));
            fill("metadata.labels[\"a.b/c\"]", json!("x"));
        };
        fill(&mut object);
        assert_eq!(
            object,
            json!({
                "metadata": { "labels": { "a.b/c": "x" } },
                "spec": { "filters": [{ "image": "a", "policy": "Always" }, { "image": "b", "policy": "Never" }],
                          "execution": { "timeout": "2h" }, "text": "x" }
            })
        );
        let once = object.clone();
        fill(&mut object);
        assert_eq!(object, once);
    }

    #[test]
    fn defaults_go_into_the_spec_labels_and_annotations_only() {
        for good in ["spec.order", "metadata.labels.team", "metadata.annotations[\"a/b\"]"] {
            assert!(path(good).is_writable(), "{good}");
        }
        for bad in [
            "spec",
            "metadata",
            "metadata.name",
            "metadata.namespace",
            "metadata.labels",
            "metadata.finalizers[0]",
        ] {
            assert!(!path(bad).is_writable(), "{bad}");
        }
    }
}
