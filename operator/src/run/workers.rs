//! Creates, counts and removes the pods of a run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};

use super::build::job;
use super::pass::Pass;
use crate::error::{Error, Obstacle, Reason, is_refusal, refused};
use crate::names;
use crate::pods::{Failed, Stage, Stuck, WorkerPod};
use protocol::container::{CLAIMER, INSTALL, PUBLISHER, WORKER};

/// How many requests run at once, and the most pods that one pass creates, or removes because they are
/// settled. Pods that end meanwhile are settled by the next pass, and wait no longer than these requests
/// take.
pub const BATCH: usize = 16;
/// Report unschedulable pods only after this long.
const UNSCHEDULED_FOR: Duration = Duration::from_secs(15);

/// How to remove pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Give their containers time to end.
    Graceful,
    /// Do not wait for their node.
    AtOnce,
}

/// The results of requesting pods.
#[derive(Default)]
struct Requested {
    created: usize,
    refusal: Option<Obstacle>,
    failure: Option<kube::Error>,
}

impl Pass<'_> {
    /// Creates pods. Refusals delay further creation; pods whose requests got no answer count as created.
    pub async fn create_pods(&mut self, owner: &Job, count: u64) -> Result<(), Error> {
        let mut requested = Requested::default();
        let mut left = usize::try_from(count).unwrap_or(BATCH).min(BATCH);
        let mut batch = self.memory.creation.first_batch(left);
        while left > 0 && requested.refusal.is_none() && requested.failure.is_none() {
            let asked = batch.min(left);
            self.request_pods(owner, asked, &mut requested).await?;
            left -= asked;
            batch *= 2;
        }
        let Requested { created, refusal, failure } = requested;
        if created > 0 {
            self.memory.creation.some_created();
        }
        if let Some(refusal) = refusal {
            self.memory.creation.refused(refusal, Instant::now());
        } else if created > 0 && failure.is_none() {
            self.memory.creation.all_created();
        }
        match failure {
            Some(error) => Err(Error::kubernetes("create pods")(error)),
            None => Ok(()),
        }
    }

    async fn request_pods(
        &mut self,
        owner: &Job,
        count: usize,
        requested: &mut Requested,
    ) -> Result<(), Error> {
        let api: Api<Pod> = self.ctx.api(self.run);
        let mut wanted = Vec::with_capacity(count);
        for _ in 0..count {
            let name = names::pod(&self.run.name_any()).map_err(Error::Random)?;
            self.memory.creation.requested(&name, Instant::now());
            wanted.push(job::pod(owner, &self.ctx.settings.worker, &self.memory.canaries, name));
        }
        let create = |pod: Pod| {
            let api = &api;
            async move { (pod.name_any(), api.create(&PostParams::default(), &pod).await) }
        };
        let mut created = stream::iter(wanted).map(create).buffer_unordered(BATCH);
        let pods_refused = |message: &str| refused(Reason::PodsRefused, "worker pods", message);
        while let Some((name, result)) = created.next().await {
            match result {
                Ok(_) => {
                    self.ctx.metrics.pod_created();
                    requested.created += 1;
                }
                // The pod exists: the watch will show whose it is.
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                Err(kube::Error::Api(status)) if is_refusal(&status) => {
                    self.memory.creation.forget(&name);
                    requested.refusal = Some(pods_refused(&status.message));
                }
                Err(error) => {
                    if let kube::Error::Api(status) = &error {
                        self.memory.creation.failed(pods_refused(&status.message));
                        // The namespace is being deleted, a quota is just being counted, or the server is too
                        // busy.
                        if (400..500).contains(&status.code) {
                            self.memory.creation.forget(&name);
                        } else {
                            self.memory.creation.perhaps_created(&name, Instant::now());
                        }
                    }
                    requested.failure = Some(error);
                }
            }
        }
        Ok(())
    }

    /// Removes pods. Pods that are already deleted are ignored.
    pub async fn remove_pods(&mut self, names: &[String], removal: Removal) -> Result<(), Error> {
        let api: Api<Pod> = self.ctx.api(self.run);
        let params = match removal {
            Removal::Graceful => DeleteParams::default(),
            Removal::AtOnce => DeleteParams::default().grace_period(0),
        };
        let remove = |name: &String| {
            let (api, params, name) = (&api, &params, name.clone());
            async move {
                let result = api.delete(&name, params).await;
                (name, result)
            }
        };
        let mut removed = stream::iter(names).map(remove).buffer_unordered(BATCH);
        let mut failure = None;
        while let Some((name, result)) = removed.next().await {
            match result {
                Ok(_) => {
                    self.ctx.metrics.pod_deleted();
                    self.memory.pods.removed.insert(name);
                }
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    self.memory.pods.removed.insert(name);
                }
                Err(error) => failure = Some(error),
            }
        }
        drop(removed);
        match failure {
            Some(error) => Err(Error::kubernetes("remove pods")(error)),
            None => Ok(()),
        }
    }
}

/// The message of a pod that died before it had a file: no file is at fault, so creation waits instead of
/// retrying endlessly.
pub fn died_without_a_file(pods: &[Arc<WorkerPod>]) -> Option<&str> {
    let Stage::Failed(Failed { reason, message, .. }) = &pods.last()?.stage else { return None };
    Some(if message.is_empty() { reason } else { message })
}

/// The problem that keeps pods from working, if there is one.
pub fn start_problem(pods: &[Arc<WorkerPod>], start_timeout: Duration, now: Instant) -> Option<Obstacle> {
    let alive: Vec<_> = pods.iter().filter(|pod| pod.is_alive()).collect();
    let stuck = alive.iter().find_map(|pod| match &pod.stage {
        Stage::Stuck(stuck) => Some(stuck),
        Stage::Unschedulable(_)
        | Stage::Starting
        | Stage::Claiming
        | Stage::Working
        | Stage::Succeeded
        | Stage::Failed(_) => None,
    });
    if let Some(stuck) = stuck {
        let reason = if stuck.has_image() { Reason::ContainerStartFailed } else { Reason::ImagePullFailed };
        let Stuck { container, image, reason: why, message } = stuck;
        let is_ours = [CLAIMER, INSTALL, PUBLISHER, WORKER].contains(&container.as_str());
        let set_by = if is_ours { ", set by the operator's --claimer-image" } else { "" };
        let message =
            format!("container {container} (image {image}{set_by}) does not start: {why}: {message}");
        return Some(reason.because(message));
    }
    // Some pods without a node, or on a slow node, are normal in a full cluster; all of them are not.
    let waiting = alive.iter().map(|pod| match &pod.stage {
        Stage::Unschedulable(message) if now.duration_since(pod.since) >= UNSCHEDULED_FOR => {
            Some(Reason::PodsUnschedulable.because(format!("no node accepts the pods: {message}")))
        }
        // A sandbox, a volume or a runtime class fails: the kubelet reports that only in events, and keeps
        // trying.
        Stage::Starting if now.duration_since(pod.since) >= start_timeout => {
            let message = format!(
                "no worker pod has started for {}s; `kubectl describe pod {}` says what its node waits for",
                start_timeout.as_secs(),
                pod.name
            );
            Some(Reason::ContainerStartFailed.because(message))
        }
        _ => None,
    });
    waiting.collect::<Option<Vec<_>>>()?.into_iter().next()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const START_TIMEOUT: Duration = Duration::from_secs(300);

    fn problem(stages: &[Stage], after: Duration) -> Option<Reason> {
        let since = Instant::now();
        let pod = |(number, stage): (usize, &Stage)| {
            Arc::new(WorkerPod::in_stage(&format!("pod-{number}"), stage.clone(), since))
        };
        let pods: Vec<_> = stages.iter().enumerate().map(pod).collect();
        start_problem(&pods, START_TIMEOUT, since + after).map(|problem| problem.reason)
    }

    /// The kubelet reports the failure of a sandbox, a volume or a runtime class only in events.
    #[test]
    fn pods_that_do_not_get_started_are_reported_once_all_of_them_took_too_long() {
        let (soon, late) = (START_TIMEOUT / 2, START_TIMEOUT);
        assert_eq!(problem(&[Stage::Starting], soon), None);
        assert_eq!(problem(&[Stage::Starting, Stage::Starting], late), Some(Reason::ContainerStartFailed));
        assert_eq!(problem(&[Stage::Starting, Stage::Working], late), None, "some do");
        assert_eq!(problem(&[], late), None);
        let unschedulable = Stage::Unschedulable("no node".into());
        assert_eq!(problem(&[unschedulable, Stage::Starting], late), Some(Reason::PodsUnschedulable));
        assert_eq!(problem(&[Stage::Claiming], late), None, "it waits for a file");
    }
}
