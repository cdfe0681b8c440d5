//! Creates the one Job of a run, and keeps it up to date with the run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::v1alpha1::Counts;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use queue::{Listing, Stats};
use serde_json::{Value, json};

use super::build::pod::Recipe;
use super::build::{job, owner};
use super::pass::{Pass, Prepared, Stop};
use super::status::RunOutcome;
use crate::error::{Error, Obstacle, Reason, chain, is_refusal, refused};
use crate::names::MANAGER;
use crate::pods::Stage;

/// How long a newly created Job may be missing from the watch before it is requested again.
const JOB_SHOWN_WITHIN: Duration = Duration::from_secs(10);

/// The last attempt to write the status of an unfinished Job.
pub struct JobWrite {
    job: Option<String>,
    status: Value,
    suspended: bool,
    has_succeeded: bool,
    at: Instant,
}

/// How long to wait after a write of a Job's status before the next one.
struct WriteEvery {
    /// After a write that succeeded.
    counts: Duration,
    /// After a write that failed: an overloaded API server is not asked again in every pass.
    failed: Duration,
}

impl JobWrite {
    /// How long the next write has to wait. Tools that suspend Jobs wait only for the condition that says so:
    /// that one is written at once, and soon again if the write failed.
    fn is_followed_after(&self, suspended: bool, every: &WriteEvery, now: Instant) -> Option<Duration> {
        let every = if self.has_succeeded { every.counts } else { every.failed };
        let left = every.saturating_sub(now.saturating_duration_since(self.at));
        Some(left).filter(|left| suspended == self.suspended && !left.is_zero())
    }

    fn wrote(&self, status: &Value) -> bool {
        self.has_succeeded && self.status == *status
    }
}

impl Pass<'_> {
    /// The Job of the run: the one that the watch shows, or a new one. `None` while an old one is being
    /// deleted.
    pub async fn ensure_job(&mut self, prepared: &Prepared, stats: &Stats) -> Result<Option<Arc<Job>>, Stop> {
        if let Some(shown) = &self.view.job {
            self.memory.job = None;
            if shown.metadata.deletion_timestamp.is_some() {
                return Ok(None);
            }
            return self.adjust_parallelism(shown).await.map(Some);
        }
        if let Some((created, since)) = &self.memory.job
            && since.elapsed() < JOB_SHOWN_WITHIN
        {
            return Ok(Some(Arc::clone(created)));
        }
        let api: Api<Job> = self.ctx.api(self.run);
        let recipe = Recipe {
            run: self.run,
            run_id: &prepared.run_id,
            snapshot: &prepared.snapshot,
            worker: &self.ctx.settings.worker,
            pending_timeout: prepared.limits.pending_timeout,
        };
        // A total that is not final yet would have to grow, and `completions` cannot change.
        let files = (stats.listing == Listing::Complete).then_some(stats.total);
        let wanted = job::job(self.run, &prepared.run_id, &recipe, files);
        let name = wanted.name_any();
        // Start with a dry run: if the Job is not ours to manage, another controller would start its pods
        // before we could delete it.
        if create(&api, &wanted, true).await?.is_some_and(|job| !job::is_managed(&job)) {
            return Err(not_managed().into());
        }
        let found = match create(&api, &wanted, false).await? {
            Some(created) => {
                let so_far = if files.is_some() { "" } else { " so far" };
                let note = format!("created Job {name} for {} files{so_far}", stats.total);
                self.ctx.tell(self.run, "JobCreated", note);
                created
            }
            // The Job was created before, and the status write was lost.
            None => api.get(&name).await.map_err(Error::kubernetes(format!("read Job {name}")))?,
        };
        if !owner::owns(self.run, &found) {
            let message = format!(
                "there is a Job {name} that does not belong to this run; delete it, or give the run another name"
            );
            return Err(Reason::NameTaken.because(message).into());
        }
        if found.metadata.deletion_timestamp.is_some() {
            return Ok(None);
        }
        if !job::is_managed(&found) {
            // The API server stopped keeping the field after the dry run.
            let _ = api.delete(&name, &DeleteParams::background()).await;
            return Err(not_managed().into());
        }
        let found = Arc::new(found);
        self.memory.job = Some((Arc::clone(&found), Instant::now()));
        Ok(Some(found))
    }

    async fn adjust_parallelism(&self, shown: &Arc<Job>) -> Result<Arc<Job>, Stop> {
        let wanted = self.run.spec.execution.parallelism;
        if shown.spec.as_ref().and_then(|spec| spec.parallelism) == Some(wanted) || job::is_finished(shown) {
            return Ok(Arc::clone(shown));
        }
        let patch = Patch::Merge(json!({"spec": {"parallelism": wanted}}));
        let api: Api<Job> = self.ctx.api(self.run);
        let patched = api.patch(&shown.name_any(), &PatchParams::default(), &patch).await;
        Ok(Arc::new(patched.map_err(Error::kubernetes("change the parallelism of the Job"))?))
    }

    /// Writes the Job's status during the run: a suspension at once, counts at intervals. Returns when the
    /// counts are due, if it is too early for them.
    pub async fn publish_job(&mut self, shown: &Job, suspended: bool) -> Option<Duration> {
        let counts = self.report.counts?;
        let every = WriteEvery { counts: self.ctx.publish_job_every(), failed: self.ctx.publish_every() };
        // A Job that was deleted by hand has been created again, with an empty status.
        self.memory.job_write.take_if(|last| last.job != shown.uid());
        let last = self.memory.job_write.as_ref();
        let early = last.and_then(|last| last.is_followed_after(suspended, &every, self.now));
        if early.is_some() {
            return early;
        }
        let alive = self.view.pods.iter().filter(|pod| pod.is_alive());
        let (active, ready) = alive.fold((0, 0), |(active, ready), pod| {
            (active + 1, ready + i32::from(pod.stage == Stage::Working))
        });
        let old = shown.status.clone().unwrap_or_default();
        let (succeeded, failed) = never_less(counts, shown);
        let start_time = old.start_time.or_else(|| self.run.status.as_ref()?.start_time.clone());
        let changed =
            old.conditions.unwrap_or_default().into_iter().find(|condition| condition.type_ == "Suspended");
        let word = if suspended { "True" } else { "False" };
        let conditions = match (&changed, suspended) {
            (None, false) => None,
            (Some(before), _) if before.status == word => Some(json!([before])),
            (_, _) => {
                let reason = if suspended { "Suspended" } else { "Resumed" };
                let now = Time(k8s_openapi::jiff::Timestamp::now());
                Some(
                    json!([{"type": "Suspended", "status": word, "reason": reason, "lastTransitionTime": now}]),
                )
            }
        };
        let mut status = json!({
            "active": active,
            "ready": ready,
            "succeeded": succeeded,
            "failed": failed,
        });
        if let Some(conditions) = conditions {
            status["conditions"] = conditions;
        }
        // The API server refuses a start time on a suspended Job.
        if let Some(start_time) = start_time.filter(|_| !suspended) {
            status["startTime"] = json!(start_time);
        }
        if self.memory.job_write.as_ref().is_some_and(|last| last.wrote(&status)) {
            return None;
        }
        let written = self.patch_job_status(shown, &status).await;
        if let Err(error) = &written {
            // Nothing depends on this status while the run continues.
            tracing::debug!(error = chain(error), "the status of the Job was not written");
        }
        let (job, has_succeeded) = (shown.uid(), written.is_ok());
        self.memory.job_write = Some(JobWrite { job, status, suspended, has_succeeded, at: Instant::now() });
        Some(every.failed).filter(|_| !has_succeeded)
    }

    /// Writes how the Job ended, in the same pass as the run's end.
    pub async fn finish_job(
        &mut self,
        shown: &Job,
        counts: Counts,
        outcome: &RunOutcome,
        message: &str,
    ) -> Result<(), Error> {
        // The watch may be older than the last write, and counts must not decrease.
        let api: Api<Job> = self.ctx.api(self.run);
        let name = shown.name_any();
        let found = api.get_opt(&name).await.map_err(Error::kubernetes(format!("read Job {name}")))?;
        let Some(shown) = found.filter(|found| owner::owns(self.run, found) && !job::is_finished(found))
        else {
            return Ok(());
        };
        match self.patch_job_status(&shown, &final_status(&shown, counts, outcome, message)).await {
            // The run ends even if the API server refuses the Job's last status. A missing right is an error,
            // because it may be granted again.
            Err(Error::Kubernetes { doing, source }) if matches!(&*source, kube::Error::Api(status) if status.code == 422) =>
            {
                tracing::warn!(run = %self.run.name_any(), doing, error = chain(&source), "the API server refused the final status of the Job");
                Ok(())
            }
            written => written,
        }
    }

    async fn patch_job_status(&self, shown: &Job, status: &Value) -> Result<(), Error> {
        let api: Api<Job> = self.ctx.api(self.run);
        let patch = Patch::Merge(json!({"status": status}));
        match api.patch_status(&shown.name_any(), &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            // Deleted by hand or by its time to live.
            Err(kube::Error::Api(error)) if error.code == 404 => Ok(()),
            Err(error) => Err(Error::kubernetes("write the status of the Job")(error)),
        }
    }
}

/// Creates the Job; `None` if a Job of this name exists.
async fn create(api: &Api<Job>, wanted: &Job, dry_run: bool) -> Result<Option<Job>, Stop> {
    let params = PostParams { dry_run, field_manager: Some(MANAGER.into()) };
    match api.create(&params, wanted).await {
        Ok(created) => Ok(Some(created)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(kube::Error::Api(status)) if is_refusal(&status) => {
            Err(refused(Reason::JobRefused, "the Job", &status.message).into())
        }
        Err(error) => Err(Error::kubernetes(format!("create Job {}", wanted.name_any()))(error).into()),
    }
}

fn not_managed() -> Obstacle {
    Reason::JobNotManaged.because(
        "this cluster drops managedBy from Jobs; its feature JobManagedBy must be on, as it is by default in the tested version 1.36",
    )
}

/// Keeps counts from decreasing, which the API server forbids for a Job: after a loss of data ours start
/// over.
fn never_less(counts: Counts, shown: &Job) -> (i64, i64) {
    let old = shown.status.as_ref();
    let (succeeded, failed) = (old.and_then(|old| old.succeeded), old.and_then(|old| old.failed));
    (counts.succeeded.max(succeeded.unwrap_or(0).into()), counts.failed.max(failed.unwrap_or(0).into()))
}

fn final_status(shown: &Job, counts: Counts, outcome: &RunOutcome, message: &str) -> Value {
    let (all_succeeded, all_failed) = never_less(counts, shown);
    let RunOutcome { succeeded, reason, start_time, completion_time, .. } = outcome;
    let condition = |type_: &str| {
        json!({"type": type_, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": completion_time, "lastProbeTime": completion_time})
    };
    let types = if *succeeded { ["SuccessCriteriaMet", "Complete"] } else { ["FailureTarget", "Failed"] };
    let known_start = shown.status.as_ref().and_then(|status| status.start_time.as_ref());
    let mut status = json!({
        "active": 0,
        "ready": 0,
        "terminating": 0,
        "succeeded": all_succeeded,
        "failed": all_failed,
        "startTime": known_start.or(start_time.as_ref()).unwrap_or(completion_time),
        "conditions": types.map(condition),
    });
    if *succeeded {
        status["completionTime"] = json!(completion_time);
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_job_wait_and_its_suspension_does_not() {
        let at = Instant::now();
        let every = WriteEvery { counts: Duration::from_secs(5), failed: Duration::from_secs(1) };
        let status = json!({"active": 1});
        let written = JobWrite { job: None, status, suspended: false, has_succeeded: true, at };
        let waits =
            |suspended, after| written.is_followed_after(suspended, &every, at + Duration::from_secs(after));
        assert_eq!(waits(false, 1), Some(Duration::from_secs(4)));
        assert_eq!((waits(false, 5), waits(false, 60)), (None, None), "they are due");
        assert_eq!(waits(true, 0), None, "at once");
        assert!(written.wrote(&json!({"active": 1})) && !written.wrote(&json!({"active": 2})));
        let failed = JobWrite { has_succeeded: false, ..written };
        assert!(!failed.wrote(&json!({"active": 1})), "it is tried again");
        assert_eq!(failed.is_followed_after(false, &every, at), Some(every.failed), "soon");
    }
}
