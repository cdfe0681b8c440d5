//! Names of Kubernetes objects, labels and annotations.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};

#[allow(clippy::expect_used, reason = "the expressions are constants, compiled by every test")]
pub(crate) fn constant(expression: &str) -> Regex {
    Regex::new(expression).expect("a constant expression compiles")
}

static DNS_LABEL: LazyLock<Regex> = LazyLock::new(|| constant("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"));
static DNS_SUBDOMAIN: LazyLock<Regex> =
    LazyLock::new(|| constant(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"));
static LABEL_VALUE: LazyLock<Regex> =
    LazyLock::new(|| constant("^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"));

/// Only the operator writes labels and annotations with this prefix.
const OWN_PREFIX: &str = "filter.plainsight.ai/";

pub(super) fn is_dns_label(name: &str) -> bool {
    name.len() <= 63 && DNS_LABEL.is_match(name)
}

/// The longest name of an object.
const OBJECT_NAME_MAX: usize = 253;

fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= OBJECT_NAME_MAX && DNS_SUBDOMAIN.is_match(name)
}

/// The DNS label that is nearest to the given name, for example `Resize_Image` → `resize-image`.
pub(super) fn as_dns_label(name: &str) -> Option<String> {
    let lower: String = name
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(63)
        .collect();
    let label = lower.trim_matches('-');
    is_dns_label(label).then(|| label.to_owned())
}

/// Checks the name, namespace and labels of an object itself, as it was written. The API server does so only
/// after the webhook, and in its own words.
pub(super) fn check_metadata(object: &Value, out: &mut Findings) {
    let field = Path::root().field("metadata");
    let metadata = &object["metadata"];
    let text = |key: &str| metadata[key].as_str().filter(|text| !text.is_empty());
    let (name, prefix) = (text("name"), text("generateName"));
    match name {
        Some(name) => check_object(&field.field("name"), name, out),
        None if prefix.is_none() => {
            out.add(&field.field("name"), Rule::MissingField, "it is missing", "add it");
        }
        None => {}
    }
    if let Some(prefix) = prefix {
        // The API server appends letters and digits, so the prefix may end with a hyphen, but not with a dot.
        let complete = if prefix.ends_with('.') { prefix.to_owned() } else { format!("{prefix}x") };
        if !is_dns_subdomain(&complete) {
            let message = format!("{} cannot begin the name of a Kubernetes object", quote(prefix));
            let example = as_dns_label(prefix).map(|label| format!(", for example {label}-"));
            let fix = format!(
                "use lowercase letters, digits and hyphens, starting with a letter or digit{}",
                example.unwrap_or_default()
            );
            out.add(&field.field("generateName"), Rule::ObjectName, message, fix);
        }
    }
    if let Some(namespace) = text("namespace") {
        check_namespace(&field.field("namespace"), namespace, out);
    }
    // A label that is not text is a wrong type, which the reader of the object reports.
    let labels: Option<BTreeMap<String, String>> = Deserialize::deserialize(&metadata["labels"]).ok();
    check_labels_of(&field.field("labels"), labels.iter().flatten(), Rule::ObjectLabel, out);
}

/// Checks the name of an object: Secret, Pipeline, service account and so on.
pub(super) fn check_object(field: &Path, name: &str, out: &mut Findings) {
    if name.len() > OBJECT_NAME_MAX {
        let message = format!(
            "{} has {} characters, but the name of a Kubernetes object has at most {OBJECT_NAME_MAX}",
            quote(name),
            name.chars().count()
        );
        out.add(field, Rule::ObjectName, message, "write a shorter name");
    } else if !is_dns_subdomain(name) {
        let message = format!("{} is not a valid name for a Kubernetes object", quote(name));
        out.add(field, Rule::ObjectName, message, name_fix(", hyphens and dots", name));
    }
}

pub(super) fn check_namespace(field: &Path, name: &str, out: &mut Findings) {
    if !is_dns_label(name) {
        let message = format!("{} is not a valid name for a namespace", quote(name));
        out.add(field, Rule::ObjectName, message, name_fix(" and hyphens", name));
    }
}

pub(super) fn name_fix(separators: &str, written: &str) -> String {
    let example = as_dns_label(written).map(|label| format!(", for example {label}")).unwrap_or_default();
    format!("use lowercase letters, digits{separators}, starting and ending with a letter or digit{example}")
}

pub(super) fn check_labels(field: &Path, labels: &BTreeMap<String, String>, out: &mut Findings) {
    check_labels_of(field, labels, Rule::PodLabel, out);
    check_not_ours(field, labels, out);
}

/// Checks the keys and values of labels.
pub(super) fn check_labels_of<'a>(
    field: &Path,
    labels: impl IntoIterator<Item = (&'a String, &'a String)>,
    rule: Rule,
    out: &mut Findings,
) {
    for (key, value) in labels {
        check_key(&field.field(key), key, rule, out);
        if value.len() > 63 || !LABEL_VALUE.is_match(value) {
            let message = format!("{} is not a valid label value", quote(value));
            let fix = "use at most 63 letters, digits, hyphens, underscores and dots, starting and ending with a letter or digit";
            out.add(&field.field(key), rule, message, fix);
        }
    }
}

pub(super) fn check_annotations(field: &Path, entries: &BTreeMap<String, String>, out: &mut Findings) {
    for key in entries.keys() {
        check_key(&field.field(key), key, Rule::PodLabel, out);
    }
    check_not_ours(field, entries, out);
}

fn check_key(field: &Path, key: &str, rule: Rule, out: &mut Findings) {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let well_formed = !name.is_empty()
        && name.len() <= 63
        && LABEL_VALUE.is_match(name)
        && prefix.is_none_or(is_dns_subdomain);
    if !well_formed {
        let message = format!("{} is not a valid key for a label or annotation", quote(key));
        out.add(field, rule, message, "write [dns.name/]name, for example acme.example/team");
    }
}

fn check_not_ours(field: &Path, entries: &BTreeMap<String, String>, out: &mut Findings) {
    for key in entries.keys().filter(|key| key.starts_with(OWN_PREFIX)) {
        let message = format!("{} begins with {OWN_PREFIX}, which is reserved for the operator", quote(key));
        out.add(&field.field(key), Rule::PodLabelReserved, message, "use a prefix of your own");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(metadata: Value) -> Vec<String> {
        let mut out = Findings::default();
        check_metadata(&json!({ "metadata": metadata }), &mut out);
        out.into_vec().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_that_kubernetes_accepts_are_accepted() {
        for metadata in [
            json!({ "name": "monday" }),
            json!({ "name": "2026-11-16.monday", "namespace": "team-a", "labels": { "acme.example/team": "A_1" } }),
            json!({ "name": "a".repeat(253) }),
            json!({ "generateName": "monday-" }),
            json!({ "generateName": "monday" }),
            json!({ "name": "", "generateName": "monday.x" }),
        ] {
            assert_eq!(refused(metadata.clone()), [""; 0], "{metadata}");
        }
    }

    #[test]
    fn a_name_that_kubernetes_refuses_comes_with_one_that_it_accepts() {
        for (metadata, words) in [
            (json!(null), "metadata.name: it is missing"),
            (json!({ "name": "Monday_Run" }), "for example monday-run [object-name]"),
            (json!({ "name": "monday run" }), "for example monday-run [object-name]"),
            (json!({ "name": "-monday" }), "for example monday [object-name]"),
            (json!({ "name": "a".repeat(254) }), "has 254 characters"),
            (json!({ "generateName": "Monday_" }), "for example monday- [object-name]"),
            (json!({ "generateName": "monday." }), "for example monday- [object-name]"),
            (json!({ "name": "a", "namespace": "Team_A" }), "for example team-a [object-name]"),
            (json!({ "name": "a", "labels": { "team": "a b" } }), "[object-label]"),
        ] {
            let refused = refused(metadata.clone());
            assert!(matches!(refused.as_slice(), [only] if only.contains(words)), "{metadata}: {refused:?}");
        }
    }
}
