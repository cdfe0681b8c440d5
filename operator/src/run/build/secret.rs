//! The Secrets of a run: the Valkey user of its workers, and copies of keys that a grant allows it to use.

use std::collections::BTreeMap;

use crds::v1alpha1::PipelineRun;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use protocol::RunId;
use protocol::secret::{ACCESS_KEY_ID, PASSWORD, SECRET_ACCESS_KEY, USERNAME};
use queue::{Password, Rights, WorkerUser};

use super::owner;
use super::snapshot::Role;
use crate::names::{self, EPOCH_ANNOTATION};

/// The Secret of the run's Valkey user.
pub fn queue(run: &PipelineRun, run_id: &RunId, user: &WorkerUser) -> Secret {
    let text = |text: &str| ByteString(text.as_bytes().to_vec());
    Secret {
        metadata: owner::metadata(run, run_id, names::queue_secret(&run.name_any())),
        data: Some(BTreeMap::from([
            (USERNAME.to_owned(), text(&user.name)),
            (PASSWORD.to_owned(), text(user.password.reveal())),
        ])),
        ..Secret::default()
    }
}

/// The user that a Secret made by [`queue`] holds.
pub fn read_queue(run: &PipelineRun, run_id: &RunId, rights: Rights, secret: &Secret) -> Option<WorkerUser> {
    let password = text(secret, PASSWORD)?;
    let uid = run.uid().unwrap_or_default();
    Some(WorkerUser::with_password(run_id, &uid, rights, Password::from(password)))
}

/// The recorded epoch of the queue.
pub fn epoch(secret: &Secret) -> Option<&str> {
    secret.metadata.annotations.as_ref()?.get(EPOCH_ANNOTATION).map(String::as_str)
}

/// A copy of keys from another namespace.
pub fn copy(run: &PipelineRun, run_id: &RunId, role: Role, keys: &Secret) -> Secret {
    let data = keys.data.clone().unwrap_or_default();
    let wanted = |key: &str| data.get(key).map(|value| (key.to_owned(), value.clone()));
    Secret {
        metadata: owner::metadata(run, run_id, names::credentials_copy(&run.name_any(), role.as_ref())),
        data: Some([ACCESS_KEY_ID, SECRET_ACCESS_KEY].into_iter().filter_map(wanted).collect()),
        ..Secret::default()
    }
}

/// The text under a key; `None` if it is missing, empty or not text.
fn text(secret: &Secret, key: &str) -> Option<String> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.clone()).ok().filter(|text| !text.is_empty())
}
