//! CEL rules that several fields share. Each states in one sentence what `rules/` explains with the value and
//! the correction, and ends with the id of that rule: while the webhook is down, and for policies and grants,
//! these are the only words that users read.

use kube::core::Rule;
use schemars::Schema;
use serde_json::{Value, json};

/// Name of an object: Secret, Pipeline, service account and so on.
pub(super) fn object_name() -> Rule {
    Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')")
        .message("the name of an object has lowercase letters, digits, hyphens and dots, and starts and ends with a letter or digit [object-name]")
}

/// A DNS label.
const IS_LABEL: &str = "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')";

/// Name of a namespace.
pub(super) fn namespace_name() -> Rule {
    Rule::new(IS_LABEL)
        .message("the name of a namespace has lowercase letters, digits and hyphens, and starts and ends with a letter or digit [object-name]")
}

/// Name of a filter, which is also the name of a container.
pub(super) fn filter_name() -> Rule {
    Rule::new(IS_LABEL)
        .message("the name of a filter has lowercase letters, digits and hyphens, and starts and ends with a letter or digit, for example resize-image [filter-name]")
}

/// Name of a policy's rule.
pub(super) fn rule_name() -> Rule {
    Rule::new(IS_LABEL)
        .message("the name of a rule has lowercase letters, digits and hyphens, and starts and ends with a letter or digit, for example allowed-registries [policy-rule-name]")
}

/// `duration()` fails, with a message of its own, on a text that is not a duration. Every rule that calls it
/// therefore checks this first, and only [`duration`] reports such a text. A duration beyond 292 years still
/// fails so; the webhook explains it.
const IS_DURATION: &str = "matches('^([0-9]+([.][0-9]+)?(ms|s|m|h))+$')";

/// A text that is a duration.
pub(super) fn duration(field: &str) -> Rule {
    Rule::new(format!("self.{IS_DURATION}")).message(
        format!("{field} is a number with ms, s, m or h, for example 90s, 15m or 1h30m [duration]").as_str(),
    )
}

/// A duration of at least `least` and at most a year.
pub(super) fn duration_range(field: &str, least: &str) -> Rule {
    Rule::new(format!(
        "!self.{IS_DURATION} || (duration(self) >= duration('{least}') && duration(self) <= duration('8760h'))"
    ))
    .message(format!("{field} is between {least} and one year (8760h) [duration]").as_str())
}

/// A duration that is not longer than another one, if both are present. Both are fields of `self`.
pub(super) fn not_longer(shorter: &str, longer: &str) -> Rule {
    Rule::new(format!(
        "!has(self.{shorter}) || !has(self.{longer}) || !self.{shorter}.{IS_DURATION} || !self.{longer}.{IS_DURATION} || duration(self.{shorter}) <= duration(self.{longer})"
    ))
}

/// Prefix of keys.
pub(super) fn key_prefix() -> Rule {
    Rule::new("!self.startsWith('s3://')")
        .message("a prefix is what follows the bucket, not a URL: no key begins with s3:// [prefix]")
}

/// Globs on keys.
pub(super) fn globs() -> Rule {
    Rule::new("self.all(glob, !glob.startsWith('/'))")
        .message("a glob is matched against the key after the prefix: write it without the slash that it begins with, or [/] if the keys really begin with one [glob]")
}

/// With a higher limit, the API server would refuse the CRD, because checking 256 names of each of 32 filters
/// could take too long.
const ENV_NAME_MAX: usize = 128;

/// Environment variables. Their schema comes from Kubernetes, which leaves these checks to the validation of
/// pods.
pub(super) fn environment(list: &mut Schema) {
    if let Some(Value::Object(name)) = list.pointer_mut("/items/properties/name") {
        name.insert("maxLength".to_owned(), json!(ENV_NAME_MAX));
        let rule = Rule::new("self.matches('^([-_A-Za-z]|[.][-_A-Za-z0-9])[-._A-Za-z0-9]*$')")
            .message("the name of an environment variable has letters, digits, underscores, hyphens and dots, and starts with no digit, for example LOG_LEVEL [env-name]");
        name.insert("x-kubernetes-validations".to_owned(), json!([rule]));
    }
    if let Some(Value::Object(variable)) = list.pointer_mut("/items") {
        let value = Rule::new("!has(self.valueFrom) || !has(self.value) || size(self.value) == 0")
            .message("an environment variable has value or valueFrom: keep one of the two [env-source]");
        let source = Rule::new("!has(self.valueFrom) || [has(self.valueFrom.configMapKeyRef), has(self.valueFrom.fieldRef), has(self.valueFrom.resourceFieldRef), has(self.valueFrom.secretKeyRef)].filter(set, set).size() == 1")
            .message("valueFrom names exactly one of configMapKeyRef, fieldRef, resourceFieldRef and secretKeyRef [env-source]");
        variable.insert("x-kubernetes-validations".to_owned(), json!([value, source]));
    }
}
