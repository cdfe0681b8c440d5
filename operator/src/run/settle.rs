//! Decides the fate of files whose pods have ended, are gone, do not start or take too long, in batches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crds::v1alpha1::FailedFile;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use queue::{EntryId, Failure, Fate, Settlement, Verdict};

use super::build::owner;
use super::pass::{Pass, Prepared};
use super::workers::BATCH;
use super::{RESYNC, verdict};
use crate::error::Error;
use crate::metrics::Outcome;
use crate::pods::{Stage, WorkerPod};
use protocol::container::CLAIMER;

/// How much longer than its grace period a pod may take to go before its node counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// How long a node may take to say that a pod has ended of which nothing runs any more.
const TIDIED_WITHIN: Duration = Duration::from_secs(30);
/// Claims that are looked at in one call.
const PAGE: usize = 1_000;

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
        Fate::Released => Some(Outcome::Released),
        // Settled before, by another operator: it has counted it.
        Fate::Ignored => None,
    }
}

/// The pods whose attempt is over, and how it ended.
type Ended = BTreeMap<String, (Verdict, Option<Arc<WorkerPod>>)>;

impl Pass<'_> {
    /// Settles all that can be settled now.
    pub async fn settle(&mut self, prepared: &Prepared) -> Result<Settled, Error> {
        let mut settled = Settled::default();
        let mut ended = self.ended(prepared, &mut settled);
        self.took_too_long(prepared, &mut ended).await?;
        let names: Vec<String> = ended.keys().cloned().collect();
        let claims = if names.is_empty() { Vec::new() } else { prepared.queue.claims_of(&names).await? };
        let mut served: HashMap<String, EntryId> = HashMap::new();
        let mut settlements = Vec::with_capacity(claims.len());
        for claim in claims {
            let Some((verdict, _)) = ended.get(&claim.consumer) else { continue };
            // A worker processes the first of its entries; another one was handed to it while nobody listened.
            let first = served.entry(claim.consumer.clone()).or_insert_with(|| claim.entry.clone());
            let verdict = if *first == claim.entry { verdict.clone() } else { Verdict::Released };
            settlements.push(Settlement { entry: claim.entry, consumer: claim.consumer, verdict });
        }
        self.settle_entries(prepared, &settlements).await?;
        settled.files = settlements.len();
        for (name, (_, pod)) in ended {
            if let Some(finished) = pod.as_ref().filter(|pod| pod.is_finished()) {
                self.ctx.metrics.settled_after(finished.since.elapsed());
            }
            let file = served.remove(&name);
            if let Some(pod) = pod.filter(|pod| file.is_none() && pod.died_without_a_file()) {
                settled.without_a_file.push(pod);
            }
            self.memory.pods.settled.insert(name, file);
        }
        self.forget_gone();
        settled.again = self.compare_with_all_pods(prepared).await?;
        settled.removable = self.removable();
        Ok(settled)
    }

    /// Pods that have ended, in whatever way, and were not settled before.
    fn ended(&mut self, prepared: &Prepared, settled: &mut Settled) -> Ended {
        let mut ended = Ended::new();
        let now = self.now;
        let overdue =
            |pod: &WorkerPod| pod.deleting.is_some_and(|going| now >= going.since + going.grace + LOST_AFTER);
        let lost = self.view.pods.iter().filter(|pod| overdue(pod) && !pod.held);
        settled.lost = lost.map(|pod| pod.name.clone()).collect();
        for pod in self.view.pods.iter().filter(|pod| !self.memory.pods.settled.contains_key(&pod.name)) {
            let start_timeout = self.ctx.settings.start_timeout;
            let verdict = match (&pod.stage, pod.deleting) {
                // It ended because we removed it: should it have claimed meanwhile, nobody tried its file.
                (Stage::Failed(_), _) if self.memory.pods.dismissed.contains(&pod.name) => {
                    Some(Verdict::Released)
                }
                (Stage::Succeeded | Stage::Failed(_), _) => verdict::of(pod, &prepared.limits.non_retryable),
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
        for (name, pod) in &self.memory.pods.gone {
            if self.memory.pods.settled.contains_key(name) {
                continue;
            }
            // It may have ended well before it was deleted.
            let verdict = match verdict::of(pod, &prepared.limits.non_retryable) {
                Some(verdict) if !self.memory.pods.dismissed.contains(name) => verdict,
                _ => self.unfinished(name),
            };
            ended.insert(name.clone(), (verdict, None));
        }
        ended
    }

    /// The file of a pod that went before it ended.
    fn unfinished(&self, pod: &str) -> Verdict {
        if self.memory.pods.dismissed.contains(pod) {
            Verdict::Released
        } else {
            Verdict::Failed(verdict::vanished(pod))
        }
    }

    /// Files that have been worked on for too long, by Valkey's clock; their pods are removed.
    async fn took_too_long(&self, prepared: &Prepared, ended: &mut Ended) -> Result<(), Error> {
        let Some(limit) = prepared.limits.file_timeout else { return Ok(()) };
        let long = |pod: &WorkerPod| pod.claiming.is_some_and(|since| self.now >= since + limit);
        // A new operator has not seen when the claimers started, so it asks now and then anyway.
        if !self.scan_is_due() && !self.view.pods.iter().any(|pod| !pod.is_finished() && long(pod)) {
            return Ok(());
        }
        let mut after = None;
        loop {
            let page = prepared.queue.pending(after.as_ref(), limit, PAGE).await?;
            for claim in &page {
                let failure = Verdict::Failed(verdict::timed_out(limit));
                ended.entry(claim.consumer.clone()).or_insert((failure, None));
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after = Some(last.entry.clone()),
                _ => return Ok(()),
            }
        }
    }

    async fn settle_entries(&mut self, prepared: &Prepared, settlements: &[Settlement]) -> Result<(), Error> {
        if settlements.is_empty() {
            return Ok(());
        }
        let fates = prepared.queue.settle(settlements, &prepared.limits.retry).await?;
        for (settlement, fate) in settlements.iter().zip(fates) {
            if let Some(outcome) = outcome(&fate) {
                self.ctx.metrics.settled(outcome, 1);
            }
            let failure = match &settlement.verdict {
                Verdict::Failed(failure) | Verdict::Rejected(failure) => Some(failure),
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
        if self.memory.failures.may_send_event() {
            let note = format!("{file}: {}", failure.reason());
            match pod {
                Some(pod) => self.ctx.warn_about(self.run, pod, "FileFailed", note),
                None => self.ctx.warn(self.run, "FileFailed", note),
            }
        }
        self.memory.failures.add(FailedFile {
            file: file[..file.floor_char_boundary(1_024)].to_owned(),
            attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
            reason: failure.reason().to_owned(),
            exit_code: failure.exit_code(),
            pod: pod.map(str::to_owned),
            time: Some(Time(Timestamp::now())),
        });
    }

    fn forget_gone(&mut self) {
        for name in self.memory.pods.forget_gone() {
            self.memory.creation.forget(&name);
        }
    }

    /// Whether it is time to look at all claims.
    fn scan_is_due(&self) -> bool {
        self.memory.pods.last_scan.is_none_or(|last| self.now.duration_since(last) >= RESYNC)
    }

    /// Now and then, all claims are compared with all pods: a pod that went while nobody watched left its file behind.
    /// Returns whether one is to be judged once more.
    async fn compare_with_all_pods(&mut self, prepared: &Prepared) -> Result<bool, Error> {
        if !self.scan_is_due() {
            return Ok(false);
        }
        let (mut again, mut strays) = (false, Vec::new());
        let known: HashSet<&str> = self.view.pods.iter().map(|pod| pod.name.as_str()).collect();
        let (mut absent, mut after) = (HashSet::new(), None);
        loop {
            let page = prepared.queue.pending(after.as_ref(), Duration::ZERO, PAGE).await?;
            for claim in &page {
                if !known.contains(claim.consumer.as_str()) {
                    absent.insert(claim.consumer.clone());
                    continue;
                }
                match self.memory.pods.settled.get(&claim.consumer) {
                    None => {}
                    // The file that was settled is pending again: Valkey went back to before that.
                    Some(file) if file.as_ref() == Some(&claim.entry) => {
                        self.memory.pods.settled.remove(&claim.consumer);
                        again = true;
                    }
                    // Another one was handed to it while nobody listened.
                    Some(_) => strays.push(Settlement {
                        entry: claim.entry.clone(),
                        consumer: claim.consumer.clone(),
                        verdict: Verdict::Released,
                    }),
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after = Some(last.entry.clone()),
                _ => break,
            }
        }
        self.settle_entries(prepared, &strays).await?;
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
        let reclaimed = prepared.queue.reclaim(Duration::ZERO, &prepared.limits.retry, judge).await?;
        for fate in &reclaimed.fates {
            if let Fate::DeadLettered { file, attempts } = fate {
                let failure =
                    Failure::new("PodGone: its pod was deleted or its node was lost before it ended", None);
                self.dead_lettered(file, *attempts, &failure, None);
            }
            let outcome = outcome(fate).map(|outcome| match outcome {
                Outcome::Retried => Outcome::Reclaimed,
                other => other,
            });
            if let Some(outcome) = outcome {
                self.ctx.metrics.settled(outcome, 1);
            }
        }
        if reclaimed.held_by_nobody > 0 {
            tracing::warn!(run = %self.run.name_any(), files = reclaimed.held_by_nobody, "queued again what nobody held");
        }
        self.memory.pods.last_scan = Some(self.now);
        Ok(again)
    }

    /// Settled pods, except the newest failures, whose logs are worth keeping. As many as a pass removes.
    fn removable(&mut self) -> Vec<String> {
        let mut removable = Vec::new();
        for pod in self.view.pods.iter().filter(|pod| pod.deleting.is_none()) {
            if !self.memory.pods.settled.contains_key(&pod.name)
                || self.memory.pods.removed.contains(&pod.name)
            {
                continue;
            }
            match &pod.stage {
                Stage::Failed(_) if pod.stopped => {
                    self.memory.pods.keep(&pod.name);
                }
                // Its node tidies up before it says that the pod has ended; deleted now, it would be gone with its log. With a
                // container that does not start it never says so.
                Stage::Failed(_) if !pod.running && self.now < pod.since + TIDIED_WITHIN => {}
                // Also one of which other containers still run: nothing else ends them.
                _ => removable.push(pod.name.clone()),
            }
        }
        removable.truncate(BATCH);
        while removable.len() < BATCH
            && let Some(oldest) = self.memory.pods.next_not_to_keep(self.ctx.settings.keep_failed_pods)
        {
            removable.push(oldest);
        }
        removable
    }
}
