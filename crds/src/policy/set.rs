//! All policies together, as they are at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::{CompiledDefault, Finding, Policy, Subject, scope};
use crate::v1alpha1::PolicyTarget;

/// The policies in force, ordered by name: the same object gets the same answer from every replica.
#[derive(Clone, Debug, Default)]
pub struct PolicySet(BTreeMap<String, Arc<Policy>>);

impl PolicySet {
    /// Adds a policy, or replaces the one of its name.
    pub fn insert(&mut self, policy: Arc<Policy>) {
        self.0.insert(policy.name().to_owned(), policy);
    }

    /// Removes a policy.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The policy of this name.
    pub fn get(&self, name: &str) -> Option<&Arc<Policy>> {
        self.0.get(name)
    }

    /// The policies.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.0.values()
    }

    /// Everything that breaks a rule, in the order of the policies. The deadline stops what is not evaluated by then, and
    /// that counts as broken.
    pub fn judge(
        &self,
        subject: &Subject<'_>,
        labels: &BTreeMap<String, String>,
        until: Instant,
    ) -> Vec<Finding> {
        let selected: Vec<&Policy> = self.selected(subject.target, labels).collect();
        let mut findings = Vec::new();
        if selected.is_empty() {
            return findings;
        }
        let scope = scope(&selected, subject);
        for policy in selected {
            policy.judge(subject, &scope, until, &mut findings);
        }
        findings
    }

    /// Fills in what policies say for fields that are absent. Of two policies the first by name has its way; doing it
    /// again changes nothing.
    ///
    /// A run that is stored keeps what it has: `stored` is the object before an update. Where it has something that cannot
    /// change, that is filled in, whatever the policy says by now; what can change is filled in if it was the default.
    pub fn fill_in(
        &self,
        target: PolicyTarget,
        labels: &BTreeMap<String, String>,
        object: &mut Value,
        stored: Option<&Value>,
    ) {
        let defaults = self.selected(target, labels).flat_map(|policy| &policy.defaults);
        let mut defaults: Vec<(usize, &CompiledDefault)> =
            defaults.filter_map(|default| Some((default.steps_needed(target)?, default))).collect();
        // What needs a parent comes after what may make it, or it would be filled in the second time only.
        defaults.sort_by_key(|(needed, _)| *needed);
        for (needed, CompiledDefault { path, value, targets: _ }) in defaults {
            match stored {
                None => path.fill(object, value, needed),
                Some(stored) => path.keep(object, stored, value, needed),
            }
        }
    }

    fn selected(
        &self,
        target: PolicyTarget,
        labels: &BTreeMap<String, String>,
    ) -> impl Iterator<Item = &Policy> {
        self.0.values().map(Arc::as_ref).filter(move |policy| policy.selects(target, labels))
    }
}

impl<P: Into<Arc<Policy>>> FromIterator<P> for PolicySet {
    fn from_iter<I: IntoIterator<Item = P>>(policies: I) -> Self {
        let mut set = Self::default();
        policies.into_iter().for_each(|policy| set.insert(policy.into()));
        set
    }
}
