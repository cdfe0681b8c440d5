//! Ends a run: the queue is closed, every pod is removed, and then the Job and the run report the end in the
//! same pass. Each step can be repeated, so a crash between any two of them changes nothing.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crds::v1alpha1::{Phase, PipelineRun};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use protocol::RunId;
use queue::{Closed, Ending, Finished, WorkerUser};

use super::build::owner;
use super::decide::End;
use super::pass::{Next, Pass, Prepared, Stop};
use super::status::{self, RunOutcome};
use super::workers::Removal;
use super::{cleanup, publish};
use crate::error::{Error, chain};
use crate::pods::{WorkerPod, is_held};

/// How soon to check again whether the last pods are gone, if the watch does not show it.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

impl Pass<'_> {
    /// Ends the run, unless an unsettled file has turned up.
    pub async fn end_run(&mut self, prepared: &Prepared, end: End) -> Result<Next, Stop> {
        let start_time = self.known_start().or_else(|| self.report.start_time.clone());
        let mut failures = self.report.failures.clone().unwrap_or_default();
        if end.is_abort() {
            failures.extend(status::never_processed(self.report.counts.unwrap_or_default(), end.as_ref()));
            failures.sort_by_key(|group| Reverse(group.count));
        }
        let outcome = RunOutcome {
            succeeded: end == End::Completed,
            reason: end.as_ref().to_owned(),
            completion_time: ended(start_time.as_ref(), Timestamp::now()),
            start_time,
            job_name: self.report.job_name.clone(),
            recent_failures: self.report.recent_failures.clone().unwrap_or_default(),
            failures,
            skipped_files: self.report.skipped,
            partly_listed: false,
        };
        let outcome = serde_json::to_string(&outcome).map_err(Error::Json)?;
        if end == End::WorkersMisbehaving {
            // Remove the user first, so that workers write nothing more: this also closes the user's
            // connections.
            WorkerUser::remove(&self.ctx.valkey, &prepared.run_id, &self.owner().uid).await?;
        }
        let ending = if end.is_abort() { Ending::Abort { reason: end.as_ref() } } else { Ending::Finish };
        while let Closed::More { .. } =
            prepared.queue.close(ending, &outcome, &self.ctx.settings.retention).await?
        {}
        // When the queue is opened again, it says how the run ended. So a run that ends now, a run that ended
        // before a crash, and a restored run all take the same path.
        self.memory.forget_queue();
        Ok(Next::Within(Duration::ZERO))
    }

    /// The start time of the run: the one that we wrote, even if the watch has not shown it yet.
    fn known_start(&self) -> Option<Time> {
        let written = self.memory.published.as_ref().map(|(status, _)| status);
        written.or(self.run.status.as_ref()).and_then(|status| status.start_time.clone())
    }

    /// Does everything that remains once the queue is closed, and reports the end when no pod is left.
    pub async fn finish(&mut self, run_id: &RunId, finished: &Finished) -> Result<Next, Stop> {
        let outcome = RunOutcome { partly_listed: !finished.listed, ..read_outcome(self.run, finished) };
        let counts = status::final_counts(&finished.counts);
        self.report.phase = Some(Phase::Running);
        self.report.counts = Some(counts);
        self.memory.listing.task = None;
        if self.remove_shown_pods().await? || self.remove_unseen_pods().await? {
            return Ok(Next::Within(LOOK_AGAIN));
        }
        let message = status::end_in_words(&outcome, counts);
        if let Some(job) = self.view.job.as_ref().or(self.memory.job.as_ref().map(|(job, _)| job)).cloned() {
            self.finish_job(&job, counts, &outcome, &message).await?;
        }
        // Nothing needs the workers' user and Secrets any more.
        WorkerUser::remove(&self.ctx.valkey, run_id, &self.owner().uid).await?;
        cleanup::remove_secrets(self.ctx, self.run).await?;
        self.report.outcome = Some(outcome);
        Ok(Next::Done)
    }

    /// Removes the pods that the watch shows; returns whether there are any.
    async fn remove_shown_pods(&mut self) -> Result<bool, Stop> {
        let pods: Vec<_> = self.view.pods.iter().filter(|pod| !pod.held).collect();
        if pods.is_empty() {
            return Ok(false);
        }
        // A pod that has stopped needs no time to end, and a kubelet that does not answer gets no more time.
        let (at_once, others): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| {
            pod.stopped || pod.deleting.is_some_and(|going| going.since.elapsed() > going.grace + LOOK_AGAIN)
        });
        let names = |pods: Vec<&Arc<WorkerPod>>| pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>();
        self.remove_pods(&names(at_once), Removal::AtOnce).await?;
        let others: Vec<_> = others.into_iter().filter(|pod| pod.deleting.is_none()).collect();
        self.remove_pods(&names(others), Removal::Graceful).await?;
        Ok(true)
    }

    /// Removes pods that the watch has not shown yet, such as one that was requested a moment ago. Returns
    /// whether there were any.
    async fn remove_unseen_pods(&mut self) -> Result<bool, Stop> {
        let pods: Api<Pod> = self.ctx.api(self.run);
        let ours = owner::pods(self.run);
        let listed =
            pods.list_metadata(&ours).await.map_err(Error::kubernetes("list the pods of the run"))?;
        let unseen = listed.items.iter().filter(|pod| !is_held(&pod.metadata));
        let names: Vec<String> = unseen.map(ResourceExt::name_any).collect();
        self.remove_pods(&names, Removal::AtOnce).await?;
        Ok(!names.is_empty())
    }

    /// Removes a pod that was requested before the end and appeared after it, and acknowledges a change of
    /// the spec.
    pub async fn tidy_up_after_the_end(&mut self) -> Result<Next, Error> {
        let late = self.view.pods.iter().filter(|pod| !pod.held);
        let late: Vec<String> = late.map(|pod| pod.name.clone()).collect();
        self.remove_pods(&late, Removal::AtOnce).await?;
        publish::acknowledge(self.ctx, self.run).await?;
        Ok(Next::Done)
    }
}

/// The end time of the run. Its start time may come from a clock that is ahead of ours, and the API server
/// refuses a Job that ends before it started.
fn ended(start: Option<&Time>, now: Timestamp) -> Time {
    Time(start.map_or(now, |start| start.0.max(now)))
}

/// The recorded outcome; if its text cannot be parsed, the counts remain.
fn read_outcome(run: &PipelineRun, finished: &Finished) -> RunOutcome {
    serde_json::from_str(&finished.outcome).unwrap_or_else(|error| {
        tracing::warn!(run = %run.name_any(), error = chain(&error), "the outcome in the ledger cannot be read");
        RunOutcome {
            succeeded: finished.counts.failed == 0 && finished.counts.total > 0,
            reason: "Restored".to_owned(),
            start_time: None,
            completion_time: Time(Timestamp::now()),
            job_name: None,
            recent_failures: Vec::new(),
            failures: Vec::new(),
            skipped_files: 0,
            partly_listed: false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_never_ends_before_it_started_whichever_clock_wrote_that() {
        let now = Timestamp::now();
        let (before, after) = (now - Duration::from_secs(9), now + Duration::from_secs(9));
        assert_eq!(ended(None, now), Time(now));
        assert_eq!(ended(Some(&Time(before)), now), Time(now));
        assert_eq!(ended(Some(&Time(after)), now), Time(after));
    }
}
