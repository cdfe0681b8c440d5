//! The pods of a run: created, counted, removed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::v1alpha1::PipelineRun;
use futures::{StreamExt, stream};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use protocol::Exit;
use protocol::container::CLAIMER;

use super::build::job;
use super::memory::Memory;
use crate::context::Context;
use crate::error::{Error, Obstacle, Reason, is_refusal, refused};
use crate::names;
use crate::pods::{Failed, Stage, WorkerPod};

/// Requests at once, and the most pods that one pass creates, or removes because they are settled: those that end meanwhile are
/// settled by the next pass, and wait no longer than these requests take.
pub const BATCH: usize = 16;
/// Pods may wait this long for a node before that is worth a word.
const UNSCHEDULED_FOR: Duration = Duration::from_secs(15);

/// What became of pods that were asked for.
#[derive(Default)]
struct Creation {
    good: usize,
    refusal: Option<Obstacle>,
    failure: Option<kube::Error>,
}

/// Creates pods. Those that the API server refuses make us wait; those of which nothing is known count as created.
pub async fn create_pods(
    ctx: &Context,
    run: &PipelineRun,
    owner: &Job,
    count: u64,
    memory: &mut Memory,
) -> Result<(), Error> {
    // Pods that die without a file were created too: a creation that works says nothing about them.
    let dying =
        memory.creation_problem.as_ref().is_some_and(|problem| problem.reason == Reason::WorkersFailing);
    let mut creation = Creation::default();
    let mut left = usize::try_from(count).unwrap_or(BATCH).min(BATCH);
    // After a refusal one, and twice as many whenever all were taken: what is refused again costs little, however many files
    // wait for the room that a quota leaves.
    let mut at_once = if memory.creation_problem.is_some() { 1 } else { left };
    while left > 0 && creation.refusal.is_none() && creation.failure.is_none() {
        let asked = at_once.min(left);
        create_at_once(ctx, run, owner, asked, memory, &mut creation).await?;
        left -= asked;
        at_once *= 2;
    }
    let Creation { good, refusal, failure } = creation;
    // What is partly refused works: a quota lets as many pods live as it does.
    if good > 0 && !dying {
        memory.creation_backoff.reset();
    }
    if let Some(refusal) = refusal {
        memory.creation_backoff.failed(Instant::now());
        memory.creation_problem = Some(refusal);
    } else if good > 0 && failure.is_none() && !dying {
        memory.creation_problem = None;
    }
    match failure {
        Some(error) => Err(Error::kubernetes("create pods")(error)),
        None => Ok(()),
    }
}

async fn create_at_once(
    ctx: &Context,
    run: &PipelineRun,
    owner: &Job,
    count: usize,
    memory: &mut Memory,
    creation: &mut Creation,
) -> Result<(), Error> {
    let api: Api<Pod> = ctx.api(run);
    let mut wanted = Vec::new();
    for _ in 0..count {
        let name = names::pod(&run.name_any()).map_err(Error::Random)?;
        memory.created(&name, Instant::now());
        wanted.push(job::pod(owner, &ctx.settings.worker, name));
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
                ctx.metrics.pod_created();
                creation.good += 1;
            }
            // It is there: the watch will show whose it is.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(kube::Error::Api(status)) if is_refusal(&status) => {
                memory.not_created(&name);
                creation.refusal = Some(pods_refused(&status.message));
            }
            Err(error) => {
                if let kube::Error::Api(status) = &error {
                    memory.creation_problem = Some(pods_refused(&status.message));
                    // Its namespace is going, a quota is counted at this moment, or the server is too busy.
                    if (400..500).contains(&status.code) {
                        memory.not_created(&name);
                    } else {
                        memory.perhaps_created(&name, Instant::now());
                    }
                }
                creation.failure = Some(error);
            }
        }
    }
    Ok(())
}

/// Removes pods; those that are gone already are none the worse.
pub async fn remove_pods(
    ctx: &Context,
    run: &PipelineRun,
    names: &[String],
    at_once: bool,
    memory: &mut Memory,
) -> Result<(), Error> {
    let api: Api<Pod> = ctx.api(run);
    let params = if at_once { DeleteParams::default().grace_period(0) } else { DeleteParams::default() };
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
                ctx.metrics.pod_deleted();
                memory.removed.insert(name);
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                memory.removed.insert(name);
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

/// Pods that died before they had a file: nothing is wrong with a file, so creation waits instead of trying for ever.
pub fn died_without_a_file(pods: &[Arc<WorkerPod>], memory: &mut Memory) {
    let Some(pod) = pods.last() else { return };
    let Stage::Failed(Failed { reason, message, exit_code, .. }) = &pod.stage else { return };
    // The run was closed meanwhile: that is how idle claimers are told.
    if *exit_code == Some(Exit::RunClosed.code()) {
        return;
    }
    let said = if message.is_empty() { reason } else { message };
    // Those that die while we wait were created before: many that die one after the other are one failure.
    let now = Instant::now();
    if memory.creation_backoff.left(now).is_none() {
        memory.creation_backoff.failed(now);
    }
    memory.creation_problem =
        Some(Reason::WorkersFailing.because(format!("worker pods end before they claim a file: {said}")));
}

/// What keeps pods from working, if anything does.
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
        let reason = match stuck.reason.as_str() {
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                Reason::ContainerStartFailed
            }
            _ => Reason::ImagePullFailed,
        };
        let whose = if stuck.container == CLAIMER {
            "the claimer (set by the operator's --claimer-image)"
        } else {
            &stuck.container
        };
        let message =
            format!("{whose} does not start with image {}: {}: {}", stuck.image, stuck.reason, stuck.message);
        return Some(reason.because(message));
    }
    // Some pods without a node, or whose node takes its time, are normal in a full cluster; all of them are not.
    let waiting = alive.iter().map(|pod| match &pod.stage {
        Stage::Unschedulable(message) if now.duration_since(pod.since) >= UNSCHEDULED_FOR => {
            Some(Reason::PodsUnschedulable.because(format!("no node takes the pods: {message}")))
        }
        // A sandbox, a volume or a runtime class: the kubelet tells only in events, and tries again by itself.
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

    /// Many pods of one lost node die in one pass after the other.
    #[test]
    fn pods_that_die_while_we_wait_do_not_make_us_wait_longer() {
        let failed =
            Failed { container: None, exit_code: None, reason: "NodeLost".into(), message: String::new() };
        let pod = Arc::new(WorkerPod::in_stage("p", Stage::Failed(failed), Instant::now()));
        let mut memory = Memory::default();
        for _ in 0..7 {
            died_without_a_file(&[Arc::clone(&pod)], &mut memory);
        }
        let left = memory.creation_backoff.left(Instant::now());
        assert!(left.is_some_and(|left| left <= Duration::from_secs(1)), "{left:?}");
        assert!(memory.creation_problem.is_some());
    }

    /// Trap 11: the kubelet says of a sandbox, a volume or a runtime class that fails only in events.
    #[test]
    fn pods_that_do_not_get_started_are_told_once_all_of_them_took_too_long() {
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
