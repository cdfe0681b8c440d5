//! The operator's view of a pod, read once from the watched object. All decisions about pods use this view,
//! so that they can be tested without any pods.

mod containers;
mod stage;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use protocol::container::{CLAIMER, PUBLISHER, WORKER};
use protocol::{Exit, Report};

use containers::{Containers, is_running, succeeded, was_started};
pub use containers::{annotation, is_start_error, is_warm};
pub use stage::{Failed, Stage, Stuck};

/// The longest grace period that is honoured. A filter needs seconds to stop, but a pod spec may set 292
/// years: its file would wait that long, and adding it to an instant would overflow.
const GRACE_MAX: Duration = Duration::from_secs(3_600);

/// How long a claimer may take to start. It usually starts within a second or two of getting a node, unless
/// its image is being pulled or the node is broken; then the pod's file goes to another pod. On a node with
/// busy processors, the kubelet takes fifteen seconds to report the start, and a file that is taken back too
/// early is processed twice.
const STARTS_WITHIN: Duration = Duration::from_secs(30);
/// How long the other containers of a pod that processes many files may continue after one of them failed:
/// the worker publishes the results that it has, and reports them.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(60);
/// How long to wait for the last status of a pod in which a container was killed: a kubelet that evicts the
/// pod, or shuts its node down, says so only there.
const LAST_STATUS_WITHIN: Duration = Duration::from_secs(5);
/// The reason of `DisruptionTarget` for a pod that its kubelet ends.
pub const ENDED_BY_KUBELET: &str = "TerminationByKubelet";
/// The exit code of a Rust program that panicked.
const PANICKED: i32 = 101;
/// The exit code of a process that was killed by signal *n* is this number plus *n*.
const KILLED: i32 = 128;

/// A worker pod.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerPod {
    /// Its name, which is also its name as a consumer.
    pub name: String,
    /// Whether it processes many files.
    pub is_warm: bool,
    /// How far it is.
    pub stage: Stage,
    /// Since when it has been in this stage, by our own clock: the moment at which the watch showed it.
    pub since: Instant,
    /// When its claimer was first seen running or ended, by our own clock.
    pub claiming: Option<Instant>,
    /// Set if it is being deleted: the time that it may take.
    pub deleting: Option<Deleting>,
    /// Whether it has ended and its node is done with it.
    pub stopped: bool,
    /// Whether any of our own containers is running.
    pub running: bool,
    /// Whether it is deleted, and only a finalizer of someone else keeps the object.
    pub held: bool,
    /// The node on which it was placed.
    pub node: Option<String>,
    /// Since when it has had a node, by our own clock.
    pub placed: Option<Instant>,
    /// Since when its node has had neither sandbox, network nor volumes for it, by our own clock. A node that
    /// pulls an image already has them.
    pub unprepared: Option<Instant>,
    /// Set if Kubernetes announced that it will end the pod for its own reasons.
    pub doomed: Option<Doomed>,
    /// The number of our own containers that were started; absent if none was.
    pub started: Option<Started>,
    /// When its claimer had fetched the file.
    pub fetched: Option<Milestone>,
    /// When its publisher was started.
    pub publishing: Option<Milestone>,
    /// When its publisher had published all results.
    pub published: Option<Milestone>,
    /// The claimer's final report.
    pub claimer: Option<Report>,
    /// The publisher's final report.
    pub publisher: Option<Report>,
}

/// The time that a pod under deletion may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deleting {
    /// Since when, by our own clock.
    pub since: Instant,
    /// Its grace period.
    pub grace: Duration,
}

/// The condition `DisruptionTarget`: eviction, drain, preemption, a lost node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doomed {
    /// Since when, by our own clock.
    pub since: Instant,
    /// The reason from Kubernetes: `EvictionByEvictionAPI`, `PreemptionByScheduler`,
    /// `DeletionByTaintManager`…
    pub reason: String,
    /// The message from Kubernetes.
    pub message: String,
}

/// The started containers of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Their number.
    pub containers: usize,
    /// When the last of them started.
    pub last: Milestone,
}

/// A step that a pod has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Milestone {
    /// When the watch showed it, by our own clock.
    pub at: Instant,
    /// Whether the watch had already shown the pod before this step. If not, the step may be hours old,
    /// because a restarted operator finds pods as they are.
    pub witnessed: bool,
}

#[cfg(test)]
impl WorkerPod {
    /// A pod for tests, in which nothing runs.
    pub fn in_stage(name: &str, stage: Stage, since: Instant) -> Self {
        Self {
            name: name.to_owned(),
            is_warm: false,
            stage,
            since,
            claiming: None,
            deleting: None,
            stopped: false,
            running: false,
            held: false,
            node: None,
            placed: None,
            unprepared: None,
            doomed: None,
            started: None,
            fetched: None,
            publishing: None,
            published: None,
            claimer: None,
            publisher: None,
        }
    }
}

impl WorkerPod {
    /// Reads a pod. `before` is its previous view.
    pub fn read(pod: &Pod, before: Option<&Self>, now: Instant) -> Self {
        let containers = Containers::of(pod);
        let stage = stage::of(pod, &containers);
        let (claimer, publisher) = (containers.named(CLAIMER), containers.named(PUBLISHER));
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let reached = |known: fn(&Self) -> Option<Milestone>, is_reached: bool| {
            let new = Milestone { at: now, witnessed: before.is_some() };
            before.and_then(known).or(is_reached.then_some(new))
        };
        Self {
            name: pod.name_any(),
            is_warm: containers.is_warm(),
            since: before.filter(|before| before.stage.is_like(&stage)).map_or(now, |before| before.since),
            claiming: before.and_then(|before| before.claiming).or(stage.has_claimer().then_some(now)),
            deleting: deleting(&pod.metadata, before, now),
            stopped: matches!(phase(pod), Some("Succeeded" | "Failed")),
            running: containers.own().any(is_running),
            held: is_held(&pod.metadata),
            placed: before.and_then(|before| before.placed).or(node.is_some().then_some(now)),
            node,
            unprepared: is_unprepared(pod, &stage, &containers)
                .then(|| before.and_then(|before| before.unprepared).unwrap_or(now)),
            doomed: doomed(pod, before, now),
            started: started(&containers, before, now),
            fetched: reached(|before| before.fetched, claimer.is_some_and(succeeded)),
            publishing: reached(|before| before.publishing, publisher.is_some_and(was_started)),
            published: reached(|before| before.published, publisher.is_some_and(succeeded)),
            claimer: claimer.and_then(stage::report),
            publisher: publisher.and_then(stage::report),
            stage,
        }
    }

    /// Whether a pass has something to do because of this change. Most changes of a pod, such as its address
    /// or a condition, require nothing. A pod that got a node is given a file.
    pub fn is_news(&self, before: Option<&Self>) -> bool {
        let flags = |pod: &Self| (pod.deleting, pod.stopped, pod.running, pod.held, pod.node.is_some());
        before.is_none_or(|before| before.stage != self.stage || flags(before) != flags(self))
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.stage.is_finished()
    }

    /// Whether it works or will work: it has not ended and is not being deleted.
    pub fn is_alive(&self) -> bool {
        !self.is_finished() && self.deleting.is_none()
    }

    /// Whether it has ended as far as its files are concerned.
    pub fn is_over(&self, now: Instant) -> bool {
        self.is_finished() && !self.is_ending(now)
    }

    /// Whether one of its containers has failed, and the operator waits for more.
    pub fn is_ending(&self, now: Instant) -> bool {
        self.ends_by().is_some_and(|end| now < end)
    }

    /// How long the operator waits for more, after one of its containers has failed. If a pod processes many
    /// files, its worker still reports on the others. If the container was killed, it may not be to blame.
    pub fn ends_by(&self) -> Option<Instant> {
        let wait = match &self.stage {
            Stage::Failed(_) if self.is_warm && self.running => Some(LAST_WORDS_WITHIN),
            Stage::Failed(Failed { exit_code: Some(code), .. }) if *code > KILLED => {
                (!self.stopped && self.deleting.is_none()).then_some(LAST_STATUS_WITHIN)
            }
            _ => None,
        };
        Some(self.since + wait?)
    }

    /// Whether it can process many files.
    pub fn can_serve(&self) -> bool {
        self.is_warm && self.is_alive() && self.stage == Stage::Working
    }

    /// Whether it can take a file: its claimer is running, or will be in a moment. A pod without a node would
    /// keep the file from pods that have one.
    pub fn awaits_file(&self, now: Instant) -> bool {
        self.is_alive()
            && match &self.stage {
                Stage::Starting => self.late_at().is_some_and(|late_at| now < late_at),
                Stage::Claiming => true,
                Stage::Unschedulable(_)
                | Stage::Stuck(_)
                | Stage::Working
                | Stage::Succeeded
                | Stage::Failed(_) => false,
            }
    }

    /// The time by which its claimer should have started.
    pub fn late_at(&self) -> Option<Instant> {
        Some(self.placed? + STARTS_WITHIN)
    }

    /// Whether its file should go to another pod, because its claimer does not start.
    pub fn is_late(&self, now: Instant) -> bool {
        let is_slow = match &self.stage {
            Stage::Starting => self.late_at().is_some_and(|late_at| now >= late_at),
            Stage::Stuck(_) => !self.may_have_claimed(),
            // A pod without a node was given no file.
            Stage::Unschedulable(_) => false,
            Stage::Claiming | Stage::Working | Stage::Succeeded | Stage::Failed(_) => false,
        };
        self.is_alive() && is_slow
    }

    /// Whether its claimer may have read the pod's file. If a pod ends before that, the file is not to blame.
    pub fn may_have_claimed(&self) -> bool {
        if let Some(said) = &self.claimer {
            return said.entry.is_some();
        }
        match &self.stage {
            Stage::Failed(Failed { container: Some(container), exit_code: Some(code), reason, .. })
                if container == CLAIMER || self.is_warm && container == WORKER =>
            {
                match Exit::from_code(*code) {
                    Some(exit) => exit.is_after_claim(),
                    // It crashed or was killed, perhaps by the file; or it is another program.
                    None => *code == PANICKED || *code > KILLED && !is_start_error(Some(reason)),
                }
            }
            _ => self.fetched.is_some() || self.started.is_some(),
        }
    }

    /// Whether it failed on its own before it had a file: its claimer never started, or ended before it read
    /// a file, or the node rejected the pod. Deletion and eviction are not failures of its own.
    pub fn died_without_a_file(&self) -> bool {
        matches!(self.stage, Stage::Failed(_))
            && !self.may_have_claimed()
            && self.deleting.is_none()
            && self.doomed.is_none()
    }
}

/// Whether only a finalizer keeps a pod: it is deleted, and its grace period is over.
pub fn is_held(pod: &ObjectMeta) -> bool {
    let has_finalizers = pod.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty());
    pod.deletion_timestamp.is_some() && pod.deletion_grace_period_seconds == Some(0) && has_finalizers
}

fn started(containers: &Containers<'_>, before: Option<&WorkerPod>, now: Instant) -> Option<Started> {
    let known = before.and_then(|before| before.started);
    let number = containers.own().filter(|container| was_started(container)).count();
    if number <= known.map_or(0, |known| known.containers) {
        return known;
    }
    Some(Started { containers: number, last: Milestone { at: now, witnessed: before.is_some() } })
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn deleting(pod: &ObjectMeta, before: Option<&WorkerPod>, now: Instant) -> Option<Deleting> {
    pod.deletion_timestamp.as_ref()?;
    let seconds = u64::try_from(pod.deletion_grace_period_seconds.unwrap_or(0)).unwrap_or(0);
    let since = before.and_then(|before| before.deleting).map_or(now, |deleting| deleting.since);
    Some(Deleting { since, grace: Duration::from_secs(seconds).min(GRACE_MAX) })
}

/// Whether the kubelet reports that the pod is not ready to start containers. Pods on a node that never
/// reports are left to Kubernetes, which gives up such nodes.
fn is_unprepared(pod: &Pod, stage: &Stage, containers: &Containers<'_>) -> bool {
    let is_ready = stage::condition(pod, "PodReadyToStartContainers");
    // The condition becomes False again when the pod has ended.
    !stage.is_finished()
        && !containers.own().any(is_running)
        && is_ready.is_some_and(|ready| ready.status == "False")
}

fn doomed(pod: &Pod, before: Option<&WorkerPod>, now: Instant) -> Option<Doomed> {
    let target = stage::condition(pod, "DisruptionTarget").filter(|target| target.status == "True")?;
    Some(Doomed {
        since: before.and_then(|before| before.doomed.as_ref()).map_or(now, |doomed| doomed.since),
        reason: target.reason.clone().unwrap_or_default(),
        message: target.message.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
