//! The one Job of a run. The operator creates its pods and writes its status (`managedBy`): the built-in
//! controller would delay all pods after each failure, and could not complete a Job that has a dead-lettered
//! file.

use crds::v1alpha1::PipelineRun;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Container, Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use protocol::container::{CLAIMER, INSTALL, PUBLISHER, WORKER};
use protocol::{RunId, env};

use super::owner;
use super::pod::{Recipe, variable};
use crate::args::WorkerSettings;
use crate::names::{self, MANAGER};
use crate::pods;
use crate::run::memory::Canaries;

/// The queue counts failures. The field requires a number, so it gets one that is never reached.
const BACKOFF_LIMIT: i32 = i32::MAX;

/// The Job for this many files; without `completions` while the number is unknown.
pub fn job(run: &PipelineRun, run_id: &RunId, recipe: &Recipe<'_>, files: Option<u64>) -> Job {
    let files = files.map(|files| i32::try_from(files).unwrap_or(i32::MAX));
    let retention = i32::try_from(recipe.worker.job_retention.as_secs()).unwrap_or(i32::MAX);
    Job {
        metadata: owner::metadata(run, run_id, names::job(&run.name_any())),
        spec: Some(JobSpec {
            managed_by: Some(MANAGER.to_owned()),
            completions: files,
            parallelism: Some(run.spec.execution.parallelism),
            backoff_limit: Some(BACKOFF_LIMIT),
            ttl_seconds_after_finished: Some(retention),
            template: recipe.template(),
            ..JobSpec::default()
        }),
        status: None,
    }
}

/// A new pod of the Job. It gets the operator's current settings, not those from when the Job was created: a
/// moved Valkey, a new CA or a fixed claimer image reach running runs.
pub fn pod(job: &Job, worker: &WorkerSettings, canaries: &Canaries, name: String) -> Pod {
    let PodTemplateSpec { metadata, mut spec } = job.spec.clone().unwrap_or_default().template;
    let is_warm = spec.as_ref().is_some_and(pods::is_warm);
    for container in
        spec.iter_mut().flat_map(|spec| spec.init_containers.iter_mut().flatten().chain(&mut spec.containers))
    {
        match container.name.as_str() {
            CLAIMER => {
                set(container, env::VALKEY_URL, Some(&worker.valkey_url));
                set(container, env::VALKEY_CA_CERTIFICATE, worker.valkey_ca.as_deref());
                set(container, env::SOURCE.canary_key, canaries.source().as_deref());
            }
            // No sink canary: a warm worker uses a result that it has published itself.
            WORKER if is_warm => {
                set(container, env::VALKEY_URL, Some(&worker.valkey_url));
                set(container, env::VALKEY_CA_CERTIFICATE, worker.valkey_ca.as_deref());
                set(container, env::SOURCE.canary_key, canaries.source().as_deref());
            }
            INSTALL if is_warm => {}
            PUBLISHER => {
                set(container, env::SINK.canary_key, canaries.sink().as_deref());
                // A new operator knows no results, but the queue remembers a file whose results are there.
                set(container, env::SOURCE.canary_key, canaries.source().as_deref());
            }
            _ => continue,
        }
        container.image = Some(worker.claimer_image.clone());
        container.image_pull_policy = Some(worker.claimer_image_pull_policy.as_ref().to_owned());
    }
    let mut metadata = metadata.unwrap_or_default();
    // Set here and not in the template, so that pods of Jobs from an older operator have it too.
    let ours = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(names::CONTAINERS_ANNOTATION.to_owned(), pods::annotation(ours));
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
    // Keep the labels that the API server adds to a Job's template: `kubectl logs job/…` finds pods by them.
    Pod { metadata, spec, status: None }
}

/// Sets a variable of a container, or removes it.
fn set(container: &mut Container, name: &str, value: Option<&str>) {
    let env = container.env.get_or_insert_default();
    env.retain(|variable| variable.name != name);
    env.extend(value.map(|value| variable(name, value)));
}

/// Whether starting pods is forbidden. `spec.suspend` belongs to other controllers (Kueue, for example), and
/// is honoured.
pub fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend).unwrap_or(false)
}

/// Whether the API server leaves the Job to us: a server that does not know `managedBy` drops the field.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::PullPolicy;
    use crate::pods::WorkerPod;
    use serde_json::json;
    use std::time::{Duration, Instant};

    /// A pod also names our containers if an older operator created its Job.
    #[test]
    fn a_pod_names_its_own_containers() {
        let worker = WorkerSettings {
            claimer_image: "claimer:2".into(),
            claimer_image_pull_policy: PullPolicy::IfNotPresent,
            valkey_url: String::new(),
            valkey_ca: None,
            job_retention: Duration::ZERO,
        };
        let spec =
            json!({"initContainers": [{"name": "claimer"}, {"name": "a"}], "containers": [{"name": "b"}]});
        let template = json!({"metadata": {"annotations": {"own": "kept"}}, "spec": spec});
        let job: Job =
            serde_json::from_value(json!({"metadata": {"name": "j"}, "spec": {"template": template}}))
                .unwrap();
        let mut pod = pod(&job, &worker, &Canaries::default(), "p".to_owned());
        assert_eq!(pod.annotations()[names::CONTAINERS_ANNOTATION], "claimer,a,b");
        assert_eq!(pod.annotations()["own"], "kept");

        let done = |name: &str| {
            json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": 0}}})
        };
        let status = json!({"phase": "Running", "initContainerStatuses": [done("claimer"), done("a")],
            "containerStatuses": [done("b"), {"name": "mesh", "image": "i", "imageID": "", "ready": true,
            "restartCount": 0, "state": {"running": {}}}]});
        pod.status = serde_json::from_value(status).unwrap();
        let mesh = serde_json::from_value(json!({"name": "mesh"})).unwrap();
        pod.spec.as_mut().unwrap().containers.push(mesh);
        assert!(WorkerPod::read(&pod, None, Instant::now()).is_finished(), "a mesh was added afterwards");
    }

    /// Pods of a running Job must follow a moved Valkey and a rotated CA.
    #[test]
    fn new_pods_of_a_running_job_follow_the_settings_and_know_the_canary() {
        let env = json!([{"name": "VALKEY_URL", "value": "redis://old:6379"}, {"name": "VALKEY_CA_CERTIFICATE",
            "value": "old"}, {"name": "STREAM", "value": "s"}]);
        let template = json!({"spec": {"initContainers": [{"name": "claimer", "image": "claimer:1", "env": env}],
            "containers": [{"name": "a", "image": "a:1"}, {"name": "publisher", "image": "claimer:1"}]}});
        let job: Job =
            serde_json::from_value(json!({"metadata": {"name": "j"}, "spec": {"template": template}}))
                .unwrap();
        let worker = WorkerSettings {
            claimer_image: "claimer:2".into(),
            claimer_image_pull_policy: PullPolicy::Always,
            valkey_url: "rediss://new:6379".into(),
            valkey_ca: Some("new".into()),
            job_retention: Duration::ZERO,
        };
        let mut fetched = WorkerPod::in_stage("p", crate::pods::Stage::Working, Instant::now());
        fetched.claimer = protocol::Report::parse("1-0 1 ok 5-9 cost/$(HOME).jpg");
        fetched.fetched = Some(crate::pods::Milestone { at: Instant::now(), witnessed: true });
        let mut canaries = Canaries::default();
        canaries.observe([&fetched]);
        let made = pod(&job, &worker, &canaries, "p".to_owned()).spec.unwrap();
        let claimer = &made.init_containers.as_ref().unwrap()[0];
        let value = |name: &str| {
            let found: Vec<_> =
                claimer.env.iter().flatten().filter(|variable| variable.name == name).collect();
            assert_eq!(found.len(), 1, "{name}");
            found[0].value.clone().unwrap()
        };
        assert_eq!(
            (value("VALKEY_URL"), value("VALKEY_CA_CERTIFICATE")),
            ("rediss://new:6379".into(), "new".into())
        );
        assert_eq!(value("S3_CANARY_KEY"), "cost/$$(HOME).jpg", "kubelet must not expand it");
        assert_eq!(claimer.image.as_deref(), Some("claimer:2"));
        assert_eq!(made.containers[0].image.as_deref(), Some("a:1"));
        let of_publisher: Vec<&str> =
            made.containers[1].env.iter().flatten().map(|variable| variable.name.as_str()).collect();
        assert_eq!(
            of_publisher,
            ["S3_CANARY_KEY"],
            "no result is known yet, but one may be beside this file's"
        );
    }
}
