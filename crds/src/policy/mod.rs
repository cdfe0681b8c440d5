//! The policy engine: the meaning of a `PipelinePolicy`. A policy is compiled once, and then judges objects
//! with pure functions, so that the webhook and the offline `validate` command cannot disagree.
//!
//! It lives beside the rules because they need it: a policy is valid if it compiles here. It never blocks,
//! and has no clock except the deadline that it is given.

mod cel;
mod check;
mod field;
mod meter;
mod selector;
mod set;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube_cel::cel::Context;
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use cel::Expression;
use cel::Variable;
pub(crate) use check::{Bound, Check, Unusable, compile_regex_whole, compile_schema};
pub(crate) use field::{FieldPath, NoSuchField};
pub use set::PolicySet;

use crate::rules::{Kind, Rule, Violation, compile_policy as compile};
use crate::v1alpha1::{PipelinePolicy, PipelinePolicySpec, PolicyAction, PolicyTarget};

/// Memory that one compiled regular expression may use: generous for a hand-written one, and small against a
/// hostile one.
pub(crate) const REGEX_BYTES_MAX: usize = 256 * 1024;

/// The longest text that a regular expression is matched against: a search takes time proportional to the
/// product of both, and nothing can stop one that has begun. Images, names and paths have at most a few
/// thousand characters.
const REGEX_TEXT_MAX: usize = 64 * 1024;

/// The number of places per field rule that a rejection names; the others have the same problem.
const PLACES_SHOWN: usize = 3;

/// The object to judge, and its context.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Its kind.
    pub target: PolicyTarget,
    /// The object, with its defaults.
    pub object: &'a Value,
    /// The object before an update.
    pub old_object: Option<&'a Value>,
    /// The admission request: `operation`, `userInfo`, `dryRun` and so on.
    pub request: Option<&'a Value>,
    /// The object's namespace.
    pub namespace: Option<&'a Value>,
    /// The Pipeline of a run, if it is known.
    pub pipeline: Option<&'a Value>,
    /// What the other runs in the run's namespace use at this moment; see [`Usage`].
    pub usage: Option<Usage>,
}

/// The combined usage of the unfinished runs in a namespace, for quotas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The number of runs.
    pub active_runs: i64,
    /// The sum of their parallelism.
    pub parallelism: i64,
}

/// A rule that an object breaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the policy.
    pub policy: String,
    /// The name of its rule; empty if the policy itself is broken.
    pub rule: String,
    /// The consequence.
    pub action: PolicyAction,
    /// The field, for rules about a field.
    pub field: Option<String>,
    /// The message of the policy's author, and what was found.
    pub message: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { policy, rule, action: _, field, message } = self;
        if let Some(field) = field {
            write!(f, "{field}: ")?;
        }
        match rule.as_str() {
            "" => write!(f, "{message} [policy {policy}]"),
            rule => write!(f, "{message} [policy {policy}/{rule}]"),
        }
    }
}

/// A compiled policy.
#[derive(Debug)]
pub struct Policy {
    name: String,
    /// The uid and generation of the object that it was compiled from, if that object was stored.
    version: Option<(String, i64)>,
    targets: Vec<PolicyTarget>,
    action: PolicyAction,
    selector: Option<LabelSelector>,
    rules: Vec<CompiledRule>,
    defaults: Vec<CompiledDefault>,
    /// Why it cannot be used; if so, nothing that it selects is admitted.
    problems: Vec<Violation>,
}

#[derive(Debug)]
pub(crate) struct CompiledRule {
    pub(crate) name: String,
    pub(crate) message: String,
    pub(crate) message_expression: Option<Expression>,
    pub(crate) test: Test,
}

impl CompiledRule {
    fn variables(&self) -> impl Iterator<Item = Variable> {
        let condition = match &self.test {
            Test::Cel(expression) => Some(expression),
            Test::Field(..) => None,
        };
        let expressions = condition.into_iter().chain(&self.message_expression);
        expressions.flat_map(|expression| expression.variables.iter().copied())
    }
}

#[derive(Debug)]
pub(crate) struct CompiledDefault {
    path: FieldPath,
    value: Value,
    /// The kinds that have the field, and how many steps towards it an object of that kind must have.
    targets: Vec<(PolicyTarget, usize)>,
}

impl CompiledDefault {
    pub(crate) fn new(field: Field, value: Value) -> Self {
        let Field { path, targets } = field;
        let needed = |target: PolicyTarget| (target, path.steps_needed(Kind::from(target).schema()));
        let targets = targets.into_iter().map(needed).collect();
        Self { path, value, targets }
    }

    /// `None` if the kind does not have the field.
    fn steps_needed(&self, target: PolicyTarget) -> Option<usize> {
        self.targets.iter().find(|(kind, _)| *kind == target).map(|(_, needed)| *needed)
    }
}

/// A field, and the kinds that have it: a policy for both kinds may refer to fields of one.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) path: FieldPath,
    pub(crate) targets: Vec<PolicyTarget>,
}

impl Field {
    fn is_of(&self, target: PolicyTarget) -> bool {
        self.targets.contains(&target)
    }
}

#[derive(Debug)]
pub(crate) enum Test {
    Cel(Expression),
    Field(Field, Check),
}

impl Policy {
    /// Compiles a policy. A policy that does not compile is kept, and denies what it selects: a policy that
    /// silently does nothing would be worse.
    pub fn compile(policy: &PipelinePolicy) -> Self {
        let PipelinePolicySpec { namespace_selector, applies_to, action, rules: _, defaults: _ } =
            &policy.spec;
        let (rules, defaults, problems) = match compile(&policy.spec) {
            Ok((rules, defaults)) => (rules, defaults, Vec::new()),
            Err(problems) => (Vec::new(), Vec::new(), problems),
        };
        Self {
            name: policy.metadata.name.clone().unwrap_or_default(),
            version: version(&policy.metadata),
            targets: applies_to.clone(),
            action: *action,
            selector: namespace_selector.clone(),
            rules,
            defaults,
            problems,
        }
    }

    /// A stored policy that does not match its schema: what it selects is unknown, so it denies everything.
    pub fn unreadable(metadata: &ObjectMeta, why: &str) -> Self {
        let problem = Violation {
            field: "spec".to_owned(),
            rule: Rule::WrongType,
            message: format!("it cannot be read ({})", one_line(why)),
            fix: "correct it".to_owned(),
        };
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            version: version(metadata),
            targets: vec![PolicyTarget::Pipeline, PolicyTarget::PipelineRun],
            action: PolicyAction::Deny,
            selector: None,
            rules: Vec::new(),
            defaults: Vec::new(),
            problems: vec![problem],
        }
    }

    /// The name of the policy.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it was compiled from this version of a stored object: only its status or its managed fields
    /// may have changed since.
    pub fn is_of(&self, metadata: &ObjectMeta) -> bool {
        self.version.is_some() && self.version == version(metadata)
    }

    /// Why it cannot be used; empty if it can.
    pub fn problems(&self) -> &[Violation] {
        &self.problems
    }

    /// How many rules and defaults are in force.
    pub fn size(&self) -> (usize, usize) {
        (self.rules.len(), self.defaults.len())
    }

    /// Whether it applies to objects of this kind in a namespace with these labels.
    pub fn selects(&self, target: PolicyTarget, labels: &BTreeMap<String, String>) -> bool {
        self.targets.contains(&target)
            && self.selector.as_ref().is_none_or(|selector| selector::matches(selector, labels))
    }

    /// Whether one of its expressions reads `usage`, which costs a walk over the runs.
    pub fn looks_at_usage(&self) -> bool {
        self.variables().any(|variable| variable == Variable::Usage)
    }

    /// Whether this rule reads the Pipeline of a run.
    pub fn looks_at_pipeline(&self, rule: &str) -> bool {
        let rules = self.rules.iter().filter(|known| known.name == rule);
        rules.flat_map(CompiledRule::variables).any(|variable| variable == Variable::Pipeline)
    }

    fn variables(&self) -> impl Iterator<Item = Variable> {
        self.rules.iter().flat_map(CompiledRule::variables)
    }

    fn judge(&self, subject: &Subject<'_>, scope: &Context<'_>, until: Instant, findings: &mut Vec<Finding>) {
        let finding = |rule: &str, action, field, message| Finding {
            policy: self.name.clone(),
            rule: rule.to_owned(),
            action,
            field,
            message,
        };
        if let Some(first) = self.problems.first() {
            let message = format!(
                "the policy cannot be used ({first}), so nothing it selects is admitted; its owners must correct or delete it"
            );
            findings.push(finding("", PolicyAction::Deny, None, message));
        }
        for CompiledRule { name, message, message_expression, test } in &self.rules {
            let message = || {
                let own = message_expression.as_ref().and_then(|own| own.text(scope, until));
                own.unwrap_or_else(|| message.clone())
            };
            if Instant::now() > until {
                let message = "the policies could not be evaluated in time; try again".to_owned();
                findings.push(finding(name, PolicyAction::Deny, None, message));
                return;
            }
            match test {
                Test::Cel(expression) => match expression.holds(scope, until) {
                    Ok(true) => {}
                    Ok(false) => findings.push(finding(name, self.action, None, message())),
                    Err(failure) => {
                        let message = message();
                        let message = format!("{message} (the rule could not be evaluated: {failure})");
                        findings.push(finding(name, self.action, None, message));
                    }
                },
                Test::Field(field, _) if !field.is_of(subject.target) => {}
                Test::Field(field, check) => {
                    let places = field.path.places(subject.object).into_iter();
                    let broken = places.filter_map(|place| Some((check.problem(place.value)?, place.path)));
                    for (problem, path) in broken.take(PLACES_SHOWN) {
                        let message = format!("it {problem}; {}", message());
                        findings.push(finding(name, self.action, Some(path), message));
                    }
                }
            }
        }
    }
}

fn version(metadata: &ObjectMeta) -> Option<(String, i64)> {
    Some((metadata.uid.clone()?, metadata.generation?))
}

/// A scope with the variables that these policies use; converting an object that no expression reads would be
/// wasted.
fn scope(policies: &[&Policy], subject: &Subject<'_>) -> Context<'static> {
    let variables: BTreeSet<Variable> = policies.iter().flat_map(|policy| policy.variables()).collect();
    let usage = subject.usage.map(|usage| json!(usage));
    cel::scope(&variables, |variable| match variable {
        Variable::Object => Some(subject.object),
        Variable::OldObject => subject.old_object,
        Variable::Request => subject.request,
        Variable::NamespaceObject => subject.namespace,
        Variable::Pipeline => subject.pipeline,
        Variable::Usage => usage.as_ref(),
    })
}

/// Errors of parsers contain a picture of the source, but a message has one line.
pub(crate) fn one_line(text: &str) -> String {
    const SHOWN: usize = 160;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests;
