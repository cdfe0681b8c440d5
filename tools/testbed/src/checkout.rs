//! The checkout as git sees it, for tests that need another version: a clone, or the previous commit.

use std::process::Command;

use crate::{
    error::Result,
    paths::{self, Paths},
};

/// Runs git in the checkout, whoever owns it: in CI, another user may have created it.
pub fn git(paths: &Paths) -> Result<Command> {
    let config = paths.state().join("gitconfig");
    paths::write(&config, "[safe]\n  directory = *\n")?;
    let mut git = Command::new("git");
    git.env("GIT_CONFIG_GLOBAL", config).current_dir(&paths.root);
    Ok(git)
}
