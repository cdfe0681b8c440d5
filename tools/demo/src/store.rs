//! The bucket: pictures go in, results come out.

use std::{collections::BTreeSet, time::Duration};

use aws_sdk_s3::{Client, primitives::ByteStream};
use futures::{StreamExt, TryStreamExt, stream};
use image::RgbImage;
use storage::{Bucket, Lister, Selection, StorageError};

use crate::{Result, pictures::Picture};

/// Concurrent requests: enough to keep a small machine busy.
const AT_ONCE: usize = 16;

/// The prefixes of a Pipeline.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Prefix of its files.
    pub source: &'static str,
    /// Prefix of its results.
    pub results: &'static str,
}

/// The prefixes of `examples/demo/pipeline.yaml`.
pub const CAMERA: Place = Place { source: "camera/", results: "results/" };
/// The prefixes of `examples/demo/warm-pipeline.yaml`.
pub const TILES: Place = Place { source: "tiles/", results: "tile-results/" };

/// A bucket that exists.
pub struct Store {
    bucket: Bucket,
    client: Client,
}

impl Store {
    /// Opens the bucket, and creates it if it does not exist.
    pub async fn open(bucket: Bucket) -> Result<Self> {
        let client = bucket.client().await;
        let found =
            tokio::time::timeout(Duration::from_secs(60), client.head_bucket().bucket(&bucket.name).send());
        let found =
            found.await.map_err(|_| format!("the S3 service of {} does not answer", bucket.uri("")))?;
        if found.is_err() {
            let made = client.create_bucket().bucket(&bucket.name).send().await.map_err(StorageError::from);
            made.map_err(|error| format!("make the bucket {}: {error}", bucket.name))?;
        }
        Ok(Self { bucket, client })
    }

    /// The URI of an object.
    pub fn uri(&self, key: &str) -> String {
        self.bucket.uri(key)
    }

    /// Stores the pictures, replacing those of an earlier demo, and removes its results.
    pub async fn seed(&self, place: Place, pictures: &[Picture]) -> Result<()> {
        let new: BTreeSet<String> = pictures.iter().map(|picture| key_of(place, picture)).collect();
        let mut old = self.keys(place.source).await?;
        old.retain(|key| !new.contains(key));
        old.extend(self.keys(place.results).await?);
        stream::iter(&old).map(Ok).try_for_each_concurrent(AT_ONCE, |key| self.remove(key)).await?;
        let store = |picture| self.put(key_of(place, picture), picture);
        stream::iter(pictures).map(Ok).try_for_each_concurrent(AT_ONCE, store).await
    }

    async fn remove(&self, key: &str) -> Result<()> {
        let removed = self.client.delete_object().bucket(&self.bucket.name).key(key).send().await;
        removed.map_err(|error| self.failed("remove", key, error.into()))?;
        Ok(())
    }

    async fn put(&self, key: String, picture: &Picture) -> Result<()> {
        let body = ByteStream::from(picture.content.clone());
        let stored = self.client.put_object().bucket(&self.bucket.name).key(&key).body(body).send().await;
        stored.map_err(|error| self.failed("store", &key, error.into()))?;
        Ok(())
    }

    /// The number of objects below a prefix.
    pub async fn count(&self, prefix: &str) -> Result<usize> {
        Ok(self.keys(prefix).await?.len())
    }

    /// The pictures below a prefix, sorted by name.
    pub async fn pictures(&self, prefix: &str) -> Result<Vec<RgbImage>> {
        let keys = self.keys(prefix).await?;
        stream::iter(&keys).map(|key| self.picture(key)).buffered(AT_ONCE).try_collect().await
    }

    async fn picture(&self, key: &str) -> Result<RgbImage> {
        let found = self.client.get_object().bucket(&self.bucket.name).key(key).send().await;
        let found = found.map_err(|error| self.failed("read", key, error.into()))?;
        let content = found.body.collect().await?.into_bytes();
        let picture = image::load_from_memory(&content).map_err(|error| format!("read {key}: {error}"))?;
        Ok(picture.into_rgb8())
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let lister = Lister::new(&self.bucket, prefix, Selection::new(prefix, &[], &[])?).await;
        let (mut keys, mut after) = (Vec::new(), Some(String::new()));
        while let Some(last) = after {
            let page = lister.page(&last).await.map_err(|error| self.failed("list", prefix, error))?;
            keys.extend(page.files.into_iter().map(|file| file.key));
            after = page.next;
        }
        Ok(keys)
    }

    fn failed(&self, doing: &str, key: &str, error: StorageError) -> String {
        format!("{doing} {}: {error}", self.uri(key))
    }
}

fn key_of(place: Place, picture: &Picture) -> String {
    format!("{}{}", place.source, picture.name)
}
