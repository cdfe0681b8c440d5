//! References to other namespaces: allowed only by a ReferenceGrant there.

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};
use super::{Context, names};
use crate::v1alpha1::{GrantFromKind, GrantToKind, ReferenceGrant};

/// Who refers to what.
pub(super) struct Reference<'a> {
    pub(super) from: GrantFromKind,
    pub(super) from_namespace: &'a str,
    pub(super) to: GrantToKind,
    pub(super) to_namespace: Option<&'a str>,
    pub(super) to_name: &'a str,
}

pub(super) fn check(field: &Path, reference: &Reference<'_>, context: &Context<'_>, out: &mut Findings) {
    let Some(namespace) = reference.to_namespace else { return };
    names::check_namespace(field, namespace, out);
    if namespace == reference.from_namespace {
        return;
    }
    let Some(grants) = context.grants else { return };
    if !grants.iter().any(|grant| permits(grant, namespace, reference)) {
        let Reference { from, from_namespace, to, to_name, .. } = reference;
        let message = format!(
            "no ReferenceGrant in namespace {} lets a {from} of {} use {to} {}",
            quote(namespace),
            quote(from_namespace),
            quote(to_name)
        );
        let own = match (from, to) {
            (GrantFromKind::PipelineRun, GrantToKind::Secret) => "a Pipeline whose Secret is in",
            (_, GrantToKind::Pipeline) => "a Pipeline of",
            (_, GrantToKind::Secret) => "a Secret of",
        };
        let fix = format!(
            "use {own} your own namespace, or ask the owners of {namespace} for a ReferenceGrant with from {{kind: {from}, namespace: {from_namespace}}} and to {{kind: {to}, name: {to_name}}}"
        );
        out.add(field, Rule::ReferenceGrant, message, fix);
    }
}

fn permits(grant: &ReferenceGrant, namespace: &str, reference: &Reference<'_>) -> bool {
    grant.metadata.namespace.as_deref() == Some(namespace)
        && grant
            .spec
            .from
            .iter()
            .any(|from| from.kind == reference.from && from.namespace == reference.from_namespace)
        && grant.spec.to.iter().any(|to| {
            to.kind == reference.to && to.name.as_deref().is_none_or(|name| name == reference.to_name)
        })
}
