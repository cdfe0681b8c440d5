//! A page of a listing, parsed from the service's answer. Data that cannot be trusted is an error; files that
//! a run could not process are skipped and counted, never silently.

use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types::{EncodingType, Object};

use crate::error::StorageError;
use crate::key;
use crate::selection::Selection;

/// The most keys of one page, as limited by the protocol.
pub const PAGE_MAX: usize = 1_000;
/// The most bytes of a key: the limit of S3 itself, on which messages, reports and file names in the
/// workspace rely. Some services store longer keys.
pub const KEY_BYTES_MAX: usize = 1_024;
/// The most bytes of an etag. A SHA-512 in hexadecimal with the number of parts has 140; each message in the
/// queue and each request for the object repeats it.
pub const ETAG_BYTES_MAX: usize = 256;
/// The most bytes of a key in a message: enough to recognize it, while the message stays readable.
const SHOWN_BYTES_MAX: usize = 80;

/// A page of the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPage {
    /// The selected files. May be empty although more follow.
    pub files: Vec<ListedFile>,
    /// Selected files that are skipped, because no run could process them.
    pub skipped: Skipped,
    /// Where the next page begins: the last key of this one, selected or not; if it has no keys, where this
    /// one began. `None` at the end of the bucket.
    pub next: Option<String>,
}

impl ListedPage {
    /// The approximate size in memory.
    pub fn bytes(&self) -> usize {
        let file = |file: &ListedFile| size_of::<ListedFile>() + file.key.len() + file.etag.len();
        self.files.iter().map(file).sum()
    }
}

/// A file of the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// Its key, exactly.
    pub key: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its etag, in quotes as in a condition of a request; empty if the service gives none.
    pub etag: String,
}

/// Files that are skipped because their key or etag is too long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// The number of files.
    pub files: u64,
    /// A description of the first one and its problem, with its key shortened.
    pub example: Option<String>,
}

impl Skipped {
    /// Adds the skipped files of a later page.
    pub fn add(&mut self, later: Self) {
        self.files += later.files;
        self.example = self.example.take().or(later.example);
    }

    /// Adds a file if it must be skipped; returns whether it was added.
    fn takes(&mut self, key: &str, etag: &str) -> bool {
        let (what, bytes, most) = match (key.len(), etag.len()) {
            (bytes, _) if bytes > KEY_BYTES_MAX => ("key", bytes, KEY_BYTES_MAX),
            (_, bytes) if bytes > ETAG_BYTES_MAX => ("etag", bytes, ETAG_BYTES_MAX),
            _ => return false,
        };
        self.files += 1;
        self.example.get_or_insert_with(|| {
            format!("the {what} of {} has {bytes} bytes, and at most {most} are supported", shown(key))
        });
        true
    }
}

/// Parses the answer to a request for the keys after `after`.
pub(crate) fn read(
    answer: ListObjectsV2Output,
    after: &str,
    selection: &Selection,
) -> Result<ListedPage, StorageError> {
    // Some services do not support the encoding and send plain keys.
    let encoded = answer.encoding_type() == Some(&EncodingType::Url);
    let Some(truncated) = answer.is_truncated() else {
        return unusable("the listing does not say whether more follows");
    };
    let objects = answer.contents.unwrap_or_default();
    if objects.len() > PAGE_MAX {
        return unusable(format!("a page of {} keys, where {PAGE_MAX} were asked for", objects.len()));
    }
    let (mut files, mut skipped, mut last) = (Vec::new(), Skipped::default(), after.to_owned());
    for (place, Object { key, size, e_tag, .. }) in objects.into_iter().enumerate() {
        let key = read_key(key, encoded)?;
        // Some services include the start key itself.
        if place == 0 && !after.is_empty() && key == after {
            continue;
        }
        // The listing continues after the last key that it has seen. A key out of order would therefore be
        // listed twice or never, and a service that always restarts would be listed forever.
        if key <= last {
            return unusable(format!(
                "the listing is not in order: {} comes after {}",
                shown(&key),
                shown(&last)
            ));
        }
        last.clone_from(&key);
        let Some(size) = size.and_then(|size| u64::try_from(size).ok()) else {
            return unusable(format!("the listing has no size for {}", shown(&key)));
        };
        let etag = e_tag.unwrap_or_default();
        if selection.takes(&key, size) && !skipped.takes(&key, &etag) {
            files.push(ListedFile { key, size, etag: quoted(etag) });
        }
    }
    Ok(ListedPage { files, skipped, next: truncated.then(|| cursor(last)) })
}

fn read_key(listed: Option<String>, encoded: bool) -> Result<String, StorageError> {
    let Some(listed) = listed else { return unusable("the listing has an object without a key") };
    if !encoded {
        return Ok(listed);
    }
    key::decode(&listed)
        .or_else(|error| unusable(format!("the key {} cannot be read: {error}", shown(&listed))))
}

/// Where the next page begins, after this key. The cursor is stored and sent, so it must not exceed the limit
/// of a key: for a longer key, it is the beginning plus the greatest character. This skips keys with the same
/// beginning, but those are all too long as well, because characters that sort later have at least as many
/// bytes.
fn cursor(mut last: String) -> String {
    if last.len() > KEY_BYTES_MAX {
        last.truncate(last.floor_char_boundary(KEY_BYTES_MAX));
        last.push(char::MAX);
    }
    last
}

/// Formats a key for a message.
fn shown(key: &str) -> String {
    let start = &key[..key.floor_char_boundary(SHOWN_BYTES_MAX)];
    let cut = if start.len() < key.len() { "…" } else { "" };
    format!("{start:?}{cut}")
}

/// Adds missing quotes: some services list etags without quotes, but do not accept such etags in a condition.
fn quoted(etag: String) -> String {
    if etag.is_empty() || etag.ends_with('"') { etag } else { format!("\"{etag}\"") }
}

pub(crate) fn unusable<T>(why: impl Into<String>) -> Result<T, StorageError> {
    Err(StorageError::Unusable(why.into()))
}
