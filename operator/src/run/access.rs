//! A run's access to its buckets and its queue: keys, grants for keys of other namespaces, and the workers'
//! Valkey user. A running run can lose all of it, so it is checked and restored repeatedly.

use std::time::Instant;

use crds::rules::{BucketKeys, Context as Rules, Validate};
use crds::v1alpha1::Pipeline;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use queue::WorkerUser;
use storage::AccessKeys;

use super::RESYNC;
use super::build::snapshot::{Credentials, Role, Snapshot};
use super::build::{owner, secret};
use super::cleanup;
use super::pass::{Pass, Prepared, Stop};
use super::setup::refuse;
use crate::error::{Error, Obstacle, Reason};
use crate::names::{self, EPOCH_ANNOTATION, MANAGER};

impl Pass<'_> {
    /// Restores access that a running run can lose: a restarted Valkey has forgotten the workers' user, a
    /// Secret was deleted, keys were replaced. While its keys are missing, or a grant for them is revoked,
    /// the run starts nothing, and the copies of keys are removed.
    pub async fn restore_access(&mut self, prepared: &Prepared) -> Result<(), Stop> {
        let checked = self.memory.user.as_ref().map(|(_, checked)| checked.elapsed());
        let due = checked.is_some_and(|ago| ago >= RESYNC);
        if due || checked.is_none() {
            self.ensure_worker_user(prepared).await?;
        }
        // Until a namespace can be read, its grants permit what they permitted before.
        if self.unread_namespace(&prepared.snapshot).is_some() {
            return Ok(());
        }
        if due || self.memory.withheld.is_some() || self.check_grants(&prepared.snapshot).is_err() {
            let withheld = match self.copy_credentials(prepared).await {
                Ok(_) => None,
                Err(Stop::Obstacle(obstacle)) => Some(obstacle),
                Err(error) => return Err(error),
            };
            let before = std::mem::replace(&mut self.memory.withheld, withheld);
            if self.memory.withheld.is_some() && (before.is_none() || due) {
                self.memory.listing.task = None;
                cleanup::remove_copied_keys(self.ctx, self.run).await?;
            }
        }
        Ok(())
    }

    /// Returns the keys of the source, if the keys of all buckets are present and well-formed. Copies keys
    /// from other namespaces, if a grant allows it.
    pub async fn copy_credentials(&self, prepared: &Prepared) -> Result<Option<AccessKeys>, Stop> {
        self.check_grants(&prepared.snapshot)?;
        let (mut source, mut copies) = (None, Vec::new());
        for wanted in prepared.snapshot.secrets() {
            let secret = self.read_credentials(&wanted).await?;
            let keys = keys(&wanted, secret.as_ref())?;
            if Some(&wanted.namespace) != self.run.metadata.namespace.as_ref() {
                let copy = |found| secret::copy(self.run, &prepared.run_id, wanted.role, found);
                copies.extend(secret.as_ref().map(copy));
            }
            if wanted.role == Role::Source {
                source = Some(keys);
            }
        }
        // Apply copies only when all keys are present: a run that lacks one cannot use the other.
        for copy in &copies {
            self.apply_secret(copy).await?;
        }
        Ok(source)
    }

    async fn read_credentials(&self, wanted: &Credentials) -> Result<Option<Secret>, Stop> {
        let Credentials { name, namespace, .. } = wanted;
        let api: Api<Secret> = Api::namespaced(self.ctx.client.clone(), namespace);
        let found = api.get_opt(name).await;
        Ok(found.map_err(Error::kubernetes(format!("read Secret {namespace}/{name}")))?)
    }

    /// A namespace whose grants the run needs, if they are unknown because it cannot be read yet.
    fn unread_namespace(&self, snapshot: &Snapshot) -> Option<String> {
        snapshot.namespaces().into_iter().find(|namespace| self.ctx.world.is_unread(namespace))
    }

    /// Runs in every pass, before any Secret is read, so that a revoked grant stops working at once.
    fn check_grants(&self, snapshot: &Snapshot) -> Result<(), Stop> {
        if let Some(namespace) = self.unread_namespace(snapshot) {
            let message = format!("the namespace {namespace} cannot be read yet, so its grants are unknown");
            return Err(Reason::OperatorRefused.because(message).into());
        }
        let own = self.run.namespace().unwrap_or_default();
        let mut others = snapshot.namespaces();
        others.retain(|namespace| *namespace != own);
        if others.is_empty() {
            return Ok(());
        }
        let grants = self.ctx.world.grants_in(&others);
        let mut pipeline = Pipeline::new(&snapshot.name, snapshot.spec.clone());
        pipeline.metadata.namespace = Some(snapshot.namespace.clone());
        let rules = Rules {
            endpoints: self.ctx.endpoints(),
            grants: Some(&grants),
            pipeline: Some(&pipeline),
            old_run: None,
        };
        refuse(Reason::InvalidSpec, self.run.validate(&rules))
    }

    /// Ensures the Secret of the workers' user. It also records the epoch of the queue; a different epoch
    /// means that Valkey lost the queue.
    async fn ensure_worker_user(&mut self, prepared: &Prepared) -> Result<(), Stop> {
        let Prepared { run_id, queue, snapshot, .. } = prepared;
        let api: Api<Secret> = self.ctx.api(self.run);
        let name = names::queue_secret(&self.run.name_any());
        let rights = snapshot.worker_rights();
        let found = api.get_opt(&name).await.map_err(Error::kubernetes(format!("look for Secret {name}")))?;
        let existing = found.as_ref().and_then(|found| secret::read_queue(self.run, run_id, rights, found));
        let user = match existing {
            Some(user) => user,
            None => WorkerUser::generate(run_id, &self.owner().uid, rights)?,
        };
        let before = found.as_ref().and_then(secret::epoch);
        let mut wanted = secret::queue(self.run, run_id, &user);
        wanted.metadata.annotations = Some([(EPOCH_ANNOTATION.to_owned(), queue.epoch().to_owned())].into());
        let is_whole = found.as_ref().is_some_and(|found| found.data == wanted.data);
        if before != Some(queue.epoch()) || !is_whole {
            self.write_secret(found.as_ref(), &wanted).await?;
            if before.is_some_and(|before| before != queue.epoch()) {
                self.memory.outcomes_lost();
                self.ctx.warn(self.run, Reason::QueueLost.as_ref(), "Valkey has lost the queue of this run: the bucket is listed again, and files may be processed twice");
            }
        }
        user.ensure(&self.ctx.valkey).await?;
        self.memory.user = Some((user, Instant::now()));
        Ok(())
    }

    async fn apply_secret(&self, wanted: &Secret) -> Result<Secret, Stop> {
        let api: Api<Secret> = self.ctx.api(self.run);
        let name = wanted.name_any();
        let found = api.get_opt(&name).await.map_err(Error::kubernetes(format!("look for Secret {name}")))?;
        match found {
            Some(found) if owner::owns(self.run, &found) && found.data == wanted.data => Ok(found),
            found => self.write_secret(found.as_ref(), wanted).await,
        }
    }

    /// Writes a Secret, replacing the one that was found, if any. Fails if the run does not own that one.
    async fn write_secret(&self, found: Option<&Secret>, wanted: &Secret) -> Result<Secret, Stop> {
        let name = wanted.name_any();
        if found.is_some_and(|found| !owner::owns(self.run, found)) {
            return Err(Error::NotOurs { what: format!("Secret {name}") }.into());
        }
        let api: Api<Secret> = self.ctx.api(self.run);
        let applied = api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(wanted)).await;
        Ok(applied.map_err(Error::kubernetes(format!("apply Secret {name}")))?)
    }
}

fn keys(wanted: &Credentials, found: Option<&Secret>) -> Result<AccessKeys, Obstacle> {
    let Credentials { name, namespace, role } = wanted;
    match BucketKeys::read(found) {
        Ok(BucketKeys { id, secret }) => {
            Ok(AccessKeys { id: id.to_owned().into(), secret: secret.to_owned().into() })
        }
        Err(problem) => {
            let message = format!("the {} bucket: {}", role.as_ref(), problem.of(namespace, name));
            Err(Reason::of_secret(&problem).because(message))
        }
    }
}
