//! Programs of the workspace, for suites that run them. `cargo test` builds only what belongs to the suite's own package.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::generated::root;

/// Builds a program like whatever asks for it (a bench is built with optimizations), and returns its path.
pub fn program(name: &str) -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    // Naming a suite gives the program the features that the suites are built with: nothing is compiled twice.
    let like = if cfg!(debug_assertions) {
        ["--profile=dev", "--test=generated"]
    } else {
        ["--profile=bench", "--bench=webhook"]
    };
    let output = Command::new(cargo)
        .args(["build", "--locked", "--workspace", "--message-format=json", "--bin", name])
        .args(like)
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{name} does not build");
    let messages = String::from_utf8(output.stdout).unwrap();
    let mut programs = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.find(|path| path.ends_with(name)).expect("cargo names the program")
}
