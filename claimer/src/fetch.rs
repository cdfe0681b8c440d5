//! Fetches one object, whole and unchanged, or fails. Memory is the same whatever its size: large objects come in parts
//! that are written where they belong. The key is only ever sent, never used as a path.

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

/// Larger objects are fetched in parts of this size: what AWS recommends, and little to repeat when one fails.
const PART_BYTES: u64 = 8 * 1024 * 1024;
/// Parts at a time. One connection rarely fills a network; more than a few only take from the other pods.
const PARTS_AT_A_TIME: usize = 4;

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("not the object that was listed: {0}")]
    Changed(String),
    #[error("cut off after {got} of {length} bytes, {tries} times: {detail}")]
    Truncated { got: u64, length: u64, tries: u32, detail: String },
    #[error(transparent)]
    Local(#[from] WorkspaceError),
}

/// The same, with the name of the object, and whether another one could be read.
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
    // The first part that fails ends the others.
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
    /// As listed or, where the listing had none, as it was at the first request: all parts are of one object.
    etag: String,
}

#[derive(Clone, Copy)]
struct Part {
    start: u64,
    length: u64,
    /// Whether it is the whole object, asked for without a range.
    whole: bool,
}

/// A try that may be worth another one, or not.
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
    /// Asks what the object is before it is fetched in parts.
    async fn head(&mut self) -> Result<Expected, FetchError> {
        let request = self.client.head_object().bucket(&self.bucket.name).key(&self.file.key);
        let head = request
            .set_if_match(self.expected_etag())
            .checksum_mode(ChecksumMode::Enabled)
            .send()
            .await
            .map_err(StorageError::from)?;
        self.compare(head.e_tag(), head.content_length(), self.file.size)?;
        if self.etag.is_empty() {
            self.etag = head.e_tag().unwrap_or_default().to_owned();
        }
        let md5 = self.md5(head.server_side_encryption(), head.sse_customer_algorithm());
        Ok(Expected { md5, checksum: Expected::checksum_of(&head) })
    }

    /// Fetches a part, again if its body breaks off: the client itself repeats only what fails before the body.
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
            // The client compares what it receives with the checksum that the service sends, if it does.
            request.checksum_mode(ChecksumMode::Enabled)
        } else {
            request.range(format!("bytes={}-{}", part.start, part.start + part.length - 1))
        };
        let response = request.send().await.map_err(StorageError::from)?;
        self.compare(response.e_tag(), response.content_length(), part.length)?;
        let md5 = self.md5(response.server_side_encryption(), response.sse_customer_algorithm());
        // As it arrives, so that nothing is read twice. What is one of many parts is compared when all of them are there.
        let expected = Expected { md5: md5.filter(|_| part.whole), checksum: None };
        let mut comparison = Comparison::with(expected);
        self.write(part, response.body, &mut comparison).await?;
        match comparison.difference() {
            None => Ok(()),
            Some(difference) => Err(FetchError::Changed(difference).into()),
        }
    }

    /// Writes a body where it belongs, a buffer at a time.
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

    /// Large files are written by a thread of their own: a disk that is slow must not keep SIGTERM waiting.
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

    /// Not every service knows If-Match, so what it sends is compared too.
    fn compare(&self, etag: Option<&str>, sent: Option<i64>, length: u64) -> Result<(), FetchError> {
        if let Some(etag) = etag
            && !self.etag.is_empty()
            && bare(etag) != bare(&self.etag)
        {
            return Err(FetchError::Changed(format!("its etag is {etag}, listed was {}", self.etag)));
        }
        match sent {
            Some(sent) if u64::try_from(sent) != Ok(length) => {
                Err(FetchError::Changed(format!("{sent} bytes instead of {length}")))
            }
            _ => Ok(()),
        }
    }
}
