//! The two steps of a pod that use the storage, for a bench that runs them in a bare loop, without queue and
//! pods.

use std::error::Error;
use std::path::Path;

pub use aws_sdk_s3::Client;
use queue::File;
use storage::Bucket;

use crate::publish::Known;

pub use crate::publish::Destination;

/// Fetches an object to a path and verifies it.
pub async fn fetch(client: &Client, bucket: &Bucket, file: &File, path: &Path) -> Result<(), impl Error> {
    crate::fetch::fetch(client, bucket, file, path).await
}

/// Uploads the results of the file `key` and verifies that the sink has them.
pub async fn publish(
    destination: &Destination,
    client: &Client,
    key: &str,
    folder: &Path,
) -> Result<(), impl Error> {
    destination.upload(client, key, folder, Known::default()).await.map(drop)
}
