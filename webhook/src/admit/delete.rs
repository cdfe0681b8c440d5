//! Warns before an object is deleted or a permission withdrawn. Nothing is refused: the owner of an object
//! may delete it.

use crds::rules::{Kind, permits};
use crds::v1alpha1::{GrantFromKind, GrantToKind, ReferenceGrant};
use serde::Deserialize;
use serde_json::Value;

use crate::review::{Operation, Request};
use crate::world::{Index, Key};

/// The number of names in a warning, which is cut off after 256 characters.
const SHOWN: usize = 3;

pub(super) fn warnings(index: &Index, request: &Request) -> Vec<String> {
    let key: Key = (request.namespace.clone(), request.name.clone());
    match request.kind {
        Kind::Pipeline => {
            let runs: Vec<&Key> = index.active_runs(&key).collect();
            let effect = "those that have started continue with the Pipeline as it was then; the others wait";
            named("runs of this Pipeline are not finished", &runs, effect).into_iter().collect()
        }
        Kind::PipelineRun => {
            let active = index.runs.get(&key).is_some_and(|run| !run.finished);
            let warning = "this run is not finished: files that are not processed yet will not be processed";
            active.then(|| warning.to_owned()).into_iter().collect()
        }
        Kind::ReferenceGrant => withdrawn(index, request),
        Kind::PipelinePolicy => Vec::new(),
    }
}

/// Warnings about references that a grant permits now and will no longer permit.
pub(super) fn withdrawn(index: &Index, request: &Request) -> Vec<String> {
    let read = |object: &Value| ReferenceGrant::deserialize(object).ok();
    let Some(old) = read(&request.old_object) else { return Vec::new() };
    let new = (request.operation == Operation::Update).then(|| read(&request.object)).flatten();
    let others = index
        .grants
        .iter()
        .filter(|((namespace, name), _)| *namespace == request.namespace && *name != request.name);
    let left: Vec<&ReferenceGrant> = others.map(|(_, grant)| grant).chain(new.as_ref()).collect();
    let lost = |from: GrantFromKind, of: &str, to: GrantToKind, name: &str| {
        permits(&old, from, of, to, name) && !left.iter().any(|grant| permits(grant, from, of, to, name))
    };

    // Names of the Secrets in this namespace that provide a Pipeline's keys.
    let secrets_here = |key: &Key| {
        let spec = index.pipelines.get(key).map(|pipeline| &pipeline.typed.spec);
        let buckets = spec.into_iter().flat_map(|spec| spec.buckets());
        let secrets = buckets.filter_map(|bucket| bucket.credentials_secret.as_ref());
        let here = secrets.filter(|secret| secret.namespace.as_ref().unwrap_or(&key.0) == &request.namespace);
        here.map(|secret| secret.name.clone()).collect::<Vec<_>>()
    };

    let (mut without_pipeline, mut without_keys) = (Vec::new(), Vec::new());
    for (key, run) in index.runs.iter().filter(|(key, run)| !run.finished && key.0 != request.namespace) {
        let of = (run.pipeline.namespace.clone().unwrap_or_else(|| key.0.clone()), run.pipeline.name.clone());
        if of.0 == request.namespace && lost(GrantFromKind::PipelineRun, &key.0, GrantToKind::Pipeline, &of.1)
        {
            without_pipeline.push(key);
        }
        if secrets_here(&of)
            .iter()
            .any(|name| lost(GrantFromKind::PipelineRun, &key.0, GrantToKind::Secret, name))
        {
            without_keys.push(key);
        }
    }
    let loses_keys = |key: &&Key| {
        key.0 != request.namespace
            && secrets_here(key)
                .iter()
                .any(|name| lost(GrantFromKind::Pipeline, &key.0, GrantToKind::Secret, name))
    };
    let pipelines: Vec<&Key> = index.pipelines.keys().filter(loses_keys).collect();
    let effect = "they stop taking new files";
    [
        named("runs that are not finished lose their Pipeline", &without_pipeline, effect),
        named("runs that are not finished lose the keys of their bucket", &without_keys, effect),
        named("Pipelines lose their Secret", &pipelines, "their runs stop taking new files"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// `2 runs … (team-a/monday, team-a/tuesday): …`; `None` if there are none.
fn named(what: &str, keys: &[&Key], effect: &str) -> Option<String> {
    let mut names: Vec<String> = keys.iter().map(|(namespace, name)| format!("{namespace}/{name}")).collect();
    names.sort();
    let all = names.len();
    names.truncate(SHOWN);
    if all > SHOWN {
        names.push("…".to_owned());
    }
    (all > 0).then(|| format!("{all} {what} ({}): {effect}", names.join(", ")))
}
