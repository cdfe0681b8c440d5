//! How an attempt ended, judged by its pod. Pure.

use protocol::Exit;
use protocol::container::{CLAIMER, PUBLISHER};
use queue::{Failure, REASON_BYTES_MAX, Verdict};

use crate::pods::{Failed, Stage, Stuck, WorkerPod};

/// The verdict about the file of a pod that has ended; `None` while it has not.
pub fn of(pod: &WorkerPod, non_retryable: &[i32]) -> Option<Verdict> {
    match &pod.stage {
        Stage::Succeeded => Some(Verdict::Succeeded),
        // What a filter says when it is told to stop is no word about its input.
        Stage::Failed(failed) if pod.deleting.is_some_and(|going| going.since <= pod.since) => {
            Some(of_failure(failed, &[]))
        }
        Stage::Failed(failed) => Some(of_failure(failed, non_retryable)),
        Stage::Unschedulable(_) | Stage::Starting | Stage::Claiming | Stage::Stuck(_) | Stage::Working => {
            None
        }
    }
}

fn of_failure(failed: &Failed, non_retryable: &[i32]) -> Verdict {
    let failure = Failure::new(&reason(failed), failed.exit_code);
    // Only a filter knows whether its input is bad; our own exit codes mean other things.
    let by_a_filter = failed.container.as_deref().is_some_and(|name| name != CLAIMER && name != PUBLISHER);
    match failed.exit_code {
        Some(code) if by_a_filter && non_retryable.contains(&code) => Verdict::Rejected(failure),
        _ => Verdict::Failed(failure),
    }
}

/// Whether the claimer or publisher ended by itself with this code, and so has said why.
fn says_why(exit_code: i32) -> bool {
    Exit::from_code(exit_code).is_some()
}

/// One text that says who failed, how, and what was said last.
fn reason(failed: &Failed) -> String {
    let Failed { container, exit_code, reason, message } = failed;
    let message = message.trim();
    let what = match (container.as_deref(), exit_code) {
        // The claimer's own message begins with the class of the failure. Killed, it has left none: then this is its log.
        (Some(CLAIMER | PUBLISHER), Some(code)) if says_why(*code) && !message.is_empty() => {
            return message.to_owned();
        }
        (Some(name), Some(_)) if reason == "OOMKilled" => {
            format!("OOMKilled: {name} used more memory than its limit")
        }
        (Some(name), Some(code)) => format!("{name} exited with code {code}"),
        (_, _) => reason.clone(),
    };
    if message.is_empty() {
        return what;
    }
    // What was said last says most.
    let room = REASON_BYTES_MAX.saturating_sub(what.len() + ": …".len());
    let start = message.ceil_char_boundary(message.len().saturating_sub(room));
    let cut = if start == 0 { "" } else { "…" };
    format!("{what}: {cut}{}", &message[start..])
}

/// The failure of a file whose pod is gone.
pub fn vanished(pod: &str) -> Failure {
    Failure::new(&format!("PodGone: the pod {pod} was deleted or its node was lost before it ended"), None)
}

/// The failure of a file whose container never started.
pub fn not_started(stuck: &Stuck) -> Failure {
    let Stuck { container, image, reason, message } = stuck;
    Failure::new(&format!("{reason}: {container} does not start with image {image}: {message}"), None)
}

/// The failure of a file that took too long.
pub fn timed_out(limit: std::time::Duration) -> Failure {
    Failure::new(&format!("FileTimeout: the attempt took longer than {limit:?}"), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    const SECOND: Duration = Duration::from_secs(1);

    fn failed(container: Option<&str>, exit_code: Option<i32>, reason: &str, message: &str) -> WorkerPod {
        let failed = Failed {
            container: container.map(str::to_owned),
            exit_code,
            reason: reason.to_owned(),
            message: message.to_owned(),
        };
        WorkerPod::in_stage("p", Stage::Failed(failed), Instant::now())
    }

    fn reason_of(pod: &WorkerPod) -> String {
        match of(pod, &[]) {
            Some(Verdict::Failed(failure) | Verdict::Rejected(failure)) => failure.reason().to_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_filter_can_say_that_its_input_is_bad_and_the_claimer_cannot() {
        let by = |container| of(&failed(Some(container), Some(15), "Error", ""), &[15]);
        assert!(matches!(by("resize"), Some(Verdict::Rejected(_))));
        assert!(matches!(by(CLAIMER), Some(Verdict::Failed(_))));
        assert!(matches!(by(PUBLISHER), Some(Verdict::Failed(_))));
        assert!(matches!(of(&failed(Some("resize"), Some(3), "Error", ""), &[15]), Some(Verdict::Failed(_))));
    }

    /// A node that is drained ends its pods.
    #[test]
    fn a_filter_that_is_told_to_stop_says_nothing_about_its_input() {
        let mut pod = failed(Some("resize"), Some(15), "Error", "");
        pod.deleting = Some(crate::pods::Deleting { since: pod.since, grace: SECOND });
        assert!(matches!(of(&pod, &[15]), Some(Verdict::Failed(_))));
        pod.deleting = pod.deleting.map(|going| crate::pods::Deleting { since: pod.since + SECOND, ..going });
        assert!(matches!(of(&pod, &[15]), Some(Verdict::Rejected(_))), "it had ended before");
    }

    #[test]
    fn the_reason_names_who_failed_and_keeps_what_was_said_last() {
        assert_eq!(
            reason_of(&failed(Some("resize"), Some(3), "Error", "a\nno such format\n")),
            "resize exited with code 3: a\nno such format"
        );
        let long =
            reason_of(&failed(Some("resize"), Some(3), "Error", &format!("{} the end", "ä".repeat(900))));
        assert!(long.starts_with("resize exited with code 3: …") && long.ends_with("the end"), "{long}");
        assert!(long.len() <= REASON_BYTES_MAX);
    }

    #[test]
    fn the_codes_of_the_claimer_are_those_that_are_documented() {
        let rows =
            include_str!("../../../docs/claimer.md").lines().filter_map(|line| line.strip_prefix("| "));
        let codes: Vec<i32> = rows.filter_map(|row| row.split(' ').next()?.parse().ok()).collect();
        assert!(codes.len() > 10, "{codes:?}");
        let said: Vec<i32> = (1..256).filter(|code| says_why(*code)).collect();
        assert_eq!(codes.into_iter().filter(|code| *code != 0).collect::<Vec<_>>(), said);
    }

    #[test]
    fn the_reason_of_an_oom_kill_and_of_an_eviction_is_kubernetes_own_word() {
        assert!(
            reason_of(&failed(Some("resize"), Some(137), "OOMKilled", "")).starts_with("OOMKilled: resize")
        );
        assert_eq!(reason_of(&failed(None, None, "Evicted", "low on disk")), "Evicted: low on disk");
        assert_eq!(
            reason_of(&failed(Some(CLAIMER), Some(15), "Error", "ObjectGone: 404")),
            "ObjectGone: 404"
        );
        let killed = failed(Some(CLAIMER), Some(137), "OOMKilled", "claimed s3://bkt/a (attempt 1)");
        assert!(reason_of(&killed).starts_with("OOMKilled: claimer"), "{}", reason_of(&killed));
    }
}
