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

/// How many mistakes of one object are collected: more would not help, and a hostile object may have a
/// million.
pub(super) const FINDINGS_MAX: usize = 100;
/// How long each text of a violation may be. The allowed words of a field fit; a key of megabytes does not.
const TEXT_BYTES_MAX: usize = 2_048;

/// Collects violations, up to [`FINDINGS_MAX`].
#[derive(Default)]
pub(super) struct Findings {
    found: Vec<Violation>,
    is_oversized: bool,
}

impl Findings {
    pub(super) fn add(
        &mut self,
        field: &Path,
        rule: Rule,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) {
        if !self.is_full() {
            let (field, message, fix) =
                (shortened(field.to_string()), shortened(message.into()), shortened(fix.into()));
            self.found.push(Violation { field, rule, message, fix });
        }
    }

    /// Whether further mistakes are not collected.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= FINDINGS_MAX
    }

    /// Notes that a part of the object is so large that only its size is worth checking.
    pub(super) fn note_oversized(&mut self) {
        self.is_oversized = true;
    }

    pub(super) fn is_oversized(&self) -> bool {
        self.is_oversized
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub(super) fn into_vec(self) -> Vec<Violation> {
        self.found
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text.push('…');
    }
    text
}

/// Quotes a value for a message, with a limited length, so that the message fits wherever it is shown.
pub(crate) fn quote(value: &str) -> String {
    const SHOWN: usize = 80;
    match value.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &value[..end]),
        None => format!("{value:?}"),
    }
}
