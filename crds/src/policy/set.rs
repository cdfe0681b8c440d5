//! All policies together, at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::{CompiledDefault, Finding, Policy, Subject, scope};
use crate::v1alpha1::PolicyTarget;

/// The policies in force, ordered by name, so that every replica gives the same answer for the same object.
#[derive(Clone, Debug, Default)]
pub struct PolicySet(BTreeMap<String, Arc<Policy>>);

impl PolicySet {
    /// Adds a policy, or replaces the one with the same name.
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

    /// All broken rules, in the order of the policies. Rules that are not evaluated by the deadline count as
    /// broken.
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

    /// Fills in the defaults of policies for absent fields. Of two policies, the first by name wins; a
    /// repetition changes nothing.
    ///
    /// A stored run keeps its values: `stored` is the object before an update. A stored value that cannot
    /// change is filled in even if the policy has changed since; a value that can change is filled in only if
    /// it was the default.
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
        // A default that needs a parent comes after one that may create the parent; otherwise only a second
        // call would fill it in.
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
