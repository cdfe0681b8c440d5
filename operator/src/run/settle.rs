//! Settles files whose pods have ended, are gone, do not start or take too long, in batches.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use queue::{Disruption, EntryId, Failure, Fate, Pending, Settlement, Verdict};

use super::RESYNC;
use super::pass::{Pass, Prepared};
use super::verdict::{self, Begun, Cause, Judgement, Moment};
use super::warm::TakenReports;
use super::workers::BATCH;
use crate::error::Error;
use crate::metrics::FileOutcome;
use crate::pods::{Stage, WorkerPod};

/// How much longer than its grace period a pod may take to disappear before its node counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// How long a node may take to report the end of a pod that has no running container.
const TIDIED_WITHIN: Duration = Duration::from_secs(30);

/// The results of settling.
#[derive(Default)]
pub struct Settled {
    /// Files that were settled.
    pub files: usize,
    /// Settled files that their pods had tried.
    pub tried: usize,
    /// Living pods that held the settled files.
    pub served: Vec<String>,
    /// Pods that are no longer needed.
    pub removable: Vec<String>,
    /// Pods to remove without waiting for their node.
    pub lost: Vec<String>,
    /// Pods that died before they had a file, with their messages.
    pub without_a_file: Vec<Arc<WorkerPod>>,
    /// Whether a pod is to be judged again.
    pub again: bool,
}

/// A pod whose attempt is over.
struct Ended {
    judgement: Judgement,
    /// The pod, unless it is gone.
    pod: Option<Arc<WorkerPod>>,
}

/// The outcome that a fate is counted as; `None` if another operator settled the file and has counted it.
pub fn outcome(fate: &Fate) -> Option<FileOutcome> {
    match fate {
        Fate::Succeeded => Some(FileOutcome::Succeeded),
        Fate::Retrying { .. } => Some(FileOutcome::Retried),
        Fate::DeadLettered { .. } => Some(FileOutcome::Failed),
        Fate::Disrupted { .. } => Some(FileOutcome::Disrupted),
        Fate::Released => Some(FileOutcome::Released),
        Fate::Ignored => None,
    }
}

/// Whether a pod that processes one file has processed this one: the file that it reported or, without a
/// report, its first.
fn is_the_file_of(claim: &Pending, judgement: &Judgement, served: &HashMap<String, EntryId>) -> bool {
    judgement.tried
        && judgement.entry.as_ref().is_none_or(|entry| *entry == claim.entry)
        && !served.contains_key(&claim.consumer)
}

/// Notes the file that the filters of a pod worked on or, if they worked on none, a file that it was
/// publishing.
fn note_served(served: &mut HashMap<String, EntryId>, claim: &Pending, begun: Option<Begun>) {
    let (pod, entry) = (claim.consumer.clone(), claim.entry.clone());
    match begun {
        Some(Begun::Filtering) => drop(served.insert(pod, entry)),
        Some(Begun::Publishing) => drop(served.entry(pod).or_insert(entry)),
        None => {}
    }
}

impl Pass<'_> {
    /// Settles everything that can be settled now.
    pub async fn settle(&mut self, prepared: &Prepared) -> Result<Settled, Error> {
        let mut settled = Settled::default();
        // Take reports first, so that they count even if their pod has ended since.
        let taken = if prepared.snapshot.is_warm() {
            self.take_reports(prepared).await?
        } else {
            TakenReports::default()
        };
        self.observe_dependencies();
        let mut ended = self.judge_ended_pods(prepared, &mut settled);
        self.judge_overlong_pods(prepared, &mut ended).await?;
        let mut served = self.settle_claims(prepared, &ended, &mut settled).await?;
        for (name, Ended { judgement, pod }) in ended {
            // A pod that ended without a file shows nothing: a restarted operator finds pods that are kept
            // for their logs.
            if served.contains_key(&name) || pod.as_ref().is_some_and(|pod| !pod.is_finished()) {
                self.memory.breakers.judged(&judgement);
            }
            if let Some(finished) = pod.as_ref().filter(|pod| pod.is_finished()) {
                self.ctx.metrics.settled_after(finished.since.elapsed());
            }
            let file = served.remove(&name);
            if let Some(pod) = pod.filter(|pod| file.is_none() && pod.died_without_a_file()) {
                settled.without_a_file.push(pod);
            }
            self.memory.pods.settled.insert(name, file);
        }
        self.forget_gone_pods();
        settled.files += taken.files;
        settled.tried += taken.files;
        settled.served = taken.served;
        settled.again = self.compare_claims_with_pods(prepared).await?;
        settled.removable = self.removable_pods();
        Ok(settled)
    }

    /// Notes which operations succeeded, before anything is judged: a fetch that another pod finished shows
    /// that the storage is up.
    fn observe_dependencies(&mut self) {
        let pods = || self.view.pods.iter().chain(self.memory.pods.gone.values()).map(AsRef::as_ref);
        self.memory.breakers.observe(pods());
        self.memory.canaries.observe(pods());
    }

    /// Judges pods that have ended, in whatever way, and were not settled before.
    fn judge_ended_pods(&mut self, prepared: &Prepared, settled: &mut Settled) -> BTreeMap<String, Ended> {
        let now = self.now;
        let overdue =
            |pod: &WorkerPod| pod.deleting.is_some_and(|going| now >= going.since + going.grace + LOST_AFTER);
        let lost = self.view.pods.iter().filter(|pod| overdue(pod) && !pod.held);
        settled.lost = lost.map(|pod| pod.name.clone()).collect();
        let start_timeout = self.ctx.settings.start_timeout;
        let mut judged = Vec::new();
        for pod in &self.view.pods {
            if self.memory.pods.settled.contains_key(&pod.name) {
                continue;
            }
            let judgement = match (&pod.stage, pod.deleting) {
                (Stage::Succeeded | Stage::Failed(_), _) if pod.is_over(now) => self.judge(prepared, pod),
                (_, Some(_)) if overdue(pod) => Some(verdict::of_vanished(pod)),
                (Stage::Stuck(stuck), None) if now.duration_since(pod.since) >= start_timeout => {
                    settled.lost.push(pod.name.clone());
                    Some(verdict::of_stuck(pod, stuck))
                }
                _ => None,
            };
            judged.extend(judgement.map(|judgement| (Arc::clone(pod), judgement, true)));
        }
        for pod in self.memory.nodes.give_up(&self.view.pods, start_timeout, now) {
            if self.memory.pods.is_done(&pod.name) {
                continue;
            }
            settled.lost.push(pod.name.clone());
            let judgement = verdict::of_unprepared(&pod);
            judged.push((pod, judgement, true));
        }
        for pod in self.memory.pods.gone.values() {
            if !self.memory.pods.settled.contains_key(&pod.name) {
                // The pod may have ended before it was deleted.
                let judgement = self.judge(prepared, pod).unwrap_or_else(|| verdict::of_vanished(pod));
                judged.push((Arc::clone(pod), judgement, false));
            }
        }
        let mut ended = BTreeMap::new();
        for (pod, judgement, is_there) in judged {
            let judgement = self.excused(&pod, judgement);
            ended.insert(pod.name.clone(), Ended { judgement, pod: is_there.then_some(pod) });
        }
        ended
    }

    fn judge(&self, prepared: &Prepared, pod: &WorkerPod) -> Option<Judgement> {
        verdict::of(pod, &prepared.limits.non_retryable, &self.memory.breakers.known())
    }

    /// Excuses a pod that we removed, and that ended because of that: a file that it claimed meanwhile was
    /// not tried. Without keys, a failure shows nothing about a file or a dependency.
    fn excused(&self, pod: &WorkerPod, judgement: Judgement) -> Judgement {
        let dismissed = pod.stage != Stage::Succeeded && self.memory.pods.dismissed.contains(&pod.name);
        let without_keys = matches!(pod.stage, Stage::Stuck(_)) && self.memory.withheld.is_some();
        if dismissed || without_keys {
            return Judgement { verdict: Verdict::Released, cause: Cause::Unclaimed, ..judgement };
        }
        judgement
    }

    /// Judges files whose filters have worked on them for too long; their pods are removed.
    async fn judge_overlong_pods(
        &self,
        prepared: &Prepared,
        ended: &mut BTreeMap<String, Ended>,
    ) -> Result<(), Error> {
        let Some(limit) = prepared.limits.file_timeout else { return Ok(()) };
        // A pod that processes many files limits the time of each file itself.
        if prepared.snapshot.is_warm() {
            return Ok(());
        }
        let long = |pod: &WorkerPod| pod.fetched.is_some_and(|fetched| self.now >= fetched.at + limit);
        // A new operator has not seen when the files were fetched, so it asks at intervals anyway.
        if !self.scan_is_due() && !self.view.pods.iter().any(|pod| !pod.is_finished() && long(pod)) {
            return Ok(());
        }
        let pods: HashMap<&str, &Arc<WorkerPod>> =
            self.view.pods.iter().map(|pod| (pod.name.as_str(), pod)).collect();
        let unix_ms = u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default();
        let now = Moment { instant: self.now, unix_ms };
        let visit = |claim: &queue::Pending| {
            let Some(pod) = pods.get(claim.consumer.as_str()) else { return };
            // A pod that is being ended, or that waits for an image, is not processing its file.
            if pod.deleting.is_some() || pod.doomed.is_some() || !pod.running {
                return;
            }
            if verdict::processing_time(pod, claim.idle, now) >= limit {
                let judgement = verdict::of_timeout(pod, limit);
                ended.entry(claim.consumer.clone()).or_insert(Ended { judgement, pod: None });
            }
        };
        prepared.queue.for_each_pending(limit, visit).await?;
        Ok(())
    }

    /// Settles the files that ended pods hold; returns the entry that each had processed. A pod settles
    /// exactly the entry that its claimer reported or, without a report, the first one that it holds. Entries
    /// that it has not tried go back unchanged.
    async fn settle_claims(
        &mut self,
        prepared: &Prepared,
        ended: &BTreeMap<String, Ended>,
        settled: &mut Settled,
    ) -> Result<HashMap<String, EntryId>, Error> {
        let mut served: HashMap<String, EntryId> = HashMap::new();
        if ended.is_empty() {
            return Ok(served);
        }
        let names: Vec<String> = ended.keys().cloned().collect();
        let claims = prepared.queue.claims_of(&names).await?;
        let is_warm = prepared.snapshot.is_warm();
        let begun = if is_warm { Some(self.begun(prepared, &claims).await?) } else { None };
        let mut begun_by = HashMap::<String, usize>::new();
        for claim in &claims {
            if begun.as_ref().is_some_and(|begun| begun.contains_key(&claim.entry)) {
                *begun_by.entry(claim.consumer.clone()).or_default() += 1;
            }
        }
        let mut settlements = Vec::with_capacity(claims.len());
        for claim in claims {
            let Some(Ended { judgement, .. }) = ended.get(&claim.consumer) else { continue };
            let verdict = match &begun {
                Some(begun) => {
                    let begun = begun.get(&claim.entry).copied();
                    note_served(&mut served, &claim, begun);
                    let others = begun_by.get(&claim.consumer).map_or(0, |all| all - 1);
                    verdict::of_held(begun, others, &claim.consumer, judgement)
                }
                None if is_the_file_of(&claim, judgement, &served) => {
                    served.insert(claim.consumer.clone(), claim.entry.clone());
                    judgement.verdict.clone()
                }
                None => Verdict::Released,
            };
            settlements.push(Settlement { entry: claim.entry, consumer: claim.consumer, verdict });
        }
        self.settle_entries(prepared, &settlements).await?;
        (settled.files, settled.tried) = (settlements.len(), served.len());
        Ok(served)
    }

    /// Settles entries, counts them, and announces files that failed permanently.
    pub async fn settle_entries(
        &mut self,
        prepared: &Prepared,
        settlements: &[Settlement],
    ) -> Result<(), Error> {
        if settlements.is_empty() {
            return Ok(());
        }
        let fates = prepared.queue.settle(settlements, &prepared.limits.retry).await?;
        for (settlement, fate) in settlements.iter().zip(fates) {
            let outcome = outcome(&fate);
            if let Some(outcome) = outcome {
                self.ctx.metrics.settled(outcome, 1);
            }
            let failure = match &settlement.verdict {
                Verdict::Failed(failure)
                | Verdict::Rejected(failure)
                | Verdict::Disrupted(Disruption { failure, .. }) => Some(failure),
                Verdict::Succeeded | Verdict::Released => None,
            };
            if let (Fate::DeadLettered { file, .. }, Some(failure)) = (&fate, failure) {
                self.announce_failure(file, failure, Some(&settlement.consumer));
            }
            let is_logged = self.log_decision(outcome, &fate, failure, Some(&settlement.consumer));
            // An outage of the storage disrupts files endlessly, and has a condition. Only a disruption that
            // counts is about this file or its pod.
            if is_logged
                && let Fate::Disrupted { file, .. } = &fate
                && let Verdict::Disrupted(Disruption { failure, counts: true }) = &settlement.verdict
            {
                self.warn_about_file("FileDisrupted", file, failure, Some(&settlement.consumer));
            }
        }
        Ok(())
    }

    /// Sends an event about a file that failed permanently, for the first few such files.
    pub fn announce_failure(&mut self, file: &str, failure: &Failure, pod: Option<&str>) {
        if self.memory.failures.may_send_event() {
            self.warn_about_file("FileFailed", file, failure, pod);
        }
    }

    /// Sends an event about a file, and relates it to the file's pod if that is known.
    pub fn warn_about_file(&self, reason: &str, file: &str, failure: &Failure, pod: Option<&str>) {
        let note = format!("{file}: {}", failure.reason());
        match pod {
            Some(pod) => self.ctx.warn_about(self.run, pod, file, reason, note),
            None => self.ctx.warn(self.run, reason, note),
        }
    }

    fn forget_gone_pods(&mut self) {
        for name in self.memory.pods.forget_gone() {
            self.memory.creation.forget(&name);
        }
    }

    /// Whether it is time to compare all claims with all pods.
    pub fn scan_is_due(&self) -> bool {
        self.memory.pods.last_scan.is_none_or(|last| self.now.duration_since(last) >= RESYNC)
    }

    /// The settled pods to remove, at most as many as one pass removes. The newest failures are kept for
    /// their logs.
    fn removable_pods(&mut self) -> Vec<String> {
        let mut removable = Vec::new();
        for pod in self.view.pods.iter().filter(|pod| pod.deleting.is_none()) {
            if !self.memory.pods.settled.contains_key(&pod.name)
                || self.memory.pods.removed.contains(&pod.name)
            {
                continue;
            }
            match &pod.stage {
                Stage::Failed(_) if pod.stopped => self.memory.pods.keep(&pod.name),
                // The node cleans up before it reports the end of the pod; deleting the pod now would lose
                // its log. With a container that does not start, the node never reports the end.
                Stage::Failed(_) if !pod.running && self.now < pod.since + TIDIED_WITHIN => {}
                // Remove it even if other containers still run: nothing else ends them.
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
