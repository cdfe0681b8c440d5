//! Names of a run's objects, derived from the run alone, so that every pass finds the same objects again.

use protocol::names::{LABEL_VALUE_MAX, shorten};

/// The field manager of everything that this operator applies, and the `managedBy` of its Jobs.
pub const MANAGER: &str = "filter.plainsight.ai/operator";
/// Keeps a PipelineRun until its data in Valkey and its objects in Kubernetes are removed.
pub const FINALIZER: &str = "filter.plainsight.ai/cleanup";
/// Label of Job and pods: the runId, shortened when it is long.
pub const RUN_LABEL: &str = "filter.plainsight.ai/run";
/// Label of Job and pods: the name of the PipelineRun, shortened when it is long.
pub const RUN_NAME_LABEL: &str = "filter.plainsight.ai/pipelinerun";
/// Label of Job and pods: the UID of the PipelineRun, which distinguishes the run from an earlier one of the
/// same name.
pub const RUN_UID_LABEL: &str = "filter.plainsight.ai/run-uid";
/// Annotation of the run's Secret: the epoch of its queue. A different epoch in Valkey means that data was
/// lost.
pub const EPOCH_ANNOTATION: &str = "filter.plainsight.ai/queue-epoch";
/// Annotation of pods: the names of our own containers, separated by commas. Other containers were added, for
/// example, by a mesh.
pub const CONTAINERS_ANNOTATION: &str = "filter.plainsight.ai/containers";
/// The path at which filters find our shim, if it is the command of their containers.
pub const SHIM: &str = "/.openfilter/bin/shim";

/// Random characters that distinguish the pods of a run. Names must never be reused, because a pod's name is
/// also its name as a consumer. With 36^9 possible suffixes, a million pods have one chance in 200 of a
/// collision, which the API server then refuses.
const SUFFIX: usize = 9;
const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// The name of a run's Job. Job names are also label values.
pub fn job(run: &str) -> String {
    child(run, "job", LABEL_VALUE_MAX)
}

/// The name of the snapshot: the Pipeline as it was when the run started.
pub fn snapshot(run: &str) -> String {
    child(run, "pipeline", NAME_MAX)
}

/// The name of the Secret with the Valkey user of the run's workers.
pub fn queue_secret(run: &str) -> String {
    child(run, "queue", NAME_MAX)
}

/// The name of the copy of a credentials Secret from another namespace.
pub fn credentials_copy(run: &str, role: &str) -> String {
    child(run, role, NAME_MAX)
}

/// A new name for a pod. Dots are replaced, because a pod's name becomes its host name.
pub fn pod(run: &str) -> Result<String, getrandom::Error> {
    let mut random = [0_u8; SUFFIX];
    getrandom::fill(&mut random)?;
    let suffix: String =
        random.iter().map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()])).collect();
    Ok(format!("{}-{suffix}", shorten(&run.replace('.', "-"), LABEL_VALUE_MAX - SUFFIX - 1)))
}

/// The longest name of an object.
const NAME_MAX: usize = 253;

/// The name is shortened before the suffix is added, so that the object's role stays readable and two runs
/// still never share a name.
fn child(run: &str, suffix: &str, max: usize) -> String {
    format!("{}-{suffix}", shorten(run, max - suffix.len() - 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Kubernetes accepts names of 253 bytes and label values of 63.
    #[test]
    fn the_longest_run_name_gives_names_within_their_limits() {
        let (one, two) = ("a.".repeat(126) + "b", "a.".repeat(126) + "c");
        assert_eq!(one.len(), 253);
        for name in [&one, &two] {
            assert!(job(name).len() <= 63 && job(name).ends_with("-job"));
            assert!(pod(name).unwrap().len() <= 63 && !pod(name).unwrap().contains('.'));
            assert!(snapshot(name).len() <= 253 && queue_secret(name).len() <= 253);
        }
        assert_ne!(job(&one), job(&two));
        assert_ne!(snapshot(&one), snapshot(&two));
    }

    #[test]
    fn a_short_name_is_kept_and_pods_differ() {
        assert_eq!(job("nightly"), "nightly-job");
        assert_ne!(pod("nightly").unwrap(), pod("nightly").unwrap());
        assert!(pod("nightly").unwrap().starts_with("nightly-"));
    }
}
