//! Programs of the workspace, for suites that run them.

use std::path::PathBuf;

use testbed::Paths;
use testbed::programs::{Profile, build};

/// Builds a program like whatever asks for it (a bench is built with optimizations), and returns its path.
pub fn program(name: &str) -> PathBuf {
    let paths = Paths::find().expect("suites run in the project");
    let mut built = build(&paths, &[name], Profile::own()).unwrap_or_else(|error| panic!("{error}"));
    built.remove(name).expect("what was asked for was built")
}
