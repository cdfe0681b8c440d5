//! The step that processes files: settles what has ended, and keeps as many pods at work as there may be.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use queue::Stats;

use super::build::job::is_suspended;
use super::decide::{self, Plan, Seen};
use super::limits::Limits;
use super::list::is_to_be_listed;
use super::pass::{Next, Pass, Prepared, Stop};
use super::settle::Settled;
use super::status;
use super::workers::{self, BATCH, Removal};
use super::{GATHER, PUBLISH_EVERY, RESYNC};
use crate::error::{Error, Reason};
use crate::pods::Stage;
use crate::world::View;

/// What is to be done with the pods.
struct Demand {
    create: u64,
    dismiss: u64,
    wake: Option<Duration>,
}

impl Pass<'_> {
    /// While files are being processed.
    pub async fn process(&mut self, prepared: &Prepared) -> Result<Next, Stop> {
        self.report.phase = Some(Phase::Running);
        let settled = self.settle(prepared).await?;
        self.note_how_workers_fare(&settled);
        let promoted = prepared.queue.promote().await?;
        let stats = prepared.queue.stats().await?;
        self.report.counts = Some(status::counts(&stats));
        if is_to_be_listed(&stats) {
            return Ok(self.list_again());
        }
        self.report_failures();

        let suspended = self.run.spec.suspend || self.view.job.as_deref().is_some_and(is_suspended);
        let plan = self.decide(prepared, &stats, suspended);
        self.remove_pods(&settled.lost, Removal::AtOnce).await?;
        let demand = match plan {
            Plan::End(end) => return self.end_run(prepared, end).await,
            Plan::GoOn { create, dismiss, wake } => Demand { create, dismiss, wake },
        };
        let job = self.ensure_job(prepared, stats.total).await?;
        self.remove_pods(&settled.removable, Removal::Graceful).await?;
        if suspended {
            self.report.phase = Some(Phase::Suspended);
        }
        if demand.dismiss > 0 {
            self.dismiss_idle(prepared, demand.dismiss).await?;
        }
        let mut more = settled.again || settled.removable.len() == BATCH;
        if let Some(job) = &job {
            self.report.job_name = Some(job.name_any());
            if demand.create > 0 && !is_suspended(job) {
                self.create_pods(job, demand.create).await?;
                more |= demand.create > BATCH as u64;
            }
            self.publish_job_if_due(job, suspended).await?;
        }
        if settled.files > 0 || self.view.pods.iter().any(|pod| pod.stage == Stage::Working) {
            self.memory.creation.workers_claim(Instant::now());
        }
        self.report_obstacle();
        let waits = [
            demand.wake,
            promoted.next,
            // Only now: it may have begun in this pass.
            self.memory.creation.waits(Instant::now()),
            self.memory.creation.in_flight_expires(self.now),
            file_timeout(&prepared.limits, self.view, self.now),
            stuck_timeout(self.ctx.settings.start_timeout, self.view, self.now),
        ];
        let soonest = waits.into_iter().flatten().min().unwrap_or(RESYNC).max(GATHER);
        Ok(Next::Within(if more { Duration::ZERO } else { soonest }))
    }

    fn note_how_workers_fare(&mut self, settled: &Settled) {
        if let Some(said) = workers::died_without_a_file(&settled.without_a_file) {
            self.memory.creation.workers_died(said, Instant::now());
        }
        if settled.files > 0 {
            self.memory.creation.room_was_freed();
        }
    }

    /// Valkey went back to an earlier state, from a backup or to a replica that was behind: files are missing again.
    fn list_again(&mut self) -> Next {
        self.ctx.warn(self.run, Reason::QueueLost.as_ref(), "Valkey went back to before the end of the listing: the bucket is listed again, and files may be processed twice");
        // Nothing was settled before the end of the listing.
        self.memory.outcomes_lost();
        self.memory.listing.is_complete = false;
        Next::Within(Duration::ZERO)
    }

    fn decide(&mut self, prepared: &Prepared, stats: &Stats, suspended: bool) -> Plan {
        let in_flight = self.memory.creation.in_flight(&self.view.pods, &self.memory.pods.gone, self.now);
        let pods = &self.memory.pods;
        let alive = self.view.pods.iter().filter(|pod| pod.is_alive() && !pods.is_done(&pod.name)).count();
        let backing_off = self.memory.creation.waits(self.now).is_some();
        let plan = decide::decide(&Seen {
            stats,
            limits: &prepared.limits,
            alive: alive as u64,
            in_flight,
            suspended: suspended || self.memory.withheld.is_some(),
            age: self.age(),
            backing_off,
        });
        if matches!(plan, Plan::GoOn { create: 0, .. }) && in_flight == 0 && !backing_off {
            // There are as many pods as are needed, so that none is refused any more.
            self.memory.creation.all_created();
        }
        plan
    }

    /// The Job's status is written as often as the run's.
    async fn publish_job_if_due(&mut self, job: &Job, suspended: bool) -> Result<(), Error> {
        let written = self.memory.published.as_ref().map(|(_, written)| written);
        match self.report.counts {
            Some(counts) if written.is_none_or(|written| written.elapsed() >= PUBLISH_EVERY) => {
                self.publish_job(job, counts, suspended).await
            }
            _ => Ok(()),
        }
    }

    /// Removes pods that wait for a file: they would claim one, although none may be started, or not so many at once. Those
    /// that have not even started go first.
    async fn dismiss_idle(&mut self, prepared: &Prepared, most: u64) -> Result<(), Error> {
        let removed = &self.memory.pods.removed;
        let waiting = self.view.pods.iter().filter(|pod| pod.is_alive() && pod.stage != Stage::Working);
        let mut waiting: Vec<_> = waiting.filter(|pod| !removed.contains(&pod.name)).collect();
        waiting.sort_by_key(|pod| pod.stage == Stage::Claiming);
        let waiting: Vec<String> = waiting.into_iter().map(|pod| pod.name.clone()).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        let claims = prepared.queue.claims_of(&waiting).await?;
        let with_file: HashSet<&String> = claims.iter().map(|claim| &claim.consumer).collect();
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let idle: Vec<String> =
            waiting.into_iter().filter(|name| !with_file.contains(name)).take(most).collect();
        let result = self.remove_pods(&idle, Removal::Graceful).await;
        let pods = &mut self.memory.pods;
        pods.dismissed.extend(idle.into_iter().filter(|name| pods.removed.contains(name)));
        result
    }

    fn report_obstacle(&mut self) {
        let start_problem =
            || workers::start_problem(&self.view.pods, self.ctx.settings.start_timeout, self.now);
        let creation_problem = || self.memory.creation.problem().cloned();
        self.report.obstacle = self.memory.withheld.clone().or_else(start_problem).or_else(creation_problem);
    }
}

/// When the first file may have taken too long.
fn file_timeout(limits: &Limits, view: &View, now: Instant) -> Option<Duration> {
    let limit = limits.file_timeout?;
    let alive = view.pods.iter().filter(|pod| pod.is_alive());
    alive
        // From the claimer's start, if it had a file at once, and from the filters' start, if it waited for one.
        .flat_map(|pod| [pod.claiming, pod.claiming.map(|_| pod.since)])
        .filter_map(|since| (since? + limit).checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}

/// When the first pod that does not start, or does not go, may have taken too long.
fn stuck_timeout(start_timeout: Duration, view: &View, now: Instant) -> Option<Duration> {
    let stuck = view.pods.iter().filter(|pod| matches!(pod.stage, Stage::Stuck(_)));
    let stuck = stuck.map(|pod| pod.since + start_timeout);
    let deleted = view.pods.iter().filter_map(|pod| pod.deleting);
    let going = deleted.map(|going| going.since + going.grace + PUBLISH_EVERY * 6);
    stuck
        .chain(going)
        .filter_map(|due| due.checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}
