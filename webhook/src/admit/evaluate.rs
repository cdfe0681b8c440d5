//! Runs policies so that a slow one cannot hold up the rest: on threads of their own, few at a time, and with a
//! deadline. The expressions are bounded by themselves (see `crds::policy`); this is the second line.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::policy::{Finding, PolicySet, Subject};
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
        self.run(self.limit, work).await
    }

    /// What breaks a policy. What cannot be evaluated in time breaks it too: otherwise a slow moment would be a way
    /// around every policy.
    pub(super) async fn judge(&self, question: Question, metrics: &Metrics) -> Vec<Finding> {
        let labels = &question.namespace.labels;
        if !question.policies.iter().any(|policy| policy.selects(question.target, labels)) {
            return Vec::new();
        }
        let (until, started) = (Instant::now() + self.limit, Instant::now());
        let judged = self.run(self.limit + GRACE, move || question.judge(until)).await;
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
    async fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Late> {
        let slots = Arc::clone(&self.slots);
        let run = async move {
            let slot = slots.acquire_owned().await.map_err(|_closed| Late)?;
            let work = move || {
                let done = work();
                drop(slot);
                done
            };
            // A panic ends here, and is an answer like any other.
            tokio::task::spawn_blocking(work).await.map_err(|_panic| Late)
        };
        timeout(limit, run).await.unwrap_or(Err(Late))
    }
}

impl Question {
    fn judge(self, until: Instant) -> Vec<Finding> {
        let Self { target, request, namespace, pipeline, policies } = &self;
        let subject = Subject {
            target: *target,
            object: &request.object,
            old_object: (request.operation == Operation::Update).then_some(&request.old_object),
            request: Some(&request.about),
            namespace: Some(&namespace.json),
            pipeline: pipeline.as_deref().map(|pipeline| &pipeline.json),
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
        assert!(evaluator.run(Duration::from_millis(50), move || wait.recv()).await.is_err());
        // Its slot is still taken: others wait, and are told.
        assert!(evaluator.run(Duration::from_millis(50), || 1).await.is_err());
        release.send(()).unwrap();
        assert_eq!(evaluator.run(Duration::from_secs(5), || 1).await.ok(), Some(1));
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let evaluator = Evaluator::new(1, Duration::from_secs(1));
        assert!(evaluator.run(Duration::from_secs(1), || panic!("as a test")).await.is_err());
        assert_eq!(evaluator.run(Duration::from_secs(1), || 1).await.ok(), Some(1));
    }
}
