//! One run: a task that looks after it, pass by pass, from its creation to its end. A pass reads what is there, decides,
//! does it, and writes the status once. Every pass can be the first of a new operator.

pub mod build;
mod cleanup;
mod decide;
mod ending;
mod job;
mod limits;
mod listing;
mod memory;
mod process;
mod publish;
mod settle;
mod setup;
mod status;
mod verdict;
mod workers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::run_id::RunId;
use crds::v1alpha1::{FailedFile, Phase, PipelineRun};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use queue::{Listing, RunQueue, Stats};
use storage::{Lister, Selection};
use tokio::sync::Notify;

use crate::context::Context;
use crate::error::{Error, Obstacle, Reason, chain, is_refusal};
use crate::names::FINALIZER;
use crate::world::{Uid, View};
use build::snapshot::Snapshot;
use decide::{Plan, Seen};
use limits::Limits;
use listing::ListingTask;
use memory::Memory;
use publish::publish;
use status::Report;

pub use cleanup::{NOTES, sweep};
pub use status::obstacle;

/// How often a run is looked at although nothing happened: the net under the watches.
pub const RESYNC: Duration = Duration::from_secs(30);
/// Changes that come together are dealt with together: a settled batch costs as much as a settled file.
const GATHER: Duration = Duration::from_millis(25);
/// A pass that takes longer is given up, and begun anew: every step can be done again.
const PASS_MAX: Duration = Duration::from_secs(120);
/// Counts are published this often at most, whatever the number of files.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// First wait after a pass that failed.
const RETRY_FIRST: Duration = Duration::from_millis(500);

/// What the API server says after so many passes that failed is not the weather of a moment: an admission webhook is down,
/// say.
const LASTING: u32 = 4;

/// When to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// When something happens, or after this long.
    Within(Duration),
    /// Not before something happens.
    Done,
}

/// Why a pass went no further.
pub enum Stop {
    /// Something stands in the way of the run.
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

/// Looks after a run until it needs nobody any more.
pub async fn look_after(ctx: Arc<Context>, uid: Uid, wake: Arc<Notify>) {
    let mut memory = Memory::default();
    loop {
        let Ok(permit) = ctx.passes.acquire().await else { return };
        let started = Instant::now();
        let passed = tokio::time::timeout(PASS_MAX, pass(&ctx, &uid, &mut memory)).await;
        drop(permit);
        ctx.metrics.passed(started.elapsed());
        match passed.unwrap_or(Err(Error::TooLong(PASS_MAX))) {
            Ok(Next::Done) => return,
            Ok(Next::Within(wait)) => {
                memory.failed_passes = 0;
                tokio::select! {
                    () = tokio::time::sleep(wait.min(RESYNC)) => {}
                    () = wake.notified() => tokio::time::sleep(GATHER).await,
                }
            }
            Err(error) => {
                ctx.metrics.pass_failed(error.as_ref());
                if let Error::Queue(error) = &error {
                    ctx.metrics.valkey_failed(error.as_ref());
                }
                let wait = RETRY_FIRST.saturating_mul(1 << memory.failed_passes.min(8)).min(RESYNC);
                memory.failed_passes += 1;
                tracing::warn!(uid = %uid, reason = error.as_ref(), error = chain(&error), ?wait, "a pass failed");
                tokio::time::sleep(wait).await;
            }
        }
    }
}

/// One pass. What stands in the way is told in the status; only what cannot even be told is an error.
async fn pass(ctx: &Arc<Context>, uid: &Uid, memory: &mut Memory) -> Result<Next, Error> {
    let Some(view) = ctx.world.view(uid) else { return Ok(Next::Done) };
    let run = &view.run;
    memory.gone.extend(ctx.world.take_gone(uid));
    if run.metadata.deletion_timestamp.is_some() {
        return cleanup::finalize(ctx, &view, memory).await;
    }
    if status::is_finished(run) {
        // One that was asked for before the end, and came after it.
        let late = view.pods.iter().filter(|pod| !pod.held);
        let late: Vec<String> = late.map(|pod| pod.name.clone()).collect();
        workers::remove_pods(ctx, run, &late, true, memory).await?;
        publish::acknowledge(ctx, run).await?;
        return Ok(Next::Done);
    }
    if !run.finalizers().iter().any(|finalizer| finalizer == FINALIZER) {
        cleanup::add_finalizer(ctx, run).await?;
    }
    if memory.published.is_none() && memory.obstacle.is_none() {
        memory.obstacle = status::obstacle(run);
    }
    let mut report = Report::default();
    if run.status.is_none() && memory.published.is_none() {
        // No conditions at all would read as "done".
        publish(ctx, run, &report, memory).await?;
    }
    let advanced = advance(ctx, uid, &view, memory, &mut report).await;
    let next = match advanced {
        Ok(next) => Ok(next),
        Err(Stop::Obstacle(obstacle)) => {
            report.obstacle = Some(obstacle);
            Ok(Next::Within(RESYNC))
        }
        Err(Stop::Error(error)) => {
            match error {
                Error::Queue(queue::Error::Lost { .. }) => memory.queue_lost(Instant::now()),
                Error::Queue(queue::Error::Closed { .. }) => memory.forget_queue(),
                _ => {}
            }
            report.obstacle = obstacle_after(&error, memory);
            Err(error)
        }
    };
    let waits = publish(ctx, run, &report, memory).await?;
    Ok(match (next?, waits) {
        (Next::Within(wait), Some(sooner)) => Next::Within(wait.min(sooner)),
        // Another operator's status was in the way of the last one.
        (Next::Done, Some(again)) => Next::Within(again),
        (next, None) => next,
    })
}

/// What stands in the way after a pass that failed: it has not found out that what was in the way before is gone.
fn obstacle_after(error: &Error, memory: &Memory) -> Option<Obstacle> {
    obstacle_of(error, memory.failed_passes)
        .or_else(|| memory.creation_problem.clone())
        .or_else(|| memory.obstacle.clone())
}

/// What people are told of an error after so many passes that failed: not of the weather of one moment, but of what keeps the
/// run from going on.
fn obstacle_of(error: &Error, failed_passes: u32) -> Option<Obstacle> {
    match error {
        Error::Queue(queue::Error::Lost { .. } | queue::Error::Closed { .. }) => None,
        Error::Queue(_) => Some(Reason::QueueUnavailable.because(chain(error))),
        Error::NotOurs { .. } => Some(Reason::NameTaken.because(chain(error))),
        Error::Kubernetes { source, .. } => match source.as_ref() {
            kube::Error::Api(status) if is_refusal(status) || failed_passes >= LASTING => {
                Some(Reason::OperatorRefused.because(chain(error)))
            }
            _ => None,
        },
        Error::Json(_) | Error::Random(_) | Error::TooLong(_) => None,
    }
}

/// What a run has once it is prepared.
struct Prepared {
    run_id: RunId,
    limits: Limits,
    snapshot: Arc<Snapshot>,
    queue: RunQueue,
}

/// Takes the run as far as it goes now.
async fn advance(
    ctx: &Arc<Context>,
    uid: &Uid,
    view: &View,
    memory: &mut Memory,
    report: &mut Report,
) -> Result<Next, Stop> {
    let run = &view.run;
    let run_id = setup::run_id(run)?;
    report.run_id = Some(run_id.to_string());
    report.job_name = view.job.as_ref().map(|job| job.name_any());
    let limits = setup::limits(ctx, run)?;
    // The queue before the Pipeline: a run that was executed before needs none.
    let queue = match setup::queue(ctx, run, &run_id, memory).await? {
        setup::Queue::Open(queue) => *queue,
        setup::Queue::Finished(finished) => {
            return ending::finish(ctx, view, &run_id, &finished, memory, report).await;
        }
    };
    report.recent_failures = Some(memory.recent_failures(known_failures(run)));
    let snapshot = setup::snapshot(ctx, run, &run_id, memory).await?;
    setup::restore(ctx, run, &run_id, &snapshot, &queue, memory, RESYNC).await?;
    let prepared = Prepared { run_id, limits, snapshot, queue };
    report.start_time = Some(Time(Timestamp::now()));
    if !memory.listed {
        let stats = prepared.queue.stats().await?;
        report.counts = Some(status::counts(&stats));
        if is_to_be_listed(&stats) {
            return list(ctx, uid, run, &prepared, &stats, memory, report).await;
        }
        memory.listed = true;
        if memory.listing.take().is_some() {
            memory.listing_succeeded();
            ctx.tell(run, "Listed", format!("found {} files", stats.total));
        }
    }
    process::process(ctx, view, &prepared, memory, report).await
}

/// Failed files that the status shows.
fn known_failures(run: &PipelineRun) -> &[FailedFile] {
    run.status.as_ref().map(|status| status.recent_failures.as_slice()).unwrap_or_default()
}

/// Whether files are still to be found.
fn is_to_be_listed(stats: &Stats) -> bool {
    stats.listing != Listing::Complete && stats.state == queue::State::Open
}

/// While the bucket is being listed, by a task of its own.
async fn list(
    ctx: &Arc<Context>,
    uid: &Uid,
    run: &PipelineRun,
    prepared: &Prepared,
    stats: &Stats,
    memory: &mut Memory,
    report: &mut Report,
) -> Result<Next, Stop> {
    report.phase = Some(Phase::Listing);
    report.listed = report.counts.map(|counts| counts.total_files);
    let age = age(run);
    if let Plan::End(end) = decide::decide(&Seen {
        stats,
        limits: &prepared.limits,
        alive: 0,
        in_flight: 0,
        suspended: run.spec.suspend,
        age,
        backing_off: true,
    }) {
        return end_run(ctx, run, prepared, end, memory, report).await;
    }
    let left = prepared.limits.timeout.map_or(RESYNC, |timeout| timeout.saturating_sub(age));
    if memory.lost {
        let message = "Valkey has lost the queue of this run, or a part of it: the bucket is listed again";
        report.obstacle = Some(Reason::QueueLost.because(message));
    }
    let now = Instant::now();
    if memory.listing.as_ref().is_some_and(|task| !task.has_ended()) {
        report.obstacle = memory.listing_problem(&stats.listing).or(report.obstacle.take());
        return Ok(Next::Within(left));
    }
    if let Some(failure) = memory.listing.take().and_then(|task| task.failure()) {
        if failure.reason == Reason::QueueLost {
            memory.queue_lost(now);
            return Ok(Next::Within(Duration::ZERO));
        }
        memory.listing_failed(failure, stats.listing.clone(), now);
    }
    report.obstacle = memory.listing_problem(&stats.listing).or(report.obstacle.take());
    if let Some(wait) = memory.listing_waits(now) {
        return Ok(Next::Within(wait.min(left)));
    }
    let Prepared { run_id, snapshot, queue, .. } = prepared;
    let keys = setup::credentials(ctx, run, run_id, snapshot).await?;
    let bucket = setup::source_bucket(&ctx.settings, &snapshot.spec.source.bucket, keys)?;
    let prefix = snapshot.prefix(run);
    let (include, exclude) = snapshot.globs(run);
    let selection = Selection::new(prefix, include, exclude)
        .map_err(|error| Reason::PipelineInvalid.because(format!("include or exclude: {error}")))?;
    let lister = Lister::new(&bucket, prefix, selection).await;
    memory.listing = Some(ListingTask::start(ctx, uid, run, queue.clone(), lister, stats));
    Ok(Next::Within(left))
}

async fn end_run(
    ctx: &Context,
    run: &PipelineRun,
    prepared: &Prepared,
    end: decide::End,
    memory: &mut Memory,
    report: &mut Report,
) -> Result<Next, Stop> {
    ending::close(ctx, run, &prepared.queue, end, memory, report).await?;
    // Opened again, it says how it ended: one path for a run that ends now, that ended before a crash, and that is restored.
    memory.forget_queue();
    Ok(Next::Within(Duration::ZERO))
}

/// How long the run has been running, by the clock that wrote its start.
fn age(run: &PipelineRun) -> Duration {
    let start = run.status.as_ref().and_then(|status| status.start_time.as_ref());
    let age = start.map(|start| Timestamp::now().duration_since(start.0));
    age.and_then(|age| Duration::try_from(age).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16) -> Error {
        let status = kube::core::Status::failure("failed calling webhook", "InternalError").with_code(code);
        Error::kubernetes("create Job r-job")(kube::Error::Api(status.boxed()))
    }

    #[test]
    fn a_refusal_is_told_at_once_and_an_error_once_it_lasts() {
        let told = |code, failed_passes| obstacle_of(&answer(code), failed_passes).map(|told| told.reason);
        assert_eq!(told(403, 0), Some(Reason::OperatorRefused));
        assert_eq!(told(500, 0), None);
        assert_eq!(told(500, LASTING), Some(Reason::OperatorRefused));
    }

    #[test]
    fn what_was_in_the_way_stays_so_while_passes_fail() {
        let mut memory = Memory::default();
        let reason = |memory: &Memory| obstacle_after(&answer(500), memory).map(|told| told.reason);
        assert_eq!(reason(&memory), None);
        memory.obstacle = Some(Reason::ImagePullFailed.because("not found"));
        assert_eq!(reason(&memory), Some(Reason::ImagePullFailed));
        memory.creation_problem = Some(Reason::PodsRefused.because("500"));
        assert_eq!(reason(&memory), Some(Reason::PodsRefused), "it is newer");
    }
}
