//! What the operator needs to know of a pod, read once from the object that the watch brought. Everything that decides
//! about pods works on this, so that it can be tested without any.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use protocol::container::{CLAIMER, PUBLISHER};
use protocol::{Exit, Report};

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
}

/// How long a pod that is being deleted may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deleting {
    /// Since when, by our own clock.
    pub since: Instant,
    /// The time that it was given.
    pub grace: Duration,
}

/// How far a pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No node was found for it.
    Unschedulable(String),
    /// It is being scheduled, or its claimer is being started.
    Starting,
    /// Its claimer waits for a file, or fetches it.
    Claiming,
    /// A container cannot be started, for now.
    Stuck(Stuck),
    /// The claimer has its file, and the filters work on it.
    Working,
    /// All containers succeeded.
    Succeeded,
    /// It failed: a container did, or the pod as a whole.
    Failed(Failed),
}

/// A container that cannot be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Which one.
    pub container: String,
    /// Its image.
    pub image: String,
    /// Kubernetes' own word: `ImagePullBackOff`, `CreateContainerConfigError`…
    pub reason: String,
    /// What it says.
    pub message: String,
}

/// How a pod failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The container that failed; none if the pod failed as a whole (evicted, for example).
    pub container: Option<String>,
    /// Its exit code.
    pub exit_code: Option<i32>,
    /// Kubernetes' own word: `OOMKilled`, `Error`, `Evicted`…
    pub reason: String,
    /// The termination message, or the last lines of the log.
    pub message: String,
}

/// Words by which the kubelet says that a container does not start; it tries again by itself.
const STUCK: [&str; 10] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];

#[cfg(test)]
impl WorkerPod {
    /// A pod as tests have it, of which nothing runs.
    pub fn in_stage(name: &str, stage: Stage, since: Instant) -> Self {
        let name = name.to_owned();
        Self {
            name,
            stage,
            since,
            claiming: None,
            deleting: None,
            stopped: false,
            running: false,
            held: false,
        }
    }
}

impl WorkerPod {
    /// Reads a pod. `before` is what was known of it.
    pub fn read(pod: &Pod, before: Option<&Self>, now: Instant) -> Self {
        let stage = stage(pod);
        let since = before.filter(|before| before.stage.is_like(&stage)).map_or(now, |before| before.since);
        let claiming = before.and_then(|before| before.claiming).or(stage.has_claimer().then_some(now));
        let deleting = pod.metadata.deletion_timestamp.is_some().then(|| {
            let grace = u64::try_from(pod.metadata.deletion_grace_period_seconds.unwrap_or(0)).unwrap_or(0);
            let since = before.and_then(|before| before.deleting).map_or(now, |deleting| deleting.since);
            Deleting { since, grace: Duration::from_secs(grace) }
        });
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let stopped = matches!(phase, Some("Succeeded" | "Failed"));
        let (running, held) = (is_running(pod), is_held(&pod.metadata));
        Self { name: pod.name_any(), stage, since, claiming, deleting, stopped, running, held }
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        matches!(self.stage, Stage::Succeeded | Stage::Failed(_))
    }

    /// Whether it works, or will: it has neither ended nor is it being deleted.
    pub fn is_alive(&self) -> bool {
        !self.is_finished() && self.deleting.is_none()
    }

    /// Whether it failed by itself before it had a file, as far as it shows: its claimer never started or ended before it
    /// claimed one, or the node did not take the pod.
    pub fn died_without_a_file(&self) -> bool {
        match &self.stage {
            // Being deleted is no failure of its own.
            _ if self.deleting.is_some() => false,
            Stage::Failed(Failed { container: None, .. }) => true,
            Stage::Failed(Failed { container: Some(container), exit_code, .. }) => {
                container == CLAIMER && !exit_code.and_then(Exit::from_code).is_some_and(Exit::is_after_claim)
            }
            Stage::Unschedulable(_)
            | Stage::Starting
            | Stage::Claiming
            | Stage::Stuck(_)
            | Stage::Working
            | Stage::Succeeded => false,
        }
    }
}

/// Whether nothing but somebody's finalizer keeps a pod: it is deleted, and its time to end is over.
pub fn is_held(pod: &ObjectMeta) -> bool {
    let has_finalizers = pod.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty());
    pod.deletion_timestamp.is_some() && pod.deletion_grace_period_seconds == Some(0) && has_finalizers
}

impl Stage {
    /// Whether the claimer was started.
    fn has_claimer(&self) -> bool {
        match self {
            Self::Unschedulable(_) | Self::Starting => false,
            Self::Stuck(stuck) => stuck.container != CLAIMER,
            Self::Claiming | Self::Working | Self::Succeeded | Self::Failed(_) => true,
        }
    }

    /// The same stage as far as time is concerned: what is said about it may change, as it does at every try.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stuck(one), Self::Stuck(two)) => one.container == two.container,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// The containers that the pod is made for. A sidecar, which somebody has put in, is started again when it ends, and runs as
/// long as any of them.
fn own_containers<'a>(pod: &'a Pod, status: &'a PodStatus) -> impl Iterator<Item = &'a ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten();
    init.filter(|container| !is_sidecar(pod, container)).chain(status.container_statuses.iter().flatten())
}

fn is_running(pod: &Pod) -> bool {
    let mut own = pod.status.iter().flat_map(|status| own_containers(pod, status));
    own.any(|container| container.state.as_ref().is_some_and(|state| state.running.is_some()))
}

fn stage(pod: &Pod) -> Stage {
    let Some(status) = &pod.status else { return Stage::Starting };
    let init = status.init_container_statuses.as_deref().unwrap_or_default();
    let main = status.container_statuses.as_deref().unwrap_or_default();
    // With `restartPolicy: Never` one container that failed is the end of the pod, also while others still run.
    let own = || own_containers(pod, status);
    let failed = own().find_map(failure);
    match status.phase.as_deref() {
        Some("Succeeded") => return Stage::Succeeded,
        // A pod that was evicted says so; its containers only say that they were killed.
        Some("Failed") if status.reason.is_some() => return Stage::Failed(failed_as_a_whole(pod)),
        Some("Failed") => return Stage::Failed(failed.unwrap_or_else(|| failed_as_a_whole(pod))),
        _ => {}
    }
    if let Some(failed) = failed {
        return Stage::Failed(failed);
    }
    let claimer = init.iter().find(|container| container.name == CLAIMER);
    let claimed = claimer.and_then(terminated).is_some();
    // Before there is a file, a sidecar that does not start holds up everything.
    let stuck = if claimed { own().find_map(stuck) } else { init.iter().chain(main).find_map(stuck) };
    if let Some(stuck) = stuck {
        return Stage::Stuck(stuck);
    }
    if claimed {
        return Stage::Working;
    }
    if claimer.and_then(|claimer| claimer.state.as_ref()).is_some_and(|state| state.running.is_some()) {
        return Stage::Claiming;
    }
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions
        .iter()
        .find(|condition| {
            condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
        })
        .map_or(Stage::Starting, |condition| {
            Stage::Unschedulable(condition.message.clone().unwrap_or_default())
        })
}

fn is_sidecar(pod: &Pod, container: &ContainerStatus) -> bool {
    let specified = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    specified
        .filter(|specified| specified.name == container.name)
        .any(|specified| specified.restart_policy.as_deref() == Some("Always"))
}

fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    container.state.as_ref()?.terminated.as_ref()
}

fn failure(container: &ContainerStatus) -> Option<Failed> {
    let ended = terminated(container).filter(|ended| ended.exit_code != 0)?;
    let message = ended.message.clone().unwrap_or_default();
    // A filter's message is its own, whatever it looks like.
    let is_ours = container.name == CLAIMER || container.name == PUBLISHER;
    let report = is_ours.then(|| Report::parse(&message)).flatten();
    Some(Failed {
        container: Some(container.name.clone()),
        exit_code: Some(ended.exit_code),
        reason: ended.reason.clone().unwrap_or_default(),
        message: report.and_then(|report| report.reason()).unwrap_or(message),
    })
}

fn failed_as_a_whole(pod: &Pod) -> Failed {
    let status = pod.status.clone().unwrap_or_default();
    Failed {
        container: None,
        exit_code: None,
        reason: status.reason.unwrap_or_else(|| "PodFailed".to_owned()),
        message: status.message.unwrap_or_default(),
    }
}

fn stuck(container: &ContainerStatus) -> Option<Stuck> {
    let ContainerState { waiting: Some(waiting), .. } = container.state.as_ref()? else { return None };
    let reason = waiting.reason.clone().filter(|reason| STUCK.contains(&reason.as_str()))?;
    Some(Stuck {
        container: container.name.clone(),
        image: container.image.clone(),
        reason,
        message: waiting.message.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(status: Value) -> WorkerPod {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap();
        WorkerPod::read(&pod, None, Instant::now())
    }

    fn container(name: &str, state: Value) -> Value {
        json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state})
    }

    fn ended(code: i32) -> Value {
        json!({"terminated": {"exitCode": code, "reason": "Error", "message": "said"}})
    }

    #[test]
    fn a_pod_has_a_file_once_its_claimer_ended_well() {
        let running = container(CLAIMER, json!({"running": {}}));
        assert_eq!(
            read(json!({"phase": "Pending", "initContainerStatuses": [running]})).stage,
            Stage::Claiming
        );
        let claimed = container(CLAIMER, ended(0));
        assert_eq!(
            read(json!({"phase": "Pending", "initContainerStatuses": [claimed]})).stage,
            Stage::Working
        );
    }

    #[test]
    fn one_failed_container_is_the_end_also_while_others_run() {
        let pod = read(json!({"phase": "Running", "initContainerStatuses": [container(CLAIMER, ended(0))],
            "containerStatuses": [container("a", json!({"running": {}})), container("b", ended(3))]}));
        assert!(pod.running && !pod.stopped, "the others are to be ended");
        let Stage::Failed(failed) = pod.stage else { panic!("{pod:?}") };
        assert_eq!((failed.container.as_deref(), failed.exit_code), (Some("b"), Some(3)));
        // As the kubelet tells it until it is done with the pod.
        let pod = read(json!({"phase": "Running", "initContainerStatuses": [container(CLAIMER, ended(0))],
            "containerStatuses": [container("a", ended(0)), container("b", ended(3))]}));
        assert!(matches!(pod.stage, Stage::Failed(_)) && !pod.running && !pod.stopped);
    }

    #[test]
    fn a_sidecar_that_is_started_again_is_no_end() {
        let sidecar = |policy: Value, state: Value| {
            let spec =
                json!({"containers": [], "initContainers": [{"name": "mesh", "restartPolicy": policy}]});
            let claimed = [container("mesh", state), container(CLAIMER, ended(0))];
            let pod = json!({"metadata": {"name": "p"}, "spec": spec,
                "status": {"phase": "Running", "initContainerStatuses": claimed}});
            WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now()).stage
        };
        let pulling = json!({"waiting": {"reason": "ErrImagePull"}});
        assert_eq!(sidecar(json!("Always"), ended(1)), Stage::Working);
        assert_eq!(sidecar(json!("Always"), pulling.clone()), Stage::Working);
        assert!(matches!(sidecar(Value::Null, ended(1)), Stage::Failed(_)));
        assert!(matches!(sidecar(Value::Null, pulling), Stage::Stuck(_)));
    }

    #[test]
    fn people_read_the_reason_of_a_report_and_the_words_of_a_filter() {
        let message = |name: &str, said: &str| {
            let state = json!({"terminated": {"exitCode": 15, "reason": "Error", "message": said}});
            let stage =
                read(json!({"phase": "Failed", "initContainerStatuses": [container(name, state)]})).stage;
            let Stage::Failed(failed) = stage else { panic!("{stage:?}") };
            failed.message
        };
        let report = "1763405000000-0 1 ObjectGone 5-9 fetch the file: s3://b/a: not found";
        assert_eq!(message(CLAIMER, report), "ObjectGone: fetch the file: s3://b/a: not found");
        assert_eq!(message(PUBLISHER, report), "ObjectGone: fetch the file: s3://b/a: not found");
        assert_eq!(message("resize", report), report);
        assert_eq!(message(CLAIMER, "ObjectGone: of an older claimer"), "ObjectGone: of an older claimer");
    }

    #[test]
    fn a_container_that_does_not_start_is_seen() {
        let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}});
        let pod = read(json!({"phase": "Pending", "containerStatuses": [container("a", waiting)]}));
        assert!(matches!(pod.stage, Stage::Stuck(Stuck { ref reason, .. }) if reason == "ImagePullBackOff"));
        let creating = json!({"waiting": {"reason": "ContainerCreating"}});
        let pod = read(json!({"phase": "Pending", "containerStatuses": [container("a", creating)]}));
        assert_eq!(pod.stage, Stage::Starting);
    }

    /// A long download and long filters are one attempt.
    #[test]
    fn the_time_of_an_attempt_goes_on_when_the_filters_start() {
        let pod = |state: Value| -> Pod {
            let status = json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]});
            serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
        };
        let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let starting = WorkerPod::read(&pod(json!({"waiting": {"reason": "PodInitializing"}})), None, start);
        assert_eq!((&starting.stage, starting.claiming), (&Stage::Starting, None));
        let fetching = WorkerPod::read(&pod(json!({"running": {}})), Some(&starting), start);
        let working = WorkerPod::read(&pod(ended(0)), Some(&fetching), later);
        assert_eq!((&working.stage, working.since, working.claiming), (&Stage::Working, later, Some(start)));
    }

    #[test]
    fn a_pod_without_a_file_is_told_from_a_file_that_failed() {
        let died = |name: &str, code| {
            read(json!({"phase": "Failed", "initContainerStatuses": [container(name, ended(code))]}))
                .died_without_a_file()
        };
        assert!(died(CLAIMER, 11) && died(CLAIMER, 12) && died(CLAIMER, 137), "no claim was made");
        assert!(died(CLAIMER, 1) && died(CLAIMER, 101), "another program, or a panic");
        assert!(died(CLAIMER, 18) && died(CLAIMER, 19), "its workspace is full, or not its own");
        assert!(!died(CLAIMER, 15), "the object of a claimed file is gone");
        assert!(!died("resize", 12), "a filter's exit code is its own business");
        assert!(
            read(json!({"phase": "Failed", "reason": "OutOfcpu"})).died_without_a_file(),
            "the node did not take it"
        );
    }

    #[test]
    fn only_a_finalizer_holds_a_pod_whose_time_is_over() {
        let held = |metadata: Value| is_held(&serde_json::from_value(metadata).unwrap());
        let (now, finalizers) = ("2026-01-01T00:00:00Z", ["example.com/hold"]);
        let over =
            json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 0, "finalizers": finalizers});
        assert!(held(over));
        let ending =
            json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 30, "finalizers": finalizers});
        assert!(!held(ending), "its containers may still run");
        assert!(!held(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 0})), "it goes at once");
        assert!(!held(json!({"finalizers": finalizers})));
    }

    #[test]
    fn time_goes_on_while_the_same_container_is_stuck() {
        let pod = |reason: &str| -> Pod {
            let waiting = json!({"waiting": {"reason": reason}});
            let status = json!({"phase": "Pending", "containerStatuses": [container("a", waiting)]});
            serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
        };
        let start = Instant::now();
        let first = WorkerPod::read(&pod("ErrImagePull"), None, start);
        let second = WorkerPod::read(&pod("ImagePullBackOff"), Some(&first), start + Duration::from_secs(9));
        assert_eq!(second.since, start);
    }
}
