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
        ListingError::Enqueue(_) | ListingError::Count(_) => Reason::QueueUnavailable,
        ListingError::List { source: storage::StorageError::NoAccess(_), .. } => Reason::CredentialsInvalid,
        ListingError::List { .. } => Reason::ListingFailed,
    };
    reason.because(chain(error))
}
