//! Opens results to the worker, which runs as another user.

use std::{
    fs::{self, DirEntry, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use nix::{
    fcntl::AT_FDCWD,
    sys::stat::{FchmodatFlags, Mode, fchmodat},
    unistd::geteuid,
};

/// Makes everything of our user at and below a path readable and writable for all (`chmod a+rwX`), without
/// following links. Skips entries that need nothing.
pub(crate) fn share(root: &Path, needs_nothing: impl Fn(&DirEntry) -> bool) -> io::Result<()> {
    let own = geteuid().as_raw();
    let owns_root = fs::symlink_metadata(root).is_ok_and(|root| root.uid() == own);
    // If we are the worker's user, its folders are ours, and they stay sticky, which keeps filters of other
    // users from replacing what is in them. Otherwise only the filter makes sticky folders, and the worker
    // could not empty those.
    let kept = if owns_root { 0o1777 } else { 0o777 };
    let mut next = vec![root.to_owned()];
    while let Some(path) = next.pop() {
        let found = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        if found.uid() == own && !found.is_symlink() {
            open_to_all(&path, &found, kept)?;
        }
        if found.is_dir() {
            next.extend(entries(&path)?.iter().filter(|entry| !needs_nothing(entry)).map(DirEntry::path));
        }
    }
    Ok(())
}

fn open_to_all(path: &Path, found: &Metadata, kept: u32) -> io::Result<()> {
    let mode = found.mode();
    let executable = if found.is_dir() || mode & 0o111 != 0 { 0o111 } else { 0 };
    let wanted = mode & kept | 0o666 | executable;
    if wanted == mode & 0o7777 {
        return Ok(());
    }
    Ok(fchmodat(AT_FDCWD, path, Mode::from_bits_truncate(wanted), FchmodatFlags::NoFollowSymlink)?)
}

fn entries(folder: &Path) -> io::Result<Vec<DirEntry>> {
    match fs::read_dir(folder) {
        // It belongs to another user, who has to open it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Vec::new()),
        entries => entries?.collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn results_are_opened_and_the_workers_own_folders_stay_sticky() {
        let folder = tempfile::tempdir().unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let (out, result) = (folder.path().join("out"), folder.path().join("out/result"));
        fs::create_dir(&out).unwrap();
        fs::write(&result, b"x").unwrap();
        for (path, mode) in [(folder.path(), 0o1777), (&out, 0o1700), (&result, 0o600)] {
            set(path, mode);
        }
        share(folder.path(), |_| false).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!([mode(folder.path()), mode(&out), mode(&result)], [0o1777, 0o1777, 0o666]);
    }
}
