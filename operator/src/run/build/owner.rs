//! Ownership: a run owns its Job, Secrets and snapshot; the Job owns the pods. Garbage collection removes
//! anything that was not removed explicitly.

use std::collections::BTreeMap;

use crds::v1alpha1::PipelineRun;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::ListParams;
use kube::{Resource, ResourceExt};
use protocol::RunId;
use protocol::names::{LABEL_VALUE_MAX, shorten};

use crate::names::{RUN_LABEL, RUN_NAME_LABEL, RUN_UID_LABEL};

/// The owner reference to the run.
pub fn reference(run: &PipelineRun) -> OwnerReference {
    OwnerReference {
        api_version: PipelineRun::api_version(&()).into_owned(),
        kind: PipelineRun::kind(&()).into_owned(),
        name: run.name_any(),
        uid: run.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Metadata of an object that the run owns.
pub fn metadata(run: &PipelineRun, run_id: &RunId, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: run.namespace(),
        labels: Some(labels(run, run_id)),
        owner_references: Some(vec![reference(run)]),
        ..ObjectMeta::default()
    }
}

/// The labels of every object that belongs to the run.
pub fn labels(run: &PipelineRun, run_id: &RunId) -> BTreeMap<String, String> {
    let name = shorten(&run.name_any(), LABEL_VALUE_MAX);
    BTreeMap::from([
        (RUN_LABEL.to_owned(), run_id.label_value()),
        (RUN_NAME_LABEL.to_owned(), name),
        (RUN_UID_LABEL.to_owned(), run.uid().unwrap_or_default()),
    ])
}

/// Selects the pods of the run.
pub fn pods(run: &PipelineRun) -> ListParams {
    ListParams::default().labels(&format!("{RUN_UID_LABEL}={}", run.uid().unwrap_or_default()))
}

/// Whether this run owns the object, as opposed to an earlier run of the same name.
pub fn owns<K: Resource>(run: &PipelineRun, object: &K) -> bool {
    let owners = object.meta().owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|owner| Some(&owner.uid) == run.metadata.uid.as_ref())
}
