//! The volume of a pod that processes many files. Filters see its folder `ws` as `/ws`, with one file at a
//! time. Prefetched files, and results that are being published, are beside it, where no filter can reach
//! them.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use crate::workspace::{Workspace, WorkspaceError, open_folder};

/// The part of the disk that prefetched files leave free, as a divisor: filters need space for results, and
/// from this point on the kubelet evicts pods.
const KEPT_FREE: u64 = 10;

/// Root of the volume.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    root: PathBuf,
}

/// The storage of one file, before and after its turn.
#[derive(Debug)]
pub(crate) struct Slot {
    folder: PathBuf,
}

impl Room {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The folder that filters see.
    fn stage(&self) -> PathBuf {
        self.root.join("ws")
    }

    /// Creates the storage of the file with this number.
    pub(crate) fn slot(&self, number: u64) -> Result<Slot, WorkspaceError> {
        let folder = self.root.join("slots").join(number.to_string());
        fs::create_dir_all(&folder).map_err(WorkspaceError::doing("make the folder", &folder))?;
        Ok(Slot { folder })
    }

    /// Whether the disk has space to prefetch this many bytes. If the disk does not tell its size, writing
    /// shows whether it does.
    pub(super) fn has_space_for(&self, bytes: u64) -> bool {
        statvfs(&self.root).map_or(true, |disk| {
            let unit = disk.fragment_size();
            leaves_enough(disk.blocks_available() * unit, disk.blocks() * unit, bytes)
        })
    }

    /// Moves a fetched file to where the filters see it.
    pub(crate) fn activate(
        &self,
        slot: &Slot,
        filters: &[String],
        uri: &str,
        attempt: u64,
    ) -> Result<(), WorkspaceError> {
        let workspace = Workspace::new(&self.stage());
        workspace.prepare(filters)?;
        let (from, to) = (slot.input(), workspace.partial());
        fs::rename(&from, &to).map_err(WorkspaceError::doing("rename", &from))?;
        workspace.complete(uri, attempt)
    }

    /// Takes the results away, and removes everything else that the filters left.
    pub(crate) fn clear(&self, slot: &Slot) -> Result<(), WorkspaceError> {
        let (stage, results) = (self.stage(), self.stage().join("out"));
        fs::rename(&results, slot.results()).map_err(WorkspaceError::doing("rename", &results))?;
        let left = fs::read_dir(&stage).map_err(WorkspaceError::doing("read", &stage))?;
        for entry in left {
            let path = entry.map_err(WorkspaceError::doing("read", &stage))?.path();
            remove(&path).map_err(WorkspaceError::doing("remove", &path))?;
        }
        Ok(())
    }
}

impl Slot {
    /// The path that the file is fetched to.
    pub(crate) fn input(&self) -> PathBuf {
        self.folder.join("input")
    }

    /// The filters' results.
    fn results(&self) -> PathBuf {
        self.folder.join("out")
    }

    /// One filter's results.
    pub(crate) fn results_of(&self, filter: &str) -> PathBuf {
        self.results().join(filter)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Anything that cannot be removed disappears with the pod.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Creates the folders of the volume, before any filter starts: the kubelet would create `ws` so that only
/// root can write to it. It is sticky, so that no filter can replace our files in it.
pub(crate) fn make(root: &Path) -> Result<(), WorkspaceError> {
    open_folder(&root.join("ws"), 0o1777)?;
    open_folder(&root.join("slots"), 0o700)
}

fn leaves_enough(available: u64, total: u64, bytes: u64) -> bool {
    available.saturating_sub(bytes) >= total / KEPT_FREE
}

fn remove(path: &Path) -> std::io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_come_later_leave_a_tenth_of_the_disk_free() {
        assert!(leaves_enough(1_000, 1_000, 900) && !leaves_enough(1_000, 1_000, 901));
        assert!(!leaves_enough(99, 1_000, 0) && !leaves_enough(1_000, 1_000, u64::MAX));
        assert!(leaves_enough(0, 0, 0), "a volume that does not know its size");
    }

    #[test]
    fn a_filter_sees_one_file_and_leaves_nothing_to_the_next() {
        let folder = tempfile::tempdir().unwrap();
        make(folder.path()).unwrap();
        let room = Room::new(folder.path());
        let filters = ["detect".to_owned()];
        for number in 0..2 {
            let slot = room.slot(number).unwrap();
            fs::write(slot.input(), number.to_string()).unwrap();
            room.activate(&slot, &filters, "s3://b/key", 1).unwrap();
            let seen = folder.path().join("ws");
            assert_eq!(fs::read_to_string(seen.join("input")).unwrap(), number.to_string());
            assert_eq!(fs::read_dir(seen.join("out/detect")).unwrap().count(), 0, "fresh");
            fs::write(seen.join("out/detect/result"), b"x").unwrap();
            fs::create_dir(seen.join("cache")).unwrap();
            fs::write(seen.join("cache/left"), b"x").unwrap();
            room.clear(&slot).unwrap();
            assert_eq!(fs::read_dir(&seen).unwrap().count(), 0);
            assert!(slot.results_of("detect").join("result").exists());
        }
        assert_eq!(
            fs::read_dir(folder.path().join("slots")).unwrap().count(),
            0,
            "slots go with their files"
        );
    }
}
