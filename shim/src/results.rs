//! Results are for the worker too, which is another user.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::{
    fcntl::AT_FDCWD,
    sys::stat::{FchmodatFlags, Mode, fchmodat},
    unistd::geteuid,
};

/// Makes everything of our user at and below a path readable and writable for all (`chmod a+rwX`), and follows no link.
pub(crate) fn share(root: &Path) -> io::Result<()> {
    let own = geteuid().as_raw();
    let mut next = vec![root.to_owned()];
    while let Some(path) = next.pop() {
        let found = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        if found.uid() == own && !found.is_symlink() {
            open_to_all(&path, &found)?;
        }
        if found.is_dir() {
            next.extend(entries(&path)?);
        }
    }
    Ok(())
}

fn open_to_all(path: &Path, found: &Metadata) -> io::Result<()> {
    let mode = found.mode();
    let executable = if found.is_dir() || mode & 0o111 != 0 { 0o111 } else { 0 };
    let wanted = mode & 0o777 | 0o666 | executable;
    if wanted == mode & 0o7777 {
        return Ok(());
    }
    Ok(fchmodat(AT_FDCWD, path, Mode::from_bits_truncate(wanted), FchmodatFlags::NoFollowSymlink)?)
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        // One of another user, which that user has to open.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}
