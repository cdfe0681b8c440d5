//! What went wrong, what was being done at that moment, and which log says more.

use std::{io, path::PathBuf, time::Duration};

/// Everything that can go wrong while a cluster starts, runs or stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A program of the machine ended badly.
    #[error("{doing}: `{command}` ended with {status}: {output}")]
    Command {
        /// What was being done.
        doing: String,
        /// The program and its arguments.
        command: String,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// The end of what it printed.
        output: String,
    },
    /// The API server refused or could not be reached.
    #[error("{doing}: {source}")]
    Api {
        /// What was being done.
        doing: String,
        /// Why it failed.
        #[source]
        source: Box<kube::Error>,
    },
    /// Something that should have happened did not.
    #[error("{what}: not within {}s; {last}; logs: {}", .timeout.as_secs(), .logs.display())]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        timeout: Duration,
        /// What was seen last.
        last: String,
        /// Where the components write what they do.
        logs: PathBuf,
    },
    /// A process of the cluster ended while it was needed.
    #[error("{name} ended; the end of {}:\n{tail}", .log.display())]
    Died {
        /// The component.
        name: String,
        /// Its log file.
        log: PathBuf,
        /// The log's last lines.
        tail: String,
    },
    /// The machine, the checkout or the request does not allow it.
    #[error("{0}")]
    Refused(String),
}

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds what was being done to a failure of somebody else's code.
pub trait Doing<T> {
    /// `doing` is an infinitive: "write the kubeconfig".
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: doing(), source })
    }
}

impl<T> Doing<T> for kube::Result<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Api { doing: doing(), source: Box::new(source) })
    }
}

impl<T> Doing<T> for serde_json::Result<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: doing(), source: source.into() })
    }
}

impl<T> Doing<T> for std::result::Result<T, rcgen::Error> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: doing(), source: io::Error::other(source) })
    }
}
