//! Adds defaults: those of the API's schema, and those of policies. They are deterministic and idempotent, so
//! that they never show up as drift.

use crds::policy::PolicySet;
use crds::rules::{self, Kind};
use crds::v1alpha1::PolicyTarget;
use serde_json::Value;

use super::validate::is_being_deleted;
use crate::review::{Operation, Request};
use crate::world::KnownNamespace;

/// Adds the defaults to the object of `request` and returns the equivalent patch; `None` if nothing may be
/// added.
pub(super) fn fill_in(
    policies: &PolicySet,
    namespace: &KnownNamespace,
    request: &mut Request,
) -> Option<json_patch::Patch> {
    let Request { kind, operation, object, old_object, .. } = request;
    let changes = matches!(operation, Operation::Create | Operation::Update);
    // An object that is being deleted is left unchanged unless its spec changes, so that its finalizers can
    // always be removed.
    let released = *operation == Operation::Update
        && is_being_deleted(object)
        && object.get("spec") == old_object.get("spec");
    if !changes || !object.is_object() || released {
        return None;
    }
    let written = written(object);
    let mut defaulted = rules::default(*kind, &written);
    if let Some(target) = target(*kind) {
        // Defaults never change the spec of a stored run; a Pipeline may gain a field with any change.
        let stored = (*operation == Operation::Update && *kind == Kind::PipelineRun).then_some(&*old_object);
        policies.fill_in(target, &namespace.labels, &mut defaulted, stored);
    }
    let patch = json_patch::diff(&written, &defaulted);
    if let (Value::Object(object), Value::Object(defaulted)) = (object, defaulted) {
        object.extend(defaulted);
    }
    Some(patch)
}

/// The parts that defaults may change.
fn written(object: &Value) -> Value {
    let mut part = serde_json::Map::new();
    for key in ["metadata", "spec"] {
        if let Some(value) = object.get(key) {
            part.insert(key.to_owned(), value.clone());
        }
    }
    Value::Object(part)
}

/// The policy target of a kind; `None` if no policy applies to it.
pub(super) fn target(kind: Kind) -> Option<PolicyTarget> {
    match kind {
        Kind::Pipeline => Some(PolicyTarget::Pipeline),
        Kind::PipelineRun => Some(PolicyTarget::PipelineRun),
        Kind::PipelinePolicy | Kind::ReferenceGrant => None,
    }
}
