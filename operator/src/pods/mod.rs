//! What the operator needs to know of a pod, read once from the object that the watch brought. Everything that decides
//! about pods works on this, so that it can be tested without any.

mod containers;
mod stage;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use protocol::container::{CLAIMER, PUBLISHER};
use protocol::{Exit, Report};

use containers::{Containers, is_running, succeeded, was_started};
pub use containers::{annotation, is_start_error};
pub use stage::{Failed, Stage, Stuck};

/// The longest grace period that is honoured. A filter needs seconds to stop; a pod spec may say 292 years, for which its
/// file would wait, and which added to an instant would overflow.
const GRACE_MAX: Duration = Duration::from_secs(3_600);

/// A worker pod.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerPod {
    /// Its name, which is also its name as a consumer.
    pub name: String,
    /// How far it is.
    pub stage: Stage,
    /// Since when it is so, by our own clock: the moment at which the watch showed it.
    pub since: Instant,
    /// Since when its claimer has been running, or has run: its file cannot be claimed for longer. By our own clock too.
    pub claiming: Option<Instant>,
    /// It is being deleted, and may take this long for it.
    pub deleting: Option<Deleting>,
    /// It has ended, and its node is done with it.
    pub stopped: bool,
    /// One of its own containers runs.
    pub running: bool,
    /// It is deleted, and only a finalizer, which is none of ours, keeps the object.
    pub held: bool,
    /// The node that it was placed on.
    pub node: Option<String>,
    /// Since when its node has had neither sandbox, network nor volumes for it, by our own clock. A node that pulls an image
    /// has them.
    pub unprepared: Option<Instant>,
    /// Kubernetes has announced that it ends the pod for a reason of its own.
    pub doomed: Option<Doomed>,
    /// Which of its own containers were started; none yet when absent.
    pub started: Option<Started>,
    /// Its claimer has fetched the file.
    pub fetched: Option<Milestone>,
    /// Its publisher was started.
    pub publishing: Option<Milestone>,
    /// Its publisher has published all results.
    pub published: Option<Milestone>,
    /// What its claimer reported at its end.
    pub claimer: Option<Report>,
    /// What its publisher reported at its end.
    pub publisher: Option<Report>,
}

/// How long a pod that is being deleted may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deleting {
    /// Since when, by our own clock.
    pub since: Instant,
    /// The time that it was given.
    pub grace: Duration,
}

/// The condition `DisruptionTarget`: eviction, drain, preemption, a lost node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doomed {
    /// Since when, by our own clock.
    pub since: Instant,
    /// Kubernetes' own word: `EvictionByEvictionAPI`, `PreemptionByScheduler`, `DeletionByTaintManager`…
    pub reason: String,
    /// What it says.
    pub message: String,
}

/// Containers of a pod that were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// How many.
    pub containers: usize,
    /// When the last of them was.
    pub last: Milestone,
}

/// A step that a pod has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Milestone {
    /// When the watch showed it, by our own clock.
    pub at: Instant,
    /// The watch showed the pod also before. Without that the step may be hours old: a restarted operator finds pods as they
    /// are.
    pub witnessed: bool,
}

#[cfg(test)]
impl WorkerPod {
    /// A pod as tests have it, of which nothing runs.
    pub fn in_stage(name: &str, stage: Stage, since: Instant) -> Self {
        Self {
            name: name.to_owned(),
            stage,
            since,
            claiming: None,
            deleting: None,
            stopped: false,
            running: false,
            held: false,
            node: None,
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
    /// Reads a pod. `before` is what was known of it.
    pub fn read(pod: &Pod, before: Option<&Self>, now: Instant) -> Self {
        let containers = Containers::of(pod);
        let stage = stage::of(pod, &containers);
        let (claimer, publisher) = (containers.named(CLAIMER), containers.named(PUBLISHER));
        let reached = |known: fn(&Self) -> Option<Milestone>, is_reached: bool| {
            let new = Milestone { at: now, witnessed: before.is_some() };
            before.and_then(known).or(is_reached.then_some(new))
        };
        Self {
            name: pod.name_any(),
            since: before.filter(|before| before.stage.is_like(&stage)).map_or(now, |before| before.since),
            claiming: before.and_then(|before| before.claiming).or(stage.has_claimer().then_some(now)),
            deleting: deleting(&pod.metadata, before, now),
            stopped: matches!(phase(pod), Some("Succeeded" | "Failed")),
            running: containers.own().any(is_running),
            held: is_held(&pod.metadata),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
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

    /// Whether a pass has something to do because of it. Most changes of a pod mean nothing to us at once: an address, a
    /// node, a condition.
    pub fn is_news(&self, before: Option<&Self>) -> bool {
        let flags = |pod: &Self| (pod.deleting, pod.stopped, pod.running, pod.held);
        before.is_none_or(|before| before.stage != self.stage || flags(before) != flags(self))
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.stage.is_finished()
    }

    /// Whether it works, or will: it has neither ended nor is it being deleted.
    pub fn is_alive(&self) -> bool {
        !self.is_finished() && self.deleting.is_none()
    }

    /// Whether it failed by itself before it had a file, as far as it shows: its claimer never started or ended before it
    /// claimed one, or the node did not take the pod.
    pub fn died_without_a_file(&self) -> bool {
        let Stage::Failed(Failed { container, added, exit_code, .. }) = &self.stage else { return false };
        let claimed =
            self.fetched.is_some() || self.claimer.as_ref().is_some_and(|said| said.entry.is_some());
        // Being deleted or evicted is no failure of its own.
        if claimed || self.deleting.is_some() || self.doomed.is_some() {
            return false;
        }
        let is_after_claim = || exit_code.and_then(Exit::from_code).is_some_and(Exit::is_after_claim);
        match container.as_deref() {
            None => true,
            Some(CLAIMER) => !is_after_claim(),
            Some(_) => *added,
        }
    }
}

/// Whether only a finalizer keeps a pod: it is deleted, and its time to end is over.
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

/// The kubelet says so itself. A pod whose node never spoke is left to Kubernetes, which gives such nodes up.
fn is_unprepared(pod: &Pod, stage: &Stage, containers: &Containers<'_>) -> bool {
    let is_ready = stage::condition(pod, "PodReadyToStartContainers");
    // It turns False once more when the pod has ended.
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
