//! Defaults: those of the API, as its schema has them, and those of policies. Deterministic, and doing it twice changes
//! nothing, so that it never shows up as drift.

use crds::policy::PolicySet;
use crds::rules::{self, Kind};
use crds::v1alpha1::PolicyTarget;
use serde_json::Value;

use super::validate::is_being_deleted;
use crate::review::{Answer, Operation, Request};
use crate::world::KnownNamespace;

pub(super) fn mutate(policies: &PolicySet, namespace: &KnownNamespace, request: &Request) -> Answer {
    let Request { kind, operation, object, old_object, .. } = request;
    let changes = matches!(operation, Operation::Create | Operation::Update);
    // What is on its way out is left alone: a finalizer must be removable whatever else is wrong. Unless what it does
    // changes.
    let released = *operation == Operation::Update
        && is_being_deleted(object)
        && object.get("spec") == old_object.get("spec");
    if !changes || !object.is_object() || released {
        return Answer::allow();
    }
    let object = written(object);
    let mut defaulted = rules::default(*kind, &object);
    if let Some(target) = target(*kind) {
        // A stored run is immutable; a Pipeline may gain a field with any change.
        let stored = (*operation == Operation::Update && *kind == Kind::PipelineRun).then_some(old_object);
        policies.fill_in(target, &namespace.labels, &mut defaulted, stored);
    }
    let patch = json_patch::diff(&object, &defaulted);
    Answer { patch: Some(patch), ..Answer::allow() }
}

/// What a default may change; the rest of the object is not ours to speak of.
fn written(object: &Value) -> Value {
    let mut part = serde_json::Map::new();
    for key in ["metadata", "spec"] {
        if let Some(value) = object.get(key) {
            part.insert(key.to_owned(), value.clone());
        }
    }
    Value::Object(part)
}

/// The kinds that policies are about.
pub(super) fn target(kind: Kind) -> Option<PolicyTarget> {
    match kind {
        Kind::Pipeline => Some(PolicyTarget::Pipeline),
        Kind::PipelineRun => Some(PolicyTarget::PipelineRun),
        Kind::PipelinePolicy | Kind::ReferenceGrant => None,
    }
}
