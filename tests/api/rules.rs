//! Every rule: one change that breaks it, the change that fixes it, and the message to the user.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crds::rules::{Context, Rule, Violation, check};
use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use serde_json::{Value, json};
use strum::IntoEnumIterator;
use tests::examples::{allowed_updates, grant, pipeline, policy, run, warm_pipeline, with};
use tests::rule_cases::{ABOUT_STORED_OBJECTS, Case, cases};

/// Checks `object` as the webhook would: with a grant for team-a in `shared`, the Pipeline above and, for
/// `Immutable`, the original run.
fn violations(object: &Value, rule: Rule) -> Vec<Violation> {
    let grants: Vec<ReferenceGrant> = vec![serde_json::from_value(grant()).unwrap()];
    let pipeline: Pipeline = serde_json::from_value(pipeline()).unwrap();
    let old: PipelineRun = serde_json::from_value(run()).unwrap();
    let context = Context {
        grants: Some(&grants),
        pipeline: Some(&pipeline),
        old_run: (rule == Rule::Immutable).then_some(&old),
        ..Context::default()
    };
    check(object, &context).expect("a kind of this API")
}

#[test]
fn objects_without_mistakes_are_accepted() {
    for object in [pipeline(), warm_pipeline(), run(), policy(), grant()] {
        assert_eq!(violations(&object, Rule::Immutable), [], "{object}");
    }
}

#[test]
fn each_mistake_is_refused_by_its_rule_and_the_mended_object_is_accepted() {
    for Case { rule, object, pointer, bad, good } in cases() {
        let refused = violations(&with(object(), pointer, bad.clone()), rule);
        let rules: Vec<Rule> = refused.iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [rule], "{pointer} = {bad}: {refused:#?}");
        assert_eq!(violations(&with(object(), pointer, good.clone()), rule), [], "{pointer} = {good}");
    }
}

#[test]
fn every_rule_has_a_case() {
    let covered: BTreeSet<Rule> = cases().iter().map(|case| case.rule).collect();
    let missing: Vec<Rule> =
        Rule::iter().filter(|rule| !covered.contains(rule) && !ABOUT_STORED_OBJECTS.contains(rule)).collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
}

#[test]
fn messages_name_the_field_the_value_the_reason_and_the_fix() {
    let mut text = String::new();
    for Case { rule, object, pointer, bad, .. } in cases() {
        for violation in violations(&with(object(), pointer, bad), rule) {
            assert!(violation.to_string().len() < 1000, "a message must fit where messages are shown");
            writeln!(text, "{violation}").unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn the_three_mutable_fields_of_a_run_may_change() {
    for (pointer, value) in allowed_updates() {
        assert_eq!(violations(&with(run(), pointer, value), Rule::Immutable), []);
    }
}

#[test]
fn offline_a_reference_to_another_namespace_passes_because_grants_are_not_known() {
    let object = with(run(), "/spec/pipelineRef/namespace", json!("other"));
    assert_eq!(check(&object, &Context::default()), Some(vec![]));
}

#[test]
fn keys_of_a_shared_pipeline_need_a_grant_of_their_own() {
    let shared: Pipeline =
        serde_json::from_value(with(pipeline(), "/metadata/namespace", json!("shared"))).unwrap();
    let object = with(run(), "/spec/pipelineRef/namespace", json!("shared"));
    let with_grant = |spec: Value| {
        let grants = [serde_json::from_value(with(grant(), "/spec", spec)).unwrap()];
        let context = Context { grants: Some(&grants), pipeline: Some(&shared), ..Context::default() };
        check(&object, &context).unwrap()
    };
    let from = json!([{ "kind": "PipelineRun", "namespace": "team-a" }]);
    let refused = with_grant(json!({ "from": from, "to": [{ "kind": "Pipeline" }] }));
    assert_eq!(refused.len(), 1);
    insta::assert_snapshot!(
        refused[0],
        @r#"spec.pipelineRef: no ReferenceGrant in namespace "shared" lets a PipelineRun of "team-a" use Secret "camera-keys"; use a Pipeline whose Secret is in your own namespace, or ask the owners of shared for a ReferenceGrant with from {kind: PipelineRun, namespace: team-a} and to {kind: Secret, name: camera-keys} [reference-grant]"#
    );
    assert_eq!(with_grant(json!({ "from": from, "to": [{ "kind": "Pipeline" }, { "kind": "Secret" }] })), []);
}

#[test]
fn several_mistakes_are_reported_together() {
    let object =
        with(with(run(), "/spec/execution/paralelism", json!(5)), "/spec/execution/timeout", json!("soon"));
    let rules: Vec<Rule> =
        violations(&object, Rule::Duration).iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [Rule::UnknownField, Rule::Duration]);
}

#[test]
fn other_kinds_are_not_judged() {
    for object in [json!({ "apiVersion": "v1", "kind": "Secret" }), json!({}), json!(null), json!([1])] {
        assert_eq!(check(&object, &Context::default()), None);
    }
}
