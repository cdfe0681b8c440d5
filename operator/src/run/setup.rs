//! The prerequisites of a run: a valid spec, a queue under its id, and the Pipeline as it was when the run
//! started. Each step either returns its result or says what blocks the run.

use std::sync::Arc;

use crds::rules::{Context as Rules, Rule, Validate, Violation};
use crds::v1alpha1::{Pipeline, PipelineRun};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use protocol::RunId;
use queue::{Finished, Opened, RunQueue, WorkerUser};

use super::build::owner;
use super::build::snapshot::Snapshot;
use super::cleanup;
use super::limits::Limits;
use super::pass::{Pass, Stop};
use super::spec_hash::spec_hash;
use crate::error::{Error, Reason};
use crate::names;

/// The runId, from the run's queue keys or from its name.
pub fn run_id(run: &PipelineRun) -> Result<RunId, Stop> {
    let id = run.spec.run_id(&run.namespace().unwrap_or_default(), &run.name_any());
    id.map_err(|error| Reason::InvalidSpec.because(error.to_string()).into())
}

/// The queue of a run.
pub enum OpenedQueue {
    /// The queue is open.
    Open(Box<RunQueue>),
    /// The run was executed before.
    Finished(Finished),
}

impl Pass<'_> {
    /// Determines the runId, and adds it to the report.
    pub fn run_id(&mut self) -> Result<RunId, Stop> {
        let run_id = run_id(self.run)?;
        self.report.run_id = Some(run_id.to_string());
        self.report.job_name = self.view.job.as_ref().map(|job| job.name_any());
        Ok(run_id)
    }

    /// The run's limits, if its spec is valid.
    pub fn check_spec(&self) -> Result<Limits, Stop> {
        let rules = Rules { endpoints: self.ctx.endpoints(), ..Rules::default() };
        refuse(Reason::InvalidSpec, self.run.validate(&rules))?;
        Limits::parse(&self.run.spec.execution, self.ctx.settings.runs)
            .ok_or_else(|| Reason::InvalidSpec.because("spec.execution cannot be read").into())
    }

    /// The queue of the run; opens it if necessary.
    pub async fn open_queue(&mut self, run_id: &RunId) -> Result<OpenedQueue, Stop> {
        if let Some(queue) = &self.memory.queue {
            return Ok(OpenedQueue::Open(Box::new(queue.clone())));
        }
        let queue = match self.open_or_take_over(run_id).await? {
            Opened::Created(queue) | Opened::Resumed(queue) => queue,
            Opened::Finished(finished) => return Ok(OpenedQueue::Finished(finished)),
            Opened::Taken { owner, .. } => {
                let message = format!(
                    "the runId {run_id} belongs to the PipelineRun with UID {owner}; give this run another name or other queue keys"
                );
                return Err(Reason::RunIdTaken.because(message).into());
            }
            Opened::Used => {
                let message = format!(
                    "a run with another spec was executed under the runId {run_id}; a run happens once, so create it under a new name"
                );
                return Err(Reason::RunIdUsed.because(message).into());
            }
        };
        self.memory.queue = Some(queue.clone());
        Ok(OpenedQueue::Open(Box::new(queue)))
    }

    /// Opens the queue. A run that was restored from a backup, or deleted and created again while Valkey was
    /// unavailable, has a different UID from the one that the queue knows: it takes its own id back, if no
    /// run with the old UID exists.
    async fn open_or_take_over(&self, run_id: &RunId) -> Result<Opened, Stop> {
        let (valkey, owner, spec) = (&self.ctx.valkey, self.owner(), spec_hash(self.run));
        let retention = &self.ctx.settings.retention;
        cleanup::remember(self.ctx, run_id, &owner).await;
        let opened = RunQueue::open(valkey, run_id, &owner, &spec, retention).await?;
        let Opened::Taken { owner: old_uid, namespace, name } = &opened else { return Ok(opened) };
        let is_same = (namespace.as_ref(), name.as_ref()) == (Some(&owner.namespace), Some(&owner.name));
        if !is_same || self.ctx.world.view(&old_uid.as_str().into()).is_some() {
            return Ok(opened);
        }
        // Remove the user first: once the queue is ours, the old UID is forgotten.
        WorkerUser::remove(valkey, run_id, old_uid).await?;
        if !RunQueue::take_over(valkey, run_id, old_uid, &owner).await? {
            return Ok(opened);
        }
        tracing::info!(run = %run_id, old_uid, "the run took over its queue from an older UID");
        Ok(RunQueue::open(valkey, run_id, &owner, &spec, retention).await?)
    }

    /// Loads the Pipeline of the run: the stored snapshot or, if none exists, the current Pipeline, which is
    /// then stored.
    pub async fn load_snapshot(&mut self, run_id: &RunId) -> Result<Arc<Snapshot>, Stop> {
        if let Some(snapshot) = &self.memory.snapshot {
            return Ok(Arc::clone(snapshot));
        }
        let api: Api<ControllerRevision> = self.ctx.api(self.run);
        let name = names::snapshot(&self.run.name_any());
        let found =
            api.get_opt(&name).await.map_err(Error::kubernetes("look for the snapshot of the Pipeline"))?;
        let stored = match found {
            Some(stored) => stored,
            None => {
                let pipeline = self.find_pipeline()?;
                let wanted = Snapshot::of(&pipeline).stored(self.run, run_id).map_err(Error::Json)?;
                match api.create(&PostParams::default(), &wanted).await {
                    Err(kube::Error::Api(status)) if status.code == 409 => api
                        .get(&name)
                        .await
                        .map_err(Error::kubernetes("read the snapshot of the Pipeline"))?,
                    created => created.map_err(Error::kubernetes("store the Pipeline as it is"))?,
                }
            }
        };
        if !owner::owns(self.run, &stored) {
            return Err(Error::NotOurs { what: format!("ControllerRevision {name}") }.into());
        }
        let snapshot = Arc::new(Snapshot::read(&stored).map_err(Error::Json)?);
        self.memory.snapshot = Some(Arc::clone(&snapshot));
        Ok(snapshot)
    }

    /// The current Pipeline, if the run may use it.
    fn find_pipeline(&self) -> Result<Arc<Pipeline>, Stop> {
        let reference = &self.run.spec.pipeline_ref;
        let own = self.run.namespace().unwrap_or_default();
        let namespace = reference.namespace.as_deref().unwrap_or(&own);
        let grants = self.ctx.world.grants_in(&[namespace.to_owned()]);
        let endpoints = self.ctx.endpoints();
        // Check the grant first: without one, a run must not find out whether a Pipeline exists in another
        // namespace.
        let rules = Rules { endpoints, grants: Some(&grants), pipeline: None, old_run: None };
        refuse(Reason::InvalidSpec, self.run.validate(&rules))?;
        let name = &reference.name;
        let missing = |what: String| Stop::from(Reason::PipelineNotFound.because(what));
        let pipeline = self.ctx.world.pipeline(namespace, name).ok_or_else(|| {
            missing(format!(
                "there is no Pipeline {name:?} in namespace {namespace:?}; the run starts when it is created"
            ))
        })?;
        if pipeline.metadata.deletion_timestamp.is_some() {
            return Err(missing(format!(
                "the Pipeline {name:?} in namespace {namespace:?} is being deleted; the run starts when it is created again"
            )));
        }
        let grants = self.ctx.world.grants_in(&Snapshot::of(&pipeline).namespaces());
        let rules = Rules { endpoints, grants: Some(&grants), pipeline: None, old_run: None };
        refuse(Reason::PipelineInvalid, pipeline.validate(&rules))?;
        refuse(Reason::InvalidSpec, self.run.validate(&Rules { pipeline: Some(&pipeline), ..rules }))?;
        Ok(pipeline)
    }
}

/// Returns an obstacle if there are violations.
pub fn refuse(reason: Reason, violations: Vec<Violation>) -> Result<(), Stop> {
    let Some(first) = violations.first() else { return Ok(()) };
    // A grant can be added later; the run itself cannot change.
    let reason = if first.rule == Rule::ReferenceGrant { Reason::ReferenceNotGranted } else { reason };
    let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
    Err(reason.because(all.join("; ")).into())
}
