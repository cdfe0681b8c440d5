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
        let turn = bounds.turns.next().await;
        from = take_turn(turn, queue, lister, after, bounds.max_files, &progress).await?;
    }
    Ok(queue.stats().await.map_err(ListingError::Count)?.total)
}

/// Adds a page, and those after it for as long as no other listing waits: then the next page is asked for while one is
/// being added. At most two pages are in memory, however large the bucket. Returns where the listing is.
async fn take_turn(
    mut turn: Turn<'_>,
    queue: &RunQueue,
    lister: &Lister,
    mut after: String,
    max_files: Option<u64>,
    progress: &impl Fn(Progress),
) -> Result<Listing, ListingError> {
    let mut listed = turn.ask(lister.page(&after)).await.map_err(failed_after(&after))?;
    loop {
        let (page, skipped, _room) = page_of(after, listed);
        let next = page.next.as_deref();
        let ahead = next.and_then(|next| turn.room_ahead().map(|room| (next, room)));
        let look_ahead = async {
            // A failure ahead must not keep this page from being added.
            Ok(match ahead {
                Some((next, room)) => Some(turn.ask_with(room, lister.page(next)).await),
                None => None,
            })
        };
        // The request first: the service works on it while the page is written to Valkey.
        let (ahead, from) =
            tokio::try_join!(biased; look_ahead, add_page(queue, &page, skipped, max_files, progress))?;
        match (from, ahead) {
            // Of use unless another listing of this run has gone further.
            (Listing::UpTo(cursor), Some(ahead)) if Some(cursor.as_str()) == next => {
                listed = ahead.map_err(failed_after(&cursor))?;
                after = cursor;
            }
            (from, _) => return Ok(from),
        }
    }
}

/// Adds a page to the queue, and reports it. Returns where the listing is.
async fn add_page(
    queue: &RunQueue,
    page: &Page,
    skipped: Skipped,
    max_files: Option<u64>,
    progress: &impl Fn(Progress),
) -> Result<Listing, ListingError> {
    match queue.enqueue(page).await.map_err(ListingError::Enqueue)? {
        Enqueued::Added { total } => {
            progress(Progress { total, skipped });
            if let Some(max) = max_files.filter(|max| total > *max) {
                return Err(ListingError::TooMany { listed: total, max });
            }
            Ok(page.next.clone().map_or(Listing::Complete, Listing::UpTo))
        }
        Enqueued::Superseded(listing) => Ok(listing),
    }
}

fn failed_after(after: &str) -> impl FnOnce(StorageError) -> ListingError {
    move |source| ListingError::List { after: after.to_owned(), source }
}

/// A page as the queue takes it. Its room in memory is given back when it is in the queue.
fn page_of(after: String, (listed, room): (ListedPage, Room<'_>)) -> (Page, Skipped, Room<'_>) {
    let ListedPage { files, skipped, next } = listed;
    let file = |ListedFile { key, size, etag }| File { key, size, etag };
    (Page { after, next, files: files.into_iter().map(file).collect() }, skipped, room)
}
