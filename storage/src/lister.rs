//! Lists a bucket page by page. A listing can go on after any key, in another process and much later: there is no token
//! that expires. What it cannot trust, it reports; it never leaves a file out without a word.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types::EncodingType;

use crate::bucket::Bucket;
use crate::error::StorageError;
use crate::key;
use crate::limit::Limit;
use crate::selection::Selection;

/// Keys of one page: the most that the protocol allows.
pub const PAGE_MAX: usize = 1_000;
/// Bytes of one page. A key of 1,024 bytes has 3,072 when every byte is escaped, and everything else about an object
/// less than that, so that a page of the longest keys has 6 MB.
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Lists the files below a prefix.
#[derive(Clone, Debug)]
pub struct Lister {
    client: Client,
    bucket: String,
    prefix: String,
    selection: Selection,
    timeout: Duration,
}

/// A page of the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPage {
    /// The files that are selected. May be empty although more follow.
    pub files: Vec<ListedFile>,
    /// Where the next page begins: the last key of this one, selected or not. `None` at the end of the bucket.
    pub next: Option<String>,
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

impl Lister {
    /// Prepares the listing; nothing is sent yet, except for ambient credentials.
    pub async fn new(bucket: &Bucket, prefix: &str, selection: Selection) -> Self {
        let client = bucket.client().await;
        // The bucket's own limit is on silence. A page is small: one that comes byte by byte is no page.
        let timeout = bucket.timeout * 2;
        Self { client, bucket: bucket.name.clone(), prefix: prefix.to_owned(), selection, timeout }
    }

    /// The page that follows a key; the first one for an empty key.
    pub async fn page(&self, after: &str) -> Result<ListedPage, StorageError> {
        let filled = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let request = self.client.list_objects_v2().bucket(&self.bucket).encoding_type(EncodingType::Url);
        let request = request.set_prefix(filled(&self.prefix)).set_start_after(filled(after));
        let limited = TimeoutConfig::builder().operation_attempt_timeout(self.timeout).build();
        let request = request
            .max_keys(PAGE_MAX as i32)
            .customize()
            .interceptor(Limit(PAGE_BYTES_MAX))
            .config_override(aws_sdk_s3::Config::builder().timeout_config(limited));
        self.read(request.send().await?, after)
    }

    fn read(&self, answer: ListObjectsV2Output, after: &str) -> Result<ListedPage, StorageError> {
        let unusable = |why: String| Err(StorageError::Unusable(why));
        // Some services do not know the encoding: then keys are as they are.
        let encoded = answer.encoding_type() == Some(&EncodingType::Url);
        let Some(truncated) = answer.is_truncated() else {
            return unusable("the listing does not say whether more follows".to_owned());
        };
        let objects = answer.contents.unwrap_or_default();
        if objects.len() > PAGE_MAX {
            return unusable(format!("a page of {} keys, where {PAGE_MAX} were asked for", objects.len()));
        }
        let (mut files, mut last) = (Vec::new(), after.to_owned());
        for object in objects {
            let Some(listed) = object.key else {
                return unusable("the listing has an object without a key".to_owned());
            };
            let key = if encoded { key::decode(&listed) } else { Ok(listed.clone()) };
            let key = match key {
                Ok(key) => key,
                Err(error) => return unusable(format!("the key {listed:?} cannot be read: {error}")),
            };
            // The listing goes on after the last key it has seen, so that a key out of order would be listed twice or
            // never; and a service that always begins anew would be listed for ever.
            if key <= last {
                return unusable(format!("the listing is not in order: {key:?} comes after {last:?}"));
            }
            let Some(size) = object.size.and_then(|size| u64::try_from(size).ok()) else {
                return unusable(format!("the listing has no size for {key:?}"));
            };
            last.clone_from(&key);
            if self.selection.takes(&key, size) {
                files.push(ListedFile { key, size, etag: quoted(object.e_tag.unwrap_or_default()) });
            }
        }
        if truncated && last == after {
            return unusable("a page without keys says that more follow".to_owned());
        }
        Ok(ListedPage { files, next: truncated.then_some(last) })
    }
}

/// Some services list etags without quotes, and then do not know them in a condition.
fn quoted(etag: String) -> String {
    if etag.is_empty() || etag.ends_with('"') { etag } else { format!("\"{etag}\"") }
}
