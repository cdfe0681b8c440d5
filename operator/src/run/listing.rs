//! The listing of a run's bucket, as a task of its own: a pass only looks how far it is. A listing of hours delays nobody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use queue::{RunQueue, Stats};
use storage::Lister;
use tokio::task::JoinHandle;

use crate::context::Context;
use crate::error::{Obstacle, Reason, chain};
use crate::listing::{ListingError, list_into};
use crate::world::Uid;

/// A listing that is under way, or has ended.
pub struct ListingTask {
    task: JoinHandle<()>,
    failure: Arc<Mutex<Option<Obstacle>>>,
}

impl ListingTask {
    /// Starts where the queue says that the last one stopped.
    pub fn start(ctx: &Arc<Context>, uid: &Uid, queue: RunQueue, lister: Lister, from: &Stats) -> Self {
        let failure = Arc::new(Mutex::new(None));
        let (from, total) = (from.listing.clone(), from.total);
        let (ctx, uid, told) = (Arc::clone(ctx), Arc::clone(uid), Arc::clone(&failure));
        let task = tokio::spawn(async move {
            let before = AtomicU64::new(total);
            let progress = |total: u64| {
                let known = before.swap(total, Ordering::Relaxed);
                ctx.metrics.page_listed(total.saturating_sub(known));
                ctx.world.touch(&uid);
            };
            if let Err(error) = list_into(&queue, &lister, from, progress).await {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(obstacle(&error));
            }
            ctx.world.touch(&uid);
        });
        Self { task, failure }
    }

    /// Whether it has ended, well or not.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<Obstacle> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ListingTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn obstacle(error: &ListingError) -> Obstacle {
    let reason = match error {
        ListingError::Enqueue(queue::Error::Lost { .. }) | ListingError::Count(queue::Error::Lost { .. }) => {
            Reason::QueueLost
        }
        // The bucket was listed into something that the queue cannot take: that is not the queue's fault.
        ListingError::Enqueue(queue::Error::Page { .. }) => Reason::ListingFailed,
        ListingError::Enqueue(_) | ListingError::Count(_) => Reason::QueueUnavailable,
        ListingError::List { source: storage::StorageError::NoAccess(_), .. } => Reason::CredentialsInvalid,
        ListingError::List { .. } => Reason::ListingFailed,
    };
    reason.because(chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_cannot_be_queued_is_not_blamed_on_the_queue() {
        let unfit = queue::Error::Page { detail: "it has 1001 files".into() };
        assert_eq!(obstacle(&ListingError::Enqueue(unfit)).reason, Reason::ListingFailed);
        let lost = queue::Error::Lost { doing: "queue a page of files" };
        assert_eq!(obstacle(&ListingError::Enqueue(lost)).reason, Reason::QueueLost);
    }
}
