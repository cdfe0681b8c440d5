//! The errors of the testbed: what failed during which step, and which log says more.

use std::{io, path::PathBuf, time::Duration};

/// Any failure while a cluster starts, runs or stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The step that failed.
        doing: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A program of the machine failed.
    #[error("cannot {doing}: `{command}` ended with {status}: {output}")]
    Command {
        /// The step that failed.
        doing: String,
        /// The program and its arguments.
        command: String,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// The end of its output.
        output: String,
    },
    /// The API server refused a request or was unreachable.
    #[error("cannot {doing}: {source}")]
    Api {
        /// The step that failed.
        doing: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// An expected event did not happen in time.
    #[error("timed out after {}s waiting until {what}: {last}; logs: {}", .timeout.as_secs(), .logs.display())]
    Timeout {
        /// The event.
        what: String,
        /// How long it was waited for.
        timeout: Duration,
        /// The last observation.
        last: String,
        /// The folder with the components' logs.
        logs: PathBuf,
    },
    /// A process of the cluster ended while it was still needed.
    #[error("{name} ended; the end of {}:\n{tail}", .log.display())]
    Died {
        /// The component.
        name: String,
        /// Its log file.
        log: PathBuf,
        /// The log's last lines.
        tail: String,
    },
    /// The machine, the checkout or the request rules this out.
    #[error("{0}")]
    Refused(String),
}

/// The result of a testbed function.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the step to a failure of other code.
pub trait Doing<T> {
    /// `doing` is an infinitive that follows "cannot": "write the kubeconfig".
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
