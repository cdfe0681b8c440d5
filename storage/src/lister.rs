//! Lists a bucket page by page. A listing can continue after any key, in another process and much later,
//! because it depends on no token that expires.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types::EncodingType;

use crate::bucket::Bucket;
use crate::error::StorageError;
use crate::limit::Limit;
use crate::page::{self, ListedPage, PAGE_MAX, unusable};
use crate::selection::Selection;

/// The most bytes of the answer to one request. A key of 1,024 bytes has 3,072 when every byte is escaped,
/// and everything else about an object is smaller, so a page of the longest keys has 6 MB.
pub const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The most consecutive pages without keys that are skipped. Each stands for up to 1,000 objects that are not
/// shown, such as deleted versions. A bucket may have ten million of them; a service that sends even more is
/// broken.
const EMPTY_PAGES_MAX: usize = 10_000;

/// Lists the files below a prefix.
#[derive(Clone, Debug)]
pub struct Lister {
    client: Client,
    bucket: String,
    prefix: String,
    selection: Selection,
    timeout: Duration,
    empty_pages_max: usize,
}

impl Lister {
    /// Prepares the listing; nothing is sent yet, except requests for ambient credentials.
    pub async fn new(bucket: &Bucket, prefix: &str, selection: Selection) -> Self {
        let client = bucket.client().await;
        // The bucket's own timeout limits silence. A page is small, so a service that sends it byte by byte
        // is broken.
        let timeout = bucket.timeout * 2;
        let (bucket, prefix) = (bucket.name.clone(), prefix.to_owned());
        Self { client, bucket, prefix, selection, timeout, empty_pages_max: EMPTY_PAGES_MAX }
    }

    /// The same lister, but it skips fewer pages without keys.
    pub fn passing_over(self, empty_pages: usize) -> Self {
        Self { empty_pages_max: empty_pages.min(EMPTY_PAGES_MAX), ..self }
    }

    /// The page that follows a key; the first page for an empty key. Pages without progress are skipped: a
    /// bucket full of deleted versions has many.
    pub async fn page(&self, after: &str) -> Result<ListedPage, StorageError> {
        let mut token = None;
        for _ in 0..=self.empty_pages_max {
            let mut answer = self.request(after, token.as_ref()).await?;
            let next_token = answer.next_continuation_token.take();
            let page = page::read(answer, after, &self.selection)?;
            if page.next.as_deref() != Some(after) {
                return Ok(page);
            }
            if next_token.is_none() || next_token == token {
                return unusable("a page without keys says that more follow, but not where");
            }
            token = next_token;
        }
        unusable(format!("more than {} pages in a row without keys", self.empty_pages_max))
    }

    /// Sends one request. The cursor accompanies the token, as with AWS clients: services give the token
    /// precedence.
    async fn request(
        &self,
        after: &str,
        token: Option<&String>,
    ) -> Result<ListObjectsV2Output, StorageError> {
        let filled = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let request = self.client.list_objects_v2().bucket(&self.bucket).encoding_type(EncodingType::Url);
        let request = request.set_prefix(filled(&self.prefix)).set_start_after(filled(after));
        let request = request.set_continuation_token(token.cloned()).max_keys(PAGE_MAX as i32);
        let limited = TimeoutConfig::builder().operation_attempt_timeout(self.timeout).build();
        let request = request
            .customize()
            .interceptor(Limit(PAGE_BYTES_MAX))
            .config_override(aws_sdk_s3::Config::builder().timeout_config(limited));
        Ok(request.send().await?)
    }
}
