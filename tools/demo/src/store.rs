//! The bucket: pictures go in, results come out.

use std::time::Duration;

use aws_sdk_s3::{Client, primitives::ByteStream};
use image::RgbImage;
use storage::{Bucket, Lister, Selection, StorageError};

use crate::{Result, pictures::Picture};

/// Prefix of the pictures, as in `examples/demo/pipeline.yaml`.
pub const SOURCE: &str = "camera/";
/// Prefix of the results, as in `examples/demo/pipeline.yaml`.
pub const RESULTS: &str = "results/";

/// A bucket that is there.
pub struct Store {
    bucket: Bucket,
    client: Client,
}

impl Store {
    /// Makes the bucket, unless it is there.
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

    /// How an object is called.
    pub fn uri(&self, key: &str) -> String {
        self.bucket.uri(key)
    }

    /// Stores the pictures, replaces those of an earlier demo, and removes its results.
    pub async fn seed(&self, pictures: &[Picture]) -> Result<()> {
        for prefix in [SOURCE, RESULTS] {
            for key in self.keys(prefix).await? {
                let removed = self.client.delete_object().bucket(&self.bucket.name).key(&key).send().await;
                removed.map_err(|error| self.failed("remove", &key, error.into()))?;
            }
        }
        for picture in pictures {
            let key = format!("{SOURCE}{}", picture.name);
            let body = ByteStream::from(picture.content.clone());
            let stored = self.client.put_object().bucket(&self.bucket.name).key(&key).body(body).send().await;
            stored.map_err(|error| self.failed("store", &key, error.into()))?;
        }
        Ok(())
    }

    /// The results of the run, in the order of their names.
    pub async fn results(&self) -> Result<Vec<RgbImage>> {
        let mut results = Vec::new();
        for key in self.keys(RESULTS).await? {
            let found = self.client.get_object().bucket(&self.bucket.name).key(&key).send().await;
            let found = found.map_err(|error| self.failed("read", &key, error.into()))?;
            let content = found.body.collect().await?.into_bytes();
            let picture =
                image::load_from_memory(&content).map_err(|error| format!("read {key}: {error}"))?;
            results.push(picture.into_rgb8());
        }
        Ok(results)
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
