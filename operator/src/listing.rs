//! Lists a bucket into the queue of a run. The queue remembers how far the listing got, so that the next call
//! goes on there; dropping it at any time, or calling it twice at once, adds no file twice and leaves none out.

use queue::{Enqueued, File, Listing, Page, RunQueue};
use storage::{ListedFile, ListedPage, Lister, Skipped, StorageError};

use crate::turns::{Room, Turn, Turns};

/// Why a listing stopped. What was added stays added.
#[derive(Debug, thiserror::Error)]
pub enum ListingError {
    /// The bucket cannot be listed.
    #[error("list the bucket after {after:?}")]
    List {
        /// The last key that is known.
        after: String,
        /// What the storage said.
        #[source]
        source: StorageError,
    },
    /// The queue did not take a page.
    #[error("add a page of files to the queue")]
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
    #[error("count the files in the queue")]
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
    /// Files that a run may have; any number when absent.
    pub max_files: Option<u64>,
}

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
        let mut turn = bounds.turns.next().await;
        let listed = turn.ask(lister.page(&after)).await.map_err(failed_after(&after))?;
        let task = Task { queue, lister, max_files: bounds.max_files, progress: &progress };
        from = task.take(turn, Held::new(after, listed)).await?;
    }
    Ok(queue.stats().await.map_err(ListingError::Count)?.total)
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
        let page = Page { after, next, files: files.into_iter().map(file).collect() };
        Self { page, skipped, _room: room }
    }
}

struct Task<'t, P> {
    queue: &'t RunQueue,
    lister: &'t Lister,
    max_files: Option<u64>,
    progress: &'t P,
}

impl<P: Fn(Progress)> Task<'_, P> {
    /// Adds a page, and those after it for as long as no other listing waits: then the next page is asked for while one is
    /// being added. At most two pages are in memory, however large the bucket. Returns where the listing is.
    async fn take<'a>(&self, mut turn: Turn<'a>, mut held: Held<'a>) -> Result<Listing, ListingError> {
        loop {
            let next = held.page.next.as_deref();
            let ahead = next.and_then(|next| turn.room_ahead().map(|room| (next, room)));
            let look_ahead = async {
                // A failure ahead must not keep this page from being added.
                Ok(match ahead {
                    Some((next, room)) => Some(turn.ask_with(room, self.lister.page(next)).await),
                    None => None,
                })
            };
            // The request first: the service works on it while the page is written to Valkey.
            let (ahead, from) = tokio::try_join!(biased; look_ahead, self.add(&held))?;
            match (from, ahead) {
                // Of use unless another listing of this run has gone further.
                (Listing::UpTo(cursor), Some(ahead)) if Some(cursor.as_str()) == next => {
                    let listed = ahead.map_err(failed_after(&cursor))?;
                    held = Held::new(cursor, listed);
                }
                (from, _) => return Ok(from),
            }
        }
    }

    /// Adds a page to the queue, and reports it. Returns where the listing is.
    async fn add(&self, Held { page, skipped, .. }: &Held<'_>) -> Result<Listing, ListingError> {
        match self.queue.enqueue(page).await.map_err(ListingError::Enqueue)? {
            Enqueued::Added { total } => {
                (self.progress)(Progress { total, skipped: skipped.clone() });
                if let Some(max) = self.max_files.filter(|max| total > *max) {
                    return Err(ListingError::TooMany { listed: total, max });
                }
                Ok(page.next.clone().map_or(Listing::Complete, Listing::UpTo))
            }
            Enqueued::Superseded(listing) => Ok(listing),
        }
    }
}

fn failed_after(after: &str) -> impl FnOnce(StorageError) -> ListingError {
    move |source| ListingError::List { after: after.to_owned(), source }
}
