//! Lists a bucket page by page. A listing can go on after any key, in another process and much later: there is no token
//! that expires.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::types::EncodingType;

use crate::bucket::Bucket;
use crate::error::StorageError;
use crate::limit::Limit;
use crate::page::{self, ListedPage, PAGE_MAX};
use crate::selection::Selection;

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
        page::read(request.send().await?, after, &self.selection)
    }
}
