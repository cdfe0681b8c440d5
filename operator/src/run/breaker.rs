//! Slows a run down while one of its dependencies fails. Pure: no I/O and no clock.
//!
//! Three disruptions of one dependency in a row, without a success of that operation in between, open its
//! breaker: pods that end are not replaced, one pod at a time probes the dependency, and the run reports what
//! is broken. The first success closes the breaker. Disruptions of pods and nodes open no breaker: thirty
//! drained pods must not throttle a healthy run.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use strum::VariantArray;

use super::dependency::{Dependency, Operation};
use super::verdict::{Cause, Judgement, Known};
use crate::error::Obstacle;
use crate::pods::{Milestone, WorkerPod};

/// Disruptions in a row that open a breaker: one or two happen to every network.
const OPENS_AFTER: u32 = 3;
/// The wait before the first probe.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait before a probe: a run is back at full parallelism a few seconds after its storage
/// recovers.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How long the text of an error is kept. Each probe fails with another file: if the message changed with
/// each, every run would write its status once per probe.
const MESSAGE_KEPT: Duration = Duration::from_secs(30);

/// The breakers of one run.
#[derive(Debug, Default)]
pub struct Breakers {
    breakers: BTreeMap<Dependency, Breaker>,
}

/// How many pods may be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// As many as the run wants.
    Full,
    /// One, as a probe.
    One,
    /// None until this time has passed.
    Wait(Duration),
    /// None: the existing pods are probes, and the watch shows how they end.
    UnderWay,
}

impl Probe {
    /// How many of the pods that the run wants may be created.
    pub fn cap(self, wanted: u64) -> u64 {
        match self {
            Self::Full => wanted,
            Self::One => wanted.min(1),
            Self::Wait(_) | Self::UnderWay => 0,
        }
    }

    /// When to decide again, if nothing happens before.
    pub fn wake(self) -> Option<Duration> {
        match self {
            Self::Wait(left) => Some(left),
            Self::Full | Self::One | Self::UnderWay => None,
        }
    }
}

#[derive(Debug, Default)]
struct Breaker {
    /// Disruptions since the last success.
    disruptions: u32,
    last_disruption: Option<Instant>,
    last_success: Option<Instant>,
    /// How many containers the pod that last failed had started.
    failed_after: usize,
    /// The last error, or a slightly older one.
    message: Option<(String, Instant)>,
    open: Option<Open>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    wait: Duration,
    next_probe: Instant,
}

impl Breakers {
    /// Notes what pods show: a finished fetch or publication, and containers that have started. Call it with
    /// all pods of a pass, including those that are gone, before they are judged.
    pub fn observe<'a>(&mut self, pods: impl IntoIterator<Item = &'a WorkerPod>) {
        let (mut image, mut container, mut fetched, mut published) = (None, None, None, None);
        for pod in pods {
            let at = |step: Option<Milestone>| step.filter(|step| step.witnessed).map(|step| step.at);
            image = image.max(at(self.went_further(Dependency::Image, pod)));
            container = container.max(at(self.went_further(Dependency::Container, pod)));
            fetched = fetched.max(at(pod.fetched));
            published = published.max(at(pod.published));
        }
        for (dependency, started) in [(Dependency::Image, image), (Dependency::Container, container)] {
            if let Some(at) = started {
                self.succeeded(dependency, at);
            }
        }
        if let Some(at) = fetched {
            self.operation_succeeded(Operation::Fetch, at);
            self.succeeded(Dependency::Workspace, at);
        }
        if let Some(at) = published {
            self.operation_succeeded(Operation::Publish, at);
        }
    }

    /// The last container start of a pod that started more containers than the pod that failed: the container
    /// that failed there works.
    fn went_further(&self, dependency: Dependency, pod: &WorkerPod) -> Option<Milestone> {
        let failed_after = self.breakers.get(&dependency).map_or(0, |breaker| breaker.failed_after);
        pod.started.filter(|started| started.containers > failed_after).map(|started| started.last)
    }

    /// Notes what a judgement shows about a dependency. An object that fails while another one can be reached
    /// is no outage.
    pub fn judged(&mut self, judgement: &Judgement) {
        if judgement.cause == Cause::Success {
            // All commands could be executed, including the last one: no pod gets further than that.
            self.succeeded(Dependency::Container, judgement.at);
        }
        let Some(dependency) = judgement.dependency() else { return };
        match dependency.operation() {
            Some(operation) if judgement.canary == Some(true) => {
                self.operation_succeeded(operation, judgement.at);
            }
            _ => {
                let reason = judgement.failure().map(queue::Failure::reason).unwrap_or_default();
                self.disrupted(dependency, judgement.at, reason);
                self.breakers.entry(dependency).or_default().failed_after = judgement.started;
            }
        }
    }

    /// Notes a disruption, at a time of our own clock.
    pub fn disrupted(&mut self, dependency: Dependency, at: Instant, message: &str) {
        self.breakers.entry(dependency).or_default().disrupted(at, message);
    }

    /// Notes a success, at a time of our own clock. It closes the breaker, unless a disruption came after it.
    pub fn succeeded(&mut self, dependency: Dependency, at: Instant) {
        self.breakers.entry(dependency).or_default().succeeded(at);
    }

    fn operation_succeeded(&mut self, operation: Operation, at: Instant) {
        self.succeeded(Dependency::storage(operation), at);
        self.succeeded(Dependency::credentials(operation), at);
    }

    /// Notes that a file was fetched at this time or later, and that filters were started with it.
    pub fn file_fetched(&mut self, at: Instant) {
        self.operation_succeeded(Operation::Fetch, at);
        self.succeeded(Dependency::Workspace, at);
        self.succeeded(Dependency::Image, at);
        self.succeeded(Dependency::Container, at);
    }

    /// When a storage last refused our keys; `None` if none refuses them now.
    pub fn keys_refused(&self) -> Option<Instant> {
        let of_keys = [Dependency::SourceCredentials, Dependency::SinkCredentials];
        let breakers = of_keys.iter().filter_map(|dependency| self.breakers.get(dependency));
        breakers.filter(|breaker| breaker.open.is_some()).filter_map(|breaker| breaker.last_disruption).max()
    }

    /// Notes that the results of a file were published.
    pub fn results_published(&mut self, at: Instant) {
        self.operation_succeeded(Operation::Publish, at);
    }

    /// How long to wait before the next attempt after a failure; `None` if nothing fails.
    pub fn next_try(&self, now: Instant) -> Option<Duration> {
        let slows = self.open_now().filter(|(dependency, _)| dependency.label().is_some());
        slows.map(|(_, open)| open.next_probe.saturating_duration_since(now)).max()
    }

    /// When operations last succeeded, for verdicts.
    pub fn known(&self) -> Known {
        let last = |operation| self.breakers.get(&Dependency::storage(operation))?.last_success;
        Known { last_fetch: last(Operation::Fetch), last_publish: last(Operation::Publish) }
    }

    /// How many pods may be created, given the living pods, and the number that were created and not seen
    /// yet.
    pub fn probe<'a>(
        &self,
        now: Instant,
        alive: impl IntoIterator<Item = &'a WorkerPod>,
        unseen: u64,
    ) -> Probe {
        let mut open: Vec<(Dependency, Open)> = self.open_now().collect();
        open.retain(|(dependency, _)| dependency.label().is_some());
        let Some(next) = open.iter().map(|(_, open)| open.next_probe).max() else { return Probe::Full };
        let is_probe = |pod: &WorkerPod| open.iter().any(|(dependency, _)| self.may_show(*dependency, pod));
        if unseen > 0 || alive.into_iter().any(is_probe) {
            return Probe::UnderWay;
        }
        match next.checked_duration_since(now).filter(|left| !left.is_zero()) {
            Some(left) => Probe::Wait(left),
            None => Probe::One,
        }
    }

    /// Whether a living pod has yet to show whether a dependency works.
    fn may_show(&self, dependency: Dependency, pod: &WorkerPod) -> bool {
        match dependency {
            Dependency::SourceCredentials | Dependency::Source | Dependency::Workspace => {
                pod.fetched.is_none()
            }
            Dependency::SinkCredentials | Dependency::Sink => pod.published.is_none(),
            Dependency::Image | Dependency::Container => self.went_further(dependency, pod).is_none(),
        }
    }

    /// The labels of open breakers, each with the time of its next probe, for metrics.
    pub fn next_probes(&self) -> impl Iterator<Item = (&'static str, Instant)> {
        self.open_now().filter_map(|(dependency, open)| Some((dependency.label()?, open.next_probe)))
    }

    /// The problem that the run waits for, if a breaker is open.
    pub fn obstacle(&self) -> Option<Obstacle> {
        let open = self.breakers.iter().filter(|(_, breaker)| breaker.open.is_some());
        // The latest failure is the current one: keys that were refused before an outage may be accepted
        // again.
        let (dependency, breaker) =
            open.max_by_key(|(dependency, breaker)| (breaker.last_disruption, Reverse(*dependency)))?;
        let error = breaker.message.as_ref().map_or("", |(message, _)| message.as_str());
        let problem = dependency.problem();
        let charge = match dependency.operation() {
            Some(Operation::Fetch) if breaker.last_success.is_none() => {
                "this operator has not seen a file fetched yet, so nothing shows that a file is at fault, and none is charged"
            }
            Some(Operation::Publish) if breaker.last_success.is_none() => {
                "this operator has not seen a result published yet, so nothing shows that a file is at fault, and none is charged"
            }
            Some(_) => "no file is charged",
            None => "files go back to the queue, and a file that never progresses is eventually charged",
        };
        let next = match dependency.label() {
            Some(_) => {
                "one pod at a time tries again every few seconds, and the run continues as soon as one succeeds"
            }
            None => "they are tried again on other nodes, or when there is room",
        };
        Some(dependency.reason().because(format!("{problem}: {error}; {charge}; {next}")))
    }

    /// Whether nothing shows yet whether source and sink are available: neither has an operation succeeded,
    /// nor have enough failed.
    pub fn know_nothing_of_storage(&self) -> bool {
        [Dependency::Source, Dependency::Sink].iter().all(|storage| {
            let breaker = self.breakers.get(storage);
            breaker.is_none_or(|breaker| breaker.open.is_none() && breaker.last_success.is_none())
        })
    }

    fn open_now(&self) -> impl Iterator<Item = (Dependency, Open)> {
        Dependency::VARIANTS
            .iter()
            .filter_map(|dependency| Some((*dependency, self.breakers.get(dependency)?.open?)))
    }
}

impl Breaker {
    fn disrupted(&mut self, at: Instant, message: &str) {
        // Times on the clock decide, not the order in which a pass happens to see events.
        if self.last_success.is_some_and(|success| at < success) {
            return;
        }
        self.disruptions = self.disruptions.saturating_add(1);
        self.last_disruption = self.last_disruption.max(Some(at));
        if self.message.as_ref().is_none_or(|(_, since)| at.saturating_duration_since(*since) >= MESSAGE_KEPT)
        {
            self.message = Some((message.to_owned(), at));
        }
        self.open = match self.open {
            None if self.disruptions < OPENS_AFTER => None,
            None => Some(Open { wait: FIRST_WAIT, next_probe: at + FIRST_WAIT }),
            // The pod was created before the breaker opened: any number of failures during the wait count as
            // one.
            Some(open) if at < open.next_probe => Some(open),
            Some(open) => {
                let wait = open.wait.saturating_mul(2).min(LONGEST_WAIT);
                Some(Open { wait, next_probe: at + wait })
            }
        };
    }

    fn succeeded(&mut self, at: Instant) {
        self.last_success = self.last_success.max(Some(at));
        if self.last_disruption.is_none_or(|disruption| disruption <= at) {
            self.disruptions = 0;
            self.message = None;
            self.open = None;
        }
    }
}

#[cfg(test)]
mod tests;
