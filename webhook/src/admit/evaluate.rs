//! Runs policies so that a slow one cannot hold up the rest: on threads of their own, few at a time, and with a
//! deadline. The expressions are bounded by themselves (see `crds::policy`); this is the second line.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::policy::{Finding, PolicySet, Subject, Usage};
use crds::v1alpha1::{PolicyAction, PolicyTarget};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::metrics::Metrics;
use crate::review::{Operation, Request};
use crate::world::{KnownNamespace, KnownPipeline};

/// An expression looks at the clock at every turn of a loop; this is for what happens between two looks.
const GRACE: Duration = Duration::from_millis(500);

/// Runs policies within limits.
#[derive(Debug)]
pub struct Evaluator {
    slots: Arc<Semaphore>,
    limit: Duration,
}

/// Policies were not evaluated.
#[derive(Debug, thiserror::Error)]
#[error("the policies could not be evaluated in time; try again")]
pub struct Late;

/// An object and what its policies may look at.
pub(super) struct Question {
    pub(super) target: PolicyTarget,
    pub(super) request: Request,
    pub(super) namespace: Arc<KnownNamespace>,
    pub(super) pipeline: Option<Arc<KnownPipeline>>,
    pub(super) usage: Option<Usage>,
    pub(super) policies: Arc<PolicySet>,
}

impl Evaluator {
    /// At most `slots` evaluations at once, each for at most `limit`.
    pub fn new(slots: usize, limit: Duration) -> Self {
        Self { slots: Arc::new(Semaphore::new(slots.max(1))), limit }
    }

    /// Compiles something.
    pub(super) async fn compile<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Late> {
        self.run(self.limit, |_until| work()).await
    }

    /// What breaks a policy. What cannot be evaluated in time breaks it too: otherwise a slow moment would be a way
    /// around every policy.
    pub(super) async fn judge(&self, question: Question, metrics: &Metrics) -> Vec<Finding> {
        let labels = &question.namespace.labels;
        if !question.policies.iter().any(|policy| policy.selects(question.target, labels)) {
            return Vec::new();
        }
        let started = Instant::now();
        let judged = self.run(self.limit + GRACE, move |until| question.judge(until)).await;
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

    /// The slot is given back when the work ends, not when the waiting does: work that hangs must not let more in.
    ///
    /// Waiting for a slot does not use up the time of the work: under load the policies would be called broken although
    /// nobody had looked at them. It counts against the time of the whole answer, and who waits too long is told to come
    /// back.
    async fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(Instant) -> T + Send + 'static,
    ) -> Result<T, Late> {
        let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(|_closed| Late)?;
        let until = Instant::now() + self.limit;
        let work = move || {
            let done = work(until);
            drop(slot);
            done
        };
        // A panic ends here, and is an answer like any other.
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
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn work_that_hangs_is_given_up_and_keeps_its_slot() {
        let evaluator = Evaluator::new(1, Duration::from_millis(50));
        let (release, wait) = std::sync::mpsc::channel::<()>();
        assert!(evaluator.run(Duration::from_millis(50), move |_| wait.recv()).await.is_err());
        // Its slot is still taken: others wait.
        let other = evaluator.run(Duration::from_millis(50), |_| 1);
        assert!(timeout(Duration::from_millis(200), other).await.is_err());
        release.send(()).unwrap();
        assert_eq!(evaluator.run(Duration::from_secs(5), |_| 1).await.ok(), Some(1));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn waiting_for_a_slot_uses_up_no_time_of_the_work() {
        let evaluator = Evaluator::new(1, Duration::from_secs(10));
        let slow = evaluator.run(Duration::from_secs(10), |_| std::thread::sleep(Duration::from_secs(2)));
        let next = evaluator.run(Duration::from_secs(10), |until| until.duration_since(Instant::now()));
        let (_, left) = tokio::join!(slow, next);
        assert!(left.unwrap() > Duration::from_millis(8_200));
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let evaluator = Evaluator::new(1, Duration::from_secs(1));
        assert!(evaluator.run(Duration::from_secs(1), |_| panic!("as a test")).await.is_err());
        assert_eq!(evaluator.run(Duration::from_secs(1), |_| 1).await.ok(), Some(1));
    }
}
