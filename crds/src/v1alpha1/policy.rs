//! `PipelinePolicy`: rules and defaults of a platform team, in addition to the built-in rules.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{Display, VariantNames};

use super::cel;

/// Rules and defaults for the Pipelines and PipelineRuns of selected namespaces.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "filter.plainsight.ai",
    version = "v1alpha1",
    kind = "PipelinePolicy",
    status = "PipelinePolicyStatus",
    shortname = "plpol",
    category = "openfilter",
    doc = "Rules and defaults that the admission webhook applies to Pipelines and PipelineRuns in the namespaces that the policy selects.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Action", type_ = "string", json_path = ".spec.action"),
    printcolumn(name = "Applies To", type_ = "string", json_path = ".spec.appliesTo"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.rules) && size(self.rules) > 0) || (has(self.defaults) && size(self.defaults) > 0)")
    .message("a policy without rules and defaults does nothing: add at least one [policy-empty]"))]
pub struct PipelinePolicySpec {
    /// The namespaces that the policy applies to; if omitted, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,

    /// The kinds that the policy applies to.
    #[schemars(length(min = 1, max = 2))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub applies_to: Vec<PolicyTarget>,

    /// `Deny` rejects an object that breaks a rule; `Warn` admits it with a warning.
    #[serde(default)]
    pub action: PolicyAction,

    /// The rules that every object must satisfy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub rules: Vec<PolicyRule>,

    /// Values that the webhook fills in for absent fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["field".into()]))]
    pub defaults: Vec<PolicyDefault>,
}

/// The kinds that a policy can apply to.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Display, VariantNames)]
#[allow(missing_docs)]
pub enum PolicyTarget {
    Pipeline,
    PipelineRun,
}

/// What happens to an object that breaks a rule.
#[derive(
    JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Display, VariantNames,
)]
pub enum PolicyAction {
    /// Reject the object.
    #[default]
    Deny,
    /// Admit the object with a warning.
    Warn,
}

/// One requirement: a CEL expression, or a check of a field.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.cel) || !has(self.field)")
        .message("the rule has both cel and field: write a rule for each [policy-rule-form]"),
    validation = Rule::new("has(self.cel) || has(self.field)")
        .message("the rule has neither cel nor field and checks nothing: write cel, or field with one of regex, range, required, forbidden and schema [policy-rule-form]"),
    validation = Rule::new("[has(self.regex), has(self.range), has(self.required), has(self.forbidden), has(self.schema)].filter(set, set).size() == (has(self.field) ? 1 : 0)")
        .message("field needs exactly one of regex, range, required, forbidden and schema; cel needs none of them [policy-rule-form]")
)]
pub struct PolicyRule {
    /// Name of the rule, unique within the policy. Rejections mention it.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = cel::rule_name())]
    pub name: String,

    /// The message to a user whose object breaks the rule: what is wrong and what to write instead.
    #[schemars(length(min = 1, max = 1024))]
    pub message: String,

    /// CEL expression over the same variables as `cel`; its text is shown instead of `message`. If it yields
    /// no text for an object, `message` is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub message_expression: Option<String>,

    /// CEL expression that must be true, over `object`, `oldObject`, `request`, `namespaceObject`, and, for
    /// runs, `pipeline` and `usage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub cel: Option<String>,

    /// Path of the field to check, for example `spec.filters[*].image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub field: Option<String>,

    /// The whole value of the field must match this regular expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub regex: Option<String>,

    /// The field must lie within these bounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<PolicyRange>,

    /// `true`: the field must be present and not empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self").message("write required: true, or leave it out [policy-rule-form]"))]
    pub required: Option<bool>,

    /// `true`: the field must be absent or empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self").message("write forbidden: true, or leave it out [policy-rule-form]"))]
    pub forbidden: Option<bool>,

    /// The field must satisfy this JSON Schema.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_object")]
    pub schema: Option<Value>,
}

/// Inclusive bounds: numbers, quantities (`4Gi`) or durations (`2h`).
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.min) || has(self.max)").message("a range needs min, max or both [policy-range]"))]
pub struct PolicyRange {
    /// The smallest allowed value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32))]
    #[x_kube(validation = Rule::new("!string(self).matches('^-?[0-9]{10,}$')")
        .message("write a large number with a unit, for example 5G [policy-range]"))]
    pub min: Option<IntOrString>,
    /// The largest allowed value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32))]
    #[x_kube(validation = Rule::new("!string(self).matches('^-?[0-9]{10,}$')")
        .message("write a large number with a unit, for example 5G [policy-range]"))]
    pub max: Option<IntOrString>,
}

/// A value for an absent field.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PolicyDefault {
    /// Path of the field, for example `spec.execution.timeout`.
    #[schemars(length(min = 1, max = 256))]
    pub field: String,
    /// The value to fill in.
    #[schemars(schema_with = "any_json")]
    pub value: Value,
}

/// Declares a type, because CEL rules see only fields that have one.
fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

fn any_json(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "x-kubernetes-preserve-unknown-fields": true })
}

/// The observed state of a policy, written by the webhook.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PipelinePolicyStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Ready`: every rule compiles and is enforced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}
