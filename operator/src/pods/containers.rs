//! The containers of a pod, and which of them are ours. A mesh or another webhook may add containers to a
//! pod: those neither keep a finished pod running nor fail it.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodSpec,
};
use kube::ResourceExt;
use protocol::container::INSTALL;

use crate::names::{CONTAINERS_ANNOTATION, SHIM};

/// The reasons that runtimes give for a container whose process never started: containerd and CRI-O, and
/// Docker.
const NOT_STARTED: [&str; 2] = ["StartError", "ContainerCannotRun"];

/// The containers of one pod.
pub struct Containers<'a> {
    pod: &'a Pod,
    own: Own<'a>,
}

/// Which containers are ours.
enum Own<'a> {
    /// The containers that the pod's annotation names.
    Named(HashSet<&'a str>),
    /// All containers except sidecars, which we never create: for pods of operators older than the
    /// annotation.
    AllBut(HashSet<&'a str>),
}

impl<'a> Containers<'a> {
    /// Determines which containers are ours.
    pub fn of(pod: &'a Pod) -> Self {
        let named = pod.annotations().get(CONTAINERS_ANNOTATION).map(|names| names.split(',').collect());
        let own = named.map_or_else(|| Own::AllBut(sidecars(pod)), Own::Named);
        Self { pod, own }
    }

    /// The statuses of all containers, ours and others, in the order in which they start.
    pub fn all(&self) -> impl Iterator<Item = &'a ContainerStatus> {
        let status = self.pod.status.as_ref();
        let init = status.and_then(|status| status.init_container_statuses.as_deref()).unwrap_or_default();
        let main = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
        init.iter().chain(main)
    }

    /// The statuses of our own containers.
    pub fn own(&self) -> impl Iterator<Item = &'a ContainerStatus> {
        self.all().filter(|container| self.is_own(&container.name))
    }

    /// One of our own containers, by name.
    pub fn named(&self, name: &str) -> Option<&'a ContainerStatus> {
        self.own().find(|container| container.name == name)
    }

    /// Whether the pod processes many files.
    pub fn is_warm(&self) -> bool {
        self.pod.spec.as_ref().is_some_and(is_warm)
    }

    /// Whether all of our main containers are running.
    pub fn all_main_run(&self) -> bool {
        let main = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let own: Vec<_> = main.filter(|container| self.is_own(&container.name)).collect();
        own.iter().all(|container| self.named(&container.name).is_some_and(is_running))
    }

    /// Whether a container is ours.
    pub fn is_own(&self, name: &str) -> bool {
        match &self.own {
            Own::Named(own) => own.contains(name),
            Own::AllBut(sidecars) => !sidecars.contains(name),
        }
    }

    /// Whether the pod has containers that are not ours.
    pub fn has_others(&self) -> bool {
        specified(self.pod).any(|container| !self.is_own(&container.name))
    }

    /// Whether the predicate is true for all of our own containers.
    pub fn all_own(&self, did: impl Fn(&ContainerStatus) -> bool) -> bool {
        let own = specified(self.pod).filter(|container| self.is_own(&container.name)).count();
        own > 0 && self.own().filter(|container| did(container)).count() == own
    }

    /// Whether the memory of a container is limited, by its own limit or by the pod's.
    pub fn has_memory_limit(&self, name: &str) -> bool {
        let limits_memory = |resources: Option<&k8s_openapi::api::core::v1::ResourceRequirements>| {
            resources.and_then(|resources| resources.limits.as_ref()?.get("memory")).is_some()
        };
        let of_the_pod = self.pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
        limits_memory(of_the_pod)
            || specified(self.pod)
                .any(|container| container.name == name && limits_memory(container.resources.as_ref()))
    }

    /// Whether our shim runs the command of a container.
    pub fn is_behind_shim(&self, name: &str) -> bool {
        let program = |container: &'a Container| container.command.as_ref()?.first();
        specified(self.pod)
            .filter(|container| container.name == name)
            .any(|container| program(container).is_some_and(|program| program == SHIM))
    }
}

fn specified(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// A sidecar restarts when it ends, and runs as long as any other container.
fn sidecars(pod: &Pod) -> HashSet<&str> {
    specified(pod)
        .filter(|container| container.restart_policy.as_deref() == Some("Always"))
        .map(|container| container.name.as_str())
        .collect()
}

/// Whether a pod processes many files: such a pod starts with its install container, any other pod with its
/// claimer.
pub fn is_warm(pod: &PodSpec) -> bool {
    pod.init_containers.iter().flatten().next().is_some_and(|first| first.name == INSTALL)
}

/// The annotation of a pod in which exactly these containers are ours.
pub fn annotation<'a>(containers: impl Iterator<Item = &'a Container>) -> String {
    containers.map(|container| container.name.as_str()).collect::<Vec<_>>().join(",")
}

/// How a container ended, if it has ended.
pub fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    container.state.as_ref()?.terminated.as_ref()
}

/// Whether it ended successfully.
pub fn succeeded(container: &ContainerStatus) -> bool {
    terminated(container).is_some_and(|ended| ended.exit_code == 0)
}

/// Whether it is running.
pub fn is_running(container: &ContainerStatus) -> bool {
    container.state.as_ref().is_some_and(|state| state.running.is_some())
}

/// Whether its process was started, even if it has ended since.
pub fn was_started(container: &ContainerStatus) -> bool {
    match container.state.as_ref() {
        Some(ContainerState { terminated: Some(ended), .. }) => !is_start_error(ended.reason.as_deref()),
        Some(ContainerState { running, .. }) => running.is_some(),
        None => false,
    }
}

/// Whether this reason means that the runtime could not start the process.
pub fn is_start_error(reason: Option<&str>) -> bool {
    reason.is_some_and(|reason| NOT_STARTED.contains(&reason))
}
