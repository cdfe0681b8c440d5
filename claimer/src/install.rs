//! Makes a pod ready that processes many files, before its filters start: the shim where they can execute it, and folders that
//! they may use under any user.

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
    /// The shim, in the image.
    pub shim: PathBuf,
    /// Folder that gets the shim, and a folder for the socket of each filter.
    pub to: PathBuf,
    /// Root of the volume that filters see a part of.
    pub room: PathBuf,
    /// The filters.
    pub filters: Vec<String>,
}

/// The pod cannot be made ready.
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

/// Makes the pod ready.
pub(crate) fn install(settings: &InstallSettings) -> Result<(), InstallError> {
    let InstallSettings { shim, to, room, filters } = settings;
    serve::make_room(room)?;
    for filter in filters {
        open_folder(&to.join("link").join(filter), 0o777)?;
    }
    install_shim(shim, to)
}

/// Puts the shim where filters can execute it.
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
