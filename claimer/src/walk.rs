//! Finds the results of a filter: every regular file below a folder, with its relative name. It never leaves
//! the folder: a link that leads out, or to anything but a file, is an error; it is neither published nor
//! silently skipped.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    /// Name below the folder, with `/` between its parts.
    pub(crate) name: String,
    /// Where its content is.
    pub(crate) path: PathBuf,
    /// Its length in bytes.
    pub(crate) size: u64,
}

/// A result that cannot be published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalkError {
    #[error("cannot read {path}")]
    Io { path: String, source: io::Error },
    #[error("{path} is {what}, which cannot be published")]
    Refused { path: String, what: &'static str },
}

/// All results below a folder, sorted by name.
pub(crate) fn walk(root: &Path) -> Result<Vec<Found>, WalkError> {
    if fs::symlink_metadata(root).is_ok_and(|root| root.is_symlink()) {
        return Err(WalkError::Refused { path: root.display().to_string(), what: "a link" });
    }
    let real_root = root.canonicalize().map_err(|error| failed(root, error))?;
    let (mut found, mut folders) = (Vec::new(), vec![(real_root.clone(), String::new())]);
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| failed(&folder, error))? {
            let path = entry.map_err(|error| failed(&folder, error))?.path();
            let refused = |what| WalkError::Refused { path: path.display().to_string(), what };
            let name = path.file_name().and_then(|name| name.to_str());
            let name = format!("{prefix}{}", name.ok_or_else(|| refused("not named in UTF-8"))?);
            let kind = fs::symlink_metadata(&path).map_err(|error| failed(&path, error))?;
            if kind.is_dir() {
                folders.push((path, format!("{name}/")));
                continue;
            }
            let real = if kind.is_symlink() {
                let target = path.canonicalize().map_err(|_| refused("a link to nothing"))?;
                if !target.starts_with(&real_root) {
                    return Err(refused("a link out of the folder"));
                }
                target
            } else {
                path.clone()
            };
            let kind = fs::metadata(&real).map_err(|error| failed(&real, error))?;
            if !kind.is_file() {
                return Err(refused("neither a file nor a folder"));
            }
            found.push(Found { name, path: real, size: kind.len() });
        }
    }
    found.sort();
    Ok(found)
}

fn failed(path: &Path, source: io::Error) -> WalkError {
    WalkError::Io { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("out");
        fs::create_dir_all(root.join("deep/er")).unwrap();
        fs::write(root.join("deep/er/b"), b"22").unwrap();
        fs::write(root.join("a"), b"1").unwrap();
        (outer, root)
    }

    fn names(root: &Path) -> Vec<String> {
        walk(root).unwrap().into_iter().map(|found| found.name).collect()
    }

    #[test]
    fn every_file_is_found_at_any_depth() {
        let (_outer, root) = folder();
        assert_eq!(names(&root), ["a", "deep/er/b"]);
    }

    #[test]
    fn a_link_to_a_file_inside_is_a_result() {
        let (_outer, root) = folder();
        symlink("deep/er/b", root.join("latest")).unwrap();
        assert_eq!(names(&root), ["a", "deep/er/b", "latest"]);
    }

    #[test]
    fn a_folder_that_is_a_link_is_refused() {
        let (outer, root) = folder();
        symlink(&root, outer.path().join("link")).unwrap();
        assert!(matches!(walk(&outer.path().join("link")), Err(WalkError::Refused { .. })));
    }

    #[test]
    fn a_link_that_leads_out_is_refused() {
        let (outer, root) = folder();
        fs::write(outer.path().join("secret"), b"x").unwrap();
        for target in ["../secret", "/etc/passwd", "missing", "deep"] {
            symlink(target, root.join("link")).unwrap();
            assert!(matches!(walk(&root), Err(WalkError::Refused { .. })), "{target}");
            fs::remove_file(root.join("link")).unwrap();
        }
    }
}
