//! Logs the fates of files, each in one line with the message `settled`: at info for decisions that people
//! search for (a retry, a dead letter, a disruption, a reclaimed file), as long as they are few, and at debug
//! for all others.

use kube::ResourceExt;
use queue::{Failure, Fate};

use super::pass::Pass;
use crate::metrics::FileOutcome;

impl Pass<'_> {
    /// Logs the fate of a file, with the outcome that it is counted as; returns whether it was logged at
    /// info.
    pub fn log_decision(
        &mut self,
        outcome: Option<FileOutcome>,
        fate: &Fate,
        failure: Option<&Failure>,
        pod: Option<&str>,
    ) -> bool {
        let (run, namespace) = (self.run.name_any(), self.run.namespace());
        let admitted = outcome
            .filter(|outcome| is_decision(*outcome))
            .and_then(|outcome| self.memory.decisions.admit(outcome, self.now).zip(Some(outcome)));
        let Some((suppressed, outcome)) = admitted else {
            tracing::debug!(run, namespace, pod, ?fate, "settled");
            return false;
        };
        let Details { file, attempts, disruptions, retry_in_ms } = details(fate);
        let reason = failure.map(Failure::reason);
        let exit_code = failure.and_then(Failure::exit_code);
        tracing::info!(
            run,
            namespace,
            pod,
            ?outcome,
            file,
            attempts,
            disruptions,
            retry_in_ms,
            reason,
            exit_code,
            suppressed,
            "settled"
        );
        true
    }
}

/// The parts of a fate that become log fields.
#[derive(Debug, Default, PartialEq, Eq)]
struct Details<'a> {
    file: Option<&'a str>,
    attempts: Option<u32>,
    disruptions: Option<u32>,
    retry_in_ms: Option<u64>,
}

fn details(fate: &Fate) -> Details<'_> {
    match fate {
        Fate::Retrying { file, attempts, delay } => Details {
            file: Some(file),
            attempts: Some(*attempts),
            disruptions: None,
            retry_in_ms: u64::try_from(delay.as_millis()).ok(),
        },
        Fate::Disrupted { file, disruptions } => {
            Details { file: Some(file), disruptions: Some(*disruptions), ..Details::default() }
        }
        Fate::DeadLettered { file, attempts } => {
            Details { file: Some(file), attempts: Some(*attempts), ..Details::default() }
        }
        Fate::Succeeded | Fate::Released | Fate::Ignored => Details::default(),
    }
}

/// Whether people search a log for this outcome.
fn is_decision(outcome: FileOutcome) -> bool {
    match outcome {
        FileOutcome::Retried | FileOutcome::Failed | FileOutcome::Disrupted | FileOutcome::Reclaimed => true,
        FileOutcome::Succeeded | FileOutcome::Released => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_line_says_which_file_and_how_often_it_was_tried() {
        let file = "in/a.mp4".to_owned();
        let retrying = Fate::Retrying { file: file.clone(), attempts: 2, delay: Duration::from_secs(3) };
        let wanted = Details {
            file: Some("in/a.mp4"),
            attempts: Some(2),
            disruptions: None,
            retry_in_ms: Some(3_000),
        };
        assert_eq!(details(&retrying), wanted);
        let disrupted = details(&Fate::Disrupted { file, disruptions: 4 }).disruptions;
        assert_eq!(disrupted, Some(4));
    }

    #[test]
    fn files_that_went_well_are_only_logged_at_debug() {
        let at_info: Vec<FileOutcome> =
            FileOutcome::ALL.into_iter().filter(|outcome| is_decision(*outcome)).collect();
        assert_eq!(
            at_info,
            [FileOutcome::Retried, FileOutcome::Failed, FileOutcome::Reclaimed, FileOutcome::Disrupted]
        );
    }
}
