//! Temporary files: each file starts with an empty TMPDIR, and everything it leaves there or in `/tmp` is
//! removed.

use std::{
    collections::HashSet,
    env,
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::unistd::{geteuid, mkdtemp};

use crate::results::share;

const DEFAULT_BASE: &str = "/tmp";

/// The temporary files of the filter's current process.
pub(crate) struct Scratch {
    base: PathBuf,
    /// The TMPDIR of the current process. An untouched one is kept for the next process: creating a folder
    /// costs more than almost anything else that the shim does for a file.
    folder: Option<PathBuf>,
    /// Folders that are not the filter's alone, and their contents before the file.
    shared: Vec<(PathBuf, HashSet<OsString>)>,
}

impl Scratch {
    /// Shared folders are wiped only in a container of our own: elsewhere others use them too.
    pub(crate) fn new(has_own_container: bool) -> Self {
        let base = env::var_os("TMPDIR").map_or_else(|| DEFAULT_BASE.into(), PathBuf::from);
        let mut shared = vec![base.clone(), DEFAULT_BASE.into()];
        shared.dedup();
        shared.retain(|_| has_own_container);
        Self {
            base,
            folder: None,
            shared: shared.into_iter().map(|folder| (folder, HashSet::new())).collect(),
        }
    }

    /// Creates a TMPDIR, unless no writable folder exists; the filter then has none either.
    pub(crate) fn begin(&mut self) -> Option<&Path> {
        // If TMPDIR is in the workspace, the worker has removed the folder with everything else there.
        self.folder.take_if(|folder| !folder.exists());
        if self.folder.is_none() {
            self.folder = mkdtemp(&self.base.join("file-XXXXXX")).ok();
        }
        for (folder, before) in &mut self.shared {
            *before = names(folder);
        }
        self.folder.as_deref()
    }

    /// Removes what our user has created since the beginning.
    pub(crate) fn wipe(&mut self) {
        self.folder.take_if(|folder| !is_untouched(folder)).inspect(|folder| remove(folder));
        let own = geteuid().as_raw();
        for (folder, before) in &self.shared {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let is_new = !before.contains(&entry.file_name());
                if is_new && entry.metadata().is_ok_and(|found| found.uid() == own) {
                    remove(&entry.path());
                }
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.folder.take().inspect(|folder| remove(folder));
    }
}

fn names(folder: &Path) -> HashSet<OsString> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}

/// Whether a folder is unchanged since `mkdtemp` created it.
fn is_untouched(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && found.mode() & 0o7777 == 0o700)
        && fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn remove(path: &Path) {
    let remove = || match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
    let removed = remove().or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        // A folder inside it may deny even its owner the removal of its contents.
        _ => share(path, |_| false).and_then(|()| remove()),
    });
    if let Err(error) = removed {
        eprintln!("shim: cannot remove the temporary {}: {error}", path.display());
    }
}
