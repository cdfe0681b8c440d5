//! Checks that the credentials Secret of a bucket is present and well-formed. Secrets are read one at a time
//! and never kept: a webhook that watched them would hold every password of the cluster.

use crds::rules::Violation;
use crds::v1alpha1::{Bucket, Pipeline};
use serde::Deserialize;
use serde_json::Value;

use super::live::Live;
use crate::review::{Answer, Request};

/// What is wrong with the Secrets that a Pipeline names. On a dry run that is only a warning: an engine
/// dry-runs a whole commit before it applies any of it, and the Secret may be in it. On the real apply
/// Secrets come first.
pub(super) async fn check(live: &dyn Live, request: &Request, answer: &mut Answer) -> Vec<Violation> {
    let Ok(pipeline) = Pipeline::deserialize(&request.object) else { return Vec::new() };
    let source = ("spec.source.bucket", &pipeline.spec.source.bucket);
    let sink = pipeline.spec.sink.as_ref().map(|sink| ("spec.sink.bucket", &sink.bucket));
    let mut violations = Vec::new();
    for (at, bucket) in [Some(source), sink].into_iter().flatten() {
        // A Pipeline whose stored Secret is gone can still be changed elsewhere.
        if is_new(&request.old_object, at, bucket) {
            violations.extend(check_one(live, request, at, bucket, answer).await);
        }
    }
    violations
}

async fn check_one(
    live: &dyn Live,
    request: &Request,
    at: &str,
    bucket: &Bucket,
    answer: &mut Answer,
) -> Option<Violation> {
    let reference = bucket.credentials_secret.as_ref()?;
    let namespace = reference.namespace.as_deref().unwrap_or(&request.namespace);
    let (field, name) = (format!("{at}.credentialsSecret"), &reference.name);
    match live.secret_problem(namespace, name).await {
        Ok(problem) => Some(problem?.violation(field, namespace, name)),
        // A transient error: the operator checks the Secret again before it uses it.
        Err(error) => {
            answer.warnings.push(format!(
                "{field}: Secret \"{namespace}/{name}\" could not be read ({error}); it is checked again before it is used"
            ));
            None
        }
    }
}

fn is_new(old: &Value, at: &str, bucket: &Bucket) -> bool {
    let pointer = format!("/{}/credentialsSecret", at.replace('.', "/"));
    let old = old.pointer(&pointer).cloned();
    old.is_none() || old != serde_json::to_value(&bucket.credentials_secret).ok()
}
