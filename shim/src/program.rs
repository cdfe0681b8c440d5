//! Finds the filter's command as the container runtime would.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, eaccess};

/// The folders that `execvp` searches without a PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

pub(crate) struct Program {
    pub(crate) path: PathBuf,
    /// The first argument is the command's own name.
    pub(crate) arguments: Vec<OsString>,
}

impl Program {
    /// Finds the program as `execvp` does; an error says why it cannot be executed.
    pub(crate) fn find(command: Vec<OsString>) -> Result<Self, String> {
        let search = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        Ok(Self { path: find(&command[0], &search)?, arguments: command })
    }
}

fn find(name: &OsStr, search: &OsStr) -> Result<PathBuf, String> {
    let shown = name.display();
    if name.as_encoded_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match fs::metadata(&path) {
            Err(error) => Err(format!("cannot execute `{shown}`: {error}")),
            Ok(_) if is_executable(&path) => Ok(path),
            Ok(_) => Err(format!("cannot execute `{shown}`: it is not an executable file for this user")),
        };
    }
    let candidates = || env::split_paths(search).map(|folder| Path::new(".").join(folder).join(name));
    match candidates().find(|path| is_executable(path)) {
        Some(path) => Ok(path),
        None if candidates().any(|path| path.exists()) => {
            Err(format!("cannot execute `{shown}`: in PATH it is not an executable file for this user"))
        }
        None => Err(format!("cannot execute `{shown}`: no such program in PATH ({})", search.display())),
    }
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && eaccess(path, AccessFlags::X_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn found(name: &str, search: &str) -> Result<PathBuf, String> {
        find(OsStr::new(name), OsStr::new(search))
    }

    #[test]
    fn programs_are_found_as_execvp_finds_them() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, tool) = (folder.path().join("plain"), folder.path().join("tool"));
        fs::create_dir(&plain).unwrap();
        fs::write(plain.join("tool"), "").unwrap();
        fs::write(&tool, "").unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
        let search = format!("/missing:{}:{}", plain.display(), folder.path().display());
        assert_eq!(found("tool", &search).unwrap(), tool, "a file that is not executable is passed over");
        assert_eq!(found(tool.to_str().unwrap(), "").unwrap(), tool);
    }

    #[test]
    fn refusals_say_why() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let search = folder.path().to_str().unwrap();
        for (name, named) in [
            ("missing", "no such program"),
            ("file", "not an executable file"),
            (file.to_str().unwrap(), "not an executable file"),
            (search, "not an executable file"),
            ("/missing/tool", "No such file"),
            ("", "cannot execute"),
        ] {
            let refused = found(name, search).unwrap_err();
            assert!(refused.contains(named), "{name}: {refused}");
        }
    }
}
