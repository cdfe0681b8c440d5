//! Uploads everything that one filter wrote, or fails the attempt. Names are the same at every attempt, so
//! that a retry overwrites what a failed one left. Nothing is deleted.

use std::path::Path;

use aws_sdk_s3::Client;
use futures::{StreamExt, TryStreamExt, stream};
use protocol::Exit;
use storage::Bucket;

use crate::args::PublishSettings;
use crate::canary::Canary;
use crate::exit::{self, shortened};
use crate::progress::Progress;
use crate::upload::{Target, UploadError};
use crate::walk::{WalkError, walk};
use crate::workspace::{Workspace, WorkspaceError};

/// Most results are small, and a request is mostly waiting.
const FILES_AT_A_TIME: usize = 4;
/// The longest key that S3 allows.
const KEY_BYTES_MAX: usize = 1_024;

/// Why the results are not all published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    #[error("cannot find out which file this is")]
    Source(#[from] WorkspaceError),
    #[error("the key {key:?} does not start with the source's prefix {prefix:?}")]
    Prefix { key: String, prefix: String },
    #[error("nothing to publish: {folder} is empty")]
    Nothing { folder: String },
    #[error("cannot collect the results")]
    Walk(#[from] WalkError),
    #[error("the name {key:?} has more than {KEY_BYTES_MAX} bytes")]
    Name { key: String },
    #[error("{uri}")]
    Upload { uri: String, canary: Option<bool>, source: UploadError },
}

impl PublishError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Source(error) => error.exit(),
            Self::Prefix { .. } => Exit::BadSettings,
            Self::Nothing { .. } => Exit::NothingToPublish,
            Self::Walk(WalkError::Io { source, .. }) => exit::of_io(source),
            Self::Walk(WalkError::Refused { .. }) | Self::Name { .. } => Exit::PublishIncomplete,
            Self::Upload { source, .. } => source.exit(),
        }
    }

    /// Whether the sink still takes results, if that was checked.
    pub(crate) fn canary(&self) -> Option<bool> {
        match self {
            Self::Upload { canary, .. } => *canary,
            Self::Source(_)
            | Self::Prefix { .. }
            | Self::Nothing { .. }
            | Self::Walk(_)
            | Self::Name { .. } => None,
        }
    }
}

/// Uploads the results of this pod's file.
pub(crate) async fn publish(settings: &PublishSettings, progress: &Progress) -> Result<String, PublishError> {
    let workspace = Workspace::new(&settings.workspace);
    progress.publishing(workspace.attempt_number());
    let key = workspace.source_key(&settings.source_bucket)?;
    let client = settings.destination.sink.client().await;
    let folder = workspace.results(&settings.destination.from);
    let known = Known { results: &settings.canary_keys, files: &settings.source_canaries };
    settings.destination.publish(&client, &key, &folder, known).await
}

/// The destination of results, and their names there.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The bucket.
    pub sink: Bucket,
    /// Prefix of every name in the sink.
    pub prefix: String,
    /// The filter whose results are uploaded.
    pub from: String,
    /// Prefix that is removed from the file's key.
    pub source_prefix: String,
}

/// What this run has reached before, newest first.
#[derive(Clone, Copy, Default)]
pub(crate) struct Known<'a> {
    /// Keys of results that it has published.
    pub(crate) results: &'a [String],
    /// Keys of files that it has fetched. Their results may be in the sink, with the same names: a new
    /// operator knows no others.
    pub(crate) files: &'a [String],
}

/// A file's results, all of which are in the sink.
pub(crate) struct Published {
    /// The common prefix of their keys.
    prefix: String,
    /// Key of the last result.
    pub(crate) last: String,
    files: usize,
    bytes: u64,
}

impl Destination {
    /// Uploads a file's results, and returns only when all of them are there, with the key of the last one.
    pub(crate) async fn publish(
        &self,
        client: &Client,
        key: &str,
        folder: &Path,
        known: Known<'_>,
    ) -> Result<String, PublishError> {
        let Published { prefix, last, files, bytes } = self.upload(client, key, folder, known).await?;
        eprintln!("published {files} files, {bytes} bytes, to {}", self.sink.uri(&prefix).escape_debug());
        Ok(last)
    }

    /// Does the same without a line in the log.
    pub(crate) async fn upload(
        &self,
        client: &Client,
        key: &str,
        folder: &Path,
        known: Known<'_>,
    ) -> Result<Published, PublishError> {
        let prefix = self.names_of(key)?;
        // A filter that wrote nothing may not have created the folder.
        let results = if folder.exists() { walk(folder)? } else { Vec::new() };
        let Some(last) = results.last() else {
            return Err(PublishError::Nothing { folder: folder.display().to_string() });
        };
        // Checked before anything is sent: an impossible name would waste half an upload.
        if let Some(long) = results.iter().find(|found| prefix.len() + found.name.len() > KEY_BYTES_MAX) {
            return Err(PublishError::Name { key: shortened(&format!("{prefix}{}", long.name)) });
        }
        let uploads = results.iter().map(async |found| {
            let key = format!("{prefix}{}", found.name);
            let target = Target { client, bucket: &self.sink.name, key: &key };
            let uploaded = target.upload(found).await;
            uploaded.map_err(|source| (key, &found.name, source))
        });
        let uploaded =
            stream::iter(uploads).buffer_unordered(FILES_AT_A_TIME).try_for_each(async |()| Ok(()));
        let bytes: u64 = results.iter().map(|found| found.size).sum();
        if let Err((key, name, source)) = uploaded.await {
            let keys = self.canary_keys(known, name);
            let canary = Canary { client, bucket: &self.sink.name, keys: &keys };
            let canary = canary.write(&key, source.exit(), bytes).await;
            return Err(PublishError::Upload { uri: shortened(&self.sink.uri(&key)), canary, source });
        }
        let last = format!("{prefix}{}", last.name);
        Ok(Published { prefix, last, files: results.len(), bytes })
    }

    /// Results that may be in the sink already, newest first: those that are known, and those of other files
    /// that have the name of the one that failed.
    fn canary_keys(&self, known: Known<'_>, name: &str) -> Vec<String> {
        let of_files = known.files.iter().filter_map(|file| self.names_of(file).ok());
        let of_files = of_files.map(|prefix| prefix + name).filter(|key| key.len() <= KEY_BYTES_MAX);
        known.results.iter().cloned().chain(of_files).collect()
    }

    /// `<sink prefix><key without the source prefix>/`.
    fn names_of(&self, key: &str) -> Result<String, PublishError> {
        let rest = key.strip_prefix(&self.source_prefix).ok_or_else(|| PublishError::Prefix {
            key: shortened(key),
            prefix: self.source_prefix.clone(),
        })?;
        Ok(format!("{}{rest}/", self.prefix))
    }
}
