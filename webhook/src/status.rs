//! The status of policies: whether they compile and are enforced.
//!
//! Every replica writes it, under one name and with the same content, and only if it differs from the stored
//! status. So no leader is needed: any running replica keeps the status right, and a second writer changes
//! nothing. It is written when a policy changes, never while a request is answered: admission has no side
//! effects.

use std::collections::BTreeMap;
use std::time::Duration;

use crds::v1alpha1::{PipelinePolicy, PipelinePolicyStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::watch::Compiled;

/// The owner of the fields that the webhook writes.
pub const FIELD_MANAGER: &str = "openfilter-webhook";

/// Limits a condition's message, which is shown in a terminal.
const MESSAGE_MAX: usize = 1024;

/// The time between two attempts at a failed write. Enforcement does not depend on it, so there is no hurry.
const RETRY: Duration = Duration::from_secs(15);

/// Writes the status of each policy that arrives, unless it is already right.
pub async fn write(client: Client, policies: mpsc::UnboundedReceiver<Compiled>) {
    // Untyped, because the API server's answer may not be a readable policy.
    let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<PipelinePolicy>(&()));
    until_each_is_done(policies, RETRY, |policy| {
        let api = api.clone();
        async move { write_one(&api, &policy).await }
    })
    .await;
}

/// Returns whether nothing is left to do.
async fn write_one(api: &Api<DynamicObject>, compiled: &Compiled) -> bool {
    let Some(status) = wanted(compiled, Time(jiff::Timestamp::now())) else { return true };
    let name = compiled.policy.name();
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    // Not server-side apply, which is refused if a field of the stored object does not have its schema's
    // type.
    match api.patch_status(name, &params, &Patch::Merge(json!({ "status": status }))).await {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.code == 404 => true,
        Err(error) => {
            warn!(policy = name, %error, "the status of the policy could not be written; retrying");
            false
        }
    }
}

/// Attempts each policy as it arrives, and retries failed ones after a while, unless a newer version arrived.
async fn until_each_is_done<F: Future<Output = bool>>(
    mut policies: mpsc::UnboundedReceiver<Compiled>,
    retry: Duration,
    mut attempt: impl FnMut(Compiled) -> F,
) {
    let mut failed: BTreeMap<String, Compiled> = BTreeMap::new();
    let mut again = Instant::now();
    loop {
        let wait =
            if failed.is_empty() { Duration::MAX } else { again.saturating_duration_since(Instant::now()) };
        let due = match timeout(wait, policies.recv()).await {
            Ok(Some(policy)) => vec![policy],
            Ok(None) => return,
            Err(_elapsed) => {
                again = Instant::now() + retry;
                failed.values().cloned().collect()
            }
        };
        for policy in due {
            let name = policy.policy.name().to_owned();
            if attempt(policy.clone()).await {
                failed.remove(&name);
            } else {
                if failed.is_empty() {
                    again = Instant::now() + retry;
                }
                failed.insert(name, policy);
            }
        }
    }
}

/// The status that a policy should have; `None` if it already has it.
fn wanted(compiled: &Compiled, now: Time) -> Option<PipelinePolicyStatus> {
    let Compiled { policy, generation, status: found } = compiled;
    let (rules, defaults) = policy.size();
    let (status, reason, message) = match policy.problems() {
        [] => {
            let counted = |number, noun| format!("{number} {noun}{}", if number == 1 { "" } else { "s" });
            let (rules, defaults) = (counted(rules, "rule"), counted(defaults, "default"));
            ("True", "Enforced", format!("{rules} and {defaults} are in force"))
        }
        problems => {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let text = format!("nothing it selects is admitted until it is corrected: {}", all.join("; "));
            ("False", "DoesNotCompile", text.chars().take(MESSAGE_MAX).collect())
        }
    };
    let old = found.as_ref().and_then(|status| status.conditions.iter().find(|c| c.type_ == "Ready"));
    let since = old.filter(|old| old.status == status).map(|old| old.last_transition_time.clone());
    let condition = Condition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: *generation,
        last_transition_time: since.unwrap_or(now),
    };
    let wanted = PipelinePolicyStatus { observed_generation: *generation, conditions: vec![condition] };
    (found.as_ref() != Some(&wanted)).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crds::policy::Policy;
    use kube::api::ObjectMeta;

    use super::*;

    fn policy(cel: &str, status: Option<PipelinePolicyStatus>) -> Compiled {
        let object = json!({
            "metadata": { "name": "p", "generation": 3 },
            "spec": { "appliesTo": ["Pipeline"], "rules": [{ "name": "r", "message": "m", "cel": cel }] }
        });
        let policy = Policy::compile(&serde_json::from_value(object).unwrap());
        Compiled { policy: Arc::new(policy), generation: Some(3), status }
    }

    fn at(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn a_policy_in_force_says_so_with_its_counts_and_writing_it_again_changes_nothing() {
        let status = wanted(&policy("true", None), at(1)).unwrap();
        assert_eq!(status.observed_generation, Some(3));
        let ready = &status.conditions[0];
        assert_eq!(
            (ready.status.as_str(), ready.message.as_str()),
            ("True", "1 rule and 0 defaults are in force")
        );
        assert_eq!(wanted(&policy("true", Some(status)), at(2)), None);
    }

    #[tokio::test]
    async fn what_could_not_be_written_is_tried_again_until_it_is_or_a_newer_version_came() {
        let (send, policies) = mpsc::unbounded_channel();
        let (attempted, mut attempts) = mpsc::unbounded_channel();
        send.send(policy("true", None)).unwrap();
        let writer = tokio::spawn(until_each_is_done(policies, Duration::from_millis(1), move |policy| {
            let generation = policy.generation;
            attempted.send(generation).unwrap();
            async move { generation == Some(4) }
        }));
        for _ in 0..3 {
            assert_eq!(attempts.recv().await, Some(Some(3)));
        }
        let mut newer = policy("true", None);
        newer.generation = Some(4);
        send.send(newer).unwrap();
        drop(send);
        writer.await.unwrap();
        let mut rest = Vec::new();
        attempts.recv_many(&mut rest, 1_000_000).await;
        assert_eq!(rest.last(), Some(&Some(4)), "the older one is left alone");
    }

    #[test]
    fn a_policy_that_does_not_compile_says_why_and_since_when() {
        let good = wanted(&policy("true", None), at(1)).unwrap();
        let bad = wanted(&policy("objekt.a", Some(good)), at(2)).unwrap();
        let ready = &bad.conditions[0];
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "DoesNotCompile"));
        assert!(ready.message.contains("did you mean object?"), "{}", ready.message);
        assert_eq!(ready.last_transition_time, at(2));
        let worse = wanted(&policy("objekt.b", Some(bad)), at(3)).unwrap();
        assert_eq!(worse.conditions[0].last_transition_time, at(2), "it was broken before");
    }

    #[test]
    fn a_policy_that_cannot_be_read_says_so() {
        let policy = Arc::new(Policy::unreadable(&ObjectMeta::default(), "unknown variant `Audit`"));
        let status = wanted(&Compiled { policy, generation: Some(3), status: None }, at(1)).unwrap();
        let ready = &status.conditions[0];
        assert_eq!((ready.status.as_str(), ready.observed_generation), ("False", Some(3)));
        assert!(ready.message.contains("it cannot be read (unknown variant `Audit`)"), "{}", ready.message);
    }
}
