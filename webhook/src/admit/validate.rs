//! Whether an object is admitted: the shared rules, what needs other objects, and the policies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crds::policy::{Finding, Policy};
use crds::rules::{self, Context, EndpointPolicy, Kind, Violation};
use crds::v1alpha1::{PipelineRun, PolicyAction, PolicyTarget, ReferenceGrant};
use serde_json::Value;

use super::evaluate::Question;
use super::mutate::target;
use super::{Admission, credentials, delete};
use crate::review::{Answer, Operation, Request};
use crate::world::{Key, KnownPipeline, run_id};

/// What kubectl notes of what it has applied. It changes with everything else, and is nobody's to judge.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

impl Admission {
    pub(super) async fn judge(&self, request: Request) -> Answer {
        let change = Change::of(&request);
        if change == Change::Nothing {
            return Answer::allow();
        }
        let mut answer = Answer::allow();
        let pipeline = self.pipeline_of(&request);
        if change == Change::Spec {
            answer.reasons.extend(self.rules(&request, pipeline.as_deref()).await);
            // Other objects are looked at for an object that makes sense by itself.
            if answer.allowed() {
                self.surroundings(&request, pipeline.as_deref(), &mut answer).await;
            }
        }
        if answer.allowed() {
            let asker = (request.namespace.clone(), request.name.clone());
            self.policies(request, pipeline, &mut answer).await;
            if !answer.allowed() {
                self.world.give_back(&asker);
            }
        }
        answer
    }

    /// The shared rules, as the operator and `openfilter validate` apply them.
    async fn rules(&self, request: &Request, pipeline: Option<&KnownPipeline>) -> Vec<String> {
        let violations = match request.kind {
            // Compiling takes milliseconds, for hostile expressions more: not on a thread that answers others.
            Kind::PipelinePolicy => {
                let object = request.object.clone();
                self.evaluator.compile(move || rules::check(&object, &Context::default())).await
            }
            Kind::Pipeline | Kind::PipelineRun | Kind::ReferenceGrant => Ok(self.check(request, pipeline)),
        };
        match violations {
            Ok(Some(violations)) => violations
                .into_iter()
                .map(|violation| {
                    self.metrics.rule_broken(&violation.rule.to_string());
                    violation.to_string()
                })
                .collect(),
            Ok(None) => {
                vec![format!("the object is not a {} of filter.plainsight.ai/v1alpha1", request.kind)]
            }
            Err(late) => vec![late.to_string()],
        }
    }

    fn check(&self, request: &Request, pipeline: Option<&KnownPipeline>) -> Option<Vec<Violation>> {
        let grants = self.grants_for(&request.object, pipeline);
        let old_run: Option<PipelineRun> = match (request.kind, request.operation) {
            (Kind::PipelineRun, Operation::Update) => serde_json::from_value(request.old_object.clone()).ok(),
            _ => None,
        };
        let context = Context {
            endpoints: EndpointPolicy {
                allowed_networks: &self.settings.allowed_networks,
                allowed_hosts: &self.settings.allowed_hosts,
            },
            grants: Some(&grants),
            pipeline: pipeline.map(|pipeline| &pipeline.typed),
            old_run: old_run.as_ref(),
        };
        rules::check(&named(request), &context)
    }

    /// The grants that could matter: a cluster may have thousands, in other namespaces. A run needs some for the Secrets of
    /// its Pipeline too, which are in the Pipeline's own namespace or in a third.
    fn grants_for(&self, object: &Value, pipeline: Option<&KnownPipeline>) -> Vec<ReferenceGrant> {
        const PLACES: [&str; 4] = [
            "/metadata",
            "/spec/pipelineRef",
            "/spec/source/bucket/credentialsSecret",
            "/spec/sink/bucket/credentialsSecret",
        ];
        let objects = std::iter::once(object).chain(pipeline.map(|pipeline| &pipeline.json));
        let namespaces: BTreeSet<&str> = objects
            .flat_map(|object| {
                PLACES.iter().filter_map(|place| object.pointer(place)?.get("namespace")?.as_str())
            })
            .collect();
        let index = self.world.read();
        let in_question =
            index.grants.iter().filter(|((namespace, _), _)| namespaces.contains(namespace.as_str()));
        in_question.map(|(_, grant)| grant.clone()).collect()
    }

    /// What only other objects can say.
    async fn surroundings(&self, request: &Request, pipeline: Option<&KnownPipeline>, answer: &mut Answer) {
        match request.kind {
            Kind::Pipeline => {
                credentials::check(&*self.live, request, answer).await;
            }
            Kind::PipelineRun => self.run(request, pipeline, answer),
            Kind::ReferenceGrant => {
                answer.warnings.extend(delete::withdrawn(&self.world.read(), request));
            }
            Kind::PipelinePolicy => {}
        }
    }

    fn run(&self, request: &Request, pipeline: Option<&KnownPipeline>, answer: &mut Answer) {
        let Ok(run) = serde_json::from_value::<PipelineRun>(request.object.clone()) else { return };
        let Request { namespace, name, operation, dry_run, .. } = request;
        let reference = &run.spec.pipeline_ref;
        let pipelines = reference.namespace.as_ref().unwrap_or(namespace);
        if pipeline.is_none() {
            answer.warnings.push(format!(
                "Pipeline \"{pipelines}/{}\" does not exist yet; the run waits for it",
                reference.name
            ));
        }
        // A name that is yet to be generated gives an id that nobody has.
        if *operation != Operation::Create || name.is_empty() {
            return;
        }
        let asker: Key = (namespace.clone(), name.clone());
        let Some(id) = run_id(&run, namespace, name) else { return };
        if let Some((namespace, name)) = self.world.taken(&id, &asker, (!dry_run).then_some(&run)) {
            let field = if run.spec.queue.is_some() { "spec.queue" } else { "metadata.name" };
            answer.reasons.push(format!(
                "{field}: the runId {:?} belongs to PipelineRun \"{namespace}/{name}\"; choose another, or leave spec.queue out and one is derived from namespace and name",
                id.as_str()
            ));
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
        let question = Question { target, request, namespace, pipeline, usage, policies };
        for finding in self.evaluator.judge(question, &self.metrics).await {
            let Finding { policy, rule, action, .. } = &finding;
            self.metrics.policy_broken(policy, rule, *action);
            match action {
                PolicyAction::Deny => {
                    answer.forbidden = true;
                    answer.reasons.push(finding.to_string());
                }
                PolicyAction::Warn => answer.warnings.push(finding.to_string()),
            }
        }
    }

    fn pipeline_of(&self, request: &Request) -> Option<Arc<KnownPipeline>> {
        if request.kind != Kind::PipelineRun {
            return None;
        }
        let reference = request.object.get("spec")?.get("pipelineRef")?;
        let name = reference.get("name")?.as_str()?.to_owned();
        let namespace = reference.get("namespace").and_then(Value::as_str).unwrap_or(&request.namespace);
        let key: Key = (namespace.to_owned(), name);
        self.world.read().pipelines.get(&key).map(Arc::clone)
    }
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

/// The object with the namespace of the request: a person may leave it out, and rules compare it.
fn named(request: &Request) -> Value {
    let mut object = request.object.clone();
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
        && !request.namespace.is_empty()
    {
        metadata.insert("namespace".to_owned(), Value::String(request.namespace.clone()));
    }
    object
}
