//! The claimer's exit codes. The operator reads them from the pod; docs/claimer.md lists them.

use strum::{AsRefStr, EnumString, VariantArray};

/// Exit codes. They start at 10, so that none is mistaken for a code of a shell or of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr, EnumString, VariantArray)]
#[repr(u8)]
pub enum Exit {
    /// The settings are unusable: the operator made a mistake in the pod.
    BadSettings = 10,
    /// Valkey did not answer for as long as `QUEUE_TIMEOUT`.
    QueueUnreachable = 11,
    /// Valkey refused user, password or rights for as long as `QUEUE_DENIED_TIMEOUT`.
    QueueDenied = 12,
    /// The storage refuses us (401, 403), or there are no credentials.
    NoAccess = 14,
    /// The object does not exist, in the words of S3.
    ObjectGone = 15,
    /// The object is not the one that was listed: its etag, length or checksum differs.
    ObjectChanged = 16,
    /// After all tries, the storage does not answer, answers 408, 429 or 5xx, or not as S3 does, knows no
    /// such bucket, does not have what was uploaded, or its certificate is not trusted.
    StorageUnreachable = 17,
    /// The workspace has no space left.
    DiskFull = 18,
    /// Another failure of the workspace.
    LocalIo = 19,
    /// Some results cannot be published: a link leads out of their folder, a name is too long, or a result
    /// was replaced meanwhile.
    PublishIncomplete = 20,
    /// The storage ended the body early, on every try.
    ObjectTruncated = 21,
    /// This version does not understand Valkey's answer.
    QueueBroken = 22,
    /// The folder of results is empty or missing.
    NothingToPublish = 23,
    /// The storage refuses the request itself (another 4xx).
    StorageRefused = 24,
    /// A filter's command cannot be executed in its container.
    FilterUnusable = 25,
    /// The container of a filter is gone, or sends messages that this version does not understand.
    FilterLost = 26,
    /// SIGTERM or SIGINT.
    Terminated = 143,
}

impl Exit {
    /// The number of the exit code.
    pub fn code(self) -> i32 {
        i32::from(self as u8)
    }

    /// The exit code with this number; `None` for a number with which the claimer never exits.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::VARIANTS.iter().copied().find(|exit| exit.code() == code)
    }

    /// Whether the storage as a whole may be the cause: it does not answer, fails, or refuses us. Errors
    /// about a single object (gone, changed, cut off, refused as a request) do not count.
    pub fn is_of_storage(self) -> bool {
        matches!(self, Self::NoAccess | Self::StorageUnreachable)
    }

    /// Whether this can happen only with a claimed file. A workspace, for example, can be full or broken
    /// earlier.
    pub fn is_after_claim(self) -> bool {
        match self {
            Self::NoAccess
            | Self::ObjectGone
            | Self::ObjectChanged
            | Self::StorageUnreachable
            | Self::PublishIncomplete
            | Self::ObjectTruncated
            | Self::NothingToPublish
            | Self::StorageRefused
            | Self::FilterLost => true,
            Self::BadSettings
            | Self::QueueUnreachable
            | Self::QueueDenied
            | Self::DiskFull
            | Self::LocalIo
            | Self::QueueBroken
            | Self::FilterUnusable
            | Self::Terminated => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_is_documented() {
        let docs = include_str!("../../docs/claimer.md");
        for exit in Exit::VARIANTS {
            let row = format!("| {} | `{}` |", exit.code(), exit.as_ref());
            assert!(docs.contains(&row), "docs/claimer.md has no row {row}");
        }
    }

    #[test]
    fn only_our_own_codes_have_a_meaning() {
        for exit in Exit::VARIANTS {
            assert_eq!(Exit::from_code(exit.code()), Some(*exit));
        }
        for other in [-1, 0, 1, 9, 101, 128, 137, 255, 266] {
            assert_eq!(Exit::from_code(other), None, "{other}");
        }
    }
}
