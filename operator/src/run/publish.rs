//! Reports to people and tools: one status write per pass, no more often than it is read, and one event per
//! new obstacle.

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
    /// Writes the status, if it changed. Returns when to try again if it is too early, or if another operator
    /// wrote one meanwhile.
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
            // The other status may know more than we do, so the next pass builds on it.
            Written::Others(newer) => (*newer, Some(PUBLISH_EVERY)),
        };
        self.memory.published = Some((written, Instant::now()));
        Ok(again)
    }

    /// Announces the end. Only the operator that wrote the end does so, so it is announced once.
    fn announce_end(&self) {
        let Some(outcome) = &self.report.outcome else { return };
        let message = status::end_in_words(outcome, self.report.counts.unwrap_or_default());
        if outcome.succeeded {
            self.ctx.tell(self.run, &outcome.reason, message);
        } else {
            self.ctx.warn(self.run, &outcome.reason, message);
        }
    }

    /// Sends one event for each new obstacle, however many passes it lasts.
    fn warn_of_a_new_obstacle(&mut self) {
        let last = self.memory.obstacle.as_ref().map(|obstacle| obstacle.reason);
        if let Some(obstacle) = self.report.obstacle.as_ref().filter(|obstacle| last != Some(obstacle.reason))
        {
            self.ctx.warn(self.run, obstacle.reason.as_ref(), obstacle.message.clone());
        }
        self.memory.obstacle = self.report.obstacle.clone();
    }
}

/// Whether tools wait for this change: a change of phase or condition, not of counts.
fn is_urgent(written: &PipelineRunStatus, status: &PipelineRunStatus) -> bool {
    let words = |status: &PipelineRunStatus| {
        let condition = |condition: &Condition| (condition.status.clone(), condition.reason.clone());
        status.conditions.iter().map(condition).collect::<Vec<_>>()
    };
    written.phase != status.phase || words(written) != words(status)
}

/// The result of writing a status.
enum Written {
    /// Our status was written.
    Ours,
    /// The run is gone, or has ended.
    Gone,
    /// Another operator has written this status meanwhile.
    Others(Box<PipelineRunStatus>),
}

/// Writes optimistically, and reads the run again after a conflict. A change of the spec does not matter
/// here; the status of another operator is kept, and so is the end of a run.
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
    // Compare as JSON: times are truncated when they are written.
    if json!(newer.status) != json!(known.status) {
        return Ok(Written::Others(Box::new(others)));
    }
    // The run changed once more: the next pass sees it.
    Ok(put(&newer).await?.unwrap_or(Written::Others(Box::new(others))))
}

/// Acknowledges a change to a run that has ended. The change does not affect the run, but tools wait: they
/// read a status of an older generation as "in progress".
pub async fn acknowledge(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    let Some(status) = status::acknowledged(run) else { return Ok(()) };
    let wanted = PipelineRun { status: Some(status), ..run.clone() };
    let api: Api<PipelineRun> = ctx.api(run);
    match api.replace_status(&run.name_any(), &PostParams::default(), &wanted).await {
        // The run was changed or deleted meanwhile: the next pass sees it.
        Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(()),
        written => written.map(|_| ()).map_err(Error::kubernetes("write the status of a run that has ended")),
    }
}
