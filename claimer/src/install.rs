//! Prepares a pod that processes many files, before its filters start: puts the shim where they can execute
//! it, and creates folders that any user may write to.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use protocol::Exit;

use crate::exit;
use crate::serve;
use crate::workspace::{WorkspaceError, open_folder};

/// Settings of `install`.
#[derive(Debug)]
pub struct InstallSettings {
    /// Path of the shim in the image.
    pub shim: PathBuf,
    /// Folder that receives the shim, and a folder for each filter's socket.
    pub to: PathBuf,
    /// Root of the volume that filters see in part.
    pub room: PathBuf,
    /// The filters.
    pub filters: Vec<String>,
}

/// Why the pod cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InstallError {
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error("cannot copy {from} to {to}")]
    Copy { from: String, to: String, source: io::Error },
}

impl InstallError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Workspace(error) => error.exit(),
            Self::Copy { source, .. } => exit::of_io(source),
        }
    }
}

/// Prepares the pod.
pub(crate) fn install(settings: &InstallSettings) -> Result<(), InstallError> {
    let InstallSettings { shim, to, room, filters } = settings;
    serve::make_room(room)?;
    for filter in filters {
        open_folder(&to.join("link").join(filter), 0o777)?;
    }
    install_shim(shim, to)
}

/// Copies the shim to a place where filters can execute it.
pub(crate) fn install_shim(shim: &Path, to: &Path) -> Result<(), InstallError> {
    open_folder(&to.join("bin"), 0o755)?;
    let target = to.join("bin").join("shim");
    let copied =
        fs::copy(shim, &target).and_then(|_| fs::set_permissions(&target, Permissions::from_mode(0o755)));
    copied.map_err(|source| InstallError::Copy {
        from: shim.display().to_string(),
        to: target.display().to_string(),
        source,
    })
}
