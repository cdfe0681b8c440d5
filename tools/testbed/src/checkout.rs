//! The checkout as git sees it, for tests that need another one: a clone, or the commit before.

use std::process::Command;

use crate::{
    error::Result,
    paths::{self, Paths},
};

/// Git in the checkout, whoever owns that: a machine of CI may have made it for us.
pub fn git(paths: &Paths) -> Result<Command> {
    let config = paths.state().join("gitconfig");
    paths::write(&config, "[safe]\n  directory = *\n")?;
    let mut git = Command::new("git");
    git.env("GIT_CONFIG_GLOBAL", config).current_dir(&paths.root);
    Ok(git)
}
