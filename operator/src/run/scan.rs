//! Compares all claims with all pods at intervals: a pod that vanished while nothing watched left its file
//! behind.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ObjectList;
use kube::{Api, ResourceExt};
use queue::{EntryId, Fate, Pending, Settlement, Verdict};

use super::build::owner;
use super::pass::{Pass, Prepared};
use super::settle::outcome;
use super::verdict;
use crate::error::Error;
use crate::metrics::FileOutcome;
use crate::pods::WorkerPod;

impl Pass<'_> {
    /// Reclaims files of pods that are gone, and releases files that were handed to pods after their end.
    /// Returns whether a pod is to be judged again.
    pub async fn compare_claims_with_pods(&mut self, prepared: &Prepared) -> Result<bool, Error> {
        if !self.scan_is_due() {
            return Ok(false);
        }
        let mut comparison = Comparison::with(&self.view.pods, &mut self.memory.pods.settled);
        let compare = |claim: &Pending| comparison.add(claim);
        let removed = prepared.queue.for_each_pending(Duration::ZERO, compare).await?;
        let Comparison { strays, mut absent, again, .. } = comparison;
        self.report_removed_consumers(removed);
        self.settle_entries(prepared, &strays).await?;
        // The watch may be late, but a list is not: a pod with a claim existed before this request.
        if !absent.is_empty() {
            for pod in self.list_pods().await?.items {
                absent.remove(&pod.name_any());
            }
        }
        if prepared.snapshot.is_warm() {
            self.release_what_was_not_begun(prepared, &absent).await?;
        }
        self.reclaim(prepared, &absent).await?;
        self.memory.pods.last_scan = Some(self.now);
        // A Valkey that went back to an earlier state has forgotten what it gave the pods.
        self.memory.pods.served.clear();
        Ok(again)
    }

    async fn reclaim(&mut self, prepared: &Prepared, absent: &HashSet<String>) -> Result<(), Error> {
        let judge = |claim: &Pending| {
            absent.contains(&claim.consumer).then(|| verdict::vanished(&claim.consumer).reason().to_owned())
        };
        let reclaimed = prepared.queue.reclaim(Duration::ZERO, &prepared.limits.retry, judge).await?;
        self.report_removed_consumers(reclaimed.removed_consumers);
        let failure = verdict::vanished("of the file");
        for fate in &reclaimed.fates {
            if let Fate::DeadLettered { file, .. } = fate {
                self.announce_failure(file, &failure, None);
            }
            let outcome = outcome(fate).map(|outcome| match outcome {
                FileOutcome::Retried | FileOutcome::Disrupted => FileOutcome::Reclaimed,
                other => other,
            });
            if let Some(outcome) = outcome {
                self.ctx.metrics.settled(outcome, 1);
            }
            let is_logged = self.log_decision(outcome, fate, Some(&failure), None);
            if is_logged && let Fate::Disrupted { file, .. } = fate {
                self.warn_about_file("FileDisrupted", file, &failure, None);
            }
        }
        if reclaimed.held_by_nobody > 0 {
            tracing::warn!(run = %self.run.name_any(), files = reclaimed.held_by_nobody, "requeued files that no pod held");
        }
        Ok(())
    }

    /// Releases the files of vanished pods, except those that a pod worked on or published: only these were
    /// disrupted.
    async fn release_what_was_not_begun(
        &mut self,
        prepared: &Prepared,
        absent: &HashSet<String>,
    ) -> Result<(), Error> {
        let names: Vec<String> = absent.iter().cloned().collect();
        let claims = prepared.queue.claims_of(&names).await?;
        let begun = self.begun(prepared, &claims).await?;
        let waiting = claims.iter().filter(|claim| !begun.contains_key(&claim.entry));
        let waiting: Vec<_> = waiting.map(released).collect();
        self.settle_entries(prepared, &waiting).await
    }

    /// Reports removed consumers. A consumer whose name no pod can have is not one of our pods.
    fn report_removed_consumers(&self, removed: u64) {
        if removed > 0 {
            let (consumers, names) = if removed == 1 { ("consumer", "name") } else { ("consumers", "names") };
            let note = format!(
                "removed {removed} {consumers} of the queue whose {names} no pod can have: files were taken by hand, or with the credentials of an older version's claimer"
            );
            self.ctx.warn(self.run, "WorkersMisbehaving", note);
        }
    }

    /// Lists all pods of the run, and updates the world from the list, which may be ahead of the watch.
    pub async fn list_pods(&self) -> Result<ObjectList<Pod>, Error> {
        let api: Api<Pod> = self.ctx.api(self.run);
        let listed =
            api.list(&owner::pods(self.run)).await.map_err(Error::kubernetes("list the pods of the run"))?;
        let namespace = self.run.namespace().unwrap_or_default();
        self.ctx.world.absorb_pods(self.uid, &namespace, &listed);
        Ok(listed)
    }
}

/// What all claims show beside all pods. Both are many: each claim costs one look into a map, and no walk
/// over pods.
struct Comparison<'a> {
    pods: HashMap<&'a str, &'a WorkerPod>,
    settled: &'a mut HashMap<String, Option<EntryId>>,
    /// Claims to give back unchanged.
    strays: Vec<Settlement>,
    /// Consumers that are no pod.
    absent: HashSet<String>,
    /// Whether a pod is to be judged once more.
    again: bool,
}

impl<'a> Comparison<'a> {
    fn with(pods: &'a [Arc<WorkerPod>], settled: &'a mut HashMap<String, Option<EntryId>>) -> Self {
        let pods = pods.iter().map(|pod| (pod.name.as_str(), pod.as_ref())).collect();
        Self { pods, settled, strays: Vec::new(), absent: HashSet::new(), again: false }
    }

    fn add(&mut self, claim: &Pending) {
        let Some(pod) = self.pods.get(claim.consumer.as_str()) else {
            self.absent.insert(claim.consumer.clone());
            return;
        };
        let processes = pod.claimer.as_ref().and_then(|report| report.entry.as_deref());
        match self.settled.get(&claim.consumer) {
            // It processes another one, which was taken back from it a moment too late.
            None if processes.is_some_and(|entry| entry != claim.entry.as_str()) => {
                self.strays.push(released(claim));
            }
            None => {}
            // The file that was settled is pending again: Valkey went back to before that.
            Some(file) if file.as_ref() == Some(&claim.entry) => {
                self.settled.remove(&claim.consumer);
                self.again = true;
            }
            // Another one was handed to it while nothing listened.
            Some(_) => self.strays.push(released(claim)),
        }
    }
}

/// Gives an entry back that its pod has not tried.
pub fn released(claim: &Pending) -> Settlement {
    Settlement { entry: claim.entry.clone(), consumer: claim.consumer.clone(), verdict: Verdict::Released }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Stage;
    use std::hint::black_box;
    use std::time::Instant;

    fn claims(of: impl Iterator<Item = usize>) -> Vec<Pending> {
        of.map(|number| Pending {
            entry: format!("{number}-0").into(),
            consumer: format!("pod-{number:06}"),
            idle: Duration::ZERO,
        })
        .collect()
    }

    fn pods(count: usize) -> Vec<Arc<WorkerPod>> {
        let now = Instant::now();
        let pod = |number| Arc::new(WorkerPod::in_stage(&format!("pod-{number:06}"), Stage::Working, now));
        (0..count).map(pod).collect()
    }

    #[test]
    fn claims_without_a_pod_are_reclaimed_and_those_that_came_too_late_are_given_back() {
        let pods = pods(4);
        let mut settled = HashMap::from([
            ("pod-000001".to_owned(), Some("1-0".to_owned().into())),
            ("pod-000002".to_owned(), Some("9-9".to_owned().into())),
        ]);
        let mut comparison = Comparison::with(&pods, &mut settled);
        claims(0..5).iter().for_each(|claim| comparison.add(claim));
        assert!(comparison.again, "Valkey went back to before pod 1 was settled");
        assert_eq!(comparison.absent, HashSet::from(["pod-000004".to_owned()]));
        let strays: Vec<&str> =
            comparison.strays.iter().map(|settlement| settlement.consumer.as_str()).collect();
        assert_eq!(strays, ["pod-000002"], "its own file is settled");
        assert_eq!(settled.into_keys().collect::<Vec<_>>(), ["pod-000002"]);
    }

    /// How long the comparison of so many pods with as many claims takes: half of the claims have a pod.
    fn time(count: usize) -> Duration {
        let (pods, claims) = (pods(count), claims(count / 2..count / 2 + count));
        let mut settled = HashMap::new();
        let start = Instant::now();
        let mut comparison = Comparison::with(&pods, &mut settled);
        claims.iter().for_each(|claim| comparison.add(claim));
        assert_eq!(black_box(&comparison).absent.len(), count / 2);
        start.elapsed()
    }

    /// Four times as many cost about four times as much; a walk over pods for each claim would cost sixteen
    /// times as much. One quiet moment in ten shows it.
    #[test]
    fn ten_thousand_claims_beside_ten_thousand_pods_cost_no_walk_for_each() {
        let ratios: Vec<f64> =
            (0..10).map(|_| time(40_000).as_secs_f64() / time(10_000).as_secs_f64()).collect();
        assert!(ratios.iter().any(|ratio| *ratio < 8.0), "{ratios:?}");
    }
}
