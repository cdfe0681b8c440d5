//! Lists a bucket into the queue of a run. The queue records how far the listing got, so that the next call
//! continues there. Dropping the future at any time, or running two at once, adds no file twice and omits
//! none.

use std::time::Duration;

use queue::{BATCH_MAX, Enqueued, File, Listing, Page, Pause, RunQueue, State};
use storage::{ListedFile, ListedPage, Lister, Skipped, StorageError};

use crate::turns::{Room, Turn, Turns};

/// Why a listing stopped. Pages that were added stay added.
#[derive(Debug, thiserror::Error)]
pub enum ListingError {
    /// The bucket cannot be listed.
    #[error("cannot list the bucket after {after:?}")]
    List {
        /// The last known key.
        after: String,
        /// The error of the storage.
        #[source]
        source: StorageError,
    },
    /// The queue did not accept a page.
    #[error("cannot add a page of files to the queue")]
    Enqueue(#[source] queue::Error),
    /// The bucket has more files than a run may have.
    #[error("{listed} files are listed, and --max-files allows {max}")]
    TooMany {
        /// Files of the run so far.
        listed: u64,
        /// The value of the setting.
        max: u64,
    },
    /// The queue did not return the number of files.
    #[error("cannot count the files in the queue")]
    Count(#[source] queue::Error),
}

/// The effect of a page that is now in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Files of the run so far.
    pub total: u64,
    /// Skipped files of this page.
    pub skipped: Skipped,
}

/// The limits of a listing.
#[derive(Clone, Copy, Debug)]
pub struct Bounds<'a> {
    /// Shared with all other listings.
    pub turns: &'a Turns,
    /// The namespace of the run: namespaces take turns.
    pub namespace: &'a str,
    /// The most files that a run may have; unlimited when absent.
    pub max_files: Option<u64>,
    /// The most files of a run that may wait in the queue; beyond that, the listing pauses.
    pub high_water: u64,
}

/// How long a paused listing waits before it checks the queue again, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);

/// Lists the rest of a bucket, starting where the queue says, and reports every page. Returns the number of
/// files of the run.
pub async fn list_into(
    queue: &RunQueue,
    lister: &Lister,
    from: Listing,
    bounds: Bounds<'_>,
    progress: impl Fn(Progress),
) -> Result<u64, ListingError> {
    let mut from = from;
    while let Listing::UpTo(after) = from {
        let mut turn = bounds.turns.next(bounds.namespace).await;
        let listed = turn.ask(lister.page(&after)).await.map_err(failed_after(&after))?;
        let task = Task { queue, lister, bounds, progress: &progress };
        from = match task.take(turn, Held::new(after, listed)).await? {
            Added::UpTo(listing) => listing,
            Added::Paused(pause) => wait_for_room(queue, pause, bounds.high_water).await?,
        };
    }
    Ok(queue.stats().await.map_err(ListingError::Count)?.total)
}

/// Waits until the queue has room for another page; returns how far the listing is. The page that did not fit
/// is listed again: keeping it would take memory from the listings of other runs.
async fn wait_for_room(queue: &RunQueue, pause: Pause, high_water: u64) -> Result<Listing, ListingError> {
    let mut wait = PAUSE_FIRST;
    loop {
        tokio::time::sleep(wait).await;
        let stats = match queue.stats().await {
            Ok(stats) => stats,
            // The listing waits anyway, and must not be reported as broken for the rest of the pause.
            Err(error) if error.is_transient() => continue,
            Err(error) => return Err(ListingError::Count(error)),
        };
        let waiting = stats.queued + stats.running;
        let has_room = match pause {
            Pause::HighWater => waiting < high_water / 2,
            // Other runs free memory, too: only the queue itself knows when.
            Pause::MemoryFull => wait == PAUSE_LONGEST || waiting < BATCH_MAX as u64 / 2,
        };
        if has_room || stats.state != State::Open {
            return Ok(stats.listing);
        }
        wait = (wait * 2).min(PAUSE_LONGEST);
    }
}

/// The result of adding a page.
enum Added {
    /// The listing has reached this point.
    UpTo(Listing),
    /// The page did not fit.
    Paused(Pause),
}

/// A page to be added, with the memory reserved for it.
struct Held<'a> {
    page: Page,
    skipped: Skipped,
    _room: Room<'a>,
}

impl<'a> Held<'a> {
    fn new(after: String, (listed, room): (ListedPage, Room<'a>)) -> Self {
        let ListedPage { files, skipped, next } = listed;
        let file = |ListedFile { key, size, etag }| File { key, size, etag };
        let files = files.into_iter().map(file).collect();
        let page = Page { after, next, files, skipped: skipped.files };
        Self { page, skipped, _room: room }
    }
}

struct Task<'t, P> {
    queue: &'t RunQueue,
    lister: &'t Lister,
    bounds: Bounds<'t>,
    progress: &'t P,
}

impl<P: Fn(Progress)> Task<'_, P> {
    /// Adds a page, and the following ones as long as no other listing waits: then it requests the next page
    /// while it adds the current one. At most two pages are in memory, however large the bucket. Returns how
    /// far the listing is.
    async fn take<'a>(&self, mut turn: Turn<'a>, mut held: Held<'a>) -> Result<Added, ListingError> {
        loop {
            let next = held.page.next.clone();
            let ahead = next.as_deref().and_then(|next| turn.room_ahead().map(|room| (next, room)));
            let look_ahead = async {
                // If the look-ahead fails, this page must still be added.
                Ok(match ahead {
                    Some((next, room)) => Some(turn.ask_with(room, self.lister.page(next)).await),
                    None => None,
                })
            };
            // Send the request first: the service works on it while the page is written to Valkey.
            let (ahead, added) = tokio::try_join!(biased; look_ahead, self.add(held))?;
            match (added, ahead) {
                // The next page is useful unless another listing of this run has progressed further.
                (Added::UpTo(Listing::UpTo(cursor)), Some(ahead)) if Some(&cursor) == next.as_ref() => {
                    let listed = ahead.map_err(failed_after(&cursor))?;
                    held = Held::new(cursor, listed);
                }
                (added, _) => return Ok(added),
            }
        }
    }

    /// Adds a page to the queue, and reports it. Returns how far the listing is. The page and its memory are
    /// freed as soon as it is added, because a look-ahead may wait much longer for its answer.
    async fn add(&self, held: Held<'_>) -> Result<Added, ListingError> {
        let Held { page, skipped, _room } = held;
        match self.queue.enqueue(&page, self.bounds.high_water).await.map_err(ListingError::Enqueue)? {
            Enqueued::Added { total } => {
                (self.progress)(Progress { total, skipped });
                if let Some(max) = self.bounds.max_files.filter(|max| total > *max) {
                    return Err(ListingError::TooMany { listed: total, max });
                }
                Ok(Added::UpTo(page.next.map_or(Listing::Complete, Listing::UpTo)))
            }
            Enqueued::Superseded(listing) => Ok(Added::UpTo(listing)),
            Enqueued::Paused(pause) => Ok(Added::Paused(pause)),
        }
    }
}

fn failed_after(after: &str) -> impl FnOnce(StorageError) -> ListingError {
    move |source| ListingError::List { after: after.to_owned(), source }
}
