//! How a run ends: the queue is closed, every pod goes, and then Job and run say so in one pass. Each step can be done
//! again, so that a crash between any two of them changes nothing.

use std::time::Duration;

use crds::v1alpha1::{Phase, PipelineRun};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use protocol::RunId;
use queue::{Closed, Ending, Finished, RunQueue, WorkerUser};

use super::build::owner;
use super::decide::End;
use super::memory::Memory;
use super::status::{self, Outcome, Report};
use super::{Next, Stop, cleanup, job, workers};
use crate::context::Context;
use crate::error::{Error, chain};
use crate::pods::is_held;
use crate::world::View;

/// How soon to look whether the last pods are gone, should the watch not say so.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Closes the queue, unless a file turned up that is not settled.
pub async fn close(
    ctx: &Context,
    run: &PipelineRun,
    queue: &RunQueue,
    end: End,
    memory: &Memory,
    report: &Report,
) -> Result<(), Stop> {
    let start_time = known_start(run, memory).or_else(|| report.start_time.clone());
    let outcome = Outcome {
        succeeded: end == End::Completed,
        reason: end.as_ref().to_owned(),
        completion_time: ended(start_time.as_ref(), Timestamp::now()),
        start_time,
        job_name: report.job_name.clone(),
        recent_failures: report.recent_failures.clone().unwrap_or_default(),
    };
    let outcome = serde_json::to_string(&outcome).map_err(Error::Json)?;
    let ending = if end.is_abort() { Ending::Abort { reason: end.as_ref() } } else { Ending::Finish };
    loop {
        match queue.close(ending, &outcome, &ctx.settings.retention).await? {
            Closed::Closed(_) | Closed::Unfinished { .. } => return Ok(()),
            Closed::More { .. } => {}
        }
    }
}

/// When the run started: what was written down, which the watch may not have shown yet.
fn known_start(run: &PipelineRun, memory: &Memory) -> Option<Time> {
    let written = memory.published.as_ref().map(|(status, _)| status);
    written.or(run.status.as_ref()).and_then(|status| status.start_time.clone())
}

/// When it ends. Trap 30: its start may be from a clock that is ahead of ours, and the API server takes no Job that ends before
/// it started.
fn ended(start: Option<&Time>, now: Timestamp) -> Time {
    Time(start.map_or(now, |start| start.0.max(now)))
}

/// Does all that is to be done once the queue is closed, and reports the end when no pod is left.
pub async fn finish(
    ctx: &Context,
    view: &View,
    run_id: &RunId,
    finished: &Finished,
    memory: &mut Memory,
    report: &mut Report,
) -> Result<Next, Stop> {
    let run = &view.run;
    let outcome = read_outcome(run, finished);
    let counts = status::final_counts(&finished.counts);
    report.phase = Some(Phase::Running);
    report.counts = Some(counts);
    memory.listing = None;
    let pods: Vec<_> = view.pods.iter().filter(|pod| !pod.held).collect();
    if !pods.is_empty() {
        // Nobody waits for a kubelet to tidy up after a pod that has stopped, or for one that does not answer.
        let (at_once, others): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| {
            pod.stopped || pod.deleting.is_some_and(|going| going.since.elapsed() > going.grace + LOOK_AGAIN)
        });
        let names = |pods: Vec<&std::sync::Arc<crate::pods::WorkerPod>>| {
            pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
        };
        workers::remove_pods(ctx, run, &names(at_once), true, memory).await?;
        let others: Vec<_> = others.into_iter().filter(|pod| pod.deleting.is_none()).collect();
        workers::remove_pods(ctx, run, &names(others), false, memory).await?;
        return Ok(Next::Within(LOOK_AGAIN));
    }
    if remove_unseen(ctx, run, memory).await? {
        return Ok(Next::Within(LOOK_AGAIN));
    }
    let message = status::end_in_words(&outcome, counts);
    if let Some(job) = view.job.as_ref().or(memory.job.as_ref().map(|(job, _)| job)).cloned() {
        job::finish(ctx, run, &job, counts, &outcome, &message, memory).await?;
    }
    // Nobody needs the workers' user and Secrets any more.
    WorkerUser::remove(&ctx.valkey, run_id, &run.uid().unwrap_or_default()).await?;
    cleanup::remove_secrets(ctx, run).await?;
    report.outcome = Some(outcome);
    Ok(Next::Done)
}

/// Pods that the watch has not shown yet: one that was asked for a moment ago, say. Whether there were any.
async fn remove_unseen(ctx: &Context, run: &PipelineRun, memory: &mut Memory) -> Result<bool, Stop> {
    let pods: Api<Pod> = ctx.api(run);
    let ours = owner::pods(run);
    let listed = pods.list_metadata(&ours).await.map_err(Error::kubernetes("list the pods of the run"))?;
    let unseen = listed.items.iter().filter(|pod| !is_held(&pod.metadata));
    let names: Vec<String> = unseen.map(ResourceExt::name_any).collect();
    workers::remove_pods(ctx, run, &names, true, memory).await?;
    Ok(!names.is_empty())
}

/// What was written down at the end; a text that cannot be read still has its counts.
fn read_outcome(run: &PipelineRun, finished: &Finished) -> Outcome {
    serde_json::from_str(&finished.outcome).unwrap_or_else(|error| {
        tracing::warn!(run = %run.name_any(), error = chain(&error), "the outcome in the ledger cannot be read");
        Outcome {
            succeeded: finished.counts.failed == 0 && finished.counts.total > 0,
            reason: "Restored".to_owned(),
            start_time: None,
            completion_time: Time(Timestamp::now()),
            job_name: None,
            recent_failures: Vec::new(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trap 30.
    #[test]
    fn a_run_never_ends_before_it_started_whoever_wrote_that_down() {
        let now = Timestamp::now();
        let (before, after) = (now - Duration::from_secs(9), now + Duration::from_secs(9));
        assert_eq!(ended(None, now), Time(now));
        assert_eq!(ended(Some(&Time(before)), now), Time(now));
        assert_eq!(ended(Some(&Time(after)), now), Time(after));
    }
}
