//! The step that processes files: settles files that have ended, and keeps as many pods at work as are
//! allowed.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use kube::ResourceExt;
use queue::{Pause, State, Stats};

use super::build::job::is_suspended;
use super::decide::{self, Plan, Seen};
use super::limits::Limits;
use super::list::is_to_be_listed;
use super::pass::{Next, Pass, Prepared, Stop};
use super::settle::Settled;
use super::status;
use super::workers::{self, BATCH, Removal};
use super::{GATHER, PUBLISH_EVERY, RESYNC};
use crate::error::{Error, MORE_MEMORY, Obstacle, Reason};
use crate::pods::{Stage, WorkerPod};
use crate::world::View;

impl Pass<'_> {
    /// Runs one pass while files are being processed.
    pub async fn process(&mut self, prepared: &Prepared) -> Result<Next, Stop> {
        self.report.phase = Some(Phase::Running);
        let settled = self.settle(prepared).await?;
        self.note_how_workers_fare(&settled);
        let promoted = prepared.queue.promote().await?;
        let stats = self.read_stats(prepared).await?;
        self.report.counts = Some(status::counts(&stats));
        if self.memory.listing.is_complete && is_to_be_listed(&stats) {
            return Ok(self.list_again());
        }
        // An abort turns all files that are left into dead letters, and its outcome is already written.
        if stats.state != State::Closing {
            self.report_failures(&prepared.queue, stats.failed).await?;
        }
        self.memory.pace.note(self.now, stats.succeeded + stats.failed);
        self.report.rate = self.memory.pace.per_second();
        self.report.workers = Some(self.view.pods.iter().filter(|pod| pod.is_alive()).count());
        self.verify_creations().await?;

        let suspended = self.run.spec.suspend || self.view.job.as_deref().is_some_and(is_suspended);
        let plan = self.decide(prepared, &stats, suspended);
        self.remove_pods(&settled.lost, Removal::AtOnce).await?;
        let (create, dismiss, wake) = match plan {
            Plan::End(end) => return self.end_run(prepared, end).await,
            Plan::GoOn { create, dismiss, wake } => (create, dismiss, wake),
        };
        let job = self.ensure_job(prepared, &stats).await?;
        self.remove_pods(&settled.removable, Removal::Graceful).await?;
        if suspended {
            self.report.phase = Some(Phase::Suspended);
        }
        let dismissed = if dismiss > 0 { self.dismiss_idle(prepared, dismiss).await? } else { 0 };
        let is_warm = prepared.snapshot.is_warm();
        if is_warm {
            self.stop_unwanted(prepared, dismiss.saturating_sub(dismissed)).await?;
        }
        if !suspended && self.memory.withheld.is_none() {
            match is_warm {
                true => self.supply(prepared, &stats, &settled.served).await?,
                false => self.hand_out(prepared).await?,
            }
        }
        let mut publish_job_in = None;
        let mut more = settled.again || settled.removable.len() == BATCH;
        if let Some(job) = &job {
            self.report.job_name = Some(job.name_any());
            if create > 0 && !is_suspended(job) {
                self.create_pods(job, create).await?;
                more |= create > BATCH as u64;
            }
            publish_job_in = self.publish_job(job, suspended).await;
        }
        if settled.tried > 0 || self.view.pods.iter().any(|pod| pod.stage == Stage::Working) {
            self.memory.creation.workers_claim(Instant::now());
        }
        self.report_obstacle(&stats);
        let waits = [
            wake,
            promoted.next,
            // Ask only now: the wait may have begun in this pass.
            self.memory.creation.waits(Instant::now()),
            self.memory.creation.in_flight_expires(self.now),
            self.listing_waits(),
            file_timeout(&prepared.limits, self.view, self.now),
            stuck_timeout(self.ctx.settings.start_timeout, self.view, self.now),
            self.late_start(),
            self.next_reports(&stats),
            publish_job_in,
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

    /// When to try a failed listing again.
    fn listing_waits(&self) -> Option<Duration> {
        let listing = &self.memory.listing;
        listing.waits(Instant::now()).filter(|_| !listing.is_complete && listing.task.is_none())
    }

    /// Restarts the listing. Valkey went back to an earlier state, from a backup or to a replica that lagged
    /// behind, so files are missing again.
    fn list_again(&mut self) -> Next {
        self.ctx.warn(self.run, Reason::QueueLost.as_ref(), "Valkey went back to before the end of the listing: the bucket is listed again, and files may be processed twice");
        // The restored state is from before the end of the listing, when nothing was settled.
        self.memory.outcomes_lost();
        self.memory.listing.is_complete = false;
        Next::Within(Duration::ZERO)
    }

    fn decide(&mut self, prepared: &Prepared, stats: &Stats, suspended: bool) -> Plan {
        let in_flight = self.memory.creation.in_flight(&self.view.pods, &self.memory.pods.gone);
        let pods = &self.memory.pods;
        let alive: Vec<&WorkerPod> = self
            .view
            .pods
            .iter()
            // A failed pod keeps its place until its last container has ended.
            .filter(|pod| (pod.is_alive() || pod.is_ending(self.now)) && !pods.is_done(&pod.name))
            .map(AsRef::as_ref)
            .collect();
        let backing_off = self.memory.creation.waits(self.now).is_some();
        let probe = self.memory.breakers.probe(self.now, alive.iter().copied(), in_flight);
        let next_probes = self.memory.breakers.next_probes();
        self.ctx.metrics.set_open(&mut self.memory.open_breakers, next_probes);
        let plan = decide::decide(&Seen {
            stats,
            limits: &prepared.limits,
            alive: alive.len() as u64,
            in_flight,
            suspended: suspended || self.memory.withheld.is_some(),
            backing_off,
            misbehaving: self.memory.warm.floods.are_too_many(),
            probe,
        });
        if matches!(plan, Plan::GoOn { create: 0, .. }) && in_flight == 0 && !backing_off {
            // Enough pods exist, so none is refused any more.
            self.memory.creation.all_created();
        }
        plan
    }

    /// Searches a list for pods that the watch should have shown by now, so that neither a stuck watch lets
    /// us create too many nor a lost request keeps a slot.
    async fn verify_creations(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if self.memory.creation.is_to_be_verified(now) {
            let listed = self.list_pods().await?.items.iter().map(ResourceExt::name_any).collect();
            self.memory.creation.verified(&listed, now);
        }
        Ok(())
    }

    /// Removes pods that process no file, because none may be started, or fewer at once. Pods without a file
    /// are removed first; the file of a pod that has not started goes back unchanged. Returns how many pods
    /// were chosen.
    async fn dismiss_idle(&mut self, prepared: &Prepared, most: u64) -> Result<u64, Error> {
        let removed = &self.memory.pods.removed;
        let waiting = self.view.pods.iter().filter(|pod| pod.is_alive() && pod.stage != Stage::Working);
        let mut waiting: Vec<_> = waiting.filter(|pod| !removed.contains(&pod.name)).collect();
        let names: Vec<String> = waiting.iter().map(|pod| pod.name.clone()).collect();
        let claims = prepared.queue.claims_of(&names).await?;
        let with_file: HashSet<&String> = claims.iter().map(|claim| &claim.consumer).collect();
        waiting.retain(|pod| !with_file.contains(&pod.name) || !pod.may_have_claimed());
        waiting.sort_by_key(|pod| (with_file.contains(&pod.name), pod.may_have_claimed()));
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let idle: Vec<String> = waiting.into_iter().map(|pod| pod.name.clone()).take(most).collect();
        let dismissed = idle.len() as u64;
        let result = self.remove_pods(&idle, Removal::Graceful).await;
        let pods = &mut self.memory.pods;
        pods.dismissed.extend(idle.into_iter().filter(|name| pods.removed.contains(name)));
        result.map(|()| dismissed)
    }

    /// Reports the most important obstacle: the one that needs a person comes first.
    fn report_obstacle(&mut self, stats: &Stats) {
        if stats.paused == Some(Pause::MemoryFull) {
            self.memory.queue_full = Some(self.now);
        }
        // The listing is not paused between two pages: the condition must not flap with each page.
        let is_full = self.memory.queue_full.is_some_and(|since| self.now.duration_since(since) < RESYNC);
        let queue_full = || is_full.then(queue_full);
        let start_problem =
            || workers::start_problem(&self.view.pods, self.ctx.settings.start_timeout, self.now);
        let memory = &self.memory;
        let obstacle = memory.withheld.clone();
        let obstacle = obstacle.or_else(|| memory.breakers.obstacle());
        let obstacle = obstacle.or_else(start_problem).or_else(|| memory.nodes.obstacle());
        let obstacle = obstacle.or_else(|| memory.creation.problem().cloned());
        // A problem of the listing was reported earlier in this pass: queued files are processed regardless.
        let obstacle = obstacle.or_else(|| self.report.obstacle.take()).or_else(queue_full);
        // A new operator does not know whether the outage that the status shows is over.
        let is_open =
            self.report.phase != Some(Phase::Suspended) && memory.breakers.know_nothing_of_storage();
        let shown = memory.outage_before.as_ref().filter(|_| is_open);
        self.report.obstacle = obstacle.or_else(|| shown.cloned());
    }
}

/// The obstacle of a listing that waits for memory: unlike one that waits for its own files, it depends on
/// other runs.
fn queue_full() -> Obstacle {
    Reason::QueueFull.because(format!(
        "Valkey uses more than 80 % of its maxmemory: this run keeps one page of files queued, and adds none while the \
         server is full; {MORE_MEMORY}"
    ))
}

/// When the first file may have exceeded its time limit.
fn file_timeout(limits: &Limits, view: &View, now: Instant) -> Option<Duration> {
    let limit = limits.file_timeout?;
    let alive = view.pods.iter().filter(|pod| pod.is_alive());
    alive
        .filter_map(|pod| (pod.fetched?.at + limit).checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}

/// When the first pod that does not start, or does not end, has taken too long.
fn stuck_timeout(start_timeout: Duration, view: &View, now: Instant) -> Option<Duration> {
    let stuck = view.pods.iter().filter(|pod| matches!(pod.stage, Stage::Stuck(_)));
    let unprepared = view.pods.iter().filter_map(|pod| pod.unprepared);
    let stuck = stuck.map(|pod| pod.since).chain(unprepared).map(|since| since + start_timeout);
    let deleted = view.pods.iter().filter_map(|pod| pod.deleting);
    let going = deleted.map(|going| going.since + going.grace + PUBLISH_EVERY * 6);
    stuck
        .chain(going)
        .chain(view.pods.iter().filter_map(|pod| pod.ends_by()))
        .filter_map(|due| due.checked_duration_since(now))
        .map(|left| left.max(PUBLISH_EVERY))
        .min()
}
