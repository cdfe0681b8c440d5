//! The reasons of failed attempts, in words for people.

use protocol::Exit;
use protocol::container::{CLAIMER, PUBLISHER, WORKER};
use queue::REASON_BYTES_MAX;

use super::{Cause, ended_from_outside};
use crate::pods::{Failed, WorkerPod, is_start_error};

/// One text that says who failed and how, with the end of its last output.
pub fn of(pod: &WorkerPod, failed: &Failed, cause: Cause) -> String {
    let Failed { container, exit_code, reason, message, .. } = failed;
    let (mut message, name) = (message.trim(), container.as_deref().unwrap_or("the pod"));
    let what = match (container.as_deref(), exit_code.and_then(Exit::from_code)) {
        (_, _) if cause == Cause::Pod && ended_from_outside(pod) => match &pod.doomed {
            Some(doomed) => {
                message = doomed.message.trim();
                doomed.reason.clone()
            }
            None => format!("PodDeleted: the pod was deleted while {name} ran"),
        },
        // Our own containers report the reason themselves. If killed, they leave no message, and this is the
        // end of their log.
        (Some(CLAIMER | PUBLISHER | WORKER), Some(exit)) if message.is_empty() => {
            return exit.as_ref().to_owned();
        }
        (Some(CLAIMER | PUBLISHER | WORKER), Some(_)) => return message.to_owned(),
        (Some(_), _) if reason == "OOMKilled" && failed.memory_limit => {
            format!("OOMKilled: {name} used more memory than its limit")
        }
        (Some(_), _) if reason == "OOMKilled" => {
            format!(
                "OOMKilled: {name}, which has no memory limit, was killed because its node ran out of memory"
            )
        }
        (Some(_), _) if is_start_error(Some(reason)) => format!("{reason}: {name} does not start"),
        (Some(_), _) if failed.of_shim() == Some(shim::UNUSABLE) => {
            format!("{}: {name} does not start", Exit::FilterUnusable.as_ref())
        }
        (Some(_), _) if cause == Cause::Pod => format!("{reason}: the node lost {name}"),
        (Some(_), _) => {
            format!("{name} exited with code {}", exit_code.map_or("?".to_owned(), |code| code.to_string()))
        }
        (None, _) => reason.clone(),
    };
    with_end_of(&what, message)
}

/// Both texts; of the second, as much of its end as fits, because the last output is the most informative.
pub(super) fn with_end_of(what: &str, message: &str) -> String {
    if message.is_empty() {
        return what.to_owned();
    }
    let room = REASON_BYTES_MAX.saturating_sub(what.len() + ": …".len());
    let start = message.ceil_char_boundary(message.len().saturating_sub(room));
    let cut = if start == 0 { "" } else { "…" };
    format!("{what}: {cut}{}", &message[start..])
}
