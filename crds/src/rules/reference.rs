//! References to other namespaces: allowed only by a ReferenceGrant there.

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};
use super::{Context, names};
use crate::v1alpha1::{GrantFromKind, GrantToKind, ReferenceGrant, ReferenceGrantSpec};

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
    let Reference { from, from_namespace, to, to_name, .. } = *reference;
    let is_there = |grant: &ReferenceGrant| grant.metadata.namespace.as_deref() == Some(namespace);
    if !grants.iter().any(|grant| is_there(grant) && permits(grant, from, from_namespace, to, to_name)) {
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

/// Whether a grant lets objects of a namespace use the object with this name in the grant's own namespace.
pub fn permits(
    grant: &ReferenceGrant,
    from: GrantFromKind,
    from_namespace: &str,
    to: GrantToKind,
    to_name: &str,
) -> bool {
    let ReferenceGrantSpec { from: froms, to: tos } = &grant.spec;
    froms.iter().any(|entry| entry.kind == from && entry.namespace == from_namespace)
        && tos
            .iter()
            .any(|entry| entry.kind == to && entry.name.as_deref().is_none_or(|only| only == to_name))
}
