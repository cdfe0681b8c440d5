//! The step that finds the files: a separate task lists the bucket, and passes only follow it.

use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use queue::{Listing, State, Stats};
use storage::{Lister, Selection};

use super::RESYNC;
use super::decide;
use super::listing::ListingTask;
use super::pass::{Next, Pass, Prepared, Stop};
use super::source_bucket::source_bucket;
use super::status;
use crate::error::Reason;

/// How soon a run notices that its listing has paused for the first time, so that files may be processed.
const PAUSE_NOTICED_WITHIN: Duration = Duration::from_secs(2);

/// Whether the listing is still incomplete.
pub fn is_to_be_listed(stats: &Stats) -> bool {
    stats.listing != Listing::Complete && stats.state == State::Open
}

impl Pass<'_> {
    /// Lists the bucket. `None` once files may be processed: either all of them are known, or enough are
    /// queued that the listing has paused. It then continues while files are processed.
    pub async fn list(&mut self, prepared: &Prepared) -> Result<Option<Next>, Stop> {
        if self.memory.listing.is_complete {
            return Ok(None);
        }
        let stats = self.read_stats(prepared).await?;
        self.report.counts = Some(status::counts(&stats));
        if !is_to_be_listed(&stats) {
            if self.memory.listing.task.as_ref().is_some_and(|task| !task.has_ended()) {
                // The task still has to report skipped files, and wakes the run at its end.
                return Ok(None);
            }
            self.memory.listing.is_complete = true;
            if self.memory.listing.task.take().is_some() {
                self.memory.listing.succeeded();
                self.ctx.tell(self.run, "Listed", format!("found {} files", stats.total));
            }
            return Ok(None);
        }
        self.report.listed = self.report.counts.map(|counts| counts.total_files);
        if stats.started {
            // Queued files are processed even if the listing is blocked. Whether the run ends is decided with
            // them.
            match self.follow_listing(prepared, &stats).await {
                Err(Stop::Obstacle(obstacle)) => self.report.obstacle = Some(obstacle),
                followed => _ = followed?,
            }
            return Ok(None);
        }
        self.report.phase = Some(Phase::Listing);
        if let Some(end) = decide::end(&stats, &prepared.limits) {
            return self.end_run(prepared, end).await.map(Some);
        }
        let left = prepared.limits.time_left(&stats).unwrap_or(RESYNC);
        let wait = self.follow_listing(prepared, &stats).await?;
        if let Some(withheld) = &self.memory.withheld {
            self.report.obstacle = Some(withheld.clone());
        }
        // A paused listing adds no page that would wake the run.
        let wait =
            wait.unwrap_or(if self.memory.listing.task.is_some() { PAUSE_NOTICED_WITHIN } else { RESYNC });
        Ok(Some(Next::Within(wait.min(left))))
    }

    /// Follows the listing task, or restarts it; returns how much longer it waits after a failure.
    async fn follow_listing(&mut self, prepared: &Prepared, stats: &Stats) -> Result<Option<Duration>, Stop> {
        if self.memory.listing.is_repeated {
            let message =
                "Valkey has lost the queue of this run, or a part of it: the bucket is listed again";
            self.report.obstacle = Some(Reason::QueueLost.because(message));
        }
        if self.memory.listing.task.as_ref().is_some_and(|task| !task.has_ended()) {
            self.report_listing_problem(stats);
            return Ok(None);
        }
        if let Some(failure) = self.memory.listing.task.take().and_then(|task| task.failure()) {
            let now = Instant::now();
            if failure.reason == Reason::QueueLost {
                self.memory.queue_lost(now);
                return Ok(Some(Duration::ZERO));
            }
            self.memory.listing.failed(failure, stats.listing.clone(), now);
        }
        self.report_listing_problem(stats);
        let wait = self.memory.listing.waits(Instant::now());
        // A run that may not use its keys lists nothing.
        if wait.is_none() && self.memory.withheld.is_none() {
            self.start_listing(prepared, stats).await?;
        }
        Ok(wait)
    }

    fn report_listing_problem(&mut self, stats: &Stats) {
        if let Some(problem) = self.memory.listing.problem(&stats.listing) {
            self.report.obstacle = Some(problem);
        }
    }

    async fn start_listing(&mut self, prepared: &Prepared, stats: &Stats) -> Result<(), Stop> {
        let keys = self.copy_credentials(prepared).await?;
        let Prepared { snapshot, queue, .. } = prepared;
        let bucket = source_bucket(&self.ctx.settings, &snapshot.spec.source.bucket, keys)?;
        let prefix = snapshot.prefix(self.run);
        let (include, exclude) = snapshot.globs(self.run);
        let selection = Selection::new(prefix, include, exclude)
            .map_err(|error| Reason::PipelineInvalid.because(format!("include or exclude: {error}")))?;
        let lister = Lister::new(&bucket, prefix, selection).await;
        self.memory.listing.task =
            Some(ListingTask::start(self.ctx, self.uid, self.run, queue.clone(), lister, stats));
        Ok(())
    }
}
