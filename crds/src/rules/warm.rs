//! Rules of Warm mode, and its parsed limits.

use std::time::Duration;

use super::path::Path;
use super::quantity::{self, Nanos};
use super::rule::Rule;
use super::time::{self, parse_duration};
use super::violation::{Findings, quote};
use crate::v1alpha1::{Filter, Mode, PipelineSpec, Protocol, WarmOptions};

/// Younger pods would start about as often as pods that process one file, which Warm mode avoids.
const MAX_POD_AGE_MIN: Duration = Duration::from_secs(60);
/// With less, a pod would wait for storage between files that are not even large.
const PREFETCH_MIN: u64 = 1 << 20;
const NANOS_PER_BYTE: Nanos = 1_000_000_000;

/// `spec.warm`, parsed once and trusted afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmLimits {
    /// Files that a pod processes before it is replaced.
    pub max_files_per_pod: u64,
    /// The maximum age of a pod.
    pub max_pod_age: Duration,
    /// Bytes that a pod prefetches.
    pub prefetch_bytes: u64,
}

impl WarmLimits {
    /// Parses the options. `None` if a field is unreadable or too small, which validation refuses.
    fn parse(options: &WarmOptions) -> Option<Self> {
        let WarmOptions { max_files_per_pod, max_pod_age, prefetch_bytes } = options;
        Some(Self {
            max_files_per_pod: u64::try_from(*max_files_per_pod).ok().filter(|files| *files > 0)?,
            max_pod_age: parse_duration(max_pod_age).filter(|age| *age >= MAX_POD_AGE_MIN)?,
            prefetch_bytes: whole_bytes(quantity::parse(&prefetch_bytes.0)?)?,
        })
    }
}

impl Default for WarmLimits {
    fn default() -> Self {
        Self { max_files_per_pod: 10_000, max_pod_age: Duration::from_secs(3600), prefetch_bytes: 256 << 20 }
    }
}

impl PipelineSpec {
    /// The limits of this Pipeline's Warm pods: its own, or the defaults.
    pub fn warm_limits(&self) -> WarmLimits {
        self.warm.as_ref().and_then(WarmLimits::parse).unwrap_or_default()
    }
}

/// A size beyond the address space counts as no limit; `None` if it is negative.
fn whole_bytes(nanos: Nanos) -> Option<u64> {
    (nanos >= 0).then(|| u64::try_from(nanos / NANOS_PER_BYTE).unwrap_or(u64::MAX))
}

pub(super) fn check(field: &Path, mode: Mode, options: &WarmOptions, out: &mut Findings) {
    if mode != Mode::Warm {
        let message = format!("mode is {mode:?}, whose pods process one file each and do not stay up");
        out.add(field, Rule::WarmMode, message, "write mode: Warm, or remove warm");
    }
    // The number of files per pod is bounded by the schema.
    let WarmOptions { max_files_per_pod: _, max_pod_age, prefetch_bytes } = options;
    time::check(&field.field("maxPodAge"), max_pod_age, MAX_POD_AGE_MIN, out);
    let text = &prefetch_bytes.0;
    let problem = match quantity::parse(text).map(whole_bytes) {
        None => "is not a quantity",
        Some(Some(bytes)) if bytes >= PREFETCH_MIN => return,
        Some(_) => "is below 1Mi",
    };
    let message = format!("{} {problem}", quote(text));
    out.add(
        &field.field("prefetchBytes"),
        Rule::Quantity,
        message,
        "write a quantity of at least 1Mi, for example 256Mi",
    );
}

/// If the operator starts a filter's command itself, it must know the command. One violation is enough,
/// because writing the command corrects both.
pub(super) fn check_command(field: &Path, filter: &Filter, mode: Mode, out: &mut Findings) {
    let Filter { name, command, protocol, .. } = filter;
    let (rule, needed_by, instead) = match (mode, protocol) {
        (Mode::Warm, Protocol::Exec | Protocol::Lines) => {
            (Rule::WarmCommand, "mode: Warm", "set mode: PodPerFile")
        }
        (Mode::PodPerFile, Protocol::Lines) => (Rule::LinesCommand, "protocol: Lines", "set protocol: Exec"),
        (Mode::PodPerFile, Protocol::Exec) => return,
    };
    if command.is_empty() {
        let message = format!(
            "filter {} has no command, which {needed_by} needs because the operator does not know the image's entrypoint",
            quote(name)
        );
        let fix =
            format!("write the image's entrypoint, for example command: [\"/usr/bin/{name}\"], or {instead}");
        out.add(field, rule, message, fix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn limits(warm: Value) -> WarmLimits {
        let spec =
            json!({ "source": { "bucket": { "name": "bkt" } }, "filters": [], "mode": "Warm", "warm": warm });
        serde_json::from_value::<PipelineSpec>(spec).unwrap().warm_limits()
    }

    #[test]
    fn limits_that_are_left_out_are_the_defaults_of_the_api() {
        let defaults = WarmLimits::parse(&WarmOptions::default()).unwrap();
        assert_eq!(defaults, WarmLimits::default());
        assert_eq!(limits(Value::Null), defaults);
        assert_eq!(limits(json!({})), defaults);
        assert_eq!(limits(json!({ "maxFilesPerPod": 7 })), WarmLimits { max_files_per_pod: 7, ..defaults });
    }

    #[test]
    fn limits_are_read_in_the_units_in_which_they_are_written() {
        let own = limits(json!({ "maxPodAge": "1h30m", "prefetchBytes": "1.5Gi" }));
        assert_eq!((own.max_pod_age.as_secs(), own.prefetch_bytes), (5400, 3 << 29));
        assert_eq!(limits(json!({ "prefetchBytes": 2_097_152 })).prefetch_bytes, 2 << 20);
        assert_eq!(limits(json!({ "prefetchBytes": "100Ei" })).prefetch_bytes, u64::MAX);
    }

    /// Validation refuses them. If an object was stored without validation, such limits must neither stop the
    /// operator nor replace its pods endlessly.
    #[test]
    fn limits_that_cannot_be_used_are_the_defaults() {
        for warm in [
            json!({ "maxPodAge": "soon" }),
            json!({ "prefetchBytes": "1GB" }),
            json!({ "prefetchBytes": "-1" }),
            json!({ "maxFilesPerPod": -1 }),
            json!({ "maxFilesPerPod": 0 }),
            json!({ "maxPodAge": "0s" }),
        ] {
            assert_eq!(limits(warm.clone()), WarmLimits::default(), "{warm}");
        }
    }
}
