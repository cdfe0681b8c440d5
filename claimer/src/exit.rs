//! How the process ends: an exit code per class of failure, and one line with the failure and its cause. The
//! operator reads both from the pod; docs/claimer.md lists them.

use protocol::Exit;
use storage::StorageError;

use crate::args::SettingsError;
use crate::claim::ClaimError;
use crate::fetch::FetchFailed;
use crate::install::InstallError;
use crate::publish::PublishError;
use crate::serve::ServeError;
use crate::workspace::WorkspaceError;

/// The exit code for a storage error.
pub(crate) fn of_storage(error: &StorageError) -> Exit {
    match error {
        StorageError::NoAccess(_) => Exit::NoAccess,
        StorageError::Gone(_) => Exit::ObjectGone,
        StorageError::Changed(_) => Exit::ObjectChanged,
        // Without its bucket, no file is at fault. Whether a 404 without S3's words is about one object, the
        // canary shows.
        StorageError::Unreachable(_)
        | StorageError::NotFound(_)
        | StorageError::Unusable(_)
        | StorageError::NoBucket(_) => Exit::StorageUnreachable,
        StorageError::Refused(_) => Exit::StorageRefused,
        // No guard is ever set here: network policies decide where a pod may connect.
        StorageError::AddressRefused(_) => Exit::BadSettings,
    }
}

/// The exit code for a file system error.
pub(crate) fn of_io(error: &std::io::Error) -> Exit {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => Exit::DiskFull,
        _ => Exit::LocalIo,
    }
}

/// Why the process fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the settings are unusable")]
    Settings(#[from] SettingsError),
    #[error("cannot claim a file")]
    Claim(#[from] ClaimError),
    #[error("cannot fetch the file")]
    Fetch(#[from] FetchFailed),
    #[error("cannot prepare the workspace")]
    Workspace(#[from] WorkspaceError),
    #[error("cannot publish the results")]
    Publish(#[from] PublishError),
    #[error("cannot prepare the pod")]
    Install(#[from] InstallError),
    #[error("cannot process files")]
    Serve(#[from] ServeError),
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
    #[error("ended by a signal")]
    Terminated,
}

impl Failure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Settings(_) => Exit::BadSettings,
            Self::Claim(error) => error.exit(),
            Self::Fetch(error) => error.exit(),
            Self::Workspace(error) => error.exit(),
            Self::Publish(error) => error.exit(),
            Self::Install(error) => error.exit(),
            Self::Serve(error) => error.exit(),
            Self::Signals(error) => of_io(error),
            Self::Terminated => Exit::Terminated,
        }
    }

    /// Whether the storage was readable at the time of the failure, if that was checked.
    pub(crate) fn canary(&self) -> Option<bool> {
        match self {
            Self::Fetch(error) => error.canary(),
            Self::Publish(error) => error.canary(),
            Self::Settings(_)
            | Self::Claim(_)
            | Self::Workspace(_)
            | Self::Install(_)
            | Self::Serve(_)
            | Self::Signals(_)
            | Self::Terminated => None,
        }
    }
}

/// The longest object name in a message: a key may have 1,024 bytes, and the reason follows it.
const NAME_BYTES_MAX: usize = 256;

/// Shortens a long name in its middle: its start says where the object is, its end says which one it is.
pub(crate) fn shortened(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX {
        return name.to_owned();
    }
    let (start, end) = name.split_at(name.floor_char_boundary(NAME_BYTES_MAX / 2));
    format!("{start}…{}", &end[end.ceil_char_boundary(end.len() - NAME_BYTES_MAX / 2)..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_keeps_both_its_ends() {
        let name = format!("s3://b/{}/end", "ü".repeat(500));
        let short = shortened(&name);
        assert!(short.starts_with("s3://b/ü") && short.ends_with("ü/end") && short.contains('…'));
        assert!(short.len() <= NAME_BYTES_MAX + '…'.len_utf8());
        assert_eq!(shortened("s3://b/a"), "s3://b/a");
    }
}
