//! One set of rules for every caller: the webhook, the operator before it acts, and the offline `validate`
//! command call the same functions, so they cannot disagree. The functions are pure: `Context` provides
//! everything that a rule must know about other objects.
//!
//! Objects that arrive as text or JSON go through [`check`], which first compares them with the schema of
//! their CRD. Objects that the API server has stored already satisfy the schema, so [`Validate::validate`] is
//! enough for them.

mod bucket;
mod credentials;
mod endpoint;
mod env;
mod grant;
mod image;
mod names;
mod path;
mod pipeline;
mod pipeline_run;
mod policy;
mod quantity;
mod reference;
mod rule;
mod schema;
mod suggest;
mod time;
mod violation;
mod warm;

pub use credentials::{BucketKeys, SecretProblem};
pub use endpoint::{EndpointPolicy, METADATA};
pub use pipeline_run::{FailureLimit, may_use};
pub use reference::permits;
pub use rule::Rule;
pub(crate) use schema::field_names;
pub use schema::{Kind, default};
pub use time::parse_duration;
pub use violation::Violation;
pub use warm::WarmLimits;

// Parts of the rules that the policy engine uses too.
pub(crate) use names::constant as constant_regex;
pub(crate) use policy::compile as compile_policy;
pub(crate) use quantity::parse as parse_quantity;
pub(crate) use suggest::nearest;
pub(crate) use violation::quote;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::v1alpha1::{Pipeline, PipelinePolicy, PipelineRun, ReferenceGrant};
use violation::Findings;

/// The facts that rules need besides the object itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context<'a> {
    /// Addresses that an administrator allows for endpoints, beyond the public default.
    pub endpoints: EndpointPolicy<'a>,
    /// All grants of the cluster; `None` if they are unknown (offline), which allows all cross-namespace
    /// references.
    pub grants: Option<&'a [ReferenceGrant]>,
    /// The Pipeline that a run refers to, if it is known.
    pub pipeline: Option<&'a Pipeline>,
    /// The run before an update.
    pub old_run: Option<&'a PipelineRun>,
}

/// An object that can check itself.
pub trait Validate {
    /// Everything that is wrong with the object; empty if it is valid.
    fn validate(&self, context: &Context<'_>) -> Vec<Violation>;
}

/// Checks an object as a person wrote it: fields and types against the CRD's own schema, then the API
/// server's defaults, then the rules. `None` if it is not a kind of this API. The webhook calls this before
/// the API server has compared the object with the schema, so time and memory must not depend on what a
/// hostile object contains.
pub fn check(object: &Value, context: &Context<'_>) -> Option<Vec<Violation>> {
    let kind = Kind::of(object)?;
    let mut findings = Findings::default();
    names::check_metadata(object, &mut findings);
    schema::shape(kind, object, &mut findings);
    if findings.is_oversized() && !findings.is_empty() {
        return Some(findings.into_vec());
    }
    let mut violations = findings.into_vec();
    let defaulted = default(kind, object);
    let more = match kind {
        Kind::Pipeline => parsed::<Pipeline>(defaulted, context),
        Kind::PipelineRun => parsed::<PipelineRun>(defaulted, context),
        Kind::PipelinePolicy => parsed::<PipelinePolicy>(defaulted, context),
        Kind::ReferenceGrant => parsed::<ReferenceGrant>(defaulted, context),
    };
    match more {
        Ok(more) => {
            violations.extend(more);
            violations.truncate(violation::FINDINGS_MAX);
        }
        // The shape usually explains an unreadable object; this is for types that it does not know (those
        // nested in Kubernetes' own types).
        Err(error) if violations.is_empty() => {
            let mut findings = Findings::default();
            findings.add(
                &path::Path::root(),
                Rule::WrongType,
                error.to_string(),
                "correct the type of this field",
            );
            violations = findings.into_vec();
        }
        Err(_) => {}
    }
    Some(violations)
}

fn parsed<T: DeserializeOwned + Validate>(
    object: Value,
    context: &Context<'_>,
) -> Result<Vec<Violation>, serde_json::Error> {
    Ok(serde_json::from_value::<T>(object)?.validate(context))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pipeline(spec: Value) -> Value {
        let mut object = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "Pipeline",
            "metadata": {"name": "p"}, "spec": {"source": {"bucket": {"name": "b", "region": "r"}},
            "filters": [{"name": "f", "image": "i:1"}]}});
        for (field, value) in spec.as_object().unwrap() {
            object["spec"][field] = value.clone();
        }
        object
    }

    /// As many bytes as a request may have. Without bounds, one of these takes hours, and each of the others
    /// hundreds of megabytes.
    #[test]
    fn a_hostile_object_takes_little_time_and_gets_a_short_answer() {
        const BYTES: usize = 1_400_000;
        let word = |letter: &str| letter.repeat(BYTES);
        let unknown: serde_json::Map<String, Value> =
            (0..100_000).map(|number| (format!("imagePullPolice{number}"), json!(1))).collect();
        let hostile = [
            json!({"filters": [{"name": word("a"), "image": "i:1"}],
                "sink": {"bucket": {"name": "b"}, "from": word("b")}}),
            json!({"source": {"bucket": {"name": "b", "region": "r"}, "include": vec!["["; BYTES / 4]}}),
            json!({"filters": vec![json!({"name": "f", "image": "i:1"}); BYTES / 40]}),
            json!({"order": word("Sequentia")}),
            Value::Object(unknown),
        ];
        for spec in hostile {
            let violations = check(&pipeline(spec), &Context::default()).unwrap();
            assert!(
                !violations.is_empty() && violations.len() <= violation::FINDINGS_MAX,
                "{}",
                violations.len()
            );
            let bytes: usize = violations.iter().map(|found| found.to_string().len()).sum();
            assert!(bytes < 100_000, "{bytes} bytes: {}", violations[0]);
        }
    }

    /// Limits count characters, which may have four bytes each.
    #[test]
    fn a_long_text_that_is_within_its_bounds_hides_no_mistake() {
        for letter in ["日", "🎥"] {
            let include = vec![letter.repeat(1_024), "[".to_owned()];
            let spec = json!({"source": {"bucket": {"name": "bkt", "region": "r"}, "include": include}});
            let violations = check(&pipeline(spec), &Context::default()).unwrap();
            let rules: Vec<Rule> = violations.iter().map(|found| found.rule).collect();
            assert_eq!(rules, [Rule::Glob]);
        }
    }

    /// A text or list that is somewhat too long is a mistake among others, and all of them are named.
    #[test]
    fn what_is_a_little_too_long_hides_no_other_mistake() {
        let spec = json!({"source": {"bucket": {"name": "bkt", "region": "r"}, "include": vec!["["; 65]},
            "filters": [{"name": "a".repeat(70), "image": "i i"}]});
        let violations = check(&pipeline(spec), &Context::default()).unwrap();
        let broken = |rule: Rule| violations.iter().filter(|found| found.rule == rule).count();
        assert_eq!((broken(Rule::ListLength), broken(Rule::TextLength), broken(Rule::Glob)), (1, 1, 65));
        assert_eq!(broken(Rule::Image), 1);
    }
}
