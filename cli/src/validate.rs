//! `openfilter validate`: applies the rules and the policies to files, as the webhook applies them to
//! requests.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crds::policy::{Policy, PolicySet, Subject, Usage};
use crds::rules::{self, Context, EndpointPolicy, Kind, Rule};
use crds::v1alpha1::{Pipeline, PipelinePolicy, PipelineRun, PolicyAction, PolicyTarget};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::ValidateArgs;
use crate::source::{self, Source};

/// The limit per object; a pull request should not have to wait longer.
const POLICY_TIME: Duration = Duration::from_secs(5);

/// Why nothing could be checked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{0} has no files ending in .yaml, .yml or .json")]
    Empty(String),
    #[error("{0} contains no PipelinePolicy")]
    NoPolicies(String),
}

/// The result of a validation.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Checked {
    /// The number of checked objects of this API.
    pub(crate) objects: usize,
    /// All mistakes.
    pub(crate) findings: Vec<Finding>,
}

/// One mistake.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    pub(crate) file: String,
    pub(crate) line: u64,
    /// Kind, namespace and name.
    pub(crate) object: String,
    /// The rule, or the policy and its rule.
    pub(crate) rule: String,
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    Error,
    Warning,
}

impl Checked {
    pub(crate) fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

pub(crate) fn validate(args: &ValidateArgs, stdin: impl Read) -> Result<Checked, Error> {
    let mut checked = Checked::default();
    let sources = source::read(&args.files, stdin, &mut checked)?;
    let policies = read_policies(&args.policies, &mut checked)?;
    let surroundings = Surroundings::of(&sources, args, &policies);
    let endpoints =
        EndpointPolicy { allowed_networks: &args.allowed_networks, allowed_hosts: &args.allowed_hosts };
    let mut run_ids: HashMap<String, String> = HashMap::new();
    for source in &sources {
        let object = &source.document.value;
        let Some(kind) = Kind::of(object) else {
            checked.findings.extend(source.unknown_kind());
            continue;
        };
        checked.objects += 1;
        let namespace = surroundings.namespace_of(object);
        let object = placed(kind, object, &namespace);
        let pipeline = surroundings.pipeline(&object, &namespace);
        let typed: Option<Pipeline> =
            pipeline.and_then(|pipeline| serde_json::from_value(pipeline.clone()).ok());
        let context = Context { endpoints, pipeline: typed.as_ref(), ..Context::default() };
        for violation in rules::check(&object, &context).unwrap_or_default() {
            let message = format!("{}: {}; {}", violation.field, violation.message, violation.fix);
            let rule = violation.rule.to_string();
            checked.findings.push(source.finding(Severity::Error, &violation.field, rule, message));
        }
        checked.findings.extend(duplicate_run_id(source, kind, &object, &namespace, &mut run_ids));
        judge(source, kind, object, &namespace, &surroundings, &policies, pipeline, &mut checked.findings);
    }
    Ok(checked)
}

#[allow(clippy::too_many_arguments, reason = "everything a policy may read, each once")]
fn judge(
    source: &Source,
    kind: Kind,
    object: Value,
    namespace: &str,
    surroundings: &Surroundings<'_>,
    policies: &PolicySet,
    pipeline: Option<&Value>,
    findings: &mut Vec<Finding>,
) {
    let target = match kind {
        Kind::Pipeline => PolicyTarget::Pipeline,
        Kind::PipelineRun => PolicyTarget::PipelineRun,
        Kind::PipelinePolicy | Kind::ReferenceGrant => return,
    };
    let (labels, namespace_object) = surroundings.namespace(namespace);
    let object = defaulted(kind, target, &object, &labels, policies);
    let request = json!({
        "operation": "CREATE", "dryRun": true, "namespace": namespace, "name": object["metadata"]["name"],
        "kind": { "group": "filter.plainsight.ai", "version": "v1alpha1", "kind": kind.to_string() },
        "userInfo": { "username": "openfilter-validate", "groups": [] }
    });
    let subject = Subject {
        target,
        object: &object,
        old_object: None,
        request: Some(&request),
        namespace: Some(&namespace_object),
        pipeline,
        // No file says which other runs will be active.
        usage: Some(Usage::default()),
    };
    for found in policies.judge(&subject, &labels, Instant::now() + POLICY_TIME) {
        let severity = match found.action {
            PolicyAction::Deny => Severity::Error,
            PolicyAction::Warn => Severity::Warning,
        };
        let field = found.field.clone().unwrap_or_default();
        let message =
            if field.is_empty() { found.message.clone() } else { format!("{field}: {}", found.message) };
        let rule = format!("policy {}/{}", found.policy, found.rule);
        findings.push(source.finding(severity, &field, rule, message));
    }
}

/// The object with its defaults, as policies see it in the webhook.
fn defaulted(
    kind: Kind,
    target: PolicyTarget,
    object: &Value,
    labels: &BTreeMap<String, String>,
    policies: &PolicySet,
) -> Value {
    let mut object = rules::default(kind, object);
    policies.fill_in(target, labels, &mut object, None);
    object
}

/// Detects two runs of one commit with the same id: only one of them would ever run.
fn duplicate_run_id(
    source: &Source,
    kind: Kind,
    object: &Value,
    namespace: &str,
    seen: &mut HashMap<String, String>,
) -> Option<Finding> {
    if kind != Kind::PipelineRun {
        return None;
    }
    let run: PipelineRun = serde_json::from_value(object.clone()).ok()?;
    let id = run.spec.run_id(namespace, run.metadata.name.as_deref()?).ok()?;
    let first = seen.insert(id.as_str().to_owned(), source.title())?;
    let message =
        format!("spec.queue: the runId {:?} belongs to {first} already; choose another", id.as_str());
    Some(source.finding(Severity::Error, "spec.queue", Rule::RunIdUnique.to_string(), message))
}

/// The other objects of the commit.
struct Surroundings<'a> {
    /// As they would be stored: with their namespace and their defaults.
    pipelines: HashMap<(String, String), Value>,
    namespaces: HashMap<&'a str, &'a Value>,
    default_namespace: &'a str,
    labels: BTreeMap<String, String>,
}

impl<'a> Surroundings<'a> {
    fn of(sources: &'a [Source], args: &'a ValidateArgs, policies: &PolicySet) -> Self {
        let mut this = Self {
            pipelines: HashMap::new(),
            namespaces: HashMap::new(),
            default_namespace: &args.namespace,
            labels: args.namespace_labels.iter().cloned().collect(),
        };
        let values = || sources.iter().map(|source| &source.document.value);
        let name =
            |value: &'a Value| value.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        for value in values().filter(|value| value["apiVersion"] == "v1" && value["kind"] == "Namespace") {
            this.namespaces.insert(name(value), value);
        }
        for value in values().filter(|value| Kind::of(value) == Some(Kind::Pipeline)) {
            let namespace = this.namespace_of(value);
            let (labels, placed) = (this.namespace(&namespace).0, placed(Kind::Pipeline, value, &namespace));
            let stored = defaulted(Kind::Pipeline, PolicyTarget::Pipeline, &placed, &labels, policies);
            this.pipelines.insert((namespace, name(value).to_owned()), stored);
        }
        this
    }

    fn namespace_of(&self, object: &Value) -> String {
        let named = object.pointer("/metadata/namespace").and_then(Value::as_str);
        named.unwrap_or(self.default_namespace).to_owned()
    }

    fn namespace(&self, name: &str) -> (BTreeMap<String, String>, Value) {
        match self.namespaces.get(name) {
            Some(object) => {
                let labels = object.pointer("/metadata/labels").cloned().unwrap_or_default();
                (serde_json::from_value(labels).unwrap_or_default(), (*object).clone())
            }
            None => (self.labels.clone(), json!({ "metadata": { "name": name, "labels": self.labels } })),
        }
    }

    fn pipeline(&self, object: &Value, namespace: &str) -> Option<&Value> {
        let reference = object.pointer("/spec/pipelineRef")?;
        let namespace = reference.get("namespace").and_then(Value::as_str).unwrap_or(namespace);
        let key = (namespace.to_owned(), reference.get("name")?.as_str()?.to_owned());
        self.pipelines.get(&key)
    }
}

/// The object in its namespace, as the API server would see it.
fn placed(kind: Kind, object: &Value, namespace: &str) -> Value {
    let mut object = object.clone();
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
        && kind != Kind::PipelinePolicy
    {
        metadata.insert("namespace".to_owned(), json!(namespace));
    }
    object
}

fn read_policies(paths: &[PathBuf], checked: &mut Checked) -> Result<PolicySet, Error> {
    let mut policies = Vec::new();
    for path in paths {
        let before = policies.len();
        for source in source::read(std::slice::from_ref(path), std::io::empty(), checked)? {
            if Kind::of(&source.document.value) != Some(Kind::PipelinePolicy) {
                continue;
            }
            let violations = rules::check(&source.document.value, &Context::default()).unwrap_or_default();
            for violation in &violations {
                let (rule, message) = (violation.rule.to_string(), violation.to_string());
                checked.findings.push(source.finding(Severity::Error, &violation.field, rule, message));
            }
            if let Ok(policy) = serde_json::from_value::<PipelinePolicy>(source.document.value) {
                policies.push(Policy::compile(&policy));
            }
        }
        // A mistyped path must not look like policies that are all satisfied.
        if policies.len() == before {
            return Err(Error::NoPolicies(path.display().to_string()));
        }
    }
    Ok(policies.into_iter().collect())
}
