//! How an attempt ended and who is to blame, judged by its pod. Pure. A file is charged an attempt only when its own
//! processing failed; everything else is a disruption, and the file goes back to the queue unharmed.

mod reason;
mod report;

pub use report::{Rules, of_report};

use std::time::{Duration, Instant};

use protocol::container::{CLAIMER, PUBLISHER, WORKER};
use protocol::{Exit, Report};
use queue::{Disruption, EntryId, Failure, Verdict};

use super::dependency::{Dependency, Operation};
use crate::pods::{Failed, Milestone, Stage, Stuck, WorkerPod, is_start_error};

/// What is known of the storage beside the pod that is judged: when operations last succeeded, by our own clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// A fetch.
    pub last_fetch: Option<Instant>,
    /// A publication.
    pub last_publish: Option<Instant>,
}

/// Now, by our own clock and as the clocks of nodes have it.
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
    /// A filter says that its input is bad.
    Input,
    /// Something that the run depends on failed.
    Dependency(Dependency),
    /// The pod or its node went: eviction, drain, preemption, deletion, a lost node.
    Pod,
    /// Our own claimer or publisher died, or a container that another program added.
    Worker,
    /// No file was tried.
    Unclaimed,
}

/// How far a pod that processes many files had come with one of them when it last spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Filters worked on it.
    Filtering,
    /// All filters had succeeded, and its results were being published.
    Publishing,
}

/// A judgement about the file of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// What becomes of the file.
    pub verdict: Verdict,
    /// Why.
    pub cause: Cause,
    /// When the attempt ended, by our own clock.
    pub at: Instant,
    /// The entry that the pod processed, if it said so; otherwise its first one.
    pub entry: Option<EntryId>,
    /// Whether the pod may have tried its file. If not, the file goes back unchanged, whatever ended the pod.
    pub tried: bool,
    /// How many of its containers the pod had started.
    pub started: usize,
    /// What a storage failure showed about the storage: whether another object could be reached at the same moment.
    pub canary: Option<bool>,
    /// Whether the pod failed as a whole: any file that it had begun may be to blame.
    pub of_whole_pod: bool,
}

impl Judgement {
    /// What failed that the run depends on.
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

/// The judgement about a pod that has ended; `None` while it has not.
pub fn of(pod: &WorkerPod, non_retryable: &[i32], known: &Known) -> Option<Judgement> {
    match &pod.stage {
        Stage::Succeeded => Some(judgement(pod, Verdict::Succeeded, Cause::Success)),
        Stage::Failed(failed) => Some(of_failed(pod, failed, non_retryable, known)),
        Stage::Unschedulable(_) | Stage::Starting | Stage::Claiming | Stage::Stuck(_) | Stage::Working => {
            None
        }
    }
}

/// The judgement about a pod one of whose containers has not started for too long.
pub fn of_stuck(pod: &WorkerPod, stuck: &Stuck) -> Judgement {
    let Stuck { container, image, reason, message } = stuck;
    let text = format!("{reason}: {container} does not start with image {image}: {message}");
    let missing = if stuck.has_image() { Dependency::Container } else { Dependency::Image };
    disruption(pod, Cause::Dependency(missing), Failure::new(&text, None), true)
}

/// The judgement about a pod that is gone, or whose node is, before it ended.
pub fn of_vanished(pod: &WorkerPod) -> Judgement {
    disruption(pod, Cause::Pod, vanished(&pod.name), true)
}

/// The judgement about a pod whose node has not prepared it for too long. Unless its node restarted, it has claimed nothing.
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

/// What becomes of a file that a pod held which processed many and has ended: filters that failed charge only the file that they
/// worked on. `others` is how many more files of the pod were begun.
pub fn of_held(begun: Option<Begun>, others: usize, pod: &str, judgement: &Judgement) -> Verdict {
    match (begun, &judgement.verdict) {
        (None, _) => Verdict::Released,
        // A worker that ends well has said what became of every file: what it said of this one is lost.
        (Some(_), Verdict::Succeeded) => of_silence(pod),
        // Each may have filled the storage of the pod: the one that did so disrupts one pod after the other, and is charged in the
        // end.
        (Some(_), Verdict::Failed(failure)) if judgement.of_whole_pod && others > 0 => {
            Verdict::Disrupted(Disruption { failure: failure.clone(), counts: true })
        }
        // The filters had another file by then. This one lost its publisher, which is ours.
        (Some(Begun::Publishing), Verdict::Failed(_) | Verdict::Rejected(_)) if !judgement.of_whole_pod => {
            let text = format!("PublishInterrupted: the pod {pod} ended while it published the results");
            Verdict::Disrupted(Disruption { failure: Failure::new(&text, None), counts: true })
        }
        (Some(_), verdict) => verdict.clone(),
    }
}

/// What becomes of a file whose worker ended well, and whose end was not reported.
fn of_silence(pod: &str) -> Verdict {
    let failure =
        Failure::new(&format!("WorkerSilent: the pod {pod} ended without reporting an outcome"), None);
    Verdict::Disrupted(Disruption { failure, counts: true })
}

/// The reason of a file whose pod is gone.
pub fn vanished(pod: &str) -> Failure {
    Failure::new(&format!("PodGone: the pod {pod} was deleted or its node was lost before it ended"), None)
}

/// The reason of a file that took too long.
fn timed_out(limit: Duration) -> Failure {
    Failure::new(&format!("FileTimeout: the attempt took longer than {limit:?}"), None)
}

/// How long the filters have worked on a file that the pod was given so long ago. Neither the start of the pod counts nor
/// waiting for storage: what the claimer needed to fetch the file, and what its publisher has needed so far.
pub fn processing_time(pod: &WorkerPod, held_for: Duration, now: Moment) -> Duration {
    let Some(fetched) = pod.fetched else { return Duration::ZERO };
    let since_fetched = if fetched.witnessed {
        now.instant.saturating_duration_since(fetched.at)
    } else {
        // Fetched before this operator started, by the clock of its node. That clock may be wrong, but the file was fetched after
        // the pod was given it, and before we first saw the pod.
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
                None => answered(failed) || succeeded_meanwhile(pod, operation, known),
            };
            let counts = dependency.operation().is_none_or(is_up);
            Judgement { canary, ..disruption(pod, cause, failure, counts) }
        }
    }
}

/// Who is to blame. The order matters: an end that came from outside says nothing about the container that it ended.
fn cause(pod: &WorkerPod, failed: &Failed, non_retryable: &[i32]) -> Cause {
    let Failed { container, added, exit_code, reason, memory_limit, .. } = failed;
    if ended_from_outside(pod) {
        return Cause::Pod;
    }
    let Some(container) = container.as_deref() else {
        // The kubelet evicts without an announcement only a pod that used more storage than its own limit.
        return if reason == "Evicted" { Cause::File } else { Cause::Pod };
    };
    match reason.as_str() {
        // Node restarted, or container lost: the codes 255 and 137 are invented.
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
        // Without a limit of its own it was killed because others used too much.
        _ if reason == "OOMKilled" && !memory_limit => Cause::Pod,
        _ => match failed.of_shim() {
            Some(shim::UNUSABLE) => Cause::Dependency(Dependency::Container),
            // The filter has answered that another attempt is of no use.
            Some(_) => Cause::Input,
            None if exit_code.is_some_and(|code| non_retryable.contains(&code)) => Cause::Input,
            None => Cause::File,
        },
    }
}

/// Whether the pod was being deleted, or was to be ended by Kubernetes, when it failed.
fn ended_from_outside(pod: &WorkerPod) -> bool {
    let deleted = pod.deleting.map(|deleting| deleting.since);
    let doomed = pod.doomed.as_ref().map(|doomed| doomed.since);
    [deleted, doomed].into_iter().flatten().any(|since| since <= pod.since)
}

fn of_claimer(exit: Exit) -> Cause {
    match exit {
        // There was no file, or the pod was handed one without knowing it.
        Exit::QueueUnreachable | Exit::QueueDenied => Cause::Unclaimed,
        Exit::NoAccess => Cause::Dependency(Dependency::SourceCredentials),
        Exit::StorageUnreachable => Cause::Dependency(Dependency::Source),
        Exit::DiskFull => Cause::Dependency(Dependency::Workspace),
        Exit::ObjectGone | Exit::ObjectChanged | Exit::ObjectTruncated | Exit::StorageRefused => Cause::File,
        // Its workspace is new: what does not work in it is the node's. Settings and queue are ours.
        Exit::LocalIo | Exit::BadSettings | Exit::QueueBroken => Cause::Worker,
        // Of the publisher only, or of a pod that processes many files.
        Exit::PublishIncomplete | Exit::NothingToPublish | Exit::FilterUnusable | Exit::FilterLost => {
            Cause::Worker
        }
        Exit::Terminated => Cause::Pod,
    }
}

fn of_worker(exit: Exit) -> Cause {
    match exit {
        Exit::FilterUnusable => Cause::Dependency(Dependency::Container),
        // What it says of a transfer it says of a single file, and goes on.
        other => of_claimer(other),
    }
}

fn of_publisher(exit: Exit) -> Cause {
    match exit {
        Exit::NoAccess => Cause::Dependency(Dependency::SinkCredentials),
        // What is gone is the bucket: a result is only ever written.
        Exit::StorageUnreachable | Exit::ObjectGone => Cause::Dependency(Dependency::Sink),
        Exit::DiskFull => Cause::Dependency(Dependency::Workspace),
        // The workspace holds what the filters wrote: results that cannot be read are theirs.
        Exit::LocalIo | Exit::PublishIncomplete | Exit::NothingToPublish => Cause::File,
        Exit::ObjectChanged | Exit::ObjectTruncated | Exit::StorageRefused => Cause::File,
        Exit::BadSettings => Cause::Worker,
        // Of the claimer only, or of a pod that processes many files.
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

/// Whether another object could be reached when the operation failed; a report of another failure says nothing.
fn canary(pod: &WorkerPod, failed: &Failed, operation: Operation) -> Option<bool> {
    let report = report_of(pod, operation)?;
    let is_of_this = report.outcome.err().map(Exit::code) == failed.exit_code;
    // A result that can be read does not show that the sink still takes new ones: it may be full, or read-only.
    let shows = |up: &bool| operation == Operation::Fetch || !*up;
    report.canary.filter(|up| is_of_this && shows(up))
}

/// Whether the storage answered all the same, with a refusal of this one object as far as we know.
fn answered(failed: &Failed) -> bool {
    failed.exit_code.and_then(Exit::from_code) == Some(Exit::ObjectGone)
}

/// Whether the same operation of another pod succeeded since this pod began with it: then the storage is up.
fn succeeded_meanwhile(pod: &WorkerPod, operation: Operation, known: &Known) -> bool {
    let (last, seen) = match operation {
        Operation::Fetch => (known.last_fetch, pod.claiming),
        Operation::Publish => (known.last_publish, pod.publishing.map(|Milestone { at, .. }| at)),
    };
    // A claimer may have waited long for its file, so its own times say more. It ended before we saw that it had.
    let began = report_of(pod, operation).and_then(|report| pod.since.checked_sub(took(report))).or(seen);
    matches!((last, began), (Some(last), Some(began)) if last > began)
}

#[cfg(test)]
mod tests;
