//! Tells a storage that is down from a single object that cannot be had: after a failure one byte is read of an object that
//! this run has read before, or the existence of a result is asked for that it has published before. Same client, so same
//! credentials and same network path.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use protocol::Exit;
use storage::{BACKOFF, StorageError};

/// A second try for a connection that was kept too long; more would only repeat what the failure itself has shown.
const TRIES: u32 = 2;
/// A storage that needs longer for one byte is not up. It bounds what the check adds to a failure.
const LIMIT: Duration = Duration::from_secs(5);

/// An object that was there, and the client that could not get another one.
pub(crate) struct Canary<'a> {
    pub(crate) client: &'a Client,
    pub(crate) bucket: &'a str,
    /// None until this run has fetched or published anything.
    pub(crate) key: Option<&'a str>,
}

impl Canary<'_> {
    /// Whether one byte of it can be read, after `failed` could not be fetched.
    pub(crate) async fn read(&self, failed: &str, exit: Exit) -> Option<bool> {
        let key = self.usable(failed, exit)?;
        let request = self.client.get_object().bucket(self.bucket).key(key).range("bytes=0-0");
        within_limit(async {
            let sent = request.customize().config_override(few_tries()).send().await;
            let mut body = match sent.map_err(StorageError::from) {
                Ok(answer) => answer.body,
                Err(error) => return up(&error),
            };
            // An empty object may also be answered with no byte at all.
            Some(!matches!(body.next().await, Some(Err(_))))
        })
        .await
    }

    /// Whether it is there, after `failed` could not be published.
    pub(crate) async fn look_up(&self, failed: &str, exit: Exit) -> Option<bool> {
        let key = self.usable(failed, exit)?;
        let request = self.client.head_object().bucket(self.bucket).key(key);
        within_limit(async {
            let sent = request.customize().config_override(few_tries()).send().await;
            sent.map_err(StorageError::from).map_or_else(|error| up(&error), |_| Some(true))
        })
        .await
    }

    /// Only a failure of the storage asks for it, and the object that failed proves nothing about itself.
    fn usable(&self, failed: &str, exit: Exit) -> Option<&str> {
        self.key.filter(|key| exit.is_of_storage() && *key != failed)
    }
}

/// What an error says about the storage.
fn up(error: &StorageError) -> Option<bool> {
    match error {
        // An empty object has no first byte (416).
        StorageError::Changed(_) => Some(true),
        // It was deleted since. That proves nothing: some services say so of whole buckets that they cannot reach.
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
    let tries = RetryConfig::standard().with_max_attempts(TRIES).with_initial_backoff(BACKOFF.0);
    aws_sdk_s3::Config::builder().retry_config(tries)
}

async fn within_limit(check: impl Future<Output = Option<bool>>) -> Option<bool> {
    tokio::time::timeout(LIMIT, check).await.unwrap_or(Some(false))
}
