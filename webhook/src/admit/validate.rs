//! Decides whether an object is admitted: by the shared rules, by checks against other objects, and by
//! policies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crds::policy::{Finding, Policy};
use crds::rules::{self, Context, EndpointPolicy, Kind, Rule, Violation};
use crds::v1alpha1::{PipelineReference, PipelineRun, PolicyAction, PolicyTarget, ReferenceGrant};
use serde::Deserialize;
use serde_json::Value;

use super::evaluate::Question;
use super::mutate::target;
use super::{Admission, credentials, delete};
use crate::review::{Answer, Operation, Request};
use crate::world::{Key, KnownPipeline};

/// kubectl's copy of the object that it applied last. It changes with every other field, so it is not
/// checked.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The Pipeline that a run refers to.
#[derive(Debug)]
enum Referred {
    There(Arc<KnownPipeline>),
    Missing,
    /// A Pipeline of another namespace that no grant covers: the run must not learn whether it exists. Also
    /// used for objects that are not runs, which refer to no Pipeline.
    Hidden,
}

/// The mistakes in an object.
#[derive(Default)]
struct Broken {
    /// Mistakes for which the object is refused.
    refused: Vec<Violation>,
    /// On a dry run: mistakes that depend on other objects as they are stored now, which are only warnings.
    for_now: Vec<Violation>,
}

impl Admission {
    pub(super) async fn judge(&self, mut request: Request) -> Answer {
        let change = Change::of(&request);
        if change == Change::Nothing {
            return Answer::allow();
        }
        complete_metadata(&mut request);
        let mut answer = Answer::allow();
        let referred = match self.pipeline_of(&request).await {
            Ok(referred) => referred,
            Err(problem) => return Answer::deny(problem),
        };
        if change == Change::Spec {
            self.rules(&request, &referred, &mut answer).await;
            // Other objects are consulted only if the object is valid on its own.
            if answer.allowed() {
                self.surroundings(&request, &referred, &mut answer).await;
            }
        }
        if answer.allowed() {
            let asker = (request.namespace.clone(), request.name.clone());
            let pipeline = match referred {
                Referred::There(pipeline) => Some(pipeline),
                Referred::Missing | Referred::Hidden => None,
            };
            self.policies(request, pipeline, &mut answer).await;
            if !answer.allowed() {
                self.world.give_back(&asker);
            }
        }
        answer
    }

    /// Refuses an object that is invalid on its own, whatever else is stored.
    pub(super) async fn judge_alone(&self, mut request: Request) -> Answer {
        let mut answer = Answer::allow();
        if target(request.kind).is_none() {
            return answer;
        }
        complete_metadata(&mut request);
        let old_run = old_run(&request);
        let alone = rules::check(&request.object, &self.context(old_run.as_ref()));
        if alone.is_none_or(|violations| violations.is_empty()) {
            return answer;
        }
        // The object is refused in any case, so the answer also lists its conflicts with its Pipeline and
        // grants. If the Pipeline cannot be read, the mistakes of the object itself are enough.
        let referred = self.pipeline_of(&request).await.unwrap_or(Referred::Hidden);
        self.rules(&request, &referred, &mut answer).await;
        answer
    }

    /// The context of the rules, without other objects.
    fn context<'a>(&'a self, old_run: Option<&'a PipelineRun>) -> Context<'a> {
        let endpoints = EndpointPolicy {
            allowed_networks: &self.settings.allowed_networks,
            allowed_hosts: &self.settings.allowed_hosts,
        };
        Context { endpoints, old_run, ..Context::default() }
    }

    /// Applies the shared rules, as the operator and `openfilter validate` do.
    async fn rules(&self, request: &Request, referred: &Referred, answer: &mut Answer) {
        let broken = match request.kind {
            // Compiling takes milliseconds, and longer for hostile expressions, so it must not use a thread
            // that answers others.
            Kind::PipelinePolicy => {
                let object = request.object.clone();
                let compiled =
                    self.evaluator.compile(move || rules::check(&object, &Context::default())).await;
                compiled.map(|broken| broken.map(|refused| Broken { refused, ..Broken::default() }))
            }
            Kind::Pipeline | Kind::PipelineRun | Kind::ReferenceGrant => Ok(self.check(request, referred)),
        };
        match broken {
            Ok(Some(Broken { refused, for_now })) => {
                refused.into_iter().for_each(|violation| self.refuse(violation, answer));
                answer.warnings.extend(for_now.iter().map(ToString::to_string));
            }
            Ok(None) => answer
                .reasons
                .push(format!("the object is not a {} of filter.plainsight.ai/v1alpha1", request.kind)),
            Err(late) => answer.reasons.push(late.to_string()),
        }
    }

    fn refuse(&self, violation: Violation, answer: &mut Answer) {
        self.metrics.rule_broken(&violation.rule.to_string());
        answer.reasons.push(violation.to_string());
    }

    fn check(&self, request: &Request, referred: &Referred) -> Option<Broken> {
        // A stored run uses its Pipeline as it was when the run started, not as it is now.
        let pipeline = match referred {
            Referred::There(pipeline) if request.operation == Operation::Create => Some(&**pipeline),
            Referred::There(_) | Referred::Missing | Referred::Hidden => None,
        };
        let grants = self.grants_for(request, pipeline);
        let old_run = old_run(request);
        let alone = self.context(old_run.as_ref());
        let context =
            Context { grants: Some(&grants), pipeline: pipeline.map(|pipeline| &pipeline.typed), ..alone };
        let refused = rules::check(&request.object, &context)?;
        if !request.dry_run || refused.is_empty() {
            return Some(Broken { refused, ..Broken::default() });
        }
        // An engine dry-runs a whole commit before it applies any of it, and the commit may contain the
        // grant, or the Pipeline with another prefix.
        let alone = rules::check(&request.object, &alone)?;
        let (refused, for_now) = refused.into_iter().partition(|violation| alone.contains(violation));
        Some(Broken { refused, for_now })
    }

    /// The grants that could matter, because a cluster may have thousands in other namespaces. A run also
    /// needs grants for the Secrets of its Pipeline, which are in the Pipeline's own namespace or in a third
    /// one.
    fn grants_for(&self, request: &Request, pipeline: Option<&KnownPipeline>) -> Vec<ReferenceGrant> {
        const PLACES: [&str; 4] = [
            "/metadata",
            "/spec/pipelineRef",
            "/spec/source/bucket/credentialsSecret",
            "/spec/sink/bucket/credentialsSecret",
        ];
        let objects = std::iter::once(&request.object).chain(pipeline.map(|pipeline| &pipeline.json));
        let mut namespaces: BTreeSet<&str> = objects
            .flat_map(|object| {
                PLACES.iter().filter_map(|place| object.pointer(place)?.get("namespace")?.as_str())
            })
            .collect();
        // References within a namespace need no grant.
        namespaces.remove(request.namespace.as_str());
        namespaces.into_iter().flat_map(|namespace| self.world.read().grants_in(namespace)).collect()
    }

    /// Checks the object against other objects.
    async fn surroundings(&self, request: &Request, referred: &Referred, answer: &mut Answer) {
        match request.kind {
            // A missing grant, which is only a warning on a dry run, must not reveal whether a Secret exists.
            Kind::Pipeline if answer.warnings.is_empty() => {
                for violation in credentials::check(&*self.live, request, answer).await {
                    if request.dry_run {
                        answer.warnings.push(violation.to_string());
                    } else {
                        self.refuse(violation, answer);
                    }
                }
            }
            Kind::PipelineRun => self.run(request, referred, answer),
            Kind::ReferenceGrant => {
                answer.warnings.extend(delete::withdrawn(&self.world.read(), request));
            }
            Kind::Pipeline | Kind::PipelinePolicy => {}
        }
    }

    fn run(&self, request: &Request, referred: &Referred, answer: &mut Answer) {
        if request.operation != Operation::Create {
            return;
        }
        let Ok(run) = PipelineRun::deserialize(&request.object) else { return };
        let Request { namespace, name, dry_run, .. } = request;
        if matches!(referred, Referred::Missing) {
            let reference = &run.spec.pipeline_ref;
            let pipelines = reference.namespace.as_ref().unwrap_or(namespace);
            answer.warnings.push(format!(
                "Pipeline \"{pipelines}/{}\" does not exist yet; the run waits for it",
                reference.name
            ));
        }
        // A name that the API server has yet to generate results in an id that is not taken.
        if name.is_empty() {
            return;
        }
        let asker: Key = (namespace.clone(), name.clone());
        let Ok(id) = run.spec.run_id(namespace, name) else { return };
        if let Some((namespace, name)) = self.world.taken(&id, &asker, (!dry_run).then_some(&run)) {
            let field = if run.spec.queue.is_some() { "spec.queue" } else { "metadata.name" };
            let message =
                format!("the runId {:?} belongs to PipelineRun \"{namespace}/{name}\"", id.as_str());
            let fix = "choose another, or leave spec.queue out and one is derived from namespace and name";
            self.refuse(
                Violation { field: field.into(), rule: Rule::RunIdUnique, message, fix: fix.into() },
                answer,
            );
        }
    }

    async fn policies(&self, request: Request, pipeline: Option<Arc<KnownPipeline>>, answer: &mut Answer) {
        let Some(target) = target(request.kind) else { return };
        let policies = self.world.policies();
        let namespace = match self.namespace(&request.namespace).await {
            Ok(namespace) => namespace,
            Err(problem) => return answer.reasons.push(problem),
        };
        let quotas =
            |policy: &Arc<Policy>| policy.selects(target, &namespace.labels) && policy.looks_at_usage();
        let usage = (target == PolicyTarget::PipelineRun && policies.iter().any(quotas))
            .then(|| self.world.usage_of_others(&(request.namespace.clone(), request.name.clone())));
        // As with the rules: on a dry run, the Pipeline of the same commit is not stored yet.
        let (dry_run, known) = (request.dry_run, Arc::clone(&policies));
        let for_now = |policy: &str, rule: &str| {
            dry_run && known.get(policy).is_some_and(|policy| policy.looks_at_pipeline(rule))
        };
        let question = Question { target, request, namespace, pipeline, usage, policies };
        for finding in self.evaluator.judge(question, &self.metrics).await {
            let Finding { policy, rule, action, .. } = &finding;
            self.metrics.policy_broken(policy, rule, *action);
            match action {
                PolicyAction::Deny if for_now(policy, rule) => answer.warnings.push(finding.to_string()),
                PolicyAction::Deny => {
                    answer.forbidden = true;
                    answer.reasons.push(finding.to_string());
                }
                PolicyAction::Warn => answer.warnings.push(finding.to_string()),
            }
        }
    }

    /// The Pipeline of a run. If the watch has not delivered it yet, the API server is asked: without it, the
    /// policies that look at the Pipeline would not apply to runs that are created right after it.
    async fn pipeline_of(&self, request: &Request) -> Result<Referred, String> {
        let reference = request.object.pointer("/spec/pipelineRef").unwrap_or(&Value::Null);
        let (Kind::PipelineRun, Ok(reference)) = (request.kind, PipelineReference::deserialize(reference))
        else {
            return Ok(Referred::Hidden);
        };
        if !rules::may_use(&request.namespace, &reference, &self.grants_for(request, None)) {
            return Ok(Referred::Hidden);
        }
        let PipelineReference { name, namespace } = reference;
        let key: Key = (namespace.unwrap_or_else(|| request.namespace.clone()), name);
        let known = self.world.read().pipelines.get(&key).map(Arc::clone);
        if let Some(known) = known {
            return Ok(Referred::There(known));
        }
        let (namespace, name) = &key;
        match self.live.pipeline(namespace, name).await {
            Ok(Some(found)) => Ok(Referred::There(Arc::new(found))),
            Ok(None) => Ok(Referred::Missing),
            Err(error) => {
                Err(format!("the Pipeline \"{namespace}/{name}\" could not be read ({error}); try again"))
            }
        }
    }
}

/// Whether a request changes what its object does.
pub(super) fn changes_spec(request: &Request) -> bool {
    Change::of(request) == Change::Spec
}

/// The part of an object that a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The spec: everything is checked.
    Spec,
    /// Labels or annotations: only policies are checked, which may be about them.
    Labels,
    /// Nothing that is checked.
    Nothing,
}

impl Change {
    /// Even after the rules became stricter, an admitted object can be changed where nothing is checked: its
    /// finalizers can be removed, its status can be written, and a run can be paused. For an object that is
    /// being deleted, only a change of spec is checked: its finalizers may keep it for long, and until then
    /// its spec may still be executed.
    fn of(request: &Request) -> Self {
        let (new, old) = (&request.object, &request.old_object);
        if request.operation == Operation::Create {
            return Self::Spec;
        }
        let same = |pointer: &str| new.pointer(pointer) == old.pointer(pointer);
        if !same("/spec") && !only_suspended(request) {
            Self::Spec
        } else if is_being_deleted(new) || same("/metadata/labels") && annotations(new) == annotations(old) {
            Self::Nothing
        } else {
            Self::Labels
        }
    }
}

/// The stored run, if the request changes one.
fn old_run(request: &Request) -> Option<PipelineRun> {
    let changed = request.kind == Kind::PipelineRun && request.operation == Operation::Update;
    changed.then(|| PipelineRun::deserialize(&request.old_object).ok()).flatten()
}

fn only_suspended(request: &Request) -> bool {
    let without = |object: &Value| {
        let mut spec = object.get("spec").cloned().unwrap_or_default();
        if let Some(fields) = spec.as_object_mut() {
            fields.remove("suspend");
        }
        spec
    };
    let switch = request.object.pointer("/spec/suspend");
    request.kind == Kind::PipelineRun
        && switch.is_none_or(Value::is_boolean)
        && without(&request.object) == without(&request.old_object)
}

/// The annotations, except kubectl's own.
fn annotations(object: &Value) -> BTreeMap<&String, &Value> {
    let all = object.pointer("/metadata/annotations").and_then(Value::as_object);
    all.into_iter().flatten().filter(|(key, _)| *key != LAST_APPLIED).collect()
}

pub(super) fn is_being_deleted(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// Copies namespace and name of the request into the object: users may omit them there, and rules check them.
fn complete_metadata(request: &mut Request) {
    let Some(metadata) = request.object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    if !request.namespace.is_empty() {
        metadata.insert("namespace".to_owned(), Value::String(request.namespace.clone()));
    }
    if !request.name.is_empty() {
        metadata.entry("name").or_insert_with(|| Value::String(request.name.clone()));
    }
}
