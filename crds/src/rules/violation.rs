//! The findings of a rule, in words that name the field, the value, why it is wrong, and what to write
//! instead.

use std::fmt;

use serde::Serialize;

use super::path::Path;
use super::rule::Rule;

/// One mistake in an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Path of the field, for example `spec.filters[1].image`.
    pub field: String,
    /// The broken rule. Stable: scripts and dashboards may rely on it.
    pub rule: Rule,
    /// The value and why it is wrong.
    pub message: String,
    /// What to write instead.
    pub fix: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, rule, message, fix } = self;
        write!(f, "{field}: {message}; {fix} [{rule}]")
    }
}

/// Collects violations.
#[derive(Default)]
pub(super) struct Findings(Vec<Violation>);

impl Findings {
    pub(super) fn add(
        &mut self,
        field: &Path,
        rule: Rule,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.0.push(Violation { field: field.to_string(), rule, message: message.into(), fix: fix.into() });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn into_vec(self) -> Vec<Violation> {
        self.0
    }
}

/// Quotes a value for a message, with a limited length, so that the message fits wherever it is shown.
pub(crate) fn quote(value: &str) -> String {
    const SHOWN: usize = 80;
    match value.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &value[..end]),
        None => format!("{value:?}"),
    }
}
