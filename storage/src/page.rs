//! A page of a listing, read from the service's answer. What cannot be trusted is an error; what a run could not process
//! is counted and left out, never without a word.

use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types::{EncodingType, Object};

use crate::error::StorageError;
use crate::key;
use crate::selection::Selection;

/// Keys of one page: the most that the protocol allows.
pub const PAGE_MAX: usize = 1_000;
/// Bytes of a key: the limit of S3 itself, on which messages, reports and file names in the workspace rely. Some services
/// store longer ones.
pub const KEY_BYTES_MAX: usize = 1_024;
/// Bytes of an etag. A SHA-512 in hexadecimal with the number of parts has 140; each message in the queue and each request
/// for the object repeats it.
pub const ETAG_BYTES_MAX: usize = 256;
/// Bytes of a key in a message: enough to recognize it, and the message stays readable.
const SHOWN_BYTES_MAX: usize = 80;

/// A page of the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPage {
    /// The files that are selected. May be empty although more follow.
    pub files: Vec<ListedFile>,
    /// Selected files that are left out, because no run could process them.
    pub skipped: Skipped,
    /// Where the next page begins: the last key of this one, selected or not; where this one began, if it has no keys.
    /// `None` at the end of the bucket.
    pub next: Option<String>,
}

impl ListedPage {
    /// About what it needs in memory.
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
    /// Its etag, with its quotes, as a condition of a request has it; empty if the service gives none.
    pub etag: String,
}

/// Files that are left out because their key or etag is too long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// How many.
    pub files: u64,
    /// The first one and why, in words: its key is shortened.
    pub example: Option<String>,
}

impl Skipped {
    /// Adds those of a later page.
    pub fn add(&mut self, later: Self) {
        self.files += later.files;
        self.example = self.example.take().or(later.example);
    }

    /// Adds a file, if it must be left out.
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

/// Reads the answer to a request for the keys after `after`.
pub(crate) fn read(
    answer: ListObjectsV2Output,
    after: &str,
    selection: &Selection,
) -> Result<ListedPage, StorageError> {
    // Some services do not know the encoding: then keys are as they are.
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
        // Some services begin with the key itself.
        if place == 0 && !after.is_empty() && key == after {
            continue;
        }
        // The listing goes on after the last key it has seen, so that a key out of order would be listed twice or never;
        // and a service that always begins again would be listed without end.
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

/// Where the next page begins, after this key. The cursor is stored and sent, so it must not be longer than a key may be: of
/// a longer one it is the beginning and the greatest character. That passes over keys with the same beginning, but those are
/// all too long as well: characters that sort later have at least as many bytes.
fn cursor(mut last: String) -> String {
    if last.len() > KEY_BYTES_MAX {
        last.truncate(last.floor_char_boundary(KEY_BYTES_MAX));
        last.push(char::MAX);
    }
    last
}

/// A key in a message.
fn shown(key: &str) -> String {
    let start = &key[..key.floor_char_boundary(SHOWN_BYTES_MAX)];
    let cut = if start.len() < key.len() { "…" } else { "" };
    format!("{start:?}{cut}")
}

/// Some services list etags without quotes, and then do not know them in a condition.
fn quoted(etag: String) -> String {
    if etag.is_empty() || etag.ends_with('"') { etag } else { format!("\"{etag}\"") }
}

pub(crate) fn unusable<T>(why: impl Into<String>) -> Result<T, StorageError> {
    Err(StorageError::Unusable(why.into()))
}
