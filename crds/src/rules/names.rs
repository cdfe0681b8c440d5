//! Names of Kubernetes objects, labels and annotations.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

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

fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253 && DNS_SUBDOMAIN.is_match(name)
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

/// Checks the name of an object: Secret, Pipeline, service account and so on.
pub(super) fn check_object(field: &Path, name: &str, out: &mut Findings) {
    if !is_dns_subdomain(name) {
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
