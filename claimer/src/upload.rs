//! Uploads one file and verifies that the storage has it: with a SHA-256 that the service checks and returns,
//! in parts if the file is large, and streamed from the disk so that memory use does not grow with the file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::{ByteStream, Length};
use aws_sdk_s3::types::{ChecksumAlgorithm, CompletedMultipartUpload, CompletedPart};
use aws_smithy_checksums::ChecksumAlgorithm as Algorithm;
use aws_smithy_types::base64;
use futures::{StreamExt, TryStreamExt, stream};
use nix::fcntl::OFlag;
use protocol::Exit;
use storage::{StorageError, chain};

use crate::exit;
use crate::verify::{BUFFER_BYTES, INLINE_BYTES};
use crate::walk::Found;
use crate::workspace::WorkspaceError;

/// Larger files are uploaded in parts of this size.
const PART_BYTES: u64 = 8 * 1024 * 1024;
/// The protocol allows 10,000 parts, so huge files use larger parts.
const PARTS_MAX: u64 = 10_000;
/// Parts of one file that are uploaded at the same time.
const PARTS_AT_A_TIME: usize = 4;

/// Why a file is not in the storage.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Local(#[from] WorkspaceError),
    #[error("{path} was replaced while the results were published")]
    Replaced { path: String },
    #[error("the storage does not have what was sent: {0}")]
    Differs(String),
    #[error("the storage's answer lacks {0}")]
    Answer(&'static str),
}

impl UploadError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            // Results are only ever written: nothing that is missing or different is a file's fault.
            Self::Storage(StorageError::Gone(_)) | Self::Differs(_) | Self::Answer(_) => {
                Exit::StorageUnreachable
            }
            Self::Storage(error) => exit::of_storage(error),
            Self::Local(error) => error.exit(),
            Self::Replaced { .. } => Exit::PublishIncomplete,
        }
    }
}

/// Where a file goes.
pub(crate) struct Target<'a> {
    pub(crate) client: &'a Client,
    pub(crate) bucket: &'a str,
    pub(crate) key: &'a str,
}

impl Target<'_> {
    /// Uploads a file and verifies it.
    pub(crate) async fn upload(&self, file: &Found) -> Result<(), UploadError> {
        let held = open(file)?;
        // From now on the file is read through the open descriptor, even if its name changes.
        let file = &Found { path: path_of(&held), name: file.name.clone(), size: file.size };
        if file.size <= PART_BYTES { self.at_once(file).await } else { self.in_parts(file).await }?;
        // Whatever the answers said, check that the object exists under this name, with this length.
        let head = self.client.head_object().bucket(self.bucket).key(self.key).send().await;
        let length = match head.map_err(StorageError::from) {
            Ok(head) => head.content_length(),
            Err(StorageError::Gone(said) | StorageError::NotFound(said)) => {
                return Err(UploadError::Differs(format!("nothing ({said})")));
            }
            Err(error) => return Err(error.into()),
        };
        if length.and_then(|length| u64::try_from(length).ok()) == Some(file.size) {
            return Ok(());
        }
        Err(UploadError::Differs(format!("{} bytes instead of {}", length.unwrap_or_default(), file.size)))
    }

    async fn at_once(&self, file: &Found) -> Result<(), UploadError> {
        let (sum, body) = piece(&file.path, 0, file.size).await?;
        let request = self.client.put_object().bucket(self.bucket).key(self.key);
        let request = request.content_length(file.size as i64).checksum_sha256(&sum).body(body);
        let answer = request.send().await.map_err(StorageError::from)?;
        same(&sum, answer.checksum_sha256())
    }

    async fn in_parts(&self, file: &Found) -> Result<(), UploadError> {
        let begin = self.client.create_multipart_upload().bucket(self.bucket).key(self.key);
        let begun =
            begin.checksum_algorithm(ChecksumAlgorithm::Sha256).send().await.map_err(StorageError::from)?;
        let id = begun.upload_id().ok_or(UploadError::Answer("an upload id"))?;
        let uploaded = self.parts(file, id).await;
        if uploaded.is_err() {
            // Parts of an unfinished upload cost money and are invisible.
            let abort = self.client.abort_multipart_upload().bucket(self.bucket).key(self.key).upload_id(id);
            if let Err(error) = abort.send().await {
                eprintln!(
                    "cannot abort the unfinished upload of {:?}: {}",
                    self.key,
                    chain(&StorageError::from(error))
                );
            }
        }
        let (sent, answered) = uploaded?;
        // A checksum without a number of parts covers the whole object; nothing here computes such a
        // checksum.
        same(&sent, answered.as_deref().filter(|answered| answered.contains('-')))
    }

    /// Uploads the parts and completes the upload. Returns the checksum of what was sent, and the one in the
    /// answer.
    async fn parts(&self, file: &Found, id: &str) -> Result<(String, Option<String>), UploadError> {
        let size = part_size(file.size);
        let parts = (0..file.size).step_by(size as usize).zip(1..).map(async |(start, number)| {
            let length = size.min(file.size - start);
            let (sum, body) = piece(&file.path, start, length).await?;
            let request = self.client.upload_part().bucket(self.bucket).key(self.key).upload_id(id);
            let request =
                request.part_number(number).content_length(length as i64).checksum_sha256(&sum).body(body);
            let answer = request.send().await.map_err(StorageError::from)?;
            same(&sum, answer.checksum_sha256())?;
            let etag = answer.e_tag().ok_or(UploadError::Answer("the etag of a part"))?;
            let part = CompletedPart::builder().part_number(number).e_tag(etag).checksum_sha256(sum).build();
            Ok::<_, UploadError>(part)
        });
        // In order, because the last request lists them in order.
        let parts: Vec<_> = stream::iter(parts).buffered(PARTS_AT_A_TIME).try_collect().await?;
        let sent = checksum_of_checksums(&parts);
        let parts = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
        let complete =
            self.client.complete_multipart_upload().bucket(self.bucket).key(self.key).upload_id(id);
        let answer = complete.multipart_upload(parts).send().await.map_err(StorageError::from)?;
        Ok((sent, answer.checksum_sha256))
    }
}

/// Opens a result if it is still the file that was found: a surviving process of a filter may have replaced
/// it with a link to one of our files.
fn open(found: &Found) -> Result<File, UploadError> {
    let mut options = File::options();
    // Never wait for a pipe in its place, either.
    let options = options.read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits());
    let replaced = || UploadError::Replaced { path: found.path.display().to_string() };
    let file = options.open(&found.path).map_err(|_| replaced())?;
    let real = path_of(&file).read_link().map_err(WorkspaceError::doing("read", &found.path))?;
    let kind = file.metadata().map_err(WorkspaceError::doing("read", &found.path))?;
    if real == found.path && kind.is_file() { Ok(file) } else { Err(replaced()) }
}

/// A path that leads to the open file.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn part_size(size: u64) -> u64 {
    size.div_ceil(PARTS_MAX).max(PART_BYTES)
}

/// Services that keep checksums return them; for others, the length is compared.
fn same(sent: &str, answered: Option<&str>) -> Result<(), UploadError> {
    match answered {
        Some(answered) if answered != sent => {
            Err(UploadError::Differs(format!("SHA-256 {answered} instead of {sent}")))
        }
        _ => Ok(()),
    }
}

/// The checksum that services keep for a multipart upload: a SHA-256 of the parts' SHA-256, and the number of
/// parts.
fn checksum_of_checksums(parts: &[CompletedPart]) -> String {
    let mut sum = Algorithm::Sha256.into_impl();
    for part in parts.iter().filter_map(CompletedPart::checksum_sha256) {
        // We encoded it ourselves, so decoding cannot fail.
        sum.update(&base64::decode(part).unwrap_or_default());
    }
    format!("{}-{}", base64::encode(sum.finalize()), parts.len())
}

/// A piece of a file as a body that can be sent again, and its SHA-256.
async fn piece(path: &Path, start: u64, length: u64) -> Result<(String, ByteStream), UploadError> {
    if length <= INLINE_BYTES {
        let content = read(path, start, length).map_err(WorkspaceError::doing("read", path))?;
        let mut sum = Algorithm::Sha256.into_impl();
        sum.update(&content);
        return Ok((base64::encode(sum.finalize()), content.into()));
    }
    let owned = path.to_owned();
    let summed = tokio::task::spawn_blocking(move || sha256(&owned, start, length)).await;
    let summed = summed.unwrap_or_else(|error| Err(error.into()));
    let sum = summed.map_err(WorkspaceError::doing("read", path))?;
    let body = ByteStream::read_from().path(path).offset(start).length(Length::Exact(length)).build().await;
    Ok((sum, body.map_err(|error| WorkspaceError::doing("read", path)(io::Error::other(error)))?))
}

fn read(path: &Path, start: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    File::open(path)?.read_exact_at(&mut content, start)?;
    Ok(content)
}

fn sha256(path: &Path, start: u64, length: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let mut sum = Algorithm::Sha256.into_impl();
    let (mut left, mut buffer) = (length, vec![0; BUFFER_BYTES]);
    while left > 0 {
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let piece = buffer.get_mut(..wanted).unwrap_or_default();
        file.read_exact(piece)?;
        sum.update(piece);
        left -= wanted as u64;
    }
    Ok(base64::encode(sum.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_was_replaced_is_not_published() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (path, secret) = (root.join("out/result"), root.join("secret"));
        std::fs::create_dir(root.join("out")).unwrap();
        std::fs::write(&secret, b"secret").unwrap();
        std::fs::write(&path, b"result").unwrap();
        let found = Found { name: "result".to_owned(), path: path.clone(), size: 6 };
        let opened = open(&found).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        assert!(matches!(open(&found), Err(UploadError::Replaced { .. })), "a link");
        assert_eq!(std::fs::read(path_of(&opened)).unwrap(), b"result", "what is open stays");
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(open(&found), Err(UploadError::Replaced { .. })), "a pipe");
        std::fs::remove_dir_all(root.join("out")).unwrap();
        std::fs::create_dir(root.join("other")).unwrap();
        std::fs::write(root.join("other/result"), b"secret").unwrap();
        std::os::unix::fs::symlink(root.join("other"), root.join("out")).unwrap();
        assert!(matches!(open(&found), Err(UploadError::Replaced { .. })), "a folder that is a link");
    }

    #[test]
    fn the_largest_object_fits_into_the_parts_that_are_allowed() {
        assert_eq!(part_size(9 * 1024 * 1024), PART_BYTES);
        let largest = 5 * 1024_u64.pow(4);
        assert!(largest.div_ceil(part_size(largest)) <= PARTS_MAX);
    }
}
