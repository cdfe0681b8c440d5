//! Runs policies so that a slow one cannot delay the rest: on separate threads, few at a time, never all for
//! one namespace, and with a deadline. The expressions have their own bounds (see `crds::policy`); this is
//! the second line of defence.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crds::policy::{Finding, PolicySet, Subject, Usage};
use crds::v1alpha1::{PolicyAction, PolicyTarget};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::metrics::Metrics;
use crate::review::{Operation, Request};
use crate::world::{KnownNamespace, KnownPipeline};

/// An expression checks the clock in every turn of a loop; this allows for the time between two checks.
const GRACE: Duration = Duration::from_millis(500);

/// Runs policies within limits.
#[derive(Debug)]
pub struct Evaluator {
    slots: Slots,
    limit: Duration,
}

/// The namespace that the work is for; empty for work without one.
type Owner<'a> = &'a str;

/// Concurrent work. One owner gets at most all but one of the slots: an owner that floods the webhook delays
/// only itself, and others find a slot.
#[derive(Debug)]
struct Slots {
    all: Arc<Semaphore>,
    each: usize,
    /// The shares of owners with work in progress.
    shares: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// A slot; dropping it frees it.
struct Slot {
    _of_all: OwnedSemaphorePermit,
    _of_share: OwnedSemaphorePermit,
}

impl Slots {
    fn new(all: usize) -> Self {
        let (all, each) = (all.max(1), all.saturating_sub(1).max(1));
        Self { all: Arc::new(Semaphore::new(all)), each, shares: Mutex::default() }
    }

    /// Waits within the owner's share first, so that few of each owner's requests wait for a slot.
    async fn take(&self, owner: Owner<'_>) -> Result<Slot, Late> {
        let closed = |_closed| Late;
        let of_share = self.share(owner).acquire_owned().await.map_err(closed)?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.map_err(closed)?;
        Ok(Slot { _of_all: of_all, _of_share: of_share })
    }

    fn share(&self, owner: Owner<'_>) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.get(owner).and_then(Weak::upgrade).unwrap_or_else(|| {
            shares.retain(|_, share| share.strong_count() > 0);
            let share = Arc::new(Semaphore::new(self.each));
            shares.insert(owner.to_owned(), Arc::downgrade(&share));
            share
        })
    }
}

/// The policies were not evaluated.
#[derive(Debug, thiserror::Error)]
#[error("the policies could not be evaluated in time; try again")]
pub struct Late;

/// An object, and what its policies may read.
pub(super) struct Question {
    pub(super) target: PolicyTarget,
    pub(super) request: Request,
    pub(super) namespace: Arc<KnownNamespace>,
    pub(super) pipeline: Option<Arc<KnownPipeline>>,
    pub(super) usage: Option<Usage>,
    pub(super) policies: Arc<PolicySet>,
}

impl Evaluator {
    /// At most `slots` concurrent evaluations, each for at most `limit`.
    pub fn new(slots: usize, limit: Duration) -> Self {
        Self { slots: Slots::new(slots), limit }
    }

    /// Runs a compilation.
    pub(super) async fn compile<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Late> {
        self.run("", self.limit, |_until| work()).await
    }

    /// The findings of the policies. A policy that cannot be evaluated in time counts as broken: otherwise a
    /// slow moment would be a way around every policy.
    pub(super) async fn judge(&self, question: Question, metrics: &Metrics) -> Vec<Finding> {
        let labels = &question.namespace.labels;
        if !question.policies.iter().any(|policy| policy.selects(question.target, labels)) {
            return Vec::new();
        }
        let started = Instant::now();
        let owner = question.request.namespace.clone();
        let judged = self.run(&owner, self.limit + GRACE, move |until| question.judge(until)).await;
        metrics.policies_evaluated(started.elapsed());
        judged.unwrap_or_else(|late| {
            vec![Finding {
                policy: "(all)".to_owned(),
                rule: String::new(),
                action: PolicyAction::Deny,
                field: None,
                message: late.to_string(),
            }]
        })
    }

    /// Runs work in a slot. The slot is freed when the work ends, not when the waiting does: work that hangs
    /// must not let more in.
    ///
    /// Waiting for a slot does not use up the time of the work: otherwise, under load, policies would be
    /// called broken without being evaluated. The wait counts towards the time of the whole answer, and a
    /// caller that waits too long is told to try again.
    async fn run<T: Send + 'static>(
        &self,
        owner: Owner<'_>,
        limit: Duration,
        work: impl FnOnce(Instant) -> T + Send + 'static,
    ) -> Result<T, Late> {
        let slot = self.slots.take(owner).await?;
        let until = Instant::now() + self.limit;
        let work = move || {
            let done = work(until);
            drop(slot);
            done
        };
        // A panic ends here, and counts as an answer like any other.
        match timeout(limit, tokio::task::spawn_blocking(work)).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_panic)) => Err(Late),
            Err(_elapsed) => Err(Late),
        }
    }
}

impl Question {
    fn judge(self, until: Instant) -> Vec<Finding> {
        let Self { target, request, namespace, pipeline, usage, policies } = &self;
        let subject = Subject {
            target: *target,
            object: &request.object,
            old_object: (request.operation == Operation::Update).then_some(&request.old_object),
            request: Some(&request.about),
            namespace: Some(&namespace.json),
            pipeline: pipeline.as_deref().map(|pipeline| &pipeline.json),
            usage: *usage,
        };
        policies.judge(&subject, &namespace.labels, until)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test(flavor = "multi_thread")]
    async fn work_that_hangs_is_given_up_and_keeps_its_slot() {
        let evaluator = Evaluator::new(1, Duration::from_millis(50));
        let (release, wait) = mpsc::channel::<()>();
        assert!(evaluator.run("a", Duration::from_millis(50), move |_| wait.recv()).await.is_err());
        // The slot is still taken, so others wait.
        let other = evaluator.run("b", LONG, |_| 1);
        assert!(timeout(Duration::from_millis(200), other).await.is_err());
        release.send(()).unwrap();
        assert_eq!(evaluator.run("b", LONG, |_| 1).await.ok(), Some(1));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn waiting_for_a_slot_uses_up_no_time_of_the_work() {
        let evaluator = Evaluator::new(1, LONG);
        let (release, wait) = mpsc::channel::<()>();
        let slow = evaluator.run("a", LONG, move |_| wait.recv());
        let next = evaluator.run("b", LONG, |until| until);
        let released = async {
            let now = Instant::now();
            release.send(()).unwrap();
            now
        };
        // In this order: when the first is released, it has the slot and the second waits for it.
        let (_, until, released) = tokio::join!(biased; slow, next, released);
        assert!(until.unwrap() >= released + LONG);
    }

    /// Slow or hostile expressions must not stall the admission of others.
    #[tokio::test(flavor = "multi_thread")]
    async fn who_fills_all_slots_of_a_namespace_holds_up_that_namespace_only() {
        let evaluator = Arc::new(Evaluator::new(2, LONG));
        let (begun, mut first) = tokio::sync::mpsc::unbounded_channel();
        let (releases, flood): (Vec<_>, Vec<_>) = (0..5)
            .map(|_| {
                let ((release, wait), begun) = (mpsc::channel::<()>(), begun.clone());
                let evaluator = Arc::clone(&evaluator);
                let work = move |_| (begun.send(()), wait.recv()).0;
                (release, tokio::spawn(async move { evaluator.run("slow", LONG, work).await.is_ok() }))
            })
            .unzip();
        first.recv().await.unwrap();
        for _ in 0..5 {
            assert_eq!(evaluator.run("polite", LONG, |_| 1).await.ok(), Some(1));
        }
        assert!(first.try_recv().is_err(), "one of the two slots is the most that one namespace has");
        drop(releases);
        for hostile in flood {
            assert!(hostile.await.unwrap());
        }
        evaluator.run("polite", LONG, |_| 1).await.unwrap();
        assert!(evaluator.slots.shares.lock().unwrap().len() <= 1, "nothing is kept of who is done");
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let evaluator = Evaluator::new(1, LONG);
        assert!(evaluator.run("a", LONG, |_| panic!("as a test")).await.is_err());
        assert_eq!(evaluator.run("a", LONG, |_| 1).await.ok(), Some(1));
    }
}
