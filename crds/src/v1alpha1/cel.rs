//! CEL rules that several fields share. Each says in one sentence what `rules/` says with the value and the correction.

use kube::core::Rule;
use schemars::Schema;
use serde_json::{Value, json};

/// Name of an object: Secret, Pipeline, service account and so on.
pub(super) fn object_name() -> Rule {
    Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')")
        .message("the name of an object has lowercase letters, digits, hyphens and dots, and starts and ends with a letter or digit")
}

/// Name of a namespace.
pub(super) fn namespace_name() -> Rule {
    Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("the name of a namespace has lowercase letters, digits and hyphens, and starts and ends with a letter or digit")
}

/// Prefix of keys.
pub(super) fn key_prefix() -> Rule {
    Rule::new("!self.startsWith('s3://')")
        .message("a prefix is what follows the bucket, not a URL: no key begins with s3://")
}

/// Globs on keys.
pub(super) fn globs() -> Rule {
    Rule::new("self.all(glob, !glob.startsWith('/'))")
        .message("a glob is matched against the key after the prefix: write it without the slash that it begins with, or [/] if the keys really begin with one")
}

/// Beyond it the API server would refuse the CRD, because judging 256 names of 32 filters could take too long.
const ENV_NAME_MAX: usize = 128;

/// Environment variables. Their schema is that of Kubernetes, which leaves this to the rules of pods.
pub(super) fn environment(list: &mut Schema) {
    if let Some(Value::Object(name)) = list.pointer_mut("/items/properties/name") {
        name.insert("maxLength".to_owned(), json!(ENV_NAME_MAX));
        let rule = Rule::new("self.matches('^([-_A-Za-z]|[.][-_A-Za-z0-9])[-._A-Za-z0-9]*$')")
            .message("the name of an environment variable has letters, digits, underscores, hyphens and dots, and starts with no digit, for example LOG_LEVEL");
        name.insert("x-kubernetes-validations".to_owned(), json!([rule]));
    }
    if let Some(Value::Object(variable)) = list.pointer_mut("/items") {
        let value = Rule::new("!has(self.valueFrom) || !has(self.value) || size(self.value) == 0")
            .message("an environment variable has value or valueFrom: keep one of the two");
        let source = Rule::new("!has(self.valueFrom) || [has(self.valueFrom.configMapKeyRef), has(self.valueFrom.fieldRef), has(self.valueFrom.resourceFieldRef), has(self.valueFrom.secretKeyRef)].filter(set, set).size() == 1")
            .message("valueFrom names exactly one of configMapKeyRef, fieldRef, resourceFieldRef and secretKeyRef");
        variable.insert("x-kubernetes-validations".to_owned(), json!([value, source]));
    }
}
