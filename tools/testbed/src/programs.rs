//! Builds programs of this workspace, for images and for suites that run them: `cargo test` builds only those
//! of a suite's own package.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    command,
    error::{Doing, Error, Result},
    paths::{self, Paths},
};

/// How to build programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Like the suites, so that common code is compiled once.
    Dev,
    /// Like the benches, for the same reason.
    Bench,
    /// As users get them: small and fast, but slow to build.
    Release,
}

impl Profile {
    /// The profile of the calling program: suites test behaviour, benches measure speed.
    pub fn own() -> Self {
        if cfg!(debug_assertions) { Self::Dev } else { Self::Bench }
    }
}

/// Builds programs of this workspace by name. The command covers the whole workspace, and for suites and
/// benches also names one of them, so that everything has the same features and nothing is compiled twice.
pub fn build(paths: &Paths, names: &[&str], profile: Profile) -> Result<BTreeMap<String, PathBuf>> {
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut build = Command::new(cargo);
    build.args(["build", "--locked", "--workspace", "--message-format=json"]);
    build.args(names.iter().flat_map(|name| ["--bin", name]));
    build.args(match profile {
        Profile::Dev => ["--test", "down"].as_slice(),
        Profile::Bench => &["--profile", "bench", "--bench", "run"],
        Profile::Release => &["--release"],
    });
    let printed = command::finish(&format!("build {}", names.join(", ")), build.current_dir(&paths.root))?;
    let messages = printed.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let programs: BTreeMap<String, PathBuf> = messages
        .filter_map(|message| {
            let name = message["target"]["name"].as_str()?;
            Some((name.to_owned(), PathBuf::from(message["executable"].as_str()?)))
        })
        .collect();
    match names.iter().find(|name| !programs.contains_key(**name)) {
        Some(name) => Err(Error::Refused(format!("the package {name} has no binary of its name"))),
        None => Ok(programs),
    }
}

/// The shim for pods: statically linked, so that it runs in images without a C library. It has its own target
/// folder, because its flags would make cargo compile all other programs again.
pub fn static_shim(paths: &Paths) -> Result<PathBuf> {
    let folder = env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = paths.root.join(folder).join("static");
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut build = Command::new(cargo);
    build.args([
        "rustc",
        "--locked",
        "--package",
        "shim",
        "--bin",
        "shim",
        "--profile",
        "shim",
        "--target-dir",
    ]);
    build.arg(&folder).args(["--", "-C", "target-feature=+crt-static"]);
    command::finish("build the shim", build.current_dir(&paths.root))?;
    Ok(folder.join("shim/shim"))
}

/// The bytes of a program without its symbols, which are most of the size of a debug build.
pub(crate) fn stripped(paths: &Paths, program: &Path) -> Result<Vec<u8>> {
    paths::make_dir(paths.images())?;
    let copy = paths.images().join(format!("stripped-{}", paths::unique()));
    let (from, to) = (program.display().to_string(), copy.display().to_string());
    command::run(&format!("strip {from}"), &["strip", "--strip-all", "-o", &to, &from])?;
    let bytes = fs::read(&copy).doing(|| format!("read {to}"))?;
    paths::remove(&copy)?;
    Ok(bytes)
}
