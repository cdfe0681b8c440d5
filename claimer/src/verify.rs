//! Compares a fetched file with what the storage says about it: a checksum of the whole object if there is
//! one, and the etag if that is an MD5. The content comes in pieces: as they arrive, or from the file if they
//! arrived out of order.

use std::fs::File;
use std::io::{self, Read};

use aws_sdk_s3::operation::head_object::HeadObjectOutput;
use aws_sdk_s3::types::ServerSideEncryption;
use aws_smithy_checksums::ChecksumAlgorithm;
use aws_smithy_checksums::http::HttpChecksum;
use aws_smithy_types::base64;
use md5::{Digest, Md5};

/// Large enough for few calls, and a negligible amount of memory.
pub(crate) const BUFFER_BYTES: usize = 1024 * 1024;

/// Up to this size a file is read or written inline: a thread would cost more than the call, which only
/// touches the kernel's cache.
pub(crate) const INLINE_BYTES: u64 = 64 * 1024;

/// The checks that the content must pass.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    /// MD5, in hexadecimal.
    pub(crate) md5: Option<String>,
    /// Checksum of the whole object, in base64.
    pub(crate) checksum: Option<(ChecksumAlgorithm, String)>,
}

impl Expected {
    /// The strongest checksum that the storage keeps for the whole object. A checksum of a multipart upload's
    /// part checksums ends in `-<parts>` and says nothing about the whole.
    pub(crate) fn checksum_of(head: &HeadObjectOutput) -> Option<(ChecksumAlgorithm, String)> {
        let kept = [
            (ChecksumAlgorithm::Sha256, head.checksum_sha256()),
            (ChecksumAlgorithm::Sha1, head.checksum_sha1()),
            (ChecksumAlgorithm::Crc64Nvme, head.checksum_crc64_nvme()),
            (ChecksumAlgorithm::Crc32c, head.checksum_crc32_c()),
            (ChecksumAlgorithm::Crc32, head.checksum_crc32()),
        ];
        let composite = head.checksum_type().is_some_and(|kind| kind.as_str() == "COMPOSITE");
        kept.into_iter()
            .filter_map(|(algorithm, value)| Some((algorithm, value?)))
            .find(|(_, value)| !composite && !value.contains('-'))
            .map(|(algorithm, value)| (algorithm, value.to_owned()))
    }

    /// The MD5 in an etag. With keys of KMS or of the customer, an etag only looks like an MD5.
    pub(crate) fn md5_of(
        etag: &str,
        encryption: Option<&ServerSideEncryption>,
        customer_key: Option<&str>,
    ) -> Option<String> {
        let opaque = customer_key.is_some()
            || encryption.is_some_and(|encryption| !matches!(encryption, ServerSideEncryption::Aes256));
        let digits = bare(etag);
        let is_md5 = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_md5 && !opaque).then(|| digits.to_ascii_lowercase())
    }

    /// Reads a file, and describes the first difference, if there is one.
    pub(crate) fn check(self, mut file: File) -> io::Result<Option<String>> {
        if self == Self::default() {
            return Ok(None);
        }
        let mut comparison = Comparison::with(self);
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            comparison.add(buffer.get(..read).unwrap_or_default());
        }
        Ok(comparison.difference())
    }
}

/// Compares content with the expected checksums, piece by piece, in order.
pub(crate) struct Comparison {
    md5: Option<(Md5, String)>,
    checksum: Option<(Box<dyn HttpChecksum>, ChecksumAlgorithm, String)>,
}

impl Comparison {
    pub(crate) fn with(Expected { md5, checksum }: Expected) -> Self {
        let checksum = checksum.map(|(algorithm, value)| (algorithm.into_impl(), algorithm, value));
        Self { md5: md5.map(|value| (Md5::new(), value)), checksum }
    }

    pub(crate) fn add(&mut self, piece: &[u8]) {
        if let Some((hash, _)) = &mut self.md5 {
            hash.update(piece);
        }
        if let Some((sum, ..)) = &mut self.checksum {
            sum.update(piece);
        }
    }

    /// The difference, after the last piece.
    pub(crate) fn difference(self) -> Option<String> {
        if let Some((hash, expected)) = self.md5 {
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            if found != expected {
                return Some(format!("its MD5 is {found}, but its etag is {expected}"));
            }
        }
        if let Some((sum, algorithm, expected)) = self.checksum {
            let found = base64::encode(sum.finalize());
            if found != expected {
                return Some(format!("its {} is {found} instead of {expected}", algorithm.as_str()));
            }
        }
        None
    }
}

/// An etag without quotes and without the marker of a weak one: services are inconsistent about both.
pub(crate) fn bare(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "\"d41d8cd98f00b204e9800998ecf8427e\"";

    #[test]
    fn only_an_etag_that_is_an_md5_is_taken_for_one() {
        assert_eq!(Expected::md5_of(EMPTY, None, None).as_deref(), Some(bare(EMPTY)));
        assert!(Expected::md5_of(EMPTY, Some(&ServerSideEncryption::Aes256), None).is_some());
        assert_eq!(Expected::md5_of(EMPTY, Some(&ServerSideEncryption::AwsKms), None), None);
        assert_eq!(Expected::md5_of(EMPTY, None, Some("AES256")), None);
        assert_eq!(Expected::md5_of("\"d41d8cd98f00b204e9800998ecf8427e-3\"", None, None), None);
        assert_eq!(Expected::md5_of("", None, None), None);
    }

    #[test]
    fn a_difference_is_named() {
        let check = |expected: Expected| {
            let mut file = tempfile::tempfile().unwrap();
            io::Write::write_all(&mut file, b"hello").unwrap();
            io::Seek::rewind(&mut file).unwrap();
            expected.check(file).unwrap()
        };
        let md5 = |text: &str| Expected { md5: Some(text.to_owned()), checksum: None };
        assert_eq!(check(md5("5d41402abc4b2a76b9719d911017c592")), None);
        assert!(check(md5("00000000000000000000000000000000")).unwrap().contains("MD5"));
        let sum =
            |text: &str| Expected { md5: None, checksum: Some((ChecksumAlgorithm::Crc32, text.to_owned())) };
        assert_eq!(check(sum("NhCmhg==")), None);
        assert!(check(sum("AAAAAA==")).unwrap().contains("crc32"));
    }
}
