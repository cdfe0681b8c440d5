//! Decides the fate of files whose pods have ended, are gone, do not start or take too long, in batches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::v1alpha1::{FailedFile, PipelineRun};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use queue::{EntryId, Failure, Fate, RunQueue, Settlement, Verdict};

use super::build::owner;
use super::limits::Limits;
use super::memory::Memory;
use super::workers::BATCH;
use super::{RESYNC, verdict};
use crate::context::Context;
use crate::error::Error;
use crate::metrics::Outcome;
use crate::names::CLAIMER;
use crate::pods::{Stage, WorkerPod};

/// How much longer than its grace period a pod may take to go before its node counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// How long a node may take to say that a pod has ended of which nothing runs any more.
const TIDIED_WITHIN: Duration = Duration::from_secs(30);

/// What is settled, and how.
pub struct Settling<'a> {
    /// The operator.
    pub ctx: &'a Context,
    /// The run.
    pub run: &'a PipelineRun,
    /// Its queue.
    pub queue: &'a RunQueue,
    /// What it allows.
    pub limits: &'a Limits,
    /// Its pods.
    pub pods: &'a [Arc<WorkerPod>],
    /// What is remembered of it.
    pub memory: &'a mut Memory,
    /// Now, by our own clock.
    pub now: Instant,
}

/// What settling found.
#[derive(Default)]
pub struct Settled {
    /// Files that were settled.
    pub files: usize,
    /// Pods that nobody needs any more.
    pub removable: Vec<String>,
    /// Pods to remove without waiting for their node.
    pub lost: Vec<String>,
    /// Pods that died before they had a file, with what they said.
    pub without_a_file: Vec<Arc<WorkerPod>>,
    /// Whether a pod is to be judged once more.
    pub again: bool,
}

fn outcome(fate: &Fate) -> Option<Outcome> {
    match fate {
        Fate::Succeeded => Some(Outcome::Succeeded),
        Fate::Retrying { .. } => Some(Outcome::Retried),
        Fate::DeadLettered { .. } => Some(Outcome::Failed),
        Fate::Disrupted { .. } | Fate::Released => Some(Outcome::Released),
        // Settled before, by another operator: it has counted it.
        Fate::Ignored => None,
    }
}

/// The pods whose attempt is over, and how it ended.
type Ended = BTreeMap<String, (Verdict, Option<Arc<WorkerPod>>)>;

impl Settling<'_> {
    /// Settles all that can be settled now.
    pub async fn run(mut self) -> Result<Settled, Error> {
        let mut settled = Settled::default();
        let mut ended = self.ended(&mut settled);
        self.took_too_long(&mut ended).await?;
        let names: Vec<String> = ended.keys().cloned().collect();
        let claims = if names.is_empty() { Vec::new() } else { self.queue.claims_of(&names).await? };
        let mut served: HashMap<String, EntryId> = HashMap::new();
        let mut settlements = Vec::with_capacity(claims.len());
        for claim in claims {
            let Some((verdict, _)) = ended.get(&claim.consumer) else { continue };
            // A worker processes the first of its entries; another one was handed to it while nobody listened.
            let first = served.entry(claim.consumer.clone()).or_insert_with(|| claim.entry.clone());
            let verdict = if *first == claim.entry { verdict.clone() } else { Verdict::Released };
            settlements.push(Settlement { entry: claim.entry, consumer: claim.consumer, verdict });
        }
        self.settle(&settlements).await?;
        settled.files = settlements.len();
        for (name, (_, pod)) in ended {
            if let Some(finished) = pod.as_ref().filter(|pod| pod.is_finished()) {
                self.ctx.metrics.settled_after(finished.since.elapsed());
            }
            let file = served.remove(&name);
            if let Some(pod) = pod.filter(|pod| file.is_none() && pod.died_without_a_file()) {
                settled.without_a_file.push(pod);
            }
            self.memory.settled.insert(name, file);
        }
        self.forget_gone();
        settled.again = self.compare_with_all_pods().await?;
        settled.removable = self.removable();
        Ok(settled)
    }

    /// Pods that have ended, in whatever way, and were not settled before.
    fn ended(&mut self, settled: &mut Settled) -> Ended {
        let mut ended = Ended::new();
        let now = self.now;
        let overdue =
            |pod: &WorkerPod| pod.deleting.is_some_and(|going| now >= going.since + going.grace + LOST_AFTER);
        let lost = self.pods.iter().filter(|pod| overdue(pod) && !pod.held);
        settled.lost = lost.map(|pod| pod.name.clone()).collect();
        for pod in self.pods.iter().filter(|pod| !self.memory.settled.contains_key(&pod.name)) {
            let start_timeout = self.ctx.settings.start_timeout;
            let verdict = match (&pod.stage, pod.deleting) {
                // It ended because we removed it: should it have claimed meanwhile, nobody tried its file.
                (Stage::Failed(_), _) if self.memory.dismissed.contains(&pod.name) => Some(Verdict::Released),
                (Stage::Succeeded | Stage::Failed(_), _) => verdict::of(pod, &self.limits.non_retryable),
                (_, Some(_)) if overdue(pod) => Some(self.unfinished(&pod.name)),
                (Stage::Stuck(stuck), None) if self.now.duration_since(pod.since) >= start_timeout => {
                    settled.lost.push(pod.name.clone());
                    // Without a claim there is no file to blame, and neither is one whose keys were taken away; another pod
                    // may be made with a better image.
                    let blamed = stuck.container != CLAIMER && self.memory.withheld.is_none();
                    Some(if blamed {
                        Verdict::Failed(verdict::not_started(stuck))
                    } else {
                        Verdict::Released
                    })
                }
                _ => None,
            };
            if let Some(verdict) = verdict {
                ended.insert(pod.name.clone(), (verdict, Some(Arc::clone(pod))));
            }
        }
        for (name, pod) in &self.memory.gone {
            if self.memory.settled.contains_key(name) {
                continue;
            }
            // It may have ended well before it was deleted.
            let verdict = match verdict::of(pod, &self.limits.non_retryable) {
                Some(verdict) if !self.memory.dismissed.contains(name) => verdict,
                _ => self.unfinished(name),
            };
            ended.insert(name.clone(), (verdict, None));
        }
        ended
    }

    /// The file of a pod that went before it ended.
    fn unfinished(&self, pod: &str) -> Verdict {
        if self.memory.dismissed.contains(pod) {
            Verdict::Released
        } else {
            Verdict::Failed(verdict::vanished(pod))
        }
    }

    /// Files that have been worked on for too long, by Valkey's clock; their pods are removed.
    async fn took_too_long(&self, ended: &mut Ended) -> Result<(), Error> {
        let Some(limit) = self.limits.file_timeout else { return Ok(()) };
        let long = |pod: &WorkerPod| pod.claiming.is_some_and(|since| self.now >= since + limit);
        // A new operator has not seen when the claimers started, so it asks now and then anyway.
        if !self.scan_is_due() && !self.pods.iter().any(|pod| !pod.is_finished() && long(pod)) {
            return Ok(());
        }
        let note = |claim: &queue::Pending| {
            let failure = Verdict::Failed(verdict::timed_out(limit));
            ended.entry(claim.consumer.clone()).or_insert((failure, None));
        };
        self.queue.for_each_pending(limit, note).await?;
        Ok(())
    }

    async fn settle(&mut self, settlements: &[Settlement]) -> Result<(), Error> {
        if settlements.is_empty() {
            return Ok(());
        }
        let fates = self.queue.settle(settlements, &self.limits.retry).await?;
        for (settlement, fate) in settlements.iter().zip(fates) {
            if let Some(outcome) = outcome(&fate) {
                self.ctx.metrics.settled(outcome, 1);
            }
            let failure = match &settlement.verdict {
                Verdict::Failed(failure) | Verdict::Rejected(failure) => Some(failure),
                Verdict::Disrupted(disruption) => Some(&disruption.failure),
                Verdict::Succeeded | Verdict::Released => None,
            };
            if let (Fate::DeadLettered { file, attempts }, Some(failure)) = (&fate, failure) {
                self.dead_lettered(file, *attempts, failure, Some(&settlement.consumer));
            }
            tracing::debug!(run = %self.run.name_any(), pod = settlement.consumer, ?fate, "settled");
        }
        Ok(())
    }

    fn dead_lettered(&mut self, file: &str, attempts: u32, failure: &Failure, pod: Option<&str>) {
        if self.memory.may_tell_of_a_failure() {
            let note = format!("{file}: {}", failure.reason());
            match pod {
                Some(pod) => self.ctx.warn_about(self.run, pod, "FileFailed", note),
                None => self.ctx.warn(self.run, "FileFailed", note),
            }
        }
        self.memory.failed(FailedFile {
            file: file[..file.floor_char_boundary(1_024)].to_owned(),
            attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
            reason: failure.reason().to_owned(),
            exit_code: failure.exit_code(),
            pod: pod.map(str::to_owned),
            time: Some(Time(Timestamp::now())),
        });
    }

    fn forget_gone(&mut self) {
        for name in std::mem::take(&mut self.memory.gone).into_keys() {
            self.memory.settled.remove(&name);
            self.memory.removed.remove(&name);
            self.memory.not_created(&name);
            self.memory.dismissed.remove(&name);
            self.memory.kept.retain(|kept| *kept != name);
        }
    }

    /// Whether it is time to look at all claims.
    fn scan_is_due(&self) -> bool {
        self.memory.last_scan.is_none_or(|last| self.now.duration_since(last) >= RESYNC)
    }

    /// Now and then, all claims are compared with all pods: a pod that went while nobody watched left its file behind.
    /// Returns whether one is to be judged once more.
    async fn compare_with_all_pods(&mut self) -> Result<bool, Error> {
        if !self.scan_is_due() {
            return Ok(false);
        }
        let (mut again, mut strays) = (false, Vec::new());
        let known: HashSet<&str> = self.pods.iter().map(|pod| pod.name.as_str()).collect();
        let mut absent = HashSet::new();
        let settled = &mut self.memory.settled;
        let compare = |claim: &queue::Pending| {
            if !known.contains(claim.consumer.as_str()) {
                absent.insert(claim.consumer.clone());
                return;
            }
            match settled.get(&claim.consumer) {
                None => {}
                // The file that was settled is pending again: Valkey went back to before that.
                Some(file) if file.as_ref() == Some(&claim.entry) => {
                    settled.remove(&claim.consumer);
                    again = true;
                }
                // Another one was handed to it while nobody listened.
                Some(_) => strays.push(Settlement {
                    entry: claim.entry.clone(),
                    consumer: claim.consumer.clone(),
                    verdict: Verdict::Released,
                }),
            }
        };
        self.queue.for_each_pending(Duration::ZERO, compare).await?;
        self.settle(&strays).await?;
        // The watch may be late, but a list is not: a pod that has claimed was there before this was asked.
        if !absent.is_empty() {
            let api: Api<Pod> = self.ctx.api(self.run);
            let ours = owner::pods(self.run);
            let listed =
                api.list_metadata(&ours).await.map_err(Error::kubernetes("list the pods of the run"))?;
            for pod in listed.items {
                absent.remove(&pod.name_any());
            }
        }
        let judge = |claim: &queue::Pending| {
            absent.contains(&claim.consumer).then(|| verdict::vanished(&claim.consumer).reason().to_owned())
        };
        let reclaimed = self.queue.reclaim(Duration::ZERO, &self.limits.retry, judge).await?;
        for fate in &reclaimed.fates {
            if let Fate::DeadLettered { file, attempts } = fate {
                let failure =
                    Failure::new("PodGone: its pod was deleted or its node was lost before it ended", None);
                self.dead_lettered(file, *attempts, &failure, None);
            }
            let outcome = outcome(fate).map(|outcome| match outcome {
                Outcome::Retried | Outcome::Released => Outcome::Reclaimed,
                other => other,
            });
            if let Some(outcome) = outcome {
                self.ctx.metrics.settled(outcome, 1);
            }
        }
        if reclaimed.held_by_nobody > 0 {
            tracing::warn!(run = %self.run.name_any(), files = reclaimed.held_by_nobody, "queued again what nobody held");
        }
        self.memory.last_scan = Some(self.now);
        Ok(again)
    }

    /// Settled pods, but for the newest failures: trap 14. As many as a pass removes.
    fn removable(&mut self) -> Vec<String> {
        let mut removable = Vec::new();
        for pod in self.pods.iter().filter(|pod| pod.deleting.is_none()) {
            if !self.memory.settled.contains_key(&pod.name) || self.memory.removed.contains(&pod.name) {
                continue;
            }
            match &pod.stage {
                Stage::Failed(_) if pod.stopped => {
                    if !self.memory.kept.contains(&pod.name) {
                        self.memory.kept.push_back(pod.name.clone());
                    }
                }
                // Its node tidies up before it says that the pod has ended; deleted now, it would be gone with its log. With a
                // container that does not start it never says so.
                Stage::Failed(_) if !pod.running && self.now < pod.since + TIDIED_WITHIN => {}
                // Also one of which other containers still run: nothing else ends them.
                _ => removable.push(pod.name.clone()),
            }
        }
        removable.truncate(BATCH);
        while self.memory.kept.len() > self.ctx.settings.keep_failed_pods && removable.len() < BATCH {
            removable.extend(self.memory.kept.pop_front());
        }
        removable
    }
}
