//! Whether an object is admitted: the shared rules, what needs other objects, and the policies.

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

/// What kubectl notes of what it has applied. It changes with everything else, and is nobody's to judge.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The Pipeline that a run refers to.
#[derive(Debug)]
enum Referred {
    There(Arc<KnownPipeline>),
    Missing,
    /// The run may not know: a Pipeline of another namespace, without a grant. What is no run refers to none.
    Hidden,
}

/// What is wrong with an object.
#[derive(Default)]
struct Broken {
    /// It is refused for these.
    refused: Vec<Violation>,
    /// On a dry run: what only other objects, as they are stored now, speak against.
    for_now: Vec<Violation>,
}

impl Admission {
    pub(super) async fn judge(&self, mut request: Request) -> Answer {
        let change = Change::of(&request);
        if change == Change::Nothing {
            return Answer::allow();
        }
        set_namespace(&mut request);
        let mut answer = Answer::allow();
        let referred = match self.pipeline_of(&request).await {
            Ok(referred) => referred,
            Err(problem) => return Answer::deny(problem),
        };
        if change == Change::Spec {
            self.rules(&request, &referred, &mut answer).await;
            // Other objects are looked at for an object that makes sense by itself.
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

    /// Refuses an object that is wrong by itself, whatever else is stored.
    pub(super) async fn judge_alone(&self, mut request: Request) -> Answer {
        let mut answer = Answer::allow();
        if target(request.kind).is_none() {
            return answer;
        }
        set_namespace(&mut request);
        let old_run = old_run(&request);
        let alone = rules::check(&request.object, &self.context(old_run.as_ref()));
        if alone.is_none_or(|violations| violations.is_empty()) {
            return answer;
        }
        // It is refused in any case, so the user reads at once what its Pipeline and grants say against it too.
        match self.pipeline_of(&request).await {
            Ok(referred) => self.rules(&request, &referred, &mut answer).await,
            Err(problem) => answer.reasons.push(problem),
        }
        answer
    }

    /// What the rules know without other objects.
    fn context<'a>(&'a self, old_run: Option<&'a PipelineRun>) -> Context<'a> {
        let endpoints = EndpointPolicy {
            allowed_networks: &self.settings.allowed_networks,
            allowed_hosts: &self.settings.allowed_hosts,
        };
        Context { endpoints, old_run, ..Context::default() }
    }

    /// The shared rules, as the operator and `openfilter validate` apply them.
    async fn rules(&self, request: &Request, referred: &Referred, answer: &mut Answer) {
        let broken = match request.kind {
            // Compiling takes milliseconds, for hostile expressions more: not on a thread that answers others.
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
        // A run that is there uses its Pipeline as it was when it started, and not as it is now.
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
        // An engine dry-runs a whole commit before it applies any of it: the Pipeline with another prefix, or the grant,
        // may be in it.
        let alone = rules::check(&request.object, &alone)?;
        let (refused, for_now) = refused.into_iter().partition(|violation| alone.contains(violation));
        Some(Broken { refused, for_now })
    }

    /// The grants that could matter: a cluster may have thousands, in other namespaces. A run needs some for the Secrets of
    /// its Pipeline too, which are in the Pipeline's own namespace or in a third.
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
        // Nobody needs a grant for what is in his own.
        namespaces.remove(request.namespace.as_str());
        namespaces.into_iter().flat_map(|namespace| self.world.read().grants_in(namespace)).collect()
    }

    /// What only other objects can say.
    async fn surroundings(&self, request: &Request, referred: &Referred, answer: &mut Answer) {
        match request.kind {
            // Without a grant, which is a warning on a dry run, nobody learns whether a Secret is there.
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
        // A name that is yet to be generated gives an id that nobody has.
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
        // As for the rules: on a dry run the Pipeline that this one is applied with is not there yet.
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

    /// The Pipeline of a run. One that the watch has not brought yet is asked for: without it the policies that look at it
    /// would not hold for runs that come right after it.
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

/// What of an object is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// What it does: everything is looked at.
    Spec,
    /// How it is labelled: policies may be about that.
    Labels,
    /// Nothing that anybody judges.
    Nothing,
}

impl Change {
    /// An object that was admitted stays changeable where nothing is judged, also after the rules became stricter: its
    /// finalizers can be removed, its status can be written, and a run can be paused. One that is on its way out can be
    /// changed in everything but what it does: its finalizers may keep it, and what it does may still be done.
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

/// The run as it is stored, if the request changes one.
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

/// The annotations that people make.
fn annotations(object: &Value) -> BTreeMap<&String, &Value> {
    let all = object.pointer("/metadata/annotations").and_then(Value::as_object);
    all.into_iter().flatten().filter(|(key, _)| *key != LAST_APPLIED).collect()
}

/// Whether an object is on its way out.
pub(super) fn is_being_deleted(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// The namespace of the request is the object's: a person may leave it out, and rules compare it.
fn set_namespace(request: &mut Request) {
    if let Some(metadata) = request.object.get_mut("metadata").and_then(Value::as_object_mut)
        && !request.namespace.is_empty()
    {
        metadata.insert("namespace".to_owned(), Value::String(request.namespace.clone()));
    }
}
