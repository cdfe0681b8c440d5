//! Label selectors, with the semantics of Kubernetes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// Whether labels satisfy a selector. A selector with an unknown operator selects everything: its policy is
/// broken, and a broken policy must not fall silent.
pub(super) fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let LabelSelector { match_labels, match_expressions } = selector;
    let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
    match_labels.iter().flatten().all(equal)
        && match_expressions.iter().flatten().all(|requirement| satisfied(requirement, labels))
}

fn satisfied(requirement: &LabelSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let LabelSelectorRequirement { key, operator, values } = requirement;
    let value = labels.get(key);
    let listed = || values.iter().flatten().any(|allowed| Some(allowed) == value);
    match operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(selector: serde_json::Value, labels: &[(&str, &str)]) -> bool {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        matches(&serde_json::from_value(selector).unwrap(), &labels)
    }

    #[test]
    fn selectors_select_as_kubernetes_does() {
        let expression = |operator: &str, values: &[&str]| json!({ "matchExpressions": [{ "key": "env", "operator": operator, "values": values }] });
        let (prod, none) = (&[("env", "prod")][..], &[][..]);
        assert!(selects(json!({}), none));
        assert!(selects(json!({ "matchLabels": { "env": "prod" } }), prod));
        assert!(!selects(json!({ "matchLabels": { "env": "dev" } }), prod));
        assert!(selects(expression("In", &["prod"]), prod) && !selects(expression("In", &["prod"]), none));
        assert!(
            !selects(expression("NotIn", &["prod"]), prod) && selects(expression("NotIn", &["prod"]), none)
        );
        assert!(selects(expression("Exists", &[]), prod) && !selects(expression("Exists", &[]), none));
        assert!(
            !selects(expression("DoesNotExist", &[]), prod) && selects(expression("DoesNotExist", &[]), none)
        );
        let both = json!({ "matchLabels": { "env": "prod" }, "matchExpressions": [{ "key": "team", "operator": "Exists" }] });
        assert!(!selects(both, prod));
    }
}
