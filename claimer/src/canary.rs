//! Tells a storage outage from a single bad object: after a failure it reads one byte of an object that this
//! run has read before, or writes beside a result that it has published before. It uses the same client,
//! hence the same credentials and network path. A listing only proposes objects: an answered listing proves
//! nothing about reading. Nor does a result that can be read prove anything about writing: a sink that is
//! full or read-only still shows what it has.

use std::error::Error;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::ChecksumAlgorithm;
use aws_smithy_checksums::ChecksumAlgorithm as Algorithm;
use aws_smithy_types::base64;
use protocol::Exit;
use storage::{BACKOFF_FIRST, StorageError, chain};

/// The second try is for a stale connection; more tries would only repeat what the failure itself has shown.
const TRIES: u32 = 2;
/// A storage that needs longer for one byte is not up. This bounds the delay that the check adds to a
/// failure.
const LIMIT: Duration = Duration::from_secs(5);
/// How many objects a listing proposes: one may be the object that failed, and others may fail as well.
const PROPOSED: i32 = 4;
/// The most bytes that a check writes: it sends them from memory, while a pod ends.
pub(crate) const WRITE_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// How long that may take.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// What a service answers that does not know multipart uploads.
const NOT_IMPLEMENTED: u16 = 501;

/// Objects that were readable before, and the client that failed to get another one.
pub(crate) struct Canary<'a> {
    pub(crate) client: &'a Client,
    pub(crate) bucket: &'a str,
    /// Newest first; empty until this run has fetched or published anything.
    pub(crate) keys: &'a [String],
}

impl Canary<'_> {
    /// Whether one byte can be read, after `failed` could not be fetched. If all known objects were deleted,
    /// others below `prefix` are tried.
    pub(crate) async fn read(&self, failed: &str, exit: Exit, prefix: &str) -> Option<bool> {
        let began = Instant::now();
        let shown = self.first_that_is_there(failed, exit, async |key| self.read_byte(key).await).await;
        let had_any = exit.is_of_storage() && self.keys.iter().any(|key| key != failed);
        if shown.is_some() || !had_any {
            return shown;
        }
        let left = LIMIT.saturating_sub(began.elapsed());
        tokio::time::timeout(left, self.read_proposed(failed, prefix)).await.unwrap_or_default()
    }

    async fn read_byte(&self, key: &str) -> Option<bool> {
        let request = self.client.get_object().bucket(self.bucket).key(key).range("bytes=0-0");
        let sent = request.customize().config_override(few_tries()).send().await;
        let mut body = match sent.map_err(StorageError::from) {
            Ok(answer) => answer.body,
            Err(error) => return up(&error),
        };
        // An empty object may also be answered without a body.
        Some(!matches!(body.next().await, Some(Err(_))))
    }

    /// Whether one of the listed objects can be read. This run has read none of them, so an unreadable one
    /// proves nothing: our keys may never have allowed it. A refused listing proves nothing either, because
    /// reading files does not require it.
    async fn read_proposed(&self, failed: &str, prefix: &str) -> Option<bool> {
        let prefix = Some(prefix.to_owned()).filter(|prefix| !prefix.is_empty());
        let request = self.client.list_objects_v2().bucket(self.bucket).set_prefix(prefix).max_keys(PROPOSED);
        let listed = request.customize().config_override(few_tries()).send().await.ok()?;
        for key in listed.contents().iter().filter_map(|object| object.key()).filter(|key| *key != failed) {
            if self.read_byte(key).await == Some(true) {
                return Some(true);
            }
        }
        None
    }

    /// Whether the sink still takes results, after `failed` could not be published: whether another result
    /// can be looked up, as after every upload, and whether the sink takes as many bytes as all results of
    /// the file have. Of more than [`WRITE_BYTES_MAX`] bytes that is not known: a sink may have room for
    /// some.
    pub(crate) async fn write(&self, failed: &str, exit: Exit, bytes: u64) -> Option<bool> {
        if !exit.is_of_storage() {
            return None;
        }
        let look_up = async {
            for key in self.keys.iter().filter(|key| *key != failed) {
                if let Some(shown) = self.look_up(key).await {
                    return Some((key, shown));
                }
            }
            None
        };
        match tokio::time::timeout(LIMIT, look_up).await {
            Ok(None) => None,
            Ok(Some((key, true))) => {
                let takes = self.begin_to_write(key, bytes.clamp(1, WRITE_BYTES_MAX)).await;
                takes.filter(|takes| !takes || bytes <= WRITE_BYTES_MAX)
            }
            Ok(Some((_, false))) | Err(_) => Some(false),
        }
    }

    async fn look_up(&self, key: &str) -> Option<bool> {
        let request = self.client.head_object().bucket(self.bucket).key(key);
        let sent = request.customize().config_override(few_tries()).send().await;
        match sent.map_err(StorageError::from) {
            Ok(_) => Some(true),
            // Keys that may write need not be allowed to read.
            Err(StorageError::NoAccess(_)) => None,
            Err(error) => up(&error),
        }
    }

    /// Whether the sink takes bytes under the name of a result, in an upload that is never completed: the
    /// result stays as it is, and no reader, event or version shows the bytes. Writing the result again could
    /// bring back what a person deleted, or replace what another pod wrote meanwhile.
    async fn begin_to_write(&self, key: &str, bytes: u64) -> Option<bool> {
        let begin = self.client.create_multipart_upload().bucket(self.bucket).key(key);
        let begin = begin.checksum_algorithm(ChecksumAlgorithm::Sha256).customize();
        let begun = match tokio::time::timeout(LIMIT, begin.config_override(few_tries()).send()).await {
            Ok(Ok(begun)) => begun,
            Ok(Err(error)) => return takes(error),
            Err(_) => return Some(false),
        };
        let id = begun.upload_id()?;
        let sent = tokio::time::timeout(WRITE_LIMIT, self.send_part(key, id, bytes)).await;
        // Parts of an unfinished upload cost money and are invisible.
        let abort =
            self.client.abort_multipart_upload().bucket(self.bucket).key(key).upload_id(id).customize();
        match tokio::time::timeout(LIMIT, abort.config_override(few_tries()).send()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                eprintln!("cannot abort the check of the sink: {}", chain(&StorageError::from(error)));
            }
            Err(_) => eprintln!("cannot abort the check of the sink: no answer within {LIMIT:?}"),
        }
        sent.unwrap_or(Some(false))
    }

    async fn send_part(&self, key: &str, id: &str, bytes: u64) -> Option<bool> {
        let content = noise(bytes);
        let mut sum = Algorithm::Sha256.into_impl();
        sum.update(&content);
        let request = self.client.upload_part().bucket(self.bucket).key(key).upload_id(id).part_number(1);
        let request = request.checksum_sha256(base64::encode(sum.finalize())).body(content.into());
        match request.customize().config_override(few_tries()).send().await {
            Ok(_) => Some(true),
            Err(error) => takes(error),
        }
    }

    /// The answer of the newest object that still exists; `None` if there is none. Only a storage failure
    /// triggers this, and the object that failed proves nothing about itself.
    async fn first_that_is_there(
        &self,
        failed: &str,
        exit: Exit,
        check: impl AsyncFn(&str) -> Option<bool>,
    ) -> Option<bool> {
        if !exit.is_of_storage() {
            return None;
        }
        let checks = async {
            for key in self.keys.iter().filter(|key| *key != failed) {
                let shown = check(key).await;
                if shown.is_some() {
                    return shown;
                }
            }
            None
        };
        tokio::time::timeout(LIMIT, checks).await.unwrap_or(Some(false))
    }
}

/// What an error says about the storage; `None` if the object was deleted.
fn up(error: &StorageError) -> Option<bool> {
    match error {
        // An empty object has no first byte (416).
        StorageError::Changed(_) => Some(true),
        // This proves nothing: a service may find its index but not its data, and some report this for entire
        // buckets that they cannot reach.
        StorageError::Gone(_) | StorageError::NotFound(_) => None,
        StorageError::NoAccess(_)
        | StorageError::NoBucket(_)
        | StorageError::Unreachable(_)
        | StorageError::Refused(_)
        | StorageError::Unusable(_)
        | StorageError::AddressRefused(_) => Some(false),
    }
}

/// What a refused write says about the sink. A service may not know such uploads, or refuse the request
/// itself: that says nothing about others.
fn takes<E>(error: SdkError<E, HttpResponse>) -> Option<bool>
where
    E: ProvideErrorMetadata + Error + Send + Sync + 'static,
{
    if error.raw_response().is_some_and(|response| response.status().as_u16() == NOT_IMPLEMENTED) {
        return None;
    }
    match StorageError::from(error) {
        StorageError::Gone(_) | StorageError::Changed(_) | StorageError::Refused(_) => None,
        StorageError::NoAccess(_)
        | StorageError::NotFound(_)
        | StorageError::NoBucket(_)
        | StorageError::Unreachable(_)
        | StorageError::Unusable(_)
        | StorageError::AddressRefused(_) => Some(false),
    }
}

/// Bytes that a service can neither compress nor already have.
fn noise(bytes: u64) -> Vec<u8> {
    let mut state = RandomState::new().build_hasher().finish() | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let length = usize::try_from(bytes).unwrap_or_default();
    let mut content: Vec<u8> = std::iter::repeat_with(next).take(length.div_ceil(8)).flatten().collect();
    content.truncate(length);
    content
}

fn few_tries() -> aws_sdk_s3::config::Builder {
    let tries = RetryConfig::standard().with_max_attempts(TRIES).with_initial_backoff(BACKOFF_FIRST);
    aws_sdk_s3::Config::builder().retry_config(tries)
}
