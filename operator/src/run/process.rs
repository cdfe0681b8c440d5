//! A pass over a run whose files are known: settles what has ended, and has as many pods at work as there may be.

use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use queue::RunQueue;

use super::build::job::is_suspended;
use super::build::pod::Recipe;
use super::decide::{self, Plan, Seen};
use super::limits::Limits;
use super::memory::Memory;
use super::settle::Settling;
use super::status::{self, Report};
use super::workers::{self, BATCH};
use super::{
    GATHER, Next, PUBLISH_EVERY, Prepared, RESYNC, Stop, age, end_run, is_to_be_listed, job, known_failures,
};
use crate::context::Context;
use crate::error::{Error, Reason};
use crate::pods::Stage;
use crate::world::View;

/// While files are being processed.
pub async fn process(
    ctx: &Context,
    view: &View,
    prepared: &Prepared,
    memory: &mut Memory,
    report: &mut Report,
) -> Result<Next, Stop> {
    let Prepared { run_id, limits, snapshot, queue } = prepared;
    let (run, now) = (view.run.as_ref(), Instant::now());
    report.phase = Some(Phase::Running);
    let settled = Settling { ctx, run, queue, limits, pods: &view.pods, memory, now }.run().await?;
    workers::died_without_a_file(&settled.without_a_file, memory);
    if settled.files > 0
        && memory.creation_problem.as_ref().is_some_and(|problem| problem.reason == Reason::QuotaExceeded)
    {
        // Pods have ended, so that there is room for others.
        memory.creation_backoff.reset();
    }
    let promoted = queue.promote().await?;
    let stats = queue.stats().await?;
    report.counts = Some(status::counts(&stats));
    if is_to_be_listed(&stats) {
        // Valkey went back to an earlier state, from a backup or to a replica that was behind: files are missing again.
        ctx.warn(run, Reason::QueueLost.as_ref(), "Valkey went back to before the end of the listing: the bucket is listed again, and files may be processed twice");
        // Nothing was settled before the end of the listing.
        memory.everything_lost();
        memory.listed = false;
        return Ok(Next::Within(Duration::ZERO));
    }
    report.recent_failures = Some(memory.recent_failures(known_failures(run)));

    let suspended = run.spec.suspend || view.job.as_deref().is_some_and(is_suspended);
    let in_flight = memory.in_flight(&view.pods, now);
    let is_done = |name: &String| memory.settled.contains_key(name) || memory.removed.contains(name);
    let alive = view.pods.iter().filter(|pod| pod.is_alive() && !is_done(&pod.name)).count() as u64;
    let seen = Seen {
        stats: &stats,
        limits,
        alive,
        in_flight,
        suspended: suspended || memory.withheld.is_some(),
        age: age(run),
        backing_off: memory.creation_backoff.left(now).is_some(),
    };
    let plan = decide::decide(&seen);
    workers::remove_pods(ctx, run, &settled.lost, true, memory).await?;
    let (create, dismiss, wake) = match plan {
        Plan::End(end) => return end_run(ctx, run, prepared, end, memory, report).await,
        Plan::GoOn { create, dismiss, wake } => (create, dismiss, wake),
    };
    if create == 0 && in_flight == 0 && !seen.backing_off {
        forget_creation_problem(memory);
    }

    let recipe = Recipe {
        run,
        run_id,
        snapshot,
        worker: &ctx.settings.worker,
        pending_timeout: limits.pending_timeout,
    };
    let job = job::ensure(ctx, view.job.as_ref(), &recipe, stats.total, memory).await?;
    workers::remove_pods(ctx, run, &settled.removable, false, memory).await?;
    if suspended {
        report.phase = Some(Phase::Suspended);
    }
    if dismiss > 0 {
        dismiss_idle(ctx, view, queue, dismiss, memory).await?;
    }
    let mut more = settled.again || settled.removable.len() == BATCH;
    if let Some(job) = &job {
        report.job_name = Some(job.name_any());
        if create > 0 && !is_suspended(job) {
            workers::create_pods(ctx, run, job, create, memory).await?;
            more |= create > BATCH as u64;
        }
        write_job(ctx, view, job, suspended, memory, report).await?;
    }
    if settled.files > 0 || view.pods.iter().any(|pod| pod.stage == Stage::Working) {
        forget_worker_problem(memory);
    }
    let start_problem = || workers::start_problem(&view.pods, ctx.settings.start_timeout, now);
    report.obstacle =
        memory.withheld.clone().or_else(start_problem).or_else(|| memory.creation_problem.clone());
    // Only now: it may have begun in this pass.
    let backing_off = memory.creation_backoff.left(Instant::now());
    let waits = [
        wake,
        promoted.next,
        backing_off,
        memory.in_flight_expires(now),
        file_timeout(limits, view, now),
        stuck_timeout(ctx, view, now),
    ];
    let soonest = waits.into_iter().flatten().min().unwrap_or(RESYNC).max(GATHER);
    Ok(Next::Within(if more { Duration::ZERO } else { soonest }))
}

/// There are as many pods as are needed, so that none is refused any more.
fn forget_creation_problem(memory: &mut Memory) {
    if memory.creation_problem.as_ref().is_some_and(|problem| problem.reason != Reason::WorkersFailing) {
        memory.creation_problem = None;
    }
}

/// Workers that claim files show that what was wrong with them is mended.
fn forget_worker_problem(memory: &mut Memory) {
    if memory.creation_problem.as_ref().is_some_and(|problem| problem.reason == Reason::WorkersFailing)
        && memory.creation_backoff.left(Instant::now()).is_none()
    {
        memory.creation_problem = None;
        memory.creation_backoff.reset();
    }
}

/// The Job's status is written as often as the run's.
async fn write_job(
    ctx: &Context,
    view: &View,
    job: &Job,
    suspended: bool,
    memory: &mut Memory,
    report: &Report,
) -> Result<(), Error> {
    let due = memory.published.as_ref().is_none_or(|(_, written)| written.elapsed() >= PUBLISH_EVERY);
    match report.counts {
        Some(counts) if due => job::publish(ctx, &view.run, job, counts, &view.pods, suspended, memory).await,
        _ => Ok(()),
    }
}

/// Pods that wait for a file would claim one, although none may be started, or not so many at once. Those that have not even
/// started go first.
async fn dismiss_idle(
    ctx: &Context,
    view: &View,
    queue: &RunQueue,
    most: u64,
    memory: &mut Memory,
) -> Result<(), Error> {
    let waiting = view.pods.iter().filter(|pod| pod.is_alive() && pod.stage != Stage::Working);
    let mut waiting: Vec<_> = waiting.filter(|pod| !memory.removed.contains(&pod.name)).collect();
    waiting.sort_by_key(|pod| pod.stage == Stage::Claiming);
    let waiting: Vec<String> = waiting.into_iter().map(|pod| pod.name.clone()).collect();
    if waiting.is_empty() {
        return Ok(());
    }
    let claims = queue.claims_of(&waiting).await?;
    let has_file = |name: &String| claims.iter().any(|claim| claim.consumer == *name);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let idle: Vec<String> = waiting.into_iter().filter(|name| !has_file(name)).take(most).collect();
    let removed = workers::remove_pods(ctx, &view.run, &idle, false, memory).await;
    memory.dismissed.extend(idle.into_iter().filter(|name| memory.removed.contains(name)));
    removed
}

fn file_timeout(limits: &Limits, view: &View, now: Instant) -> Option<Duration> {
    let limit = limits.file_timeout?;
    let alive = view.pods.iter().filter(|pod| pod.is_alive());
    alive
        // From the claimer's start, if it had a file at once, and from the filters' start, if it waited for one.
        .flat_map(|pod| [pod.claiming, pod.claiming.map(|_| pod.since)])
        .filter_map(|since| (since? + limit).checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}

fn stuck_timeout(ctx: &Context, view: &View, now: Instant) -> Option<Duration> {
    let stuck = view.pods.iter().filter(|pod| matches!(pod.stage, Stage::Stuck(_)));
    let stuck = stuck.map(|pod| pod.since + ctx.settings.start_timeout);
    let going = view
        .pods
        .iter()
        .filter_map(|pod| pod.deleting)
        .map(|going| going.since + going.grace + PUBLISH_EVERY * 6);
    stuck
        .chain(going)
        .filter_map(|due| due.checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}
