//! Rules of a PipelineRun.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use protocol::{RunId, RunIdError};
use serde::Serialize;

use super::path::Path;
use super::reference::{self, Reference};
use super::rule::Rule;
use super::violation::{Findings, Violation, quote};
use super::{Context, Validate, bucket, env, names, time};
use crate::v1alpha1::{
    Execution, GrantFromKind, GrantToKind, Pipeline, PipelineReference, PipelineRun, PipelineRunSpec,
    QueueKeys, ReferenceGrant, RunSource,
};

/// It takes this long to tell a lost node from a slow one; a shorter timeout would hand out files that are
/// still being processed.
const PENDING_TIMEOUT_MIN: Duration = Duration::from_secs(10);
/// Pods need about a second to start, so a shorter limit could never be met.
const TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// A run has about a million files: nine digits are plenty, and fit into an integer of every client.
const COUNT_MAX: u64 = 999_999_999;

/// How to write `maxFailedFiles`.
pub(super) const FAILURES_FORM: &str =
    "write a count such as 5 (at most 999999999), or a percentage from 0% to 100%";

/// How many files may fail: the parsed `maxFailedFiles`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureLimit {
    /// A number of files.
    Count(u64),
    /// A percentage of all files.
    Percent(u8),
}

impl FailureLimit {
    /// Parses the field; `None` if it is neither a count nor a percentage.
    pub fn parse(limit: &IntOrString) -> Option<Self> {
        match limit {
            IntOrString::Int(count) => {
                u64::try_from(*count).ok().filter(|count| *count <= COUNT_MAX).map(Self::Count)
            }
            // As in the CRD, leading zeros count as digits.
            IntOrString::String(text) => match text.strip_suffix('%') {
                Some("100") => Some(Self::Percent(100)),
                Some(percent) => digits(percent, 2)?.parse().ok().map(Self::Percent),
                None => digits(text, 9)?.parse().ok().map(Self::Count),
            },
        }
    }
}

/// The text, if it consists of one to `most` digits.
fn digits(text: &str, most: usize) -> Option<&str> {
    let all = !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    (all && text.len() <= most).then_some(text)
}

impl Validate for PipelineRun {
    fn validate(&self, context: &Context<'_>) -> Vec<Violation> {
        let mut out = Findings::default();
        let field = Path::root().field("spec");
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let PipelineRunSpec { pipeline_ref, source, env: variables, execution, queue, suspend: _ } =
            &self.spec;

        let at_ref = field.field("pipelineRef");
        check_pipeline(&at_ref, pipeline_ref, namespace, context, &mut out);
        if let Some(pipeline) = context.pipeline {
            check_credentials(&at_ref, pipeline, namespace, context, &mut out);
        }
        if let Some(source) = source {
            check_source(&field.field("source"), source, context.pipeline, &mut out);
        }
        env::check(&field.field("env"), variables, &mut out);
        check_execution(&field.field("execution"), execution, &mut out);
        if let Some(queue) = queue {
            check_queue(&field.field("queue"), queue, &mut out);
        }
        if let Some(old) = context.old_run {
            check_unchanged(&field, &self.spec, &old.spec, &mut out);
        }
        out.into_vec()
    }
}

/// Whether a run in `namespace` may use the Pipeline that it names. Without a grant, a run must not reveal
/// anything about a Pipeline of another namespace. A malformed name is refused as well.
pub fn may_use(namespace: &str, pipeline: &PipelineReference, grants: &[ReferenceGrant]) -> bool {
    let (mut out, context) = (Findings::default(), Context { grants: Some(grants), ..Context::default() });
    check_pipeline(&Path::root(), pipeline, namespace, &context, &mut out);
    out.into_vec().is_empty()
}

fn check_pipeline(
    field: &Path,
    pipeline: &PipelineReference,
    namespace: &str,
    context: &Context<'_>,
    out: &mut Findings,
) {
    names::check_object(&field.field("name"), &pipeline.name, out);
    let reference = Reference {
        from: GrantFromKind::PipelineRun,
        from_namespace: namespace,
        to: GrantToKind::Pipeline,
        to_namespace: pipeline.namespace.as_deref(),
        to_name: &pipeline.name,
    };
    reference::check(&field.field("namespace"), &reference, context, out);
}

fn check_source(field: &Path, source: &RunSource, pipeline: Option<&Pipeline>, out: &mut Findings) {
    let RunSource { prefix, include, exclude } = source;
    if let Some(prefix) = prefix {
        let at = field.field("prefix");
        bucket::check_prefix(&at, prefix, out);
        if let Some(pipeline) = pipeline {
            let whole = &pipeline.spec.source.bucket.prefix;
            if !prefix.starts_with(whole.as_str()) {
                let message =
                    format!("{} lies outside the Pipeline's prefix {}", quote(prefix), quote(whole));
                out.add(&at, Rule::RunPrefix, message, format!("begin it with {}", quote(whole)));
            }
        }
    }
    bucket::check_globs(&field.field("include"), include.as_deref().unwrap_or_default(), out);
    bucket::check_globs(&field.field("exclude"), exclude.as_deref().unwrap_or_default(), out);
}

fn check_execution(field: &Path, execution: &Execution, out: &mut Findings) {
    time::check(&field.field("pendingTimeout"), &execution.pending_timeout, PENDING_TIMEOUT_MIN, out);
    let backoff = field.field("retryBackoff");
    let initial =
        time::check(&backoff.field("initial"), &execution.retry_backoff.initial, Duration::ZERO, out);
    let max = time::check(&backoff.field("max"), &execution.retry_backoff.max, Duration::ZERO, out);
    if let (Some(initial), Some(max)) = (initial, max)
        && initial > max
    {
        let message = format!(
            "{} is longer than max, {}",
            quote(&execution.retry_backoff.initial),
            quote(&execution.retry_backoff.max)
        );
        out.add(&backoff.field("initial"), Rule::BackoffOrder, message, "lower initial or raise max");
    }
    let limit = |name: &str, text: &Option<String>, out: &mut Findings| {
        text.as_ref().and_then(|text| {
            time::check(&field.field(name), text, TIMEOUT_MIN, out).map(|limit| (limit, text.clone()))
        })
    };
    let file_timeout = limit("fileTimeout", &execution.file_timeout, out);
    let timeout = limit("timeout", &execution.timeout, out);
    if let (Some((file, file_text)), Some((run, run_text))) = (file_timeout, timeout)
        && file > run
    {
        let message = format!(
            "{} is longer than timeout, {}, the limit of the whole run",
            quote(&file_text),
            quote(&run_text)
        );
        out.add(
            &field.field("fileTimeout"),
            Rule::FileTimeout,
            message,
            "lower fileTimeout or raise timeout",
        );
    }
    if let Some(limit) = &execution.max_failed_files {
        check_max_failed(&field.field("maxFailedFiles"), limit, out);
    }
}

/// Credentials of another namespace are copied into the run's namespace, where others can read them: a grant
/// for the Pipeline alone does not permit that.
fn check_credentials(
    field: &Path,
    pipeline: &Pipeline,
    namespace: &str,
    context: &Context<'_>,
    out: &mut Findings,
) {
    for bucket in pipeline.spec.buckets() {
        let Some(secret) = &bucket.credentials_secret else { continue };
        let reference = Reference {
            from: GrantFromKind::PipelineRun,
            from_namespace: namespace,
            to: GrantToKind::Secret,
            to_namespace: secret.namespace.as_deref().or(pipeline.metadata.namespace.as_deref()),
            to_name: &secret.name,
        };
        reference::check(field, &reference, context, out);
    }
}

fn check_max_failed(field: &Path, limit: &IntOrString, out: &mut Findings) {
    if FailureLimit::parse(limit).is_some() {
        return;
    }
    let (written, text) = match limit {
        IntOrString::Int(count) => (count.to_string(), count.to_string()),
        IntOrString::String(text) => (quote(text), text.clone()),
    };
    let (number, most, above) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100, "is above 100%"),
        None => (text.as_str(), COUNT_MAX, "is above 999999999"),
    };
    let why = match digits(number, usize::MAX).map(str::parse::<u64>) {
        None => "is neither a count nor a percentage",
        Some(Ok(number)) if number <= most => "has too many digits",
        Some(_) => above,
    };
    out.add(field, Rule::MaxFailedFiles, format!("{written} {why}"), FAILURES_FORM);
}

fn check_queue(field: &Path, queue: &QueueKeys, out: &mut Findings) {
    const FORM: &str =
        "write stream: pr:<runId>:work and group: cg:<runId>, or leave queue out and both are derived";
    let Err(error) = RunId::from_keys(queue.stream.as_deref(), queue.group.as_deref()) else { return };
    let (at, rule, message) = match &error {
        RunIdError::NoStream => {
            (field.field("stream"), Rule::QueueKeysBoth, "it is missing, but queue.group is set".to_owned())
        }
        RunIdError::NoGroup => {
            (field.field("group"), Rule::QueueKeysBoth, "it is missing, but queue.stream is set".to_owned())
        }
        RunIdError::Neither => (field.clone(), Rule::QueueKeysBoth, error.to_string()),
        RunIdError::Stream(_) => (field.field("stream"), Rule::QueueKey, error.to_string()),
        RunIdError::Group(_) => (field.field("group"), Rule::QueueKey, error.to_string()),
        RunIdError::Malformed(_) => (field.clone(), Rule::RunId, error.to_string()),
        RunIdError::Different { .. } => (field.clone(), Rule::QueueKeysRunId, error.to_string()),
    };
    out.add(&at, rule, message, FORM);
}

/// Checks everything except parallelism, maxFailedFiles and suspend: the rest is fixed when a run is created.
fn check_unchanged(field: &Path, new: &PipelineRunSpec, old: &PipelineRunSpec, out: &mut Findings) {
    let at = field.field("execution");
    let mut unchanged = Unchanged { out };
    unchanged.check(&field.field("pipelineRef"), &new.pipeline_ref, &old.pipeline_ref);
    unchanged.check(&field.field("source"), &new.source, &old.source);
    unchanged.check(&field.field("env"), &by_name(&new.env), &by_name(&old.env));
    unchanged.check(&field.field("queue"), &new.queue, &old.queue);
    let (new, old) = (&new.execution, &old.execution);
    unchanged.check(&at.field("maxAttempts"), &new.max_attempts, &old.max_attempts);
    unchanged.check(&at.field("pendingTimeout"), &new.pending_timeout, &old.pending_timeout);
    unchanged.check(&at.field("retryBackoff"), &new.retry_backoff, &old.retry_backoff);
    unchanged.check(&at.field("fileTimeout"), &new.file_timeout, &old.file_timeout);
    unchanged.check(&at.field("timeout"), &new.timeout, &old.timeout);
    let codes = at.field("nonRetryableExitCodes");
    let set = |codes: &[i32]| codes.iter().copied().collect::<BTreeSet<_>>();
    unchanged.check(&codes, &set(&new.non_retryable_exit_codes), &set(&old.non_retryable_exit_codes));
}

/// The variables in a fixed order: to the API server the list is a map, whose order has no meaning.
fn by_name(env: &[EnvVar]) -> Vec<&EnvVar> {
    let mut env: Vec<&EnvVar> = env.iter().collect();
    env.sort_by(|a, b| a.name.cmp(&b.name));
    env
}

struct Unchanged<'a> {
    out: &'a mut Findings,
}

impl Unchanged<'_> {
    fn check<T: PartialEq + Serialize>(&mut self, field: &Path, new: &T, old: &T) {
        if new == old {
            return;
        }
        // `None` if the field is absent.
        let shown = |value: &T| {
            let text = serde_json::to_string(value).unwrap_or_default();
            (text != "null" && text != "[]").then(|| text.chars().take(80).collect::<String>())
        };
        let (what, fix) = match (shown(old), shown(new)) {
            (None, _) => ("added".to_owned(), "remove it, and create a new PipelineRun with it"),
            (Some(old), None) => {
                (format!("removed (it was {old})"), "restore it, and create a new PipelineRun without it")
            }
            (Some(old), Some(new)) => (
                format!("changed from {old} to {new}"),
                "restore the old value, and create a new PipelineRun with the new one",
            ),
        };
        let message = format!(
            "it cannot be {what}: a run happens once, and of its spec only execution.parallelism, execution.maxFailedFiles and suspend may change"
        );
        self.out.add(field, Rule::Immutable, message, fix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_may_use_pipelines_of_its_own_namespace_and_those_that_are_granted() {
        let reference = |namespace: Option<&str>, name: &str| PipelineReference {
            name: name.to_owned(),
            namespace: namespace.map(str::to_owned),
        };
        let grant: ReferenceGrant = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "g", "namespace": "shared" },
            "spec": { "from": [{ "kind": "PipelineRun", "namespace": "team-a" }], "to": [{ "kind": "Pipeline", "name": "p" }] }
        }))
        .unwrap();
        let may =
            |reference: PipelineReference, grants: &[ReferenceGrant]| may_use("team-a", &reference, grants);
        assert!(may(reference(None, "p"), &[]) && may(reference(Some("team-a"), "p"), &[]));
        assert!(!may(reference(Some("shared"), "p"), &[]));
        assert!(may(reference(Some("shared"), "p"), std::slice::from_ref(&grant)));
        assert!(!may(reference(Some("shared"), "q"), &[grant]));
        // The caller puts the name into a URL.
        assert!(!may(reference(None, "../../team-b/pipelines/p"), &[]) && !may(reference(None, ".."), &[]));
    }
}
