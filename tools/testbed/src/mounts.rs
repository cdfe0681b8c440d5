//! The mounts that containers and volumes leave below the testbed's folders.

use std::path::{Path, PathBuf};

use crate::{command, error::Result, paths};

/// Every mount at or below a folder, deepest first.
pub(crate) fn below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mounts = paths::read("/proc/self/mounts")?;
    let mut found: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .map(|path| PathBuf::from(unescape(path)))
        .filter(|path| path.starts_with(folder))
        .collect();
    found.reverse(); // later mounts may sit on earlier ones
    Ok(found)
}

/// Unmounts everything at or below a folder.
pub(crate) fn unmount_below(folder: &Path) -> Result<()> {
    for mount in below(folder)? {
        let path = mount.display().to_string();
        // A mount that a dying process still holds is detached now, and freed when the process is gone.
        if command::run("unmount", &["umount", &path]).is_err() {
            command::run("detach a mount", &["umount", "--lazy", &path])?;
        }
    }
    Ok(())
}

/// Replaces `\040`, which is how the kernel writes a space.
fn unescape(path: &str) -> String {
    path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_in_a_mount_is_read_back() {
        assert_eq!(unescape("/a\\040b"), "/a b");
    }

    #[test]
    fn a_sibling_with_the_same_start_is_not_below() {
        assert!(below(Path::new("/pro")).unwrap().is_empty());
        assert!(!below(Path::new("/proc")).unwrap().is_empty());
    }
}
