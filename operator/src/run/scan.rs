//! Compares all claims with all pods now and then: a pod that went while nothing watched left its file behind.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
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
use crate::metrics::FileOutcome;
use crate::pods::WorkerPod;

impl Pass<'_> {
    /// Reclaims what pods hold that are gone, and releases what was handed to pods after their end. Returns whether a pod is to
    /// be judged once more.
    pub async fn compare_claims_with_pods(&mut self, prepared: &Prepared) -> Result<bool, Error> {
        if !self.scan_is_due() {
            return Ok(false);
        }
        let (mut again, mut strays, mut absent) = (false, Vec::new(), HashSet::new());
        let known: HashMap<&str, &Arc<WorkerPod>> =
            self.view.pods.iter().map(|pod| (pod.name.as_str(), pod)).collect();
        let settled = &mut self.memory.pods.settled;
        let compare = |claim: &Pending| {
            let Some(pod) = known.get(claim.consumer.as_str()) else {
                absent.insert(claim.consumer.clone());
                return;
            };
            let processes = pod.claimer.as_ref().and_then(|report| report.entry.as_deref());
            match settled.get(&claim.consumer) {
                // It processes another one, which was taken back from it a moment too late.
                None if processes.is_some_and(|entry| entry != claim.entry.as_str()) => {
                    strays.push(released(claim));
                }
                None => {}
                // The file that was settled is pending again: Valkey went back to before that.
                Some(file) if file.as_ref() == Some(&claim.entry) => {
                    settled.remove(&claim.consumer);
                    again = true;
                }
                // Another one was handed to it while nothing listened.
                Some(_) => strays.push(released(claim)),
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
        if prepared.snapshot.is_warm() {
            self.release_what_was_not_begun(prepared, &absent).await?;
        }
        self.reclaim(prepared, &absent).await?;
        self.memory.pods.last_scan = Some(self.now);
        // A Valkey that went back to an earlier state has forgotten what it gave them.
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

    /// Of the files of a pod that processed many, only those that it worked on or published were disrupted.
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

    /// A consumer whose name cannot be a pod's is no pod of ours.
    fn report_removed_consumers(&self, removed: u64) {
        if removed > 0 {
            let note = format!(
                "removed {removed} consumers of the queue whose names no pod can have: files were taken by hand, or with the credentials of an older version's claimer"
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

/// Gives an entry back that its pod has not tried.
pub fn released(claim: &Pending) -> Settlement {
    Settlement { entry: claim.entry.clone(), consumer: claim.consumer.clone(), verdict: Verdict::Released }
}
