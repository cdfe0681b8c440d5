//! Compares all claims with all pods now and then: a pod that went while nothing watched left its file behind.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ObjectList;
use kube::{Api, ResourceExt};
use queue::{Fate, Pending, Settlement, Verdict};

use super::build::owner;
use super::pass::{Pass, Prepared};
use super::settle::outcome;
use super::verdict;
use crate::error::Error;
use crate::metrics::Outcome;

impl Pass<'_> {
    /// Reclaims what pods hold that are gone, and releases what was handed to pods after their end. Returns whether a pod is to
    /// be judged once more.
    pub async fn compare_claims_with_pods(&mut self, prepared: &Prepared) -> Result<bool, Error> {
        if !self.scan_is_due() {
            return Ok(false);
        }
        let (mut again, mut strays, mut absent) = (false, Vec::new(), HashSet::new());
        let known: HashSet<&str> = self.view.pods.iter().map(|pod| pod.name.as_str()).collect();
        let settled = &mut self.memory.pods.settled;
        let compare = |claim: &Pending| {
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
                // Another one was handed to it while nothing listened.
                Some(_) => strays.push(Settlement {
                    entry: claim.entry.clone(),
                    consumer: claim.consumer.clone(),
                    verdict: Verdict::Released,
                }),
            }
        };
        let removed = prepared.queue.for_each_pending(Duration::ZERO, compare).await?;
        self.report_removed_consumers(removed);
        self.settle_entries(prepared, &strays).await?;
        // The watch may be late, but a list is not: a pod that has claimed was there before this was asked.
        if !absent.is_empty() {
            for pod in self.list_pods().await?.items {
                absent.remove(&pod.name_any());
            }
        }
        self.reclaim(prepared, &absent).await?;
        self.memory.pods.last_scan = Some(self.now);
        Ok(again)
    }

    async fn reclaim(&mut self, prepared: &Prepared, absent: &HashSet<String>) -> Result<(), Error> {
        let judge = |claim: &Pending| {
            absent.contains(&claim.consumer).then(|| verdict::vanished(&claim.consumer).reason().to_owned())
        };
        let reclaimed = prepared.queue.reclaim(Duration::ZERO, &prepared.limits.retry, judge).await?;
        self.report_removed_consumers(reclaimed.removed_consumers);
        for fate in &reclaimed.fates {
            if let Fate::DeadLettered { file, .. } = fate {
                self.announce_failure(file, &verdict::vanished("of the file"), None);
            }
            let outcome = outcome(fate).map(|outcome| match outcome {
                Outcome::Retried | Outcome::Disrupted => Outcome::Reclaimed,
                other => other,
            });
            if let Some(outcome) = outcome {
                self.ctx.metrics.settled(outcome, 1);
            }
        }
        if reclaimed.held_by_nobody > 0 {
            tracing::warn!(run = %self.run.name_any(), files = reclaimed.held_by_nobody, "queued files again that had no holder");
        }
        Ok(())
    }

    /// A consumer whose name cannot be a pod's is no claimer of ours: a filter uses the workers' credentials.
    fn report_removed_consumers(&self, removed: u64) {
        if removed > 0 {
            let note = format!(
                "{removed} consumers of the queue had names that no pod has, and were removed: a program in a worker pod uses the claimer's Valkey user"
            );
            self.ctx.warn(self.run, "WorkersMisbehaving", note);
        }
    }

    /// All pods of the run. The world learns from the list, too: it may be ahead of the watch.
    pub async fn list_pods(&self) -> Result<ObjectList<Pod>, Error> {
        let api: Api<Pod> = self.ctx.api(self.run);
        let listed =
            api.list(&owner::pods(self.run)).await.map_err(Error::kubernetes("list the pods of the run"))?;
        let namespace = self.run.namespace().unwrap_or_default();
        self.ctx.world.absorb_pods(self.uid, &namespace, &listed);
        Ok(listed)
    }
}
