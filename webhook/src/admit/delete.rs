//! What somebody should know before an object goes, or a permission is withdrawn. Nothing is refused: whoever owns an
//! object may delete it.

use crds::rules::Kind;
use crds::v1alpha1::{GrantFromKind, GrantToKind, ReferenceGrant};
use serde_json::Value;

use crate::review::{Operation, Request};
use crate::world::{Index, Key};

/// Names that are listed in a warning, which is cut off after 256 characters.
const SHOWN: usize = 3;

/// Warnings about a deletion.
pub(super) fn warnings(index: &Index, request: &Request) -> Vec<String> {
    let key: Key = (request.namespace.clone(), request.name.clone());
    match request.kind {
        Kind::Pipeline => {
            let runs: Vec<&Key> = index.active_runs(&key).collect();
            let effect =
                "they go on with the Pipeline as it was when they started, and wait if they have not started";
            named("runs of this Pipeline are not finished", &runs, effect).into_iter().collect()
        }
        Kind::PipelineRun => {
            let active = index.runs.get(&key).is_some_and(|run| !run.finished);
            let warning = "this run is not finished: files that are not processed yet will not be";
            active.then(|| warning.to_owned()).into_iter().collect()
        }
        Kind::ReferenceGrant => withdrawn(index, request),
        Kind::PipelinePolicy => Vec::new(),
    }
}

/// Warnings about references that a grant permits now and will not permit any more.
pub(super) fn withdrawn(index: &Index, request: &Request) -> Vec<String> {
    let read = |object: &Value| serde_json::from_value::<ReferenceGrant>(object.clone()).ok();
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

    let mut runs: Vec<&Key> = Vec::new();
    for (key, run) in &index.runs {
        let elsewhere = run.pipeline.namespace.as_deref() == Some(request.namespace.as_str());
        if elsewhere
            && !run.finished
            && lost(GrantFromKind::PipelineRun, &key.0, GrantToKind::Pipeline, &run.pipeline.name)
        {
            runs.push(key);
        }
    }
    let mut pipelines: Vec<&Key> = Vec::new();
    for (key, pipeline) in &index.pipelines {
        let spec = &pipeline.typed.spec;
        let buckets = [Some(&spec.source.bucket), spec.sink.as_ref().map(|sink| &sink.bucket)];
        let secrets = buckets.into_iter().flatten().filter_map(|bucket| bucket.credentials_secret.as_ref());
        let mut elsewhere =
            secrets.filter(|secret| secret.namespace.as_deref() == Some(request.namespace.as_str()));
        if elsewhere.any(|secret| lost(GrantFromKind::Pipeline, &key.0, GrantToKind::Secret, &secret.name)) {
            pipelines.push(key);
        }
    }
    let runs = named("runs that are not finished lose their Pipeline", &runs, "they stop taking new files");
    let pipelines = named("Pipelines lose their Secret", &pipelines, "their runs stop taking new files");
    runs.into_iter().chain(pipelines).collect()
}

fn permits(grant: &ReferenceGrant, from: GrantFromKind, of: &str, to: GrantToKind, name: &str) -> bool {
    grant.spec.from.iter().any(|entry| entry.kind == from && entry.namespace == of)
        && grant
            .spec
            .to
            .iter()
            .any(|entry| entry.kind == to && entry.name.as_deref().is_none_or(|only| only == name))
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
