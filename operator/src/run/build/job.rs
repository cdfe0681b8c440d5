//! The one Job of a run. The operator creates its pods and writes its status (`managedBy`): the built-in controller would
//! delay all pods after each failure, and could not complete a Job with a dead-lettered file.

use crds::v1alpha1::PipelineRun;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use protocol::RunId;
use protocol::container::{CLAIMER, PUBLISHER};

use super::owner;
use super::pod::Recipe;
use crate::args::WorkerSettings;
use crate::names::{self, MANAGER};

/// Failures are the queue's business; the field is required to be a number, and this one never matters.
const BACKOFF_LIMIT: i32 = i32::MAX;

/// The Job for this many files.
pub fn job(run: &PipelineRun, run_id: &RunId, recipe: &Recipe<'_>, files: u64) -> Job {
    let files = i32::try_from(files).unwrap_or(i32::MAX);
    let retention = i32::try_from(recipe.worker.job_retention.as_secs()).unwrap_or(i32::MAX);
    Job {
        metadata: owner::metadata(run, run_id, names::job(&run.name_any())),
        spec: Some(JobSpec {
            managed_by: Some(MANAGER.to_owned()),
            completions: Some(files),
            parallelism: Some(run.spec.execution.parallelism),
            backoff_limit: Some(BACKOFF_LIMIT),
            ttl_seconds_after_finished: Some(retention),
            template: recipe.template(),
            ..JobSpec::default()
        }),
        status: None,
    }
}

/// A new pod of the Job. Our own image is that of the present settings: a wrong one can be mended while a run is running.
pub fn pod(job: &Job, worker: &WorkerSettings, name: String) -> Pod {
    let PodTemplateSpec { metadata, mut spec } = job.spec.clone().unwrap_or_default().template;
    for container in
        spec.iter_mut().flat_map(|spec| spec.init_containers.iter_mut().flatten().chain(&mut spec.containers))
    {
        if container.name == CLAIMER || container.name == PUBLISHER {
            container.image = Some(worker.claimer_image.clone());
        }
    }
    let mut metadata = metadata.unwrap_or_default();
    metadata.name = Some(name);
    metadata.namespace = job.namespace();
    metadata.owner_references = Some(vec![OwnerReference {
        api_version: Job::api_version(&()).into_owned(),
        kind: Job::kind(&()).into_owned(),
        name: job.name_any(),
        uid: job.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }]);
    // The API server adds labels of its own to the template of a Job; pods of a Job are found by them (kubectl logs job/…).
    Pod { metadata, spec, status: None }
}

/// Whether nobody may start pods: `spec.suspend` belongs to others (Kueue, for example), and is honoured.
pub fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend).unwrap_or(false)
}

/// Whether the API server has left the Job to us: one that does not know `managedBy` drops it.
pub fn is_managed(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref()) == Some(MANAGER)
}

/// Whether the Job has ended.
pub fn is_finished(job: &Job) -> bool {
    let conditions = job.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    })
}
