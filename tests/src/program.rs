//! Builds and runs programs of the workspace for suites.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use testbed::Paths;
use testbed::programs::{Profile, build};

/// A program that ends with the thread that started it, even if the suite is killed.
pub fn mortal(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Builds a program with the caller's profile (optimized for benches), and returns its path.
pub fn program(name: &str) -> PathBuf {
    let paths = Paths::find().expect("suites run in the project");
    let mut built = build(&paths, &[name], Profile::own()).unwrap_or_else(|error| panic!("{error}"));
    built.remove(name).expect("what was asked for was built")
}
