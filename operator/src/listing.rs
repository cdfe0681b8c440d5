//! Lists a bucket into the queue of a run. The queue remembers how far the listing got, so that whoever calls this next
//! goes on there; dropping it at any time, or calling it twice at once, adds no file twice and leaves none out.

use queue::{Enqueued, File, Listing, Page, RunQueue};
use storage::{ListedFile, ListedPage, Lister, Skipped, StorageError};

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

/// Lists the rest of a bucket, from where the queue says that the listing is, and reports every page. Returns the number of
/// files of the run.
///
/// While a page is being added, the next one is asked for: two pages in memory, however large the bucket.
pub async fn list_into(
    queue: &RunQueue,
    lister: &Lister,
    from: Listing,
    progress: impl Fn(Progress),
) -> Result<u64, ListingError> {
    let mut from = from;
    let mut ahead = None;
    while let Listing::UpTo(after) = from {
        let listed = match ahead.take() {
            Some(page) => page,
            None => page_after(lister, &after).await?,
        };
        let (page, skipped) = page_of(after, listed);
        let add = async { queue.enqueue(&page).await.map_err(ListingError::Enqueue) };
        let look_ahead = async {
            // A failure ahead must not keep this page from being added.
            Ok(match &page.next {
                Some(next) => Some(page_after(lister, next).await),
                None => None,
            })
        };
        // The request first: the service works on it while the page is written to Valkey.
        let (next_page, added) = tokio::try_join!(biased; look_ahead, add)?;
        from = match added {
            Enqueued::Added { total } => {
                progress(Progress { total, skipped });
                page.next.clone().map_or(Listing::Complete, Listing::UpTo)
            }
            Enqueued::Superseded(listing) => listing,
        };
        // Of use unless somebody else has gone further.
        if let (Listing::UpTo(cursor), Some(next)) = (&from, &page.next)
            && cursor == next
        {
            ahead = next_page.transpose()?;
        }
    }
    Ok(queue.stats().await.map_err(ListingError::Count)?.total)
}

async fn page_after(lister: &Lister, after: &str) -> Result<ListedPage, ListingError> {
    lister.page(after).await.map_err(|source| ListingError::List { after: after.to_owned(), source })
}

fn page_of(after: String, listed: ListedPage) -> (Page, Skipped) {
    let ListedPage { files, skipped, next } = listed;
    let file = |ListedFile { key, size, etag }| File { key, size, etag };
    (Page { after, next, files: files.into_iter().map(file).collect() }, skipped)
}
