//! Checks that the credentials Secret of a bucket is present and well-formed. Secrets are read one at a time
//! and never kept: a webhook that watched them would hold every password of the cluster.

use crds::v1alpha1::{Bucket, Pipeline};
use serde::Deserialize;
use serde_json::Value;

use super::live::Live;
use crate::review::{Answer, Request};

/// Checks every Secret that a Pipeline names. On a dry run a missing Secret is only a warning: an engine
/// dry-runs a whole commit before it applies any of it, and the commit may contain the Secret. On the real
/// apply, Secrets come first.
pub(super) async fn check(live: &dyn Live, request: &Request, answer: &mut Answer) {
    let Ok(pipeline) = Pipeline::deserialize(&request.object) else { return };
    let source = ("spec.source.bucket", &pipeline.spec.source.bucket);
    let sink = pipeline.spec.sink.as_ref().map(|sink| ("spec.sink.bucket", &sink.bucket));
    for (at, bucket) in [Some(source), sink].into_iter().flatten() {
        // A Pipeline whose stored Secret is gone can still be changed elsewhere.
        if is_new(&request.old_object, at, bucket) {
            check_one(live, request, at, bucket, answer).await;
        }
    }
}

async fn check_one(live: &dyn Live, request: &Request, at: &str, bucket: &Bucket, answer: &mut Answer) {
    let Some(reference) = &bucket.credentials_secret else { return };
    let namespace = reference.namespace.as_deref().unwrap_or(&request.namespace);
    let name = &reference.name;
    let problem = match live.secret_problem(namespace, name).await {
        Ok(None) => return,
        Ok(Some(problem)) => format!("{at}.credentialsSecret: {}", problem.of(namespace, name)),
        // A transient error: the operator checks the Secret again before it uses it.
        Err(error) => {
            answer.warnings.push(format!(
                "{at}.credentialsSecret: Secret \"{namespace}/{name}\" could not be read ({error}); it is checked again before it is used"
            ));
            return;
        }
    };
    if request.dry_run {
        answer.warnings.push(problem);
    } else {
        answer.reasons.push(problem);
    }
}

fn is_new(old: &Value, at: &str, bucket: &Bucket) -> bool {
    let pointer = format!("/{}/credentialsSecret", at.replace('.', "/"));
    let old = old.pointer(&pointer).cloned();
    old.is_none() || old != serde_json::to_value(&bucket.credentials_secret).ok()
}
