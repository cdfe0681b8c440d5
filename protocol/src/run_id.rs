//! `RunId`: the id of a run in Valkey, in labels and in metrics. Parsed once, trusted afterwards.

use std::fmt;
use std::str::FromStr;

use crate::names::{LABEL_VALUE_MAX, shorten};

/// The longest runId: key names stay readable, and `<namespace>.<name>` usually fits without being cut.
pub const RUN_ID_MAX: usize = 128;

/// The id of a run: 1 to 128 of `[A-Za-z0-9._-]`, starting and ending with a letter or digit.
///
/// Written in braces (`{id}`), it is the hash tag of its keys, which puts them all in one slot of a Valkey
/// Cluster. The braces belong to the keys, not to the id: in labels and in the status, `abc` and `{abc}` are
/// the same id, so of two runs with these keys only one is admitted. In Valkey, their keys are distinct.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RunId {
    id: String,
    hash_tag: bool,
}

/// Why a text is not a runId, or two queue keys do not contain one.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RunIdError {
    /// The id itself is malformed.
    #[error(
        "{0:?} is not a runId: use 1 to {RUN_ID_MAX} letters, digits, dots, underscores and hyphens, starting and ending with a letter or digit"
    )]
    Malformed(String),
    /// The stream is not `pr:<runId>:work`.
    #[error("{0:?} is not pr:<runId>:work")]
    Stream(String),
    /// The group is not `cg:<runId>`.
    #[error("{0:?} is not cg:<runId>")]
    Group(String),
    /// Only the group is set.
    #[error("queue.stream is missing, but queue.group is set")]
    NoStream,
    /// Only the stream is set.
    #[error("queue.group is missing, but queue.stream is set")]
    NoGroup,
    /// Both are missing.
    #[error("queue has neither stream nor group")]
    Neither,
    /// Stream and group contain different ids.
    #[error("stream {stream:?} and group {group:?} hold different runIds")]
    Different {
        /// The stream as written.
        stream: String,
        /// The group as written.
        group: String,
    },
}

impl RunId {
    /// The id of a run that names no queue keys: `<namespace>.<name>`, shortened with a hash if it is too
    /// long. It is unambiguous, because a namespace has no dots.
    pub fn derive(namespace: &str, name: &str) -> Result<Self, RunIdError> {
        shorten(&format!("{namespace}.{name}"), RUN_ID_MAX).parse()
    }

    /// The id in the stream and the group of a run's `spec.queue`.
    pub fn from_keys(stream: Option<&str>, group: Option<&str>) -> Result<Self, RunIdError> {
        let (stream, group) = match (stream, group) {
            (Some(stream), Some(group)) => (stream, group),
            (None, Some(_)) => return Err(RunIdError::NoStream),
            (Some(_), None) => return Err(RunIdError::NoGroup),
            (None, None) => return Err(RunIdError::Neither),
        };
        let in_stream: Self = stream
            .strip_prefix("pr:")
            .and_then(|rest| rest.strip_suffix(":work"))
            .ok_or_else(|| RunIdError::Stream(stream.to_owned()))?
            .parse()?;
        let in_group: Self =
            group.strip_prefix("cg:").ok_or_else(|| RunIdError::Group(group.to_owned()))?.parse()?;
        if in_stream != in_group {
            return Err(RunIdError::Different { stream: stream.to_owned(), group: group.to_owned() });
        }
        Ok(in_stream)
    }

    /// The bare id, without braces.
    pub fn as_str(&self) -> &str {
        &self.id
    }

    /// The id as a label value: shortened with a hash if it exceeds 63 characters.
    pub fn label_value(&self) -> String {
        shorten(&self.id, LABEL_VALUE_MAX)
    }

    /// The key of this run that ends in `suffix`.
    pub fn key(&self, suffix: &str) -> String {
        format!("pr:{}:{suffix}", self.tag())
    }

    /// The consumer group of this run.
    pub fn group(&self) -> String {
        format!("cg:{}", self.tag())
    }

    fn tag(&self) -> String {
        if self.hash_tag { format!("{{{}}}", self.id) } else { self.id.clone() }
    }
}

impl FromStr for RunId {
    type Err = RunIdError;

    fn from_str(text: &str) -> Result<Self, RunIdError> {
        let (id, hash_tag) = match text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            Some(inner) => (inner, true),
            None => (text, false),
        };
        let at_ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let inside = id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if id.len() > RUN_ID_MAX || !inside || !at_ends(id.chars().next()) || !at_ends(id.chars().last()) {
            return Err(RunIdError::Malformed(text.to_owned()));
        }
        Ok(Self { id: id.to_owned(), hash_tag })
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn from_keys(stream: &str, group: &str) -> Result<RunId, RunIdError> {
        RunId::from_keys(Some(stream), Some(group))
    }

    #[test]
    fn ids_at_the_limits_are_accepted_and_beyond_them_refused() {
        for good in ["a", "7", "team-a.run_1", &"a".repeat(128), "{team.run}"] {
            assert!(good.parse::<RunId>().is_ok(), "{good}");
        }
        for bad in
            ["", "-a", "a-", ".a", "a b", "a:b", "ä", "{}", "{a", "a}", "{{a}}", "a*", &"a".repeat(129)]
        {
            assert_eq!(bad.parse::<RunId>(), Err(RunIdError::Malformed(bad.into())));
        }
    }

    #[test]
    fn a_long_namespace_and_name_still_give_a_run_id_and_a_label() {
        let id = RunId::derive(&"n".repeat(63), &"r".repeat(253)).unwrap();
        assert_eq!(id.as_str().len(), RUN_ID_MAX);
        assert_eq!(id.label_value().len(), LABEL_VALUE_MAX);
        assert_ne!(id, RunId::derive(&"n".repeat(63), &"r".repeat(252)).unwrap());
    }

    #[test]
    fn queue_keys_give_one_run_id_or_say_why_not() {
        assert_eq!(from_keys("pr:a.b:work", "cg:a.b"), RunId::derive("a", "b"));
        let clustered = from_keys("pr:{a.b}:work", "cg:{a.b}").unwrap();
        assert_eq!((clustered.as_str(), clustered.key("work").as_str()), ("a.b", "pr:{a.b}:work"));
        assert_eq!(clustered.group(), "cg:{a.b}");

        assert!(matches!(from_keys("pr:a:work", "cg:b"), Err(RunIdError::Different { .. })));
        assert!(matches!(from_keys("pr:a:work", "cg:{a}"), Err(RunIdError::Different { .. })));
        assert!(matches!(from_keys("a", "cg:a"), Err(RunIdError::Stream(_))));
        assert!(matches!(from_keys("pr:a:work", "a"), Err(RunIdError::Group(_))));
        assert_eq!(RunId::from_keys(Some("pr:a:work"), None), Err(RunIdError::NoGroup));
        assert_eq!(RunId::from_keys(None, Some("cg:a")), Err(RunIdError::NoStream));
        assert_eq!(RunId::from_keys(None, None), Err(RunIdError::Neither));
    }
}
