//! One pass over a run: it reads the current state, decides, acts, and writes the status once. Each step has
//! its own file, as methods of [`Pass`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::v1alpha1::PipelineRun;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use protocol::RunId;
use queue::{Owner, RunQueue, Stats};

use super::RESYNC;
use super::build::snapshot::Snapshot;
use super::limits::Limits;
use super::memory::Memory;
use super::setup::OpenedQueue;
use super::status::{self, Report};
use crate::context::Context;
use crate::error::{Error, MORE_MEMORY, Obstacle, Reason, chain, is_refusal};
use crate::world::{Uid, View};

/// An API error that persists for this many passes is reported, not treated as transient: an admission
/// webhook may be down, for example.
const PERSISTENT: u32 = 4;
/// How many dead letters to read per request: a reply stays below a megabyte or two.
const DEAD_LETTERS_PAGE: usize = 1_000;

/// When the next pass is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// When something happens, or after this long.
    Within(Duration),
    /// Not before something happens.
    Done,
}

/// Why a pass ended early.
pub enum Stop {
    /// Something blocks the run.
    Obstacle(Obstacle),
    /// The pass failed.
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<queue::Error> for Stop {
    fn from(error: queue::Error) -> Self {
        Self::Error(error.into())
    }
}

impl From<Obstacle> for Stop {
    fn from(obstacle: Obstacle) -> Self {
        Self::Obstacle(obstacle)
    }
}

/// A pass, with everything that its steps share.
pub struct Pass<'a> {
    /// The operator.
    pub ctx: &'a Arc<Context>,
    /// The UID of the run.
    pub uid: &'a Uid,
    /// The state of the run that the watches have shown.
    pub view: &'a View,
    /// The run itself.
    pub run: &'a PipelineRun,
    /// The memory of earlier passes.
    pub memory: &'a mut Memory,
    /// The report of this pass.
    pub report: Report,
    /// When the pass began, by our own clock.
    pub now: Instant,
}

/// A run that is ready for listing and processing.
pub struct Prepared {
    /// The run's id.
    pub run_id: RunId,
    /// The run's limits.
    pub limits: Limits,
    /// The run's Pipeline.
    pub snapshot: Arc<Snapshot>,
    /// The run's queue, which is open.
    pub queue: RunQueue,
}

impl<'a> Pass<'a> {
    /// Begins a pass now.
    pub fn new(ctx: &'a Arc<Context>, uid: &'a Uid, view: &'a View, memory: &'a mut Memory) -> Self {
        Self { ctx, uid, view, run: &view.run, memory, report: Report::default(), now: Instant::now() }
    }

    /// Runs the pass. The status reports obstacles; only a failure that cannot be reported there is an error.
    pub async fn run(mut self) -> Result<Next, Error> {
        if self.run.metadata.deletion_timestamp.is_some() {
            return self.finalize().await;
        }
        if status::is_finished(self.run) {
            return self.tidy_up_after_the_end().await;
        }
        self.ensure_finalizer().await?;
        self.recall_obstacle();
        if self.run.status.is_none() && self.memory.published.is_none() {
            // No conditions at all would read as "done".
            self.publish().await?;
        }
        let advanced = self.advance().await;
        let next = self.report_what_stopped(advanced);
        let publish_again = self.publish().await?;
        Ok(match (next?, publish_again) {
            (Next::Within(wait), Some(sooner)) => Next::Within(wait.min(sooner)),
            // Another operator's status blocked the last write.
            (Next::Done, Some(again)) => Next::Within(again),
            (next, None) => next,
        })
    }

    /// Takes the run as far as possible now.
    async fn advance(&mut self) -> Result<Next, Stop> {
        let run_id = self.run_id()?;
        self.memory.run_id = Some(run_id.clone());
        let limits = self.check_spec()?;
        // Open the queue before loading the Pipeline: a run that was executed before needs no Pipeline.
        let queue = match self.open_queue(&run_id).await? {
            OpenedQueue::Open(queue) => *queue,
            OpenedQueue::Finished(finished) => return self.finish(&run_id, &finished).await,
        };
        let snapshot = self.load_snapshot(&run_id).await?;
        let prepared = Prepared { run_id, limits, snapshot, queue };
        self.restore_access(&prepared).await?;
        self.report.start_time = Some(Time(Timestamp::now()));
        if let Some(next) = self.list(&prepared).await? {
            return Ok(next);
        }
        self.process(&prepared).await
    }

    /// Lets a new operator start with the obstacle that the status shows, so that it is reported only once.
    fn recall_obstacle(&mut self) {
        if self.memory.published.is_none() && self.memory.obstacle.is_none() {
            self.memory.obstacle = status::obstacle(self.run);
            let shown = self.memory.obstacle.clone();
            self.memory.outage_before = shown.filter(|shown| shown.reason == Reason::StorageUnavailable);
        }
    }

    fn report_what_stopped(&mut self, advanced: Result<Next, Stop>) -> Result<Next, Error> {
        match advanced {
            Ok(next) => Ok(next),
            Err(Stop::Obstacle(obstacle)) => {
                self.report.obstacle = Some(obstacle);
                Ok(Next::Within(RESYNC))
            }
            Err(Stop::Error(error)) => {
                match error {
                    Error::Queue(queue::Error::Lost { .. }) => self.memory.queue_lost(Instant::now()),
                    Error::Queue(queue::Error::Closed { .. }) => self.memory.forget_queue(),
                    _ => {}
                }
                self.report.obstacle = obstacle_after(&error, self.memory);
                Err(error)
            }
        }
    }

    /// Reports the files that failed permanently, for the status: the newest, and all of them in groups. The
    /// dead letters that were written since are read whenever more files have failed; a new operator reads
    /// all.
    pub async fn report_failures(&mut self, queue: &RunQueue, failed: u64) -> Result<(), Stop> {
        if self.memory.failures.are_outdated(failed) {
            loop {
                let after = self.memory.failures.last_read(failed);
                let letters = queue.dead_letters(after.as_ref(), DEAD_LETTERS_PAGE).await?;
                let is_last = letters.len() < DEAD_LETTERS_PAGE;
                self.memory.failures.read(letters);
                if is_last {
                    break;
                }
            }
            self.memory.failures.all_read(failed);
        }
        self.report.recent_failures = self.memory.failures.newest();
        self.report.failures = self.memory.failures.groups();
        Ok(())
    }

    /// Reads the counts of the queue, which also knows the age of the run and a file that could be fetched. A
    /// queue that an older version opened, or that was lost, does not know the age: it learns it from the
    /// status, once.
    pub async fn read_stats(&mut self, prepared: &Prepared) -> Result<Stats, Stop> {
        let mut stats = prepared.queue.stats().await?;
        if stats.age.is_none() {
            stats.age = Some(prepared.queue.begin(age(self.run, Timestamp::now())).await?);
        }
        self.memory.canaries.recall(stats.canary.as_deref(), self.now);
        self.report.skipped = stats.skipped;
        Ok(stats)
    }

    /// The run as the owner of a queue in Valkey.
    pub fn owner(&self) -> Owner {
        Owner {
            uid: self.run.uid().unwrap_or_default(),
            namespace: self.run.namespace().unwrap_or_default(),
            name: self.run.name_any(),
        }
    }
}

/// The age of a run according to its status. The clocks of two operators differ, so this is only for a queue
/// that does not know the age.
fn age(run: &PipelineRun, now: Timestamp) -> Duration {
    let start = run.status.as_ref().and_then(|status| status.start_time.as_ref());
    start.and_then(|start| Duration::try_from(now.duration_since(start.0)).ok()).unwrap_or_default()
}

/// The obstacle after a failed pass, which has not found out whether the obstacle before it is gone.
fn obstacle_after(error: &Error, memory: &Memory) -> Option<Obstacle> {
    obstacle_of(error, memory.failed_passes)
        .or_else(|| memory.creation.problem().cloned())
        .or_else(|| memory.obstacle.clone())
}

/// The obstacle that an error amounts to after this many failed passes; `None` if the error does not keep
/// blocking the run.
fn obstacle_of(error: &Error, failed_passes: u32) -> Option<Obstacle> {
    match error {
        Error::Queue(queue::Error::Lost { .. } | queue::Error::Closed { .. }) => None,
        Error::Queue(queue::Error::Full { .. }) => {
            Some(Reason::QueueFull.because(format!("{}; {MORE_MEMORY}", chain(error))))
        }
        Error::Queue(_) => Some(Reason::QueueUnavailable.because(chain(error))),
        Error::NotOurs { .. } => Some(Reason::NameTaken.because(chain(error))),
        Error::Kubernetes { source, .. } => match source.as_ref() {
            kube::Error::Api(status) if is_refusal(status) || failed_passes >= PERSISTENT => {
                Some(Reason::OperatorRefused.because(chain(error)))
            }
            _ => None,
        },
        Error::Json(_) | Error::Random(_) | Error::TooLong(_) => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn answer(code: u16) -> Error {
        let status = kube::core::Status::failure("failed calling webhook", "InternalError").with_code(code);
        Error::kubernetes("create Job r-job")(kube::Error::Api(status.boxed()))
    }

    #[test]
    fn a_queue_that_does_not_know_the_age_of_its_run_learns_it_from_the_status() {
        let started = |start: Option<&str>| -> PipelineRun {
            serde_json::from_value(serde_json::json!({"apiVersion": "filter.plainsight.ai/v1alpha1",
                "kind": "PipelineRun", "metadata": {"name": "r", "namespace": "n"},
                "spec": {"pipelineRef": {"name": "p"}}, "status": {"startTime": start}}))
            .unwrap()
        };
        let age = |start| age(&started(start), "2026-01-01T00:01:00Z".parse().unwrap());
        assert_eq!(age(None), Duration::ZERO);
        assert_eq!(age(Some("2026-01-01T00:00:00Z")), Duration::from_secs(60));
        assert_eq!(age(Some("2026-01-01T00:02:00Z")), Duration::ZERO, "written by a clock that is ahead");
    }

    #[test]
    fn a_refusal_is_reported_at_once_and_an_error_once_it_persists() {
        let reported =
            |code, failed_passes| obstacle_of(&answer(code), failed_passes).map(|found| found.reason);
        assert_eq!(reported(403, 0), Some(Reason::OperatorRefused));
        assert_eq!(reported(500, 0), None);
        assert_eq!(reported(500, PERSISTENT), Some(Reason::OperatorRefused));
    }

    #[test]
    fn a_full_server_is_reported_with_what_to_do() {
        let source = redis::RedisError::from((redis::ErrorKind::UnexpectedReturnType, "OOM"));
        let full = Error::Queue(queue::Error::Full { doing: "open the queue", source });
        let found = obstacle_of(&full, 0).unwrap();
        assert_eq!(found.reason, Reason::QueueFull);
        assert!(
            found.message.ends_with("; give Valkey more memory, or let other runs end first"),
            "{found:?}"
        );
    }

    #[test]
    fn an_obstacle_stays_reported_while_passes_fail() {
        let mut memory = Memory::default();
        let reason = |memory: &Memory| obstacle_after(&answer(500), memory).map(|found| found.reason);
        assert_eq!(reason(&memory), None);
        memory.obstacle = Some(Reason::ImagePullFailed.because("not found"));
        assert_eq!(reason(&memory), Some(Reason::ImagePullFailed));
        memory.creation.failed(Reason::PodsRefused.because("500"));
        assert_eq!(reason(&memory), Some(Reason::PodsRefused), "it is newer");
    }
}
