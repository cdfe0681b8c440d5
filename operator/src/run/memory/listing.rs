//! The listing of the bucket: whether it is done, under way, or waiting after a failure.

use std::time::{Duration, Instant};

use queue::Listing;

use super::Backoff;
use crate::error::Obstacle;
use crate::run::listing::ListingTask;

/// The progress of listing a run's bucket.
#[derive(Default)]
pub struct ListingProgress {
    /// The bucket has been listed to its end: from then on, a pass only reads the counts, once.
    pub is_complete: bool,
    /// The task that lists, or that has failed.
    pub task: Option<ListingTask>,
    /// Valkey lost the queue, and the bucket is being listed again.
    pub is_repeated: bool,
    /// Why the listing failed, and how far it had got.
    problem: Option<(Obstacle, Listing)>,
    backoff: Backoff,
    /// How often the queue was lost. A successful listing does not reset this: the next loss may follow it.
    losses: Backoff,
}

impl ListingProgress {
    /// Stops the listing, because the queue must be opened again; the queue then says how far it is listed.
    pub fn stop(&mut self) {
        self.is_complete = false;
        self.task = None;
    }

    /// Notes that the queue was lost. A server that keeps losing it, because it evicts keys, must not cause
    /// endless listings.
    pub fn queue_lost(&mut self, now: Instant) {
        self.losses.failed(now);
    }

    /// Notes that the listing failed at this point.
    pub fn failed(&mut self, why: Obstacle, at: Listing, now: Instant) {
        self.backoff.failed(now);
        self.problem = Some((why, at));
    }

    /// Notes that the bucket has been listed to its end.
    pub fn succeeded(&mut self) {
        self.backoff.reset();
        self.is_repeated = false;
    }

    /// How much longer the next attempt waits; `None` if it does not.
    pub fn waits(&self, now: Instant) -> Option<Duration> {
        self.backoff.left(now).max(self.losses.left(now))
    }

    /// Why the listing makes no progress. A listing past the point of failure makes progress again.
    pub fn problem(&mut self, at: &Listing) -> Option<Obstacle> {
        if self.problem.as_ref().is_some_and(|(_, failed_at)| failed_at != at) {
            self.problem = None;
            self.backoff.reset();
        }
        self.problem.as_ref().map(|(why, _)| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;

    #[test]
    fn a_queue_that_is_lost_again_and_again_is_listed_ever_more_rarely() {
        let (mut listing, now) = (ListingProgress::default(), Instant::now());
        for seconds in [1, 2, 4] {
            listing.queue_lost(now);
            assert_eq!(listing.waits(now), Some(Duration::from_secs(seconds)));
            listing.succeeded();
        }
        listing.failed(Reason::ListingFailed.because("as a test"), Listing::UpTo(String::new()), now);
        assert_eq!(listing.waits(now), Some(Duration::from_secs(4)), "the longer of both");
    }

    #[test]
    fn a_listing_that_goes_on_has_no_problem() {
        let (mut listing, now) = (ListingProgress::default(), Instant::now());
        let at = Listing::UpTo("a".into());
        listing.failed(Reason::ListingFailed.because("as a test"), at.clone(), now);
        assert!(listing.problem(&at).is_some());
        assert!(listing.problem(&Listing::UpTo("b".into())).is_none());
        assert_eq!(listing.waits(now), None);
    }
}
