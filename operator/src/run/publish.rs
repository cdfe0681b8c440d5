//! Tells people and tools: one status write per pass, not more often than anybody reads, and an event per new obstacle.

use std::time::{Duration, Instant};

use crds::v1alpha1::{PipelineRun, PipelineRunStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::PUBLISH_EVERY;
use super::memory::Memory;
use super::status::{self, Report};
use crate::context::Context;
use crate::error::{Error, Reason};

/// Writes the status, if there is something to say. Returns when to come back if it is too early to say it.
pub async fn publish(
    ctx: &Context,
    run: &PipelineRun,
    report: &Report,
    memory: &mut Memory,
) -> Result<Option<Duration>, Error> {
    let mut known = run.clone();
    if let Some((written, _)) = &memory.published {
        known.status = Some(written.clone());
    }
    warn_once(ctx, run, report, memory);
    let status = status::build(&known, report, &Time(Timestamp::now()));
    if known.status.as_ref() == Some(&status) {
        return Ok(None);
    }
    if let Some((written, when)) = &memory.published {
        let words = |status: &PipelineRunStatus| {
            status
                .conditions
                .iter()
                .map(|condition| (condition.status.clone(), condition.reason.clone()))
                .collect::<Vec<_>>()
        };
        let urgent = written.phase != status.phase || words(written) != words(&status);
        if let Some(left) = PUBLISH_EVERY.checked_sub(when.elapsed()).filter(|_| !urgent) {
            return Ok(Some(left));
        }
    }
    let (written, again) = match write(ctx, &known, &status).await? {
        Written::Ours => (status, None),
        Written::Gone => return Ok(None),
        // It may know more than we do, so the next pass builds on it.
        Written::Others(newer) => (*newer, Some(PUBLISH_EVERY)),
    };
    memory.published = Some((written, Instant::now()));
    Ok(again)
}

/// What became of a status.
enum Written {
    /// It is there.
    Ours,
    /// The run is gone, or has ended.
    Gone,
    /// Another operator has written this one meanwhile.
    Others(Box<PipelineRunStatus>),
}

/// Optimistic: what others changed meanwhile is read first. A change of the spec is none of our business; a status of
/// another operator stays, and so does the end of a run.
async fn write(ctx: &Context, known: &PipelineRun, status: &PipelineRunStatus) -> Result<Written, Error> {
    let api: Api<PipelineRun> = ctx.api(known);
    let (name, mut run) = (known.name_any(), known.clone());
    for last in [false, true] {
        run.status = Some(status.clone());
        match api.replace_status(&name, &PostParams::default(), &run).await {
            Ok(_) => return Ok(Written::Ours),
            Err(kube::Error::Api(error)) if error.code == 404 => return Ok(Written::Gone),
            Err(kube::Error::Api(error)) if error.code == 409 && !last => {
                let newer = api.get_opt(&name).await.map_err(Error::kubernetes("read the run again"))?;
                let Some(newer) = newer.filter(|newer| newer.metadata.uid == known.metadata.uid) else {
                    return Ok(Written::Gone);
                };
                if status::is_finished(&newer) {
                    return Ok(Written::Gone);
                }
                // As JSON: times are cut off when they are written.
                if let Some(others) =
                    newer.status.as_ref().filter(|_| json!(newer.status) != json!(known.status))
                {
                    return Ok(Written::Others(Box::new(others.clone())));
                }
                run = newer;
            }
            Err(error) => return Err(Error::kubernetes("write the status of the run")(error)),
        }
    }
    Ok(Written::Gone)
}

/// Says of a run that was changed after its end that this was seen. It does not matter to the run, but tools wait for it: a
/// status of an older generation reads as "in progress".
pub async fn acknowledge(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    let Some(status) = status::acknowledged(run) else { return Ok(()) };
    let wanted = PipelineRun { status: Some(status), ..run.clone() };
    let api: Api<PipelineRun> = ctx.api(run);
    match api.replace_status(&run.name_any(), &PostParams::default(), &wanted).await {
        // Changed or deleted meanwhile: the next pass sees it.
        Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(()),
        written => written.map(|_| ()).map_err(Error::kubernetes("write the status of a run that has ended")),
    }
}

/// One event for each new obstacle, however many passes it stays.
fn warn_once(ctx: &Context, run: &PipelineRun, report: &Report, memory: &mut Memory) {
    use Reason::{ContainerStartFailed, ImagePullFailed, PodsUnschedulable};
    let reason = report.obstacle.as_ref().map(|obstacle| obstacle.reason);
    if let Some(obstacle) = report.obstacle.as_ref().filter(|_| memory.warned != reason) {
        if matches!(obstacle.reason, ImagePullFailed | ContainerStartFailed | PodsUnschedulable) {
            ctx.metrics.pod_start_failed(obstacle.reason.as_ref());
        }
        ctx.warn(run, obstacle.reason.as_ref(), obstacle.message.clone());
    }
    memory.warned = reason;
}
