//! Tells a storage outage from a single bad object: after a failure it reads one byte of an object that this
//! run has read before, or looks up a result that it has published before. It uses the same client, hence the
//! same credentials and network path. A listing only proposes objects: an answered listing proves nothing
//! about reading.

use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use protocol::Exit;
use storage::{BACKOFF_FIRST, StorageError};

/// The second try is for a stale connection; more tries would only repeat what the failure itself has shown.
const TRIES: u32 = 2;
/// A storage that needs longer for one byte is not up. This bounds the delay that the check adds to a
/// failure.
const LIMIT: Duration = Duration::from_secs(5);
/// How many objects a listing proposes: one may be the object that failed, and others may fail as well.
const PROPOSED: i32 = 4;

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

    /// Whether a result exists, after `failed` could not be published.
    pub(crate) async fn look_up(&self, failed: &str, exit: Exit) -> Option<bool> {
        self.first_that_is_there(failed, exit, async |key| {
            let request = self.client.head_object().bucket(self.bucket).key(key);
            let sent = request.customize().config_override(few_tries()).send().await;
            match sent.map_err(StorageError::from) {
                Ok(_) => Some(true),
                // Keys that may write need not be allowed to read.
                Err(StorageError::NoAccess(_)) => None,
                Err(error) => up(&error),
            }
        })
        .await
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
        StorageError::Gone(_) => None,
        StorageError::NoAccess(_)
        | StorageError::NoBucket(_)
        | StorageError::Unreachable(_)
        | StorageError::Refused(_)
        | StorageError::Unusable(_)
        | StorageError::AddressRefused(_) => Some(false),
    }
}

fn few_tries() -> aws_sdk_s3::config::Builder {
    let tries = RetryConfig::standard().with_max_attempts(TRIES).with_initial_backoff(BACKOFF_FIRST);
    aws_sdk_s3::Config::builder().retry_config(tries)
}
