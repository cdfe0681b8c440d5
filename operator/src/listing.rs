//! Lists a bucket into the queue of a run. The queue remembers how far the listing got, so that the next call
//! goes on there; dropping it at any time, or calling it twice at once, adds no file twice and leaves none out.

use std::time::Duration;

use queue::{BATCH_MAX, Enqueued, File, Listing, Page, Pause, RunQueue, State};
use storage::{ListedFile, ListedPage, Lister, Skipped, StorageError};

use crate::turns::{Room, Turn, Turns};

/// Why a listing stopped. What was added stays added.
#[derive(Debug, thiserror::Error)]
pub enum ListingError {
    /// The bucket cannot be listed.
    #[error("cannot list the bucket after {after:?}")]
    List {
        /// The last key that is known.
        after: String,
        /// What the storage said.
        #[source]
        source: StorageError,
    },
    /// The queue did not take a page.
    #[error("cannot add a page of files to the queue")]
    Enqueue(#[source] queue::Error),
    /// The bucket has more files than a run may have.
    #[error("{listed} files are listed, and --max-files allows {max}")]
    TooMany {
        /// Files of the run so far.
        listed: u64,
        /// The setting.
        max: u64,
    },
    /// The queue did not say how many files there are.
    #[error("cannot count the files in the queue")]
    Count(#[source] queue::Error),
}

/// What a page brought that is in the queue now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Files of the run so far.
    pub total: u64,
    /// Files of this page that were left out.
    pub skipped: Skipped,
}

/// What a listing has to keep to.
#[derive(Clone, Copy, Debug)]
pub struct Bounds<'a> {
    /// Shared with all other listings.
    pub turns: &'a Turns,
    /// Where the run is: namespaces take turns.
    pub namespace: &'a str,
    /// Files that a run may have; any number when absent.
    pub max_files: Option<u64>,
    /// Files of a run that may wait in the queue: beyond it the listing pauses.
    pub high_water: u64,
}

/// How long a paused listing waits before it checks the queue again, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);

/// Lists the rest of a bucket, from where the queue says that the listing is, and reports every page. Returns the number of
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

/// Waits until the queue has room for another page; returns where the listing is. The page that did not fit is listed again:
/// held meanwhile, it would take memory from the listings of other runs.
async fn wait_for_room(queue: &RunQueue, pause: Pause, high_water: u64) -> Result<Listing, ListingError> {
    let mut wait = PAUSE_FIRST;
    loop {
        tokio::time::sleep(wait).await;
        let stats = match queue.stats().await {
            Ok(stats) => stats,
            // It waits anyway, and must not be reported as broken for the rest of the pause.
            Err(error) if error.is_transient() => continue,
            Err(error) => return Err(ListingError::Count(error)),
        };
        let waiting = stats.queued + stats.running;
        let has_room = match pause {
            Pause::HighWater => waiting < high_water / 2,
            // Memory is freed by other runs, too: only the queue itself knows when.
            Pause::MemoryFull => wait == PAUSE_LONGEST || waiting < BATCH_MAX as u64 / 2,
        };
        if has_room || stats.state != State::Open {
            return Ok(stats.listing);
        }
        wait = (wait * 2).min(PAUSE_LONGEST);
    }
}

/// What became of a page.
enum Added {
    /// The listing is here.
    UpTo(Listing),
    /// It did not fit.
    Paused(Pause),
}

/// A page that is to be added, and its room in memory until it is.
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
    /// Adds a page, and those after it for as long as no other listing waits: then the next page is asked for while one is
    /// being added. At most two pages are in memory, however large the bucket. Returns where the listing is.
    async fn take<'a>(&self, mut turn: Turn<'a>, mut held: Held<'a>) -> Result<Added, ListingError> {
        loop {
            let next = held.page.next.clone();
            let ahead = next.as_deref().and_then(|next| turn.room_ahead().map(|room| (next, room)));
            let look_ahead = async {
                // A failure ahead must not keep this page from being added.
                Ok(match ahead {
                    Some((next, room)) => Some(turn.ask_with(room, self.lister.page(next)).await),
                    None => None,
                })
            };
            // The request first: the service works on it while the page is written to Valkey.
            let (ahead, added) = tokio::try_join!(biased; look_ahead, self.add(held))?;
            match (added, ahead) {
                // Of use unless another listing of this run has gone further.
                (Added::UpTo(Listing::UpTo(cursor)), Some(ahead)) if Some(&cursor) == next.as_ref() => {
                    let listed = ahead.map_err(failed_after(&cursor))?;
                    held = Held::new(cursor, listed);
                }
                (added, _) => return Ok(added),
            }
        }
    }

    /// Adds a page to the queue, and reports it. Returns where the listing is. The page and its room are free as soon as it is
    /// added: a look-ahead may wait much longer for its answer.
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
