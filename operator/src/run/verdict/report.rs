//! Judges a file whose running worker reports that it failed, by the same rules as for a pod that ended.

use std::time::Instant;

use protocol::{FileState, FilterEnding, FilterFailure, State, Transfer, TransferFailure};
use queue::{Disruption, EntryId, Failure, Reported, Verdict};

use super::reason::with_end_of;
use super::{Cause, Judgement, Known, of_claimer, of_publisher, timed_out};
use crate::run::build::snapshot::Snapshot;
use crate::run::limits::Limits;

/// The inputs of a judgement besides the report.
pub struct Rules<'a> {
    /// The run's limits.
    pub limits: &'a Limits,
    /// The run's Pipeline.
    pub snapshot: &'a Snapshot,
    /// The operator's knowledge about the storage.
    pub known: Known,
    /// The current time.
    pub now: Instant,
}

/// The judgement about a file by its worker's report; `None` while the worker still processes it.
pub fn of_report(reported: &Reported, rules: &Rules<'_>) -> Option<Judgement> {
    let judged = |verdict, cause| judgement(reported, verdict, cause, rules.now);
    let Some(FileState { state, .. }) = FileState::parse(&reported.report) else {
        let failure =
            Failure::new("the worker's report cannot be read; the worker may be of another version", None);
        return Some(judged(Verdict::Disrupted(Disruption { failure, counts: true }), Cause::Worker));
    };
    match state {
        State::Started | State::Publishing => None,
        State::Succeeded => Some(judged(Verdict::Succeeded, Cause::Success)),
        State::Released => Some(judged(Verdict::Released, Cause::Unclaimed)),
        State::FilterFailed(failure) => {
            let (verdict, cause) = of_filter(&failure, rules);
            Some(judged(verdict, cause))
        }
        State::TransferFailed(failure) => Some(of_transfer(reported, &failure, rules)),
    }
}

fn judgement(reported: &Reported, verdict: Verdict, cause: Cause, at: Instant) -> Judgement {
    let entry: Option<EntryId> = Some(reported.entry.clone());
    Judgement {
        verdict,
        cause,
        at,
        entry,
        tried: cause != Cause::Unclaimed,
        started: 0,
        canary: None,
        of_whole_pod: false,
    }
}

fn of_filter(failed: &FilterFailure, rules: &Rules<'_>) -> (Verdict, Cause) {
    let FilterFailure { filter, ending, oom_killed, after_term, text } = failed;
    let exit_code = match ending {
        FilterEnding::Exited(code) => Some(*code),
        FilterEnding::Signaled(signal) => Some(128 + signal),
        FilterEnding::TimedOut | FilterEnding::Refused { .. } | FilterEnding::BadAnswer => None,
    };
    let disrupted = |what: &str| {
        let failure = Failure::new(&with_end_of(what, text.trim()), exit_code);
        (Verdict::Disrupted(Disruption { failure, counts: true }), Cause::Pod)
    };
    // When a pod is removed, Kubernetes ends all of its processes.
    if *after_term {
        return disrupted(&format!("PodDeleted: the pod was being terminated while {filter} ran"));
    }
    let limited = rules.snapshot.has_memory_limit(filter);
    let what = match ending {
        FilterEnding::Exited(_) | FilterEnding::Signaled(_) if *oom_killed && !limited => {
            return disrupted(&format!(
                "OOMKilled: {filter}, which has no memory limit, was killed because its node ran out of memory"
            ));
        }
        FilterEnding::Exited(_) | FilterEnding::Signaled(_) if *oom_killed => {
            format!("OOMKilled: {filter} used more memory than its limit")
        }
        FilterEnding::Exited(code) => format!("{filter} exited with code {code}"),
        FilterEnding::Signaled(signal) => format!("{filter} was terminated by signal {signal}"),
        FilterEnding::TimedOut => {
            timed_out(rules.limits.file_timeout.unwrap_or_default()).reason().to_owned()
        }
        FilterEnding::Refused { .. } => format!("{filter} refused the file"),
        FilterEnding::BadAnswer => format!("{filter} gave no valid answer"),
    };
    let failure = Failure::new(&with_end_of(&what, text.trim()), exit_code);
    let is_final = *ending == FilterEnding::Refused { retry: false }
        || exit_code.is_some_and(|code| rules.limits.non_retryable.contains(&code));
    if is_final {
        (Verdict::Rejected(failure), Cause::Input)
    } else {
        (Verdict::Failed(failure), Cause::File)
    }
}

fn of_transfer(reported: &Reported, failed: &TransferFailure, rules: &Rules<'_>) -> Judgement {
    let TransferFailure { transfer, exit, canary, took, text } = failed;
    let (cause, last) = match transfer {
        Transfer::Fetch => (of_claimer(*exit), rules.known.last_fetch),
        Transfer::Publish => (of_publisher(*exit), rules.known.last_publish),
    };
    let failure = Failure::new(&format!("{}: {text}", exit.as_ref()), Some(exit.code()));
    let verdict = match cause {
        Cause::Success => Verdict::Succeeded,
        Cause::Unclaimed => Verdict::Released,
        Cause::File => Verdict::Failed(failure),
        Cause::Input => Verdict::Rejected(failure),
        Cause::Pod | Cause::Worker => Verdict::Disrupted(Disruption { failure, counts: true }),
        Cause::Dependency(dependency) => {
            let succeeded_meanwhile =
                || last.zip(rules.now.checked_sub(*took)).is_some_and(|(last, began)| last > began);
            let is_up = canary.unwrap_or_else(succeeded_meanwhile);
            let counts = dependency.operation().is_none() || is_up;
            let verdict = Verdict::Disrupted(Disruption { failure, counts });
            return Judgement { canary: *canary, ..judgement(reported, verdict, cause, rules.now) };
        }
    };
    judgement(reported, verdict, cause, rules.now)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::run::dependency::Dependency;
    use crate::run::limits::RunSettings;
    use serde_json::json;
    use std::time::Duration;

    fn judge_with(report: &str, known: impl Fn(Instant) -> Known) -> Option<Judgement> {
        let execution = json!({"nonRetryableExitCodes": [3], "fileTimeout": "1m"});
        let limits =
            Limits::parse(&serde_json::from_value(execution).unwrap(), RunSettings::for_tests()).unwrap();
        let spec = json!({"source": {"bucket": {"name": "b"}}, "filters": [{"name": "free", "image": "i"},
            {"name": "limited", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}]});
        let spec = serde_json::from_value(spec).unwrap();
        let snapshot = Snapshot { namespace: "n".into(), name: "p".into(), spec };
        let now = Instant::now();
        let rules = Rules { limits: &limits, snapshot: &snapshot, known: known(now), now };
        let reported = Reported { entry: "1-0".to_owned().into(), report: report.to_owned() };
        of_report(&reported, &rules)
    }

    fn judge(report: &str) -> Judgement {
        judge_with(report, |_| Known::default()).unwrap()
    }

    fn reason(judgement: &Judgement) -> &str {
        judgement.failure().unwrap().reason()
    }

    fn counts(judgement: &Judgement) -> bool {
        matches!(&judgement.verdict, Verdict::Disrupted(Disruption { counts: true, .. }))
    }

    #[test]
    fn a_filter_that_fails_charges_its_file_unless_the_pod_was_being_ended() {
        let failed = judge("pod filter free exit:1 oom=0 term=0 no such picture");
        assert_eq!(failed.cause, Cause::File);
        assert_eq!(reason(&failed), "free exited with code 1: no such picture");
        assert_eq!(judge("pod filter free signal:11 oom=0 term=0 ").cause, Cause::File);
        let late = judge("pod filter free timeout oom=0 term=0 ");
        assert_eq!(
            (late.cause, reason(&late)),
            (Cause::File, "FileTimeout: the attempt took longer than 60s")
        );
        assert_eq!(judge("pod filter free garbage oom=0 term=0 ").cause, Cause::File);
        for ended in ["exit:1", "signal:15", "refused:final"] {
            let disrupted = judge(&format!("pod filter free {ended} oom=0 term=1 "));
            assert!(disrupted.cause == Cause::Pod && counts(&disrupted), "{ended}");
        }
    }

    #[test]
    fn bad_input_is_not_tried_again() {
        for report in ["pod filter free exit:3 oom=0 term=0 ", "pod filter free refused:final oom=0 term=0 "]
        {
            assert!(matches!(judge(report).verdict, Verdict::Rejected(_)), "{report}");
        }
        let again = judge("pod filter free refused:retry oom=0 term=0 busy");
        assert!(matches!(again.verdict, Verdict::Failed(_)));
        assert_eq!(reason(&again), "free refused the file: busy");
    }

    #[test]
    fn memory_is_a_files_fault_only_where_it_is_limited() {
        let limited = judge("pod filter limited signal:9 oom=1 term=0 ");
        assert_eq!(limited.cause, Cause::File);
        assert_eq!(reason(&limited), "OOMKilled: limited used more memory than its limit");
        let free = judge("pod filter free signal:9 oom=1 term=0 ");
        assert!(free.cause == Cause::Pod && counts(&free));
    }

    #[test]
    fn a_storage_that_fails_charges_nobody_unless_another_object_can_be_had() {
        let down = judge("pod fetch StorageUnreachable+down 50 s3://b/k");
        assert_eq!(down.cause, Cause::Dependency(Dependency::Source));
        assert!(!counts(&down) && counts(&judge("pod fetch StorageUnreachable+up 50 s3://b/k")));
        assert!(!counts(&judge("pod fetch NoAccess 50 s3://b/k")), "nothing shows that the file is at fault");
        let meanwhile = |now: Instant| Known {
            last_fetch: now.checked_sub(Duration::from_millis(10)),
            ..Known::default()
        };
        assert!(counts(&judge_with("pod fetch NoAccess 50 s3://b/k", meanwhile).unwrap()));
        assert!(counts(&judge("pod publish NoAccess+up 50 s3://b/k")), "the sink takes others");
        assert!(!counts(&judge("pod publish NoAccess+down 50 s3://b/k")));
        assert!(!counts(&judge("pod publish NoAccess 50 s3://b/k")), "it may be full");
        assert_eq!(judge("pod fetch ObjectGone 50 s3://b/k").cause, Cause::File);
        assert_eq!(judge("pod publish NothingToPublish 50 x").cause, Cause::File);
        assert_eq!(judge("pod fetch DiskFull 50 x").cause, Cause::Dependency(Dependency::Workspace));
    }

    #[test]
    fn what_was_not_tried_goes_back_and_what_cannot_be_read_is_no_files_fault() {
        assert_eq!(judge("pod released").verdict, Verdict::Released);
        assert_eq!(judge("pod succeeded").verdict, Verdict::Succeeded);
        for under_way in ["pod started", "pod started publishing"] {
            assert!(judge_with(under_way, |_| Known::default()).is_none(), "{under_way}");
        }
        let other = judge("pod something else");
        assert!(other.cause == Cause::Worker && counts(&other));
    }
}
