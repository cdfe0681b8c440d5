//! The stage of a pod, judged by its phase and our own containers.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodCondition,
};
use protocol::container::{CLAIMER, PUBLISHER, WORKER};
use protocol::{Exit, Report};

use super::containers::{Containers, is_running, succeeded, terminated};

/// The stage of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No node was found for it.
    Unschedulable(String),
    /// It is being scheduled, or its claimer is being started.
    Starting,
    /// Its claimer waits for a file, or fetches it.
    Claiming,
    /// A container cannot be started at the moment.
    Stuck(Stuck),
    /// The claimer has its file, and the filters work on it.
    Working,
    /// All of our containers succeeded.
    Succeeded,
    /// A container failed, or the pod as a whole.
    Failed(Failed),
}

/// A container that cannot be started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stuck {
    /// The name of the container.
    pub container: String,
    /// Its image.
    pub image: String,
    /// The reason from Kubernetes: `ImagePullBackOff`, `CreateContainerConfigError`…
    pub reason: String,
    /// The message from Kubernetes.
    pub message: String,
}

/// How a pod failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failed {
    /// The failed container; absent if the pod failed as a whole (for example, because it was evicted).
    pub container: Option<String>,
    /// Whether another program added this container to the pod.
    pub added: bool,
    /// Its exit code.
    pub exit_code: Option<i32>,
    /// The reason from Kubernetes: `OOMKilled`, `Error`, `Evicted`…
    pub reason: String,
    /// The termination message, or the last lines of the log.
    pub message: String,
    /// Whether its memory is limited: if so, an out-of-memory kill means that it exceeded its limit.
    pub memory_limit: bool,
    /// Whether our shim runs its command, so that some exit codes are the shim's.
    pub behind_shim: bool,
}

/// The kubelet's reasons for an image that it cannot pull; it retries on its own.
const NOT_PULLED: [&str; 7] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
];
/// The kubelet's reasons for a container that it cannot create or start; it retries on its own.
const NOT_CREATED: [&str; 3] = ["CreateContainerConfigError", "CreateContainerError", "RunContainerError"];

impl Stuck {
    /// Whether the image is present, and only creating the container fails.
    pub fn has_image(&self) -> bool {
        NOT_CREATED.contains(&self.reason.as_str())
    }
}

impl Failed {
    /// The exit code, if it is one of the shim's own.
    pub fn of_shim(&self) -> Option<u8> {
        let code = self.exit_code.and_then(|code| u8::try_from(code).ok());
        code.filter(|code| self.behind_shim && [shim::UNUSABLE, shim::REJECTED].contains(code))
    }
}

impl Stage {
    /// Whether the pod has ended.
    pub fn is_finished(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed(_))
    }

    /// Whether the claimer was started.
    pub fn has_claimer(&self) -> bool {
        match self {
            Self::Unschedulable(_) | Self::Starting => false,
            Self::Stuck(stuck) => stuck.container != CLAIMER,
            Self::Claiming | Self::Working | Self::Succeeded | Self::Failed(_) => true,
        }
    }

    /// Whether time counts from the same start: the text may change with every try.
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stuck(one), Self::Stuck(two)) => one.container == two.container,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// Reads the stage of a pod.
pub fn of(pod: &Pod, containers: &Containers<'_>) -> Stage {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase == Some("Succeeded") {
        return Stage::Succeeded;
    }
    // Later events of the pod do not concern the file, and an added container may run forever.
    if (phase == Some("Failed") || containers.has_others()) && containers.all_own(succeeded) {
        return Stage::Succeeded;
    }
    if phase == Some("Failed") {
        return Stage::Failed(failure_of_the_pod(pod, containers));
    }
    if let Some(failed) = first_failure(containers, containers.own()) {
        return Stage::Failed(failed);
    }
    if containers.is_warm() {
        return of_warm(pod, containers);
    }
    let claimer = containers.named(CLAIMER);
    let claimed = claimer.and_then(terminated).is_some();
    // Until the claimer has its file, an added container that does not start blocks everything; afterwards it
    // blocks only itself.
    let stuck =
        containers.all().filter(|container| !claimed || containers.is_own(&container.name)).find_map(stuck);
    if let Some(stuck) = stuck {
        return Stage::Stuck(stuck);
    }
    if claimed {
        return Stage::Working;
    }
    if claimer.is_some_and(is_running) {
        return Stage::Claiming;
    }
    before_start(pod)
}

/// A pod that processes many files works once all of its containers are running.
fn of_warm(pod: &Pod, containers: &Containers<'_>) -> Stage {
    if containers.all_main_run() {
        return Stage::Working;
    }
    containers.all().find_map(stuck).map_or_else(|| before_start(pod), Stage::Stuck)
}

fn before_start(pod: &Pod) -> Stage {
    condition(pod, "PodScheduled")
        .filter(|condition| condition.reason.as_deref() == Some("Unschedulable"))
        .map_or(Stage::Starting, |condition| {
            Stage::Unschedulable(condition.message.clone().unwrap_or_default())
        })
}

/// A condition of a pod.
pub fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

fn failure_of_the_pod(pod: &Pod, containers: &Containers<'_>) -> Failed {
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.reason.clone());
    let message = status.and_then(|status| status.message.clone()).unwrap_or_default();
    // The pod itself reports an eviction; its containers report only that they were killed.
    if let Some(reason) = reason {
        return Failed { reason, message, ..Failed::default() };
    }
    first_failure(containers, containers.own())
        .or_else(|| first_failure(containers, containers.all()))
        .unwrap_or_else(|| Failed { reason: "PodFailed".to_owned(), message, ..Failed::default() })
}

/// The container that failed first: the others may have ended only because of it.
fn first_failure<'a>(
    containers: &Containers<'_>,
    among: impl Iterator<Item = &'a ContainerStatus>,
) -> Option<Failed> {
    let failed = among.filter_map(|container| {
        let ended = terminated(container).filter(|ended| ended.exit_code != 0)?;
        Some((container, ended))
    });
    // A container without a time was lost, so a container with a time failed before it.
    let (container, ended) = failed.min_by_key(|(container, ended)| {
        let finished = ended.finished_at.as_ref();
        (rank(containers, container, ended), finished.is_none(), finished.map(|time| time.0))
    })?;
    Some(Failed {
        container: Some(container.name.clone()),
        added: !containers.is_own(&container.name),
        exit_code: Some(ended.exit_code),
        reason: ended.reason.clone().unwrap_or_default(),
        message: report(container)
            .and_then(|report| report.reason())
            .or_else(|| ended.message.clone())
            .unwrap_or_default(),
        memory_limit: containers.has_memory_limit(&container.name),
        behind_shim: containers.is_behind_shim(&container.name),
    })
}

/// Ranks failures by how much they explain, regardless of their time. A worker ends because of a filter: it
/// reports a filter that cannot be executed, but knows nothing about a filter that is gone.
fn rank(containers: &Containers<'_>, container: &ContainerStatus, ended: &ContainerStateTerminated) -> u8 {
    let is_worker = containers.is_warm() && container.name == WORKER;
    match Exit::from_code(ended.exit_code).filter(|_| is_worker) {
        Some(Exit::FilterUnusable) => 0,
        Some(Exit::FilterLost) => 2,
        _ => 1,
    }
}

/// The final report of one of our own containers. The message of a filter is never a report, even if it looks
/// like one.
pub fn report(container: &ContainerStatus) -> Option<Report> {
    if !matches!(container.name.as_str(), CLAIMER | PUBLISHER | WORKER) {
        return None;
    }
    Report::parse(terminated(container)?.message.as_deref()?)
}

fn stuck(container: &ContainerStatus) -> Option<Stuck> {
    let ContainerState { waiting: Some(waiting), .. } = container.state.as_ref()? else { return None };
    let is_stuck =
        |reason: &&String| NOT_PULLED.contains(&reason.as_str()) || NOT_CREATED.contains(&reason.as_str());
    Some(Stuck {
        container: container.name.clone(),
        image: container.image.clone(),
        reason: waiting.reason.as_ref().filter(is_stuck)?.clone(),
        message: waiting.message.clone().unwrap_or_default(),
    })
}
