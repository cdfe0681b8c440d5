//! Fetches one object, whole and unchanged, or fails. Memory use does not depend on the size: large objects
//! come in parts, each written to its place. The key is only ever sent, never used as a path.

use std::fs::File as LocalFile;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::ChecksumMode;
use aws_smithy_checksums::body::validate::Error as ChecksumError;
use futures::{StreamExt, TryStreamExt, stream};
use protocol::Exit;
use queue::File;
use storage::{BACKOFF_FIRST, BACKOFF_LONGEST, Bucket, StorageError, chain, has};

use crate::backoff::Backoff;
use crate::exit::{self, shortened};
use crate::verify::{BUFFER_BYTES, Comparison, Expected, INLINE_BYTES, bare};
use crate::workspace::WorkspaceError;

/// Larger objects are fetched in parts of this size: AWS recommends it, and little is repeated when a part
/// fails.
const PART_BYTES: u64 = 8 * 1024 * 1024;
/// One connection rarely saturates a network; more than a few only take bandwidth from other pods.
const PARTS_AT_A_TIME: usize = 4;

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("the object is not the one that was listed: {0}")]
    Changed(String),
    #[error("the object was cut off after {got} of {length} bytes, {tries} times: {detail}")]
    Truncated { got: u64, length: u64, tries: u32, detail: String },
    #[error(transparent)]
    Local(#[from] WorkspaceError),
}

/// The error with the name of the object, and whether another object could be read.
#[derive(Debug, thiserror::Error)]
#[error("{uri}")]
pub(crate) struct FetchFailed {
    uri: String,
    canary: Option<bool>,
    source: FetchError,
}

impl FetchError {
    pub(crate) fn at(self, uri: &str, canary: Option<bool>) -> FetchFailed {
        FetchFailed { uri: shortened(uri), canary, source: self }
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Storage(error) => exit::of_storage(error),
            Self::Changed(_) => Exit::ObjectChanged,
            Self::Truncated { .. } => Exit::ObjectTruncated,
            Self::Local(error) => error.exit(),
        }
    }
}

impl FetchFailed {
    pub(crate) fn exit(&self) -> Exit {
        self.source.exit()
    }

    pub(crate) fn canary(&self) -> Option<bool> {
        self.canary
    }
}

/// Fetches an object to a path and verifies it.
pub(crate) async fn fetch(
    client: &Client,
    bucket: &Bucket,
    file: &File,
    path: &Path,
) -> Result<(), FetchError> {
    let local = LocalFile::create_new(path).map_err(WorkspaceError::doing("create", path))?;
    let mut fetch = Fetch { client, bucket, file, path, local: Arc::new(local), etag: file.etag.clone() };
    if file.size <= PART_BYTES {
        return fetch.part(Part { start: 0, length: file.size, whole: true }).await;
    }
    let expected = fetch.head().await?;
    let parts = (0..file.size).step_by(PART_BYTES as usize).map(|start| {
        let length = PART_BYTES.min(file.size - start);
        fetch.part(Part { start, length, whole: false })
    });
    // The first failed part stops the others.
    stream::iter(parts).buffer_unordered(PARTS_AT_A_TIME).try_for_each(async |()| Ok(())).await?;
    let written = LocalFile::open(path).map_err(WorkspaceError::doing("open", path))?;
    let checked = tokio::task::spawn_blocking(|| expected.check(written)).await;
    match checked.unwrap_or_else(|error| Err(error.into())).map_err(WorkspaceError::doing("read", path))? {
        None => Ok(()),
        Some(difference) => Err(FetchError::Changed(difference)),
    }
}

struct Fetch<'a> {
    client: &'a Client,
    bucket: &'a Bucket,
    file: &'a File,
    path: &'a Path,
    local: Arc<LocalFile>,
    /// The etag from the listing or, if the listing had none, from the first request: all parts come from one
    /// object.
    etag: String,
}

#[derive(Clone, Copy)]
struct Part {
    start: u64,
    length: u64,
    /// Whether this is the whole object, requested without a range.
    whole: bool,
}

/// A failed try, and whether it is worth repeating.
enum Failed {
    Broken { got: u64, detail: String },
    Corrupt(String),
    Final(FetchError),
}

impl<E: Into<FetchError>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self::Final(error.into())
    }
}

impl Fetch<'_> {
    /// Asks for the object's properties before it is fetched in parts.
    async fn head(&mut self) -> Result<Expected, FetchError> {
        let request = self.client.head_object().bucket(&self.bucket.name).key(&self.file.key);
        let request = request.set_if_match(self.expected_etag()).checksum_mode(ChecksumMode::Enabled);
        let head = match request.send().await.map_err(StorageError::from) {
            Ok(head) => head,
            Err(error) => return Err(self.explained(error).await.into()),
        };
        self.compare(head.e_tag(), head.content_length(), self.file.size)?;
        if self.etag.is_empty() {
            self.etag = head.e_tag().unwrap_or_default().to_owned();
        }
        let md5 = self.md5(head.server_side_encryption(), head.sse_customer_algorithm());
        Ok(Expected { md5, checksum: Expected::checksum_of(&head) })
    }

    /// The same failure in the service's words, if it has any: a HEAD response has no body for them. Without
    /// them, a deleted object looks like a gateway that does not reach the service.
    async fn explained(&self, failure: StorageError) -> StorageError {
        if !matches!(failure, StorageError::NotFound(_)) {
            return failure;
        }
        let request = self.client.get_object().bucket(&self.bucket.name).key(&self.file.key);
        match request.range("bytes=0-0").send().await {
            Ok(_) => failure,
            Err(error) => error.into(),
        }
    }

    /// Fetches a part, and repeats it if its body breaks off: the client itself repeats only failures before
    /// the body.
    async fn part(&self, part: Part) -> Result<(), FetchError> {
        let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_LONGEST);
        let mut tries = 1;
        loop {
            let failed = match self.try_part(part).await {
                Ok(()) => return Ok(()),
                Err(Failed::Final(error)) => return Err(error),
                Err(failed) => failed,
            };
            if tries >= self.bucket.max_attempts {
                return Err(match failed {
                    Failed::Broken { got, detail } => {
                        FetchError::Truncated { got, length: part.length, tries, detail }
                    }
                    Failed::Corrupt(detail) => FetchError::Changed(detail),
                    Failed::Final(error) => error,
                });
            }
            tries += 1;
            tokio::time::sleep(backoff.wait()).await;
        }
    }

    async fn try_part(&self, part: Part) -> Result<(), Failed> {
        let mut request = self.client.get_object().bucket(&self.bucket.name).key(&self.file.key);
        request = request.set_if_match(self.expected_etag());
        request = if part.whole {
            // The client compares what it receives with the service's checksum, if there is one.
            request.checksum_mode(ChecksumMode::Enabled)
        } else {
            request.range(format!("bytes={}-{}", part.start, part.start + part.length - 1))
        };
        let response = request.send().await.map_err(StorageError::from)?;
        self.compare(response.e_tag(), response.content_length(), part.length)?;
        let md5 = self.md5(response.server_side_encryption(), response.sse_customer_algorithm());
        // Compared as it arrives, so that nothing is read twice. One of many parts is compared once all of
        // them are there.
        let expected = Expected { md5: md5.filter(|_| part.whole), checksum: None };
        let mut comparison = Comparison::with(expected);
        self.write(part, response.body, &mut comparison).await?;
        match comparison.difference() {
            None => Ok(()),
            Some(difference) => Err(FetchError::Changed(difference).into()),
        }
    }

    /// Writes a body to its place, a buffer at a time.
    async fn write(
        &self,
        part: Part,
        mut body: ByteStream,
        comparison: &mut Comparison,
    ) -> Result<(), Failed> {
        let (mut got, mut buffer) = (0, Vec::new());
        while let Some(piece) = body.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) if has::<ChecksumError>(&error) => return Err(Failed::Corrupt(chain(&error))),
                Err(error) => return Err(Failed::Broken { got, detail: chain(&error) }),
            };
            got += piece.len() as u64;
            if got > part.length {
                return Err(FetchError::Changed(format!("more than {} bytes", part.length)).into());
            }
            comparison.add(&piece);
            buffer.extend_from_slice(&piece);
            if buffer.len() >= BUFFER_BYTES {
                let start = part.start + got - buffer.len() as u64;
                self.write_at(std::mem::take(&mut buffer), start).await?;
            }
        }
        if got < part.length {
            return Err(Failed::Broken { got, detail: "the body is too short".to_owned() });
        }
        let start = part.start + got - buffer.len() as u64;
        Ok(self.write_at(buffer, start).await?)
    }

    /// A thread of its own writes large files: a slow disk must not delay SIGTERM.
    async fn write_at(&self, buffer: Vec<u8>, start: u64) -> Result<(), FetchError> {
        if self.file.size <= INLINE_BYTES {
            let written = self.local.write_all_at(&buffer, start);
            return Ok(written.map_err(WorkspaceError::doing("write", self.path))?);
        }
        let local = Arc::clone(&self.local);
        let written = tokio::task::spawn_blocking(move || local.write_all_at(&buffer, start)).await;
        let written = written.unwrap_or_else(|error| Err(error.into()));
        Ok(written.map_err(WorkspaceError::doing("write", self.path))?)
    }

    fn expected_etag(&self) -> Option<String> {
        (!self.etag.is_empty()).then(|| self.etag.clone())
    }

    fn md5(
        &self,
        encryption: Option<&aws_sdk_s3::types::ServerSideEncryption>,
        customer_key: Option<&str>,
    ) -> Option<String> {
        self.bucket.etag_is_md5.then(|| Expected::md5_of(&self.etag, encryption, customer_key)).flatten()
    }

    /// Some services ignore If-Match, so the answer is compared too.
    fn compare(&self, etag: Option<&str>, sent: Option<i64>, length: u64) -> Result<(), FetchError> {
        if let Some(etag) = etag
            && !self.etag.is_empty()
            && bare(etag) != bare(&self.etag)
        {
            return Err(FetchError::Changed(format!("its etag is {etag}, but {} was listed", self.etag)));
        }
        match sent {
            Some(sent) if u64::try_from(sent) == Ok(length) => Ok(()),
            // A gateway's own page has no etag.
            _ if etag.is_none() && !self.etag.is_empty() => Err(StorageError::Unusable(format!(
                "an answer without an etag, although {} was listed",
                self.etag
            ))
            .into()),
            Some(sent) => Err(FetchError::Changed(format!("{sent} bytes instead of {length}"))),
            None => Ok(()),
        }
    }
}
