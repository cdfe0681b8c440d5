//! Judges by its pod how an attempt ended and who is to blame. Pure. A file is charged an attempt only when
//! its own processing failed; anything else is a disruption, and the file goes back to the queue without a
//! charge.

mod reason;
mod report;

pub use report::{Rules, of_report};

use std::time::{Duration, Instant};

use protocol::container::{CLAIMER, PUBLISHER, WORKER};
use protocol::{Exit, Report};
use queue::{Disruption, EntryId, Failure, Verdict};

use super::dependency::{Dependency, Operation};
use crate::pods::{ENDED_BY_KUBELET, Failed, Milestone, Stage, Stuck, WorkerPod, is_start_error};

/// Knowledge about the storage from outside the pod that is judged: when operations last succeeded, by our
/// own clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The last fetch.
    pub last_fetch: Option<Instant>,
    /// The last publication.
    pub last_publish: Option<Instant>,
}

/// The current time: by our own clock, and as Unix time, which the nodes use.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// By our own clock.
    pub instant: Instant,
    /// Milliseconds since 1970.
    pub unix_ms: u64,
}

/// Why an attempt ended as it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Every container succeeded.
    Success,
    /// Processing the file failed.
    File,
    /// A filter reported that its input is bad.
    Input,
    /// A dependency of the run failed.
    Dependency(Dependency),
    /// The pod or its node was removed: eviction, drain, preemption, deletion, a lost node.
    Pod,
    /// Our own claimer or publisher died, or so did a container that another program added.
    Worker,
    /// No file was tried.
    Unclaimed,
}

/// How far a pod that processes many files had got with one of them, according to its last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Filters were working on it.
    Filtering,
    /// All filters had succeeded, and its results were being published.
    Publishing,
}

/// A judgement about the file of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The fate of the file.
    pub verdict: Verdict,
    /// The cause of the end.
    pub cause: Cause,
    /// When the attempt ended, by our own clock.
    pub at: Instant,
    /// The entry that the pod processed, if it reported one; otherwise its first one.
    pub entry: Option<EntryId>,
    /// Whether the pod may have tried its file. If not, the file goes back unchanged, no matter what ended
    /// the pod.
    pub tried: bool,
    /// How many of its containers the pod had started.
    pub started: usize,
    /// What a storage failure showed about the storage: whether another object could be reached at the same
    /// time.
    pub canary: Option<bool>,
    /// Whether the pod failed as a whole, so that any file that it had begun may be to blame.
    pub of_whole_pod: bool,
}

impl Judgement {
    /// The dependency that failed, if one did.
    pub fn dependency(&self) -> Option<Dependency> {
        match self.cause {
            Cause::Dependency(dependency) => Some(dependency),
            Cause::Success | Cause::File | Cause::Input | Cause::Pod | Cause::Worker | Cause::Unclaimed => {
                None
            }
        }
    }

    /// Why the attempt failed, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        match &self.verdict {
            Verdict::Failed(failure)
            | Verdict::Rejected(failure)
            | Verdict::Disrupted(Disruption { failure, .. }) => Some(failure),
            Verdict::Succeeded | Verdict::Released => None,
        }
    }
}

/// The judgement about a pod that has ended; `None` if it has not.
pub fn of(pod: &WorkerPod, non_retryable: &[i32], known: &Known) -> Option<Judgement> {
    match &pod.stage {
        Stage::Succeeded => Some(judgement(pod, Verdict::Succeeded, Cause::Success)),
        Stage::Failed(failed) => Some(of_failed(pod, failed, non_retryable, known)),
        Stage::Unschedulable(_) | Stage::Starting | Stage::Claiming | Stage::Stuck(_) | Stage::Working => {
            None
        }
    }
}

/// The judgement about a pod with a container that has not started for too long.
pub fn of_stuck(pod: &WorkerPod, stuck: &Stuck) -> Judgement {
    let Stuck { container, image, reason, message } = stuck;
    let text = format!("{reason}: container {container} (image {image}) does not start: {message}");
    let missing = if stuck.has_image() { Dependency::Container } else { Dependency::Image };
    disruption(pod, Cause::Dependency(missing), Failure::new(&text, None), true)
}

/// The judgement about a pod that disappeared, or whose node did, before it ended.
pub fn of_vanished(pod: &WorkerPod) -> Judgement {
    disruption(pod, Cause::Pod, vanished(&pod.name), true)
}

/// The judgement about a pod whose node has not prepared it for too long. Unless the node restarted, the pod
/// has claimed nothing.
pub fn of_unprepared(pod: &WorkerPod) -> Judgement {
    let node = pod.node.as_deref().unwrap_or("its node");
    let text = format!(
        "NodeNotStarting: {node} did not set up the sandbox, network or volumes of the pod {}",
        pod.name
    );
    disruption(pod, Cause::Pod, Failure::new(&text, None), true)
}

/// The judgement about a pod whose filters took too long.
pub fn of_timeout(pod: &WorkerPod, limit: Duration) -> Judgement {
    judgement(pod, Verdict::Failed(timed_out(limit)), Cause::File)
}

/// The verdict on a file held by an ended pod that processed many files: a failed filter charges only the
/// file that it worked on. `others` is how many more of the pod's files were begun.
pub fn of_held(begun: Option<Begun>, others: usize, pod: &str, judgement: &Judgement) -> Verdict {
    match (begun, &judgement.verdict) {
        (None, _) => Verdict::Released,
        // A worker that ends successfully has reported every file: its report on this one was lost.
        (Some(_), Verdict::Succeeded) => of_silence(pod),
        // Any of the files may have filled the pod's storage: the one that did so disrupts one pod after
        // another, and is charged in the end.
        (Some(_), Verdict::Failed(failure)) if judgement.of_whole_pod && others > 0 => {
            Verdict::Disrupted(Disruption { failure: failure.clone(), counts: true })
        }
        // The filters had moved on to another file. This one lost its publisher, which is ours.
        (Some(Begun::Publishing), Verdict::Failed(_) | Verdict::Rejected(_)) if !judgement.of_whole_pod => {
            let text = format!("PublishInterrupted: the pod {pod} ended while it published the results");
            Verdict::Disrupted(Disruption { failure: Failure::new(&text, None), counts: true })
        }
        (Some(_), verdict) => verdict.clone(),
    }
}

/// The verdict on a file whose worker ended successfully without reporting the file's end.
fn of_silence(pod: &str) -> Verdict {
    let failure =
        Failure::new(&format!("WorkerSilent: the pod {pod} ended without reporting an outcome"), None);
    Verdict::Disrupted(Disruption { failure, counts: true })
}

/// The failure of a file whose pod is gone.
pub fn vanished(pod: &str) -> Failure {
    Failure::new(&format!("PodGone: the pod {pod} was deleted or its node was lost before it ended"), None)
}

/// The failure of a file that took too long.
fn timed_out(limit: Duration) -> Failure {
    Failure::new(&format!("FileTimeout: the attempt took longer than {limit:?}"), None)
}

/// How long the filters have worked on a file that the pod has held for the given time. Excludes the start of
/// the pod and waiting for storage: the claimer's time to fetch the file, and its publisher's time so far.
pub fn processing_time(pod: &WorkerPod, held_for: Duration, now: Moment) -> Duration {
    let Some(fetched) = pod.fetched else { return Duration::ZERO };
    let since_fetched = if fetched.witnessed {
        now.instant.saturating_duration_since(fetched.at)
    } else {
        // The file was fetched before this operator started, by the clock of its node. That clock may be
        // wrong, but the fetch came after the pod was given the file, and before we first saw the pod.
        let (ended_ms, fetching) =
            pod.claimer.as_ref().map_or_else(Default::default, |report| (report.ended_ms, took(report)));
        let by_its_node = Duration::from_millis(now.unix_ms.saturating_sub(ended_ms));
        let at_least = now.instant.saturating_duration_since(fetched.at);
        by_its_node.min(held_for.saturating_sub(fetching)).max(at_least)
    };
    let publishing =
        pod.publishing.map_or(Duration::ZERO, |started| now.instant.saturating_duration_since(started.at));
    since_fetched.saturating_sub(publishing)
}

fn took(report: &Report) -> Duration {
    Duration::from_millis(report.ended_ms.saturating_sub(report.started_ms))
}

fn judgement(pod: &WorkerPod, verdict: Verdict, cause: Cause) -> Judgement {
    let entry = pod.claimer.as_ref().and_then(|report| report.entry.clone());
    let started = pod.started.map_or(0, |started| started.containers);
    Judgement {
        verdict,
        cause,
        at: pod.since,
        entry: entry.map(EntryId::from),
        tried: pod.may_have_claimed(),
        started,
        canary: None,
        of_whole_pod: matches!(&pod.stage, Stage::Failed(failed) if failed.container.is_none()),
    }
}

fn disruption(pod: &WorkerPod, cause: Cause, failure: Failure, counts: bool) -> Judgement {
    judgement(pod, Verdict::Disrupted(Disruption { failure, counts }), cause)
}

fn of_failed(pod: &WorkerPod, failed: &Failed, non_retryable: &[i32], known: &Known) -> Judgement {
    let cause = cause(pod, failed, non_retryable);
    let failure = Failure::new(&reason::of(pod, failed, cause), failed.exit_code);
    match cause {
        Cause::Success => judgement(pod, Verdict::Succeeded, cause),
        Cause::File => judgement(pod, Verdict::Failed(failure), cause),
        Cause::Input => judgement(pod, Verdict::Rejected(failure), cause),
        Cause::Unclaimed => judgement(pod, Verdict::Released, cause),
        Cause::Pod | Cause::Worker => disruption(pod, cause, failure, true),
        Cause::Dependency(dependency) => {
            let canary = dependency.operation().and_then(|operation| canary(pod, failed, operation));
            let is_up = |operation| match canary {
                Some(reached) => reached,
                None => succeeded_meanwhile(pod, operation, known),
            };
            let counts = dependency.operation().is_none_or(is_up);
            Judgement { canary, ..disruption(pod, cause, failure, counts) }
        }
    }
}

/// Who is to blame. The order matters: an end that came from outside shows nothing about the container that
/// it ended.
fn cause(pod: &WorkerPod, failed: &Failed, non_retryable: &[i32]) -> Cause {
    let Failed { container, added, exit_code, reason, memory_limit, .. } = failed;
    if ended_from_outside(pod) {
        return Cause::Pod;
    }
    let Some(container) = container.as_deref() else {
        // The kubelet evicts without announcement only a pod that exceeded its own storage limit.
        return if reason == "Evicted" { Cause::File } else { Cause::Pod };
    };
    match reason.as_str() {
        // The node restarted or the container was lost; the codes 255 and 137 are invented.
        "Unknown" | "ContainerStatusUnknown" => return Cause::Pod,
        reason if is_start_error(Some(reason)) => return Cause::Dependency(Dependency::Container),
        _ if *added => return Cause::Worker,
        _ => {}
    }
    let exit = exit_code.and_then(Exit::from_code);
    match container {
        WORKER if pod.is_warm => exit.map_or(Cause::Worker, of_worker),
        CLAIMER => exit.map_or(Cause::Worker, of_claimer),
        PUBLISHER => exit.map_or(Cause::Worker, of_publisher),
        // Without a limit of its own, the filter was killed because others used too much.
        _ if reason == "OOMKilled" && !memory_limit => Cause::Pod,
        _ => match failed.of_shim() {
            Some(shim::UNUSABLE) => Cause::Dependency(Dependency::Container),
            // The filter answered that another attempt is pointless.
            Some(_) => Cause::Input,
            None if exit_code.is_some_and(|code| non_retryable.contains(&code)) => Cause::Input,
            None => Cause::File,
        },
    }
}

/// Whether the pod was being deleted, or Kubernetes was about to end it, when it failed. A kubelet announces
/// nothing: it says that it has ended the pod after it has done so.
fn ended_from_outside(pod: &WorkerPod) -> bool {
    let deleted = pod.deleting.map(|deleting| deleting.since);
    let doomed = pod.doomed.as_ref().map(|doomed| doomed.since);
    [deleted, doomed].into_iter().flatten().any(|since| since <= pod.since)
        || pod.doomed.as_ref().is_some_and(|doomed| doomed.reason == ENDED_BY_KUBELET)
}

fn of_claimer(exit: Exit) -> Cause {
    match exit {
        // No file was available, or the pod was handed one without noticing.
        Exit::QueueUnreachable | Exit::QueueDenied => Cause::Unclaimed,
        Exit::NoAccess => Cause::Dependency(Dependency::SourceCredentials),
        Exit::StorageUnreachable => Cause::Dependency(Dependency::Source),
        Exit::DiskFull => Cause::Dependency(Dependency::Workspace),
        Exit::ObjectGone | Exit::ObjectChanged | Exit::ObjectTruncated | Exit::StorageRefused => Cause::File,
        // The workspace is new, so local failures are the node's. Settings and queue are ours.
        Exit::LocalIo | Exit::BadSettings | Exit::QueueBroken => Cause::Worker,
        // These come only from the publisher, or from a pod that processes many files.
        Exit::PublishIncomplete | Exit::NothingToPublish | Exit::FilterUnusable | Exit::FilterLost => {
            Cause::Worker
        }
        Exit::Terminated => Cause::Pod,
    }
}

fn of_worker(exit: Exit) -> Cause {
    match exit {
        Exit::FilterUnusable => Cause::Dependency(Dependency::Container),
        // A worker reports a failed transfer for a single file, and continues.
        other => of_claimer(other),
    }
}

fn of_publisher(exit: Exit) -> Cause {
    match exit {
        Exit::NoAccess => Cause::Dependency(Dependency::SinkCredentials),
        // Results are only ever written, so nothing that is missing is a file's fault.
        Exit::StorageUnreachable | Exit::ObjectGone => Cause::Dependency(Dependency::Sink),
        Exit::DiskFull => Cause::Dependency(Dependency::Workspace),
        // The filters wrote the contents of the workspace, so unreadable results are their fault.
        Exit::LocalIo | Exit::PublishIncomplete | Exit::NothingToPublish => Cause::File,
        Exit::ObjectChanged | Exit::ObjectTruncated | Exit::StorageRefused => Cause::File,
        Exit::BadSettings => Cause::Worker,
        // These come only from the claimer, or from a pod that processes many files.
        Exit::QueueUnreachable | Exit::QueueDenied | Exit::QueueBroken => Cause::Worker,
        Exit::FilterUnusable | Exit::FilterLost => Cause::Worker,
        Exit::Terminated => Cause::Pod,
    }
}

fn report_of(pod: &WorkerPod, operation: Operation) -> Option<&Report> {
    match operation {
        Operation::Fetch => pod.claimer.as_ref(),
        Operation::Publish => pod.publisher.as_ref(),
    }
}

/// Whether the same operation worked for another object when this one failed: a byte of it could be read, or
/// the sink took as much beside it. A report of another failure says nothing.
fn canary(pod: &WorkerPod, failed: &Failed, operation: Operation) -> Option<bool> {
    let report = report_of(pod, operation)?;
    let is_of_this = report.outcome.err().map(Exit::code) == failed.exit_code;
    report.canary.filter(|_| is_of_this)
}

/// Whether the same operation succeeded in another pod since this pod began it, which means that the storage
/// is up.
fn succeeded_meanwhile(pod: &WorkerPod, operation: Operation, known: &Known) -> bool {
    let (last, seen) = match operation {
        Operation::Fetch => (known.last_fetch, pod.claiming),
        Operation::Publish => (known.last_publish, pod.publishing.map(|Milestone { at, .. }| at)),
    };
    // A claimer may have waited long for its file, so its own times are more precise. It ended before we
    // noticed.
    let began = report_of(pod, operation).and_then(|report| pod.since.checked_sub(took(report))).or(seen);
    matches!((last, began), (Some(last), Some(began)) if last > began)
}

#[cfg(test)]
mod tests;
