//! Lists a run's bucket in a separate task: a pass only checks its progress, so a listing of hours delays
//! nothing else.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crds::v1alpha1::PipelineRun;
use kube::ResourceExt;
use queue::{RunQueue, Stats};
use storage::{Lister, Skipped};
use tokio::task::JoinHandle;

use crate::context::Context;
use crate::error::{MORE_MEMORY, Obstacle, Reason, chain};
use crate::listing::{Bounds, ListingError, Progress, list_into};
use crate::world::Uid;

/// The reason of the event about skipped files.
const FILES_SKIPPED: &str = "FilesSkipped";

/// A listing that is under way or has ended.
pub struct ListingTask {
    task: JoinHandle<()>,
    failure: Arc<Mutex<Option<Obstacle>>>,
}

impl ListingTask {
    /// Starts a listing where the last one stopped, according to the queue.
    pub fn start(
        ctx: &Arc<Context>,
        uid: &Uid,
        run: &PipelineRun,
        queue: RunQueue,
        lister: Lister,
        from: &Stats,
    ) -> Self {
        let failure = Arc::new(Mutex::new(None));
        // A restarted operator knows how many files were skipped before, but has no example.
        let skipped = Skipped { files: from.skipped, example: None };
        let (from, total) = (from.listing.clone(), from.total);
        let (ctx, uid, run, told) = (Arc::clone(ctx), Arc::clone(uid), run.clone(), Arc::clone(&failure));
        let task = tokio::spawn(async move {
            let so_far = Mutex::new((total, skipped));
            let progress = |page: Progress| {
                let (known, skipped) = &mut *lock(&so_far);
                ctx.metrics.page_listed(page.total.saturating_sub(*known), page.skipped.files);
                *known = page.total;
                skipped.add(page.skipped);
                ctx.world.touch(&uid);
            };
            let namespace = run.namespace().unwrap_or_default();
            let bounds = Bounds {
                turns: &ctx.turns,
                namespace: &namespace,
                max_files: ctx.settings.runs.max_files,
                high_water: ctx.settings.queue_high_water,
            };
            let listed = list_into(&queue, &lister, from, bounds, progress).await;
            let (_, skipped) = so_far.into_inner().unwrap_or_else(PoisonError::into_inner);
            // A failed listing is started again, and then reports all skipped files.
            if skipped.files > 0 && listed.is_ok() {
                let note = in_words(&skipped);
                tracing::warn!(run = %run.name_any(), namespace, skipped = skipped.files, note, "files were skipped");
                ctx.warn(&run, FILES_SKIPPED, note);
            }
            if let Err(error) = listed {
                *lock(&told) = Some(obstacle(&error));
            }
            ctx.world.touch(&uid);
        });
        Self { task, failure }
    }

    /// Whether the listing has ended, successfully or not.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Why the listing failed, if it did.
    pub fn failure(&self) -> Option<Obstacle> {
        lock(&self.failure).clone()
    }
}

impl Drop for ListingTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text of the event; one event covers all skipped files.
fn in_words(skipped: &Skipped) -> String {
    let Skipped { files, example } = skipped;
    let (files, are) =
        if *files == 1 { ("1 file".to_owned(), "is") } else { (format!("{files} files"), "are") };
    let example = example.as_deref().unwrap_or("their key or etag is too long");
    format!("{files} of the bucket {are} not processed, and not counted: {example}")
}

fn obstacle(error: &ListingError) -> Obstacle {
    let reason = match error {
        ListingError::Enqueue(queue::Error::Lost { .. }) | ListingError::Count(queue::Error::Lost { .. }) => {
            Reason::QueueLost
        }
        // The bucket yielded a page that the queue cannot take, which is not the queue's fault.
        ListingError::Enqueue(queue::Error::Page { .. }) => Reason::ListingFailed,
        ListingError::Enqueue(queue::Error::Full { .. }) => {
            return Reason::QueueFull.because(format!("{}; {MORE_MEMORY}", chain(error)));
        }
        ListingError::Enqueue(_) | ListingError::Count(_) => Reason::QueueUnavailable,
        ListingError::List { source: storage::StorageError::NoAccess(_), .. } => Reason::CredentialsInvalid,
        // The next pass ends the run for having too many files.
        ListingError::List { .. } | ListingError::TooMany { .. } => Reason::ListingFailed,
    };
    reason.because(chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_files_are_reported_with_their_number_and_an_example() {
        let example = Some("the key of \"a\"… has 1025 bytes".to_owned());
        let words = |files| in_words(&Skipped { files, example: example.clone() });
        assert_eq!(
            words(1),
            "1 file of the bucket is not processed, and not counted: the key of \"a\"… has 1025 bytes"
        );
        let unknown = in_words(&Skipped { files: 2, example: None });
        assert_eq!(
            unknown,
            "2 files of the bucket are not processed, and not counted: their key or etag is too long"
        );
        assert!(words(2_000).starts_with("2000 files of the bucket are not"), "{}", words(2_000));
    }

    #[test]
    fn a_page_that_cannot_be_queued_is_not_blamed_on_the_queue() {
        let unfit = queue::Error::Page { detail: "it has 1001 files".into() };
        assert_eq!(obstacle(&ListingError::Enqueue(unfit)).reason, Reason::ListingFailed);
        let lost = queue::Error::Lost { doing: "queue a page of files" };
        assert_eq!(obstacle(&ListingError::Enqueue(lost)).reason, Reason::QueueLost);
    }
}
