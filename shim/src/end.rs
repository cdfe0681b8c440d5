//! Why the shim ends.

use std::fmt;

#[derive(Debug)]
pub(crate) enum End {
    /// The worker is gone, so there are no more files.
    Finished,
    /// The command cannot be executed.
    Unusable(String),
    /// Something failed that the shim needs.
    Broken(String),
}

impl From<nix::Error> for End {
    fn from(error: nix::Error) -> Self {
        Self::Broken(format!("the kernel refuses what every file needs: {error}"))
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("the worker is gone"),
            Self::Unusable(text) | Self::Broken(text) => f.write_str(text),
        }
    }
}
