//! Programs of the workspace, for suites that run them.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use testbed::Paths;
use testbed::programs::{Profile, build};

/// A program that ends when the thread that starts it does, so also with a suite that is killed.
pub fn mortal(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Builds a program like whatever asks for it (a bench is built with optimizations), and returns its path.
pub fn program(name: &str) -> PathBuf {
    let paths = Paths::find().expect("suites run in the project");
    let mut built = build(&paths, &[name], Profile::own()).unwrap_or_else(|error| panic!("{error}"));
    built.remove(name).expect("what was asked for was built")
}
