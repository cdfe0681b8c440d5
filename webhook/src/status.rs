//! The status of policies: whether they compile and are enforced.
//!
//! Every replica writes it, by server-side apply under one name and with the same content, and only where it differs
//! from what is there. So no leader is needed, whoever is up keeps it right, and a second writer changes nothing. It is
//! written when a policy changes, never while a request is answered: admission has no side effects.

use crds::policy::Policy;
use crds::v1alpha1::{PipelinePolicy, PipelinePolicyStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::mpsc;
use tracing::warn;

/// Who owns the fields that the webhook writes.
pub const FIELD_MANAGER: &str = "openfilter-webhook";

/// A condition's message is shown in a terminal.
const MESSAGE_MAX: usize = 1024;

/// Writes the status of each policy that comes, if it is not so already.
pub async fn write(client: Client, mut policies: mpsc::UnboundedReceiver<PipelinePolicy>) {
    let api: Api<PipelinePolicy> = Api::all(client);
    let params = PatchParams::apply(FIELD_MANAGER).force();
    while let Some(policy) = policies.recv().await {
        let Some(status) = wanted(&policy, Time(jiff::Timestamp::now())) else { continue };
        let name = policy.name_any();
        let patch = json!({
            "apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelinePolicy",
            "metadata": { "name": name }, "status": status
        });
        if let Err(error) = api.patch_status(&name, &params, &Patch::Apply(&patch)).await {
            // The next change, or the next start of any replica, tries again; enforcement does not depend on it.
            warn!(policy = name, %error, "the status of the policy could not be written");
        }
    }
}

/// The status that a policy should have; `None` if it has it.
fn wanted(policy: &PipelinePolicy, now: Time) -> Option<PipelinePolicyStatus> {
    let compiled = Policy::compile(policy);
    let (rules, defaults) = compiled.size();
    let (status, reason, message) = match compiled.problems() {
        [] => ("True", "Enforced", format!("{rules} rules and {defaults} defaults are in force")),
        problems => {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let text = format!("nothing it selects is admitted until it is corrected: {}", all.join("; "));
            ("False", "DoesNotCompile", text.chars().take(MESSAGE_MAX).collect())
        }
    };
    let generation = policy.metadata.generation;
    let old = policy.status.as_ref().and_then(|status| status.conditions.iter().find(|c| c.type_ == "Ready"));
    let since = old.filter(|old| old.status == status).map(|old| old.last_transition_time.clone());
    let condition = Condition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: since.unwrap_or(now),
    };
    let wanted = PipelinePolicyStatus { observed_generation: generation, conditions: vec![condition] };
    (policy.status.as_ref() != Some(&wanted)).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(cel: &str, status: Option<PipelinePolicyStatus>) -> PipelinePolicy {
        let mut policy: PipelinePolicy = serde_json::from_value(json!({
            "metadata": { "name": "p", "generation": 3 },
            "spec": { "appliesTo": ["Pipeline"], "rules": [{ "name": "r", "message": "m", "cel": cel }] }
        }))
        .unwrap();
        policy.status = status;
        policy
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
            ("True", "1 rules and 0 defaults are in force")
        );
        assert_eq!(wanted(&policy("true", Some(status)), at(2)), None);
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
}
