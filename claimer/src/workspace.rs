//! The folder that all containers of the pod share. The fetched file has a fixed name: an object's key is
//! never a path.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use protocol::Exit;

use crate::exit;

/// The folder, usually `/ws`.
pub(crate) struct Workspace {
    root: PathBuf,
}

/// Why the workspace cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {path}")]
pub(crate) struct WorkspaceError {
    doing: &'static str,
    path: String,
    #[source]
    source: io::Error,
}

impl WorkspaceError {
    pub(crate) fn exit(&self) -> Exit {
        exit::of_io(&self.source)
    }

    /// For `map_err`.
    pub(crate) fn doing(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self { doing, path, source }
    }
}

impl Workspace {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The path at which filters find the file.
    fn input(&self) -> PathBuf {
        self.root.join("input")
    }

    /// The path of the file until it is complete and verified.
    pub(crate) fn partial(&self) -> PathBuf {
        self.root.join(".input.part")
    }

    /// Holds the file's origin: exactly `s3://bucket/key`, without a newline at the end.
    fn source_uri(&self) -> PathBuf {
        self.root.join("input.source_uri")
    }

    /// Holds the number of the attempt, counted from 1.
    fn attempt(&self) -> PathBuf {
        self.root.join("input.attempt")
    }

    /// The folder with a filter's results.
    pub(crate) fn results(&self, filter: &str) -> PathBuf {
        self.root.join("out").join(filter)
    }

    /// Removes what an interrupted claimer left, and creates the filters' folders.
    pub(crate) fn prepare(&self, filters: &[String]) -> Result<(), WorkspaceError> {
        for path in [self.input(), self.partial(), self.source_uri(), self.attempt()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(WorkspaceError::doing("remove", &path)(error));
                }
                _ => {}
            }
        }
        // Filters run as users that are not known in advance, so everyone may write; the sticky bit keeps one
        // filter from removing another's folder.
        open_folder(&self.root.join("out"), 0o1777)?;
        filters.iter().try_for_each(|filter| open_folder(&self.results(filter), 0o777))
    }

    /// Gives the fetched file its name. This comes last, so that a reader who sees the file also sees the
    /// rest.
    pub(crate) fn complete(&self, uri: &str, attempt: u64) -> Result<(), WorkspaceError> {
        for (path, content) in [(self.source_uri(), uri), (self.attempt(), &attempt.to_string())] {
            fs::write(&path, content).map_err(WorkspaceError::doing("write", &path))?;
            readable(&path)?;
        }
        readable(&self.partial())?;
        fs::rename(self.partial(), self.input()).map_err(WorkspaceError::doing("rename to", &self.input()))
    }

    /// Removes what was fetched so far, if anything.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_file(self.partial());
    }

    /// The number of the attempt; 0 if it cannot be read.
    pub(crate) fn attempt_number(&self) -> u64 {
        fs::read_to_string(self.attempt()).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// The key of the file's object in this bucket.
    pub(crate) fn source_key(&self, bucket: &str) -> Result<String, WorkspaceError> {
        let path = self.source_uri();
        let uri = fs::read_to_string(&path).map_err(WorkspaceError::doing("read", &path))?;
        uri.strip_prefix(&format!("s3://{bucket}/")).map(str::to_owned).ok_or_else(|| {
            WorkspaceError::doing("understand", &path)(io::Error::other(format!(
                "it does not name an object of the bucket {bucket}"
            )))
        })
    }
}

/// Creates a folder with exactly this mode, whatever the umask is.
pub(crate) fn open_folder(path: &Path, mode: u32) -> Result<(), WorkspaceError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(WorkspaceError::doing("create the folder", path))
}

fn readable(path: &Path) -> Result<(), WorkspaceError> {
    fs::set_permissions(path, Permissions::from_mode(0o644)).map_err(WorkspaceError::doing("share", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_user_may_write_to_a_filters_folder_and_preparing_twice_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(folder.path());
        for _ in 0..2 {
            workspace.prepare(&["detect".to_owned(), "blur".to_owned()]).unwrap();
            for filter in ["detect", "blur"] {
                let mode = fs::metadata(workspace.results(filter)).unwrap().permissions().mode();
                assert_eq!(mode & 0o7777, 0o777);
            }
        }
    }

    #[test]
    fn a_key_is_read_back_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(folder.path());
        for key in ["a b", "new\nline\n", "/lead", "../up", "s3://x/y", "ü%20+"] {
            fs::write(workspace.partial(), b"x").unwrap();
            workspace.complete(&format!("s3://b/{key}"), 1).unwrap();
            assert_eq!(workspace.source_key("b").unwrap(), key);
        }
        assert!(workspace.source_key("other").is_err());
    }
}
