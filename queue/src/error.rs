//! Errors of the queue, and their consequences for the caller.

use redis::{ErrorKind, RedisError};
use strum::AsRefStr;

/// An error of the queue. The variant is suitable as a metric label or an event reason; the data is not.
#[derive(Debug, thiserror::Error, AsRefStr)]
pub enum Error {
    /// The server cannot be reached, does not answer in time, or is still starting. Nothing is known about
    /// the queue, and certainly not that it is empty.
    #[error("cannot reach Valkey to {doing}")]
    Unavailable {
        /// The action that failed.
        doing: &'static str,
        /// The error of the connection.
        #[source]
        source: RedisError,
    },
    /// The server refuses our user or password, or this user lacks the right. A restarted server has
    /// forgotten the users that were created at run time: retry while the operator restores them.
    #[error("Valkey does not allow this user to {doing}")]
    Denied {
        /// The action that failed.
        doing: &'static str,
        /// The server's error.
        #[source]
        source: RedisError,
    },
    /// The server is at its `maxmemory` and refuses writes that need more. Settling files and ending runs
    /// frees memory and is not refused.
    #[error("cannot {doing}: Valkey has no memory left")]
    Full {
        /// The action that failed.
        doing: &'static str,
        /// The server's error.
        #[source]
        source: RedisError,
    },
    /// The opened queue is gone, was replaced by another one, or is inconsistent: data was lost.
    #[error("cannot {doing}: Valkey has lost data of the queue")]
    Lost {
        /// The action that failed.
        doing: &'static str,
    },
    /// The run is closed, so there is nothing to claim.
    #[error("the stream {stream} is gone: the run is closed or was deleted")]
    Closed {
        /// The stream of the run.
        stream: String,
    },
    /// The server answered with an error of another kind.
    #[error("cannot {doing}")]
    Server {
        /// The action that failed.
        doing: &'static str,
        /// The server's error.
        #[source]
        source: RedisError,
    },
    /// This version does not understand the server's answer.
    #[error("cannot {doing}: Valkey sent an unexpected reply: {detail}")]
    Reply {
        /// The action that failed.
        doing: &'static str,
        /// The part that was not understood.
        detail: String,
    },
    /// The page of files is invalid and was not sent.
    #[error("cannot queue a page of files: {detail}")]
    Page {
        /// The mistake.
        detail: String,
    },
    /// The connection settings are unusable.
    #[error("the Valkey settings are unusable: {detail}")]
    Config {
        /// The mistake, and how to fix it.
        detail: String,
    },
}

/// Replies of a server that is starting, failing over, or temporarily out of disk or replicas.
const TRANSIENT: [&str; 8] =
    ["LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "MISCONF", "NOREPLICAS", "BUSY"];

impl Error {
    pub(crate) fn from_redis(doing: &'static str, source: RedisError) -> Self {
        let denied = source.kind() == ErrorKind::AuthenticationFailed
            || ["WRONGPASS", "NOAUTH", "NOPERM"].iter().any(|code| has_code(&source, code))
            // The reply of a server with a password to a long command before authentication.
            || source.to_string().contains("unauthenticated");
        let transient = TRANSIENT.iter().any(|code| has_code(&source, code))
            || source.to_string().contains("max number of clients");
        if denied {
            Self::Denied { doing, source }
        } else if has_code(&source, "OOM") {
            Self::Full { doing, source }
        } else if transient || source.is_io_error() || source.is_timeout() || source.is_connection_dropped() {
            Self::Unavailable { doing, source }
        } else {
            Self::Server { doing, source }
        }
    }

    pub(crate) fn reply(doing: &'static str, detail: impl Into<String>) -> Self {
        Self::Reply { doing, detail: detail.into() }
    }

    /// Whether retrying later can help without a change to the settings.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::Denied { .. } | Self::Full { .. } => true,
            Self::Lost { .. }
            | Self::Closed { .. }
            | Self::Server { .. }
            | Self::Reply { .. }
            | Self::Page { .. }
            | Self::Config { .. } => false,
        }
    }
}

/// Whether the server answered a command, or one in a pipeline, with this error code.
pub(crate) fn has_code(error: &RedisError, code: &str) -> bool {
    error
        .clone()
        .into_server_errors()
        .is_some_and(|errors| errors.iter().any(|(_, error)| error.code() == code))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn replied(reply: &str) -> Error {
        let value = redis::parse_redis_value(reply.as_bytes()).unwrap();
        Error::from_redis("settle files", value.extract_error().unwrap_err())
    }

    #[test]
    fn a_full_server_is_distinguished_from_one_that_cannot_be_reached() {
        let full = replied("-OOM command not allowed when used memory > 'maxmemory'.\r\n");
        assert!(matches!(full, Error::Full { .. }) && full.is_transient(), "{full:?}");
        assert_eq!(full.to_string(), "cannot settle files: Valkey has no memory left");
        let starting = replied("-LOADING the dataset is in memory\r\n");
        assert!(matches!(starting, Error::Unavailable { .. }) && starting.is_transient(), "{starting:?}");
        let broken = replied("-ERR unknown command\r\n");
        assert!(matches!(broken, Error::Server { .. }) && !broken.is_transient(), "{broken:?}");
    }
}
