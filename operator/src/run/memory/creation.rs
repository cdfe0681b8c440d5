//! The creation of pods: which ones the watch has not shown yet, and whether more may be requested.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Backoff;
use crate::error::{Obstacle, Reason};
use crate::pods::WorkerPod;

/// A pod that the watch has not shown after this long is searched for in a list: either it was not created
/// after all, or the watch is stuck.
const SHOWN_WITHIN: Duration = Duration::from_secs(60);
/// The same for a pod whose creation the API server answered with an error: only the watch may still be
/// slightly late.
const SHOWN_AFTER_ERROR_WITHIN: Duration = Duration::from_secs(5);

/// The state of creating a run's pods.
#[derive(Default)]
pub struct Creation {
    /// Pods that were requested and that the watch has not shown yet, and when to search for them in a list.
    in_flight: HashMap<String, Instant>,
    backoff: Backoff,
    /// Why pods are refused or die, if they do.
    problem: Option<Obstacle>,
}

impl Creation {
    /// Notes that a pod is about to be requested.
    pub fn requested(&mut self, pod: &str, now: Instant) {
        self.in_flight.insert(pod.to_owned(), now + SHOWN_WITHIN);
    }

    /// Notes that the API server answered with an error, so the pod may or may not exist.
    pub fn perhaps_created(&mut self, pod: &str, now: Instant) {
        self.in_flight.insert(pod.to_owned(), now + SHOWN_AFTER_ERROR_WITHIN);
    }

    /// Notes that the pod does not exist: it was refused, or is gone.
    pub fn forget(&mut self, pod: &str) {
        self.in_flight.remove(pod);
    }

    /// The number of pods that were requested and that the watch has neither shown nor removed. Without them,
    /// a slow watch would let us create too many. They count until a list shows that they do not exist.
    pub fn in_flight(&mut self, shown: &[Arc<WorkerPod>], gone: &BTreeMap<String, Arc<WorkerPod>>) -> u64 {
        if !self.in_flight.is_empty() {
            for pod in shown {
                self.in_flight.remove(&pod.name);
            }
            self.in_flight.retain(|pod, _| !gone.contains_key(pod));
        }
        self.in_flight.len() as u64
    }

    /// Whether it is time to search for pods in a list.
    pub fn is_to_be_verified(&self, now: Instant) -> bool {
        self.in_flight.values().any(|until| *until <= now)
    }

    /// Takes the pods in a list that was requested at this time. Pods that were requested earlier and are not
    /// in the list do not exist; the watch will show the others.
    pub fn verified(&mut self, listed: &HashSet<String>, now: Instant) {
        self.in_flight.retain(|pod, until| *until > now || listed.contains(pod));
        for until in self.in_flight.values_mut().filter(|until| **until <= now) {
            *until = now + SHOWN_WITHIN;
        }
    }

    /// When to search for the first of them.
    pub fn in_flight_expires(&self, now: Instant) -> Option<Duration> {
        self.in_flight.values().min().map(|until| until.saturating_duration_since(now))
    }

    /// How much longer creation waits; `None` if it does not.
    pub fn waits(&self, now: Instant) -> Option<Duration> {
        self.backoff.left(now)
    }

    /// Why pods are refused or die, if they do.
    pub fn problem(&self) -> Option<&Obstacle> {
        self.problem.as_ref()
    }

    /// How many of the wanted pods to request first. While there is a problem, it is one, and each batch that
    /// is accepted doubles the next. So repeated refusals cost little, no matter how many files wait for room
    /// in a quota.
    pub fn first_batch(&self, wanted: usize) -> usize {
        if self.problem.is_some() { 1 } else { wanted }
    }

    /// Notes that the API server refused a pod, and will refuse the next one too.
    pub fn refused(&mut self, why: Obstacle, now: Instant) {
        self.backoff.failed(now);
        self.problem = Some(why);
    }

    /// Notes that the API server answered with an error that may be transient.
    pub fn failed(&mut self, why: Obstacle) {
        self.problem = Some(why);
    }

    /// Notes that some pods were created: a quota that refuses only some of them works as intended.
    pub fn some_created(&mut self) {
        // Pods that die without a file were created too, so a successful creation shows nothing about them.
        if !self.is_about(Reason::WorkersFailing) {
            self.backoff.reset();
        }
    }

    /// Notes that no pod was refused.
    pub fn all_created(&mut self) {
        if !self.is_about(Reason::WorkersFailing) {
            self.problem = None;
        }
    }

    /// Notes that pods ended, so a quota has room for others.
    pub fn room_was_freed(&mut self) {
        if self.is_about(Reason::QuotaExceeded) {
            self.backoff.reset();
        }
    }

    /// Notes that worker pods died before they had a file. Pods that die during the wait were created before
    /// it, so a series of deaths counts as one failure.
    pub fn workers_died(&mut self, said: &str, now: Instant) {
        if self.backoff.left(now).is_none() {
            self.backoff.failed(now);
        }
        let message = format!("worker pods end before they claim a file: {said}");
        self.problem = Some(Reason::WorkersFailing.because(message));
    }

    /// Notes that workers claim files, which shows that the cause of the deaths is fixed.
    pub fn workers_claim(&mut self, now: Instant) {
        if self.is_about(Reason::WorkersFailing) && self.backoff.left(now).is_none() {
            self.problem = None;
            self.backoff.reset();
        }
    }

    fn is_about(&self, reason: Reason) -> bool {
        self.problem.as_ref().is_some_and(|problem| problem.reason == reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Stage;

    fn pod(name: &str, now: Instant) -> Arc<WorkerPod> {
        Arc::new(WorkerPod::in_stage(name, Stage::Claiming, now))
    }

    #[test]
    fn a_pod_counts_from_its_creation_and_only_once() {
        let (mut creation, now) = (Creation::default(), Instant::now());
        let mut gone = BTreeMap::new();
        creation.requested("a", now);
        creation.requested("b", now);
        assert_eq!(creation.in_flight(&[], &gone), 2, "the watch has shown none");
        assert_eq!(creation.in_flight(&[pod("a", now)], &gone), 1);
        gone.insert("b".into(), pod("b", now));
        assert_eq!(creation.in_flight(&[], &gone), 0, "b existed and is gone");
    }

    /// A half-open watch shows nothing for a minute, while pods are still created.
    #[test]
    fn a_pod_counts_until_a_list_shows_that_it_does_not_exist() {
        let (mut creation, now, none) = (Creation::default(), Instant::now(), BTreeMap::new());
        creation.requested("lost", now);
        creation.requested("unseen", now);
        let later = now + SHOWN_WITHIN;
        assert!(!creation.is_to_be_verified(now) && creation.is_to_be_verified(later));
        assert_eq!(creation.in_flight(&[], &none), 2, "time alone proves nothing");
        creation.requested("new", later);
        creation.verified(&HashSet::from(["unseen".to_owned()]), later);
        assert_eq!(creation.in_flight(&[], &none), 2, "unseen exists, and new is younger than the list");
        assert!(!creation.is_to_be_verified(later));
    }

    /// A burst of errors must not stop creation for a minute.
    #[test]
    fn a_creation_that_was_answered_with_an_error_counts_for_a_moment_only() {
        let (mut creation, now, none) = (Creation::default(), Instant::now(), BTreeMap::new());
        creation.requested("unanswered", now);
        creation.requested("failed", now);
        creation.perhaps_created("failed", now);
        assert_eq!(creation.in_flight(&[], &none), 2);
        assert_eq!(
            creation.in_flight_expires(now),
            Some(SHOWN_AFTER_ERROR_WITHIN),
            "nothing else would wake the run"
        );
        let later = now + SHOWN_AFTER_ERROR_WITHIN;
        assert!(creation.is_to_be_verified(later));
        creation.verified(&HashSet::new(), later);
        assert_eq!(creation.in_flight(&[], &none), 1);
    }

    /// The pods of one lost node die one pass after another.
    #[test]
    fn pods_that_die_during_the_wait_do_not_prolong_it() {
        let (mut creation, now) = (Creation::default(), Instant::now());
        for _ in 0..7 {
            creation.workers_died("NodeLost", now);
        }
        assert_eq!(creation.waits(now), Some(Duration::from_secs(1)));
        assert_eq!(creation.problem().map(|problem| problem.reason), Some(Reason::WorkersFailing));
    }

    #[test]
    fn only_workers_that_claim_files_clear_the_problem_of_workers_that_die() {
        let (mut creation, now) = (Creation::default(), Instant::now());
        creation.workers_died("BadSettings", now);
        creation.some_created();
        creation.all_created();
        creation.workers_claim(now);
        assert!(creation.problem().is_some() && creation.waits(now).is_some(), "the wait is not over");
        creation.workers_claim(now + Duration::from_secs(1));
        assert!(creation.problem().is_none());
    }

    #[test]
    fn a_refusal_is_forgotten_once_all_pods_are_created() {
        let (mut creation, now) = (Creation::default(), Instant::now());
        creation.refused(Reason::QuotaExceeded.because("exceeded quota"), now);
        assert_eq!(creation.first_batch(16), 1);
        creation.room_was_freed();
        assert!(creation.waits(now).is_none(), "a pod has ended");
        creation.all_created();
        assert_eq!((creation.first_batch(16), creation.problem()), (16, None));
    }
}
