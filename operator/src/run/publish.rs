//! Reports to people and tools: one status write per pass, not more often than it is read, and an event per new obstacle.

use std::time::{Duration, Instant};

use crds::v1alpha1::{PipelineRun, PipelineRunStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::PUBLISH_EVERY;
use super::pass::Pass;
use super::status;
use crate::context::Context;
use crate::error::Error;

impl Pass<'_> {
    /// Writes the status, if it changed. Returns when to come back if it is too early to write it, or if another operator wrote
    /// one meanwhile.
    pub async fn publish(&mut self) -> Result<Option<Duration>, Error> {
        let mut known = self.run.clone();
        if let Some((written, _)) = &self.memory.published {
            known.status = Some(written.clone());
        }
        self.warn_of_a_new_obstacle();
        let status = status::build(&known, &self.report, &Time(Timestamp::now()));
        if known.status.as_ref() == Some(&status) {
            return Ok(None);
        }
        if let Some((written, when)) = &self.memory.published
            && let Some(left) = self.ctx.publish_every().checked_sub(when.elapsed())
            && !is_urgent(written, &status)
        {
            return Ok(Some(left));
        }
        let (written, again) = match write(self.ctx, &known, &status).await? {
            Written::Ours => {
                self.announce_end();
                (status, None)
            }
            Written::Gone => return Ok(None),
            // It may know more than we do, so the next pass builds on it.
            Written::Others(newer) => (*newer, Some(PUBLISH_EVERY)),
        };
        self.memory.published = Some((written, Instant::now()));
        Ok(again)
    }

    /// The operator that wrote the end announces it, so that it is announced once.
    fn announce_end(&self) {
        let Some(outcome) = &self.report.outcome else { return };
        let message = status::end_in_words(outcome, self.report.counts.unwrap_or_default());
        if outcome.succeeded {
            self.ctx.tell(self.run, &outcome.reason, message);
        } else {
            self.ctx.warn(self.run, &outcome.reason, message);
        }
    }

    /// One event for each new obstacle, however many passes it stays.
    fn warn_of_a_new_obstacle(&mut self) {
        let last = self.memory.obstacle.as_ref().map(|obstacle| obstacle.reason);
        if let Some(obstacle) = self.report.obstacle.as_ref().filter(|obstacle| last != Some(obstacle.reason))
        {
            self.ctx.warn(self.run, obstacle.reason.as_ref(), obstacle.message.clone());
        }
        self.memory.obstacle = self.report.obstacle.clone();
    }
}

/// Whether tools wait for this change: not a count, but a phase or a condition.
fn is_urgent(written: &PipelineRunStatus, status: &PipelineRunStatus) -> bool {
    let words = |status: &PipelineRunStatus| {
        let condition = |condition: &Condition| (condition.status.clone(), condition.reason.clone());
        status.conditions.iter().map(condition).collect::<Vec<_>>()
    };
    written.phase != status.phase || words(written) != words(status)
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
    let name = known.name_any();
    let put = async |run: &PipelineRun| {
        let wanted = PipelineRun { status: Some(status.clone()), ..run.clone() };
        match api.replace_status(&name, &PostParams::default(), &wanted).await {
            Ok(_) => Ok(Some(Written::Ours)),
            Err(kube::Error::Api(error)) if error.code == 404 => Ok(Some(Written::Gone)),
            Err(kube::Error::Api(error)) if error.code == 409 => Ok(None),
            Err(error) => Err(Error::kubernetes("write the status of the run")(error)),
        }
    };
    if let Some(written) = put(known).await? {
        return Ok(written);
    }
    let newer = api.get_opt(&name).await.map_err(Error::kubernetes("read the run again"))?;
    let ours = |newer: &PipelineRun| newer.metadata.uid == known.metadata.uid && !status::is_finished(newer);
    let Some(newer) = newer.filter(ours) else { return Ok(Written::Gone) };
    let others = newer.status.clone().unwrap_or_default();
    // As JSON: times are cut off when they are written.
    if json!(newer.status) != json!(known.status) {
        return Ok(Written::Others(Box::new(others)));
    }
    // Changed once more: the next pass sees it.
    Ok(put(&newer).await?.unwrap_or(Written::Others(Box::new(others))))
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
