//! Claims one file, however long Valkey takes to come back. It reads its own pending entry first (the queue does), so a
//! restarted container gets the same file again, and it never acknowledges anything.

use std::time::{Duration, Instant};

use protocol::Exit;
use queue::{Claim, Error, Server, Worker};
use storage::chain;

use crate::backoff::Backoff;

/// One blocking read. Bounded, because a connection that a middlebox dropped would otherwise wait for ever.
const BLOCK: Duration = Duration::from_secs(5);
/// Waits between tries to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Which queue, as whom, and how patiently.
#[derive(Clone, Debug)]
pub struct QueueSettings {
    /// Valkey.
    pub server: Server,
    /// Stream of the run.
    pub stream: String,
    /// Consumer group of the run.
    pub group: String,
    /// Name of this pod.
    pub consumer: String,
    /// How long Valkey may be away.
    pub unavailable_limit: Duration,
    /// How long Valkey may refuse us.
    pub denied_limit: Duration,
}

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("no answer for {limit:?}")]
    Unreachable { limit: Duration, source: Error },
    #[error("refused for {limit:?}")]
    Denied { limit: Duration, source: Error },
    #[error("nothing to do")]
    Closed { source: Error },
    #[error("unusable answer")]
    Broken { source: Error },
    #[error("unusable settings")]
    Settings { source: Error },
}

impl ClaimError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { .. } => Exit::QueueUnreachable,
            Self::Denied { .. } => Exit::QueueDenied,
            Self::Closed { .. } => Exit::RunClosed,
            Self::Broken { .. } => Exit::QueueBroken,
            Self::Settings { .. } => Exit::BadSettings,
        }
    }
}

/// Waits for a file and claims it.
pub(crate) async fn claim(settings: &QueueSettings) -> Result<Claim, ClaimError> {
    let QueueSettings { server, stream, group, consumer, unavailable_limit, denied_limit } = settings;
    let mut worker = Worker::new(server.clone(), stream, group, consumer);
    let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
    // A clock for each: a server that alternates between away and refusing must not be waited for without end.
    let (mut away_since, mut refused_since) = (None, None);
    loop {
        let source = match worker.claim(BLOCK).await {
            Ok(Some(claim)) => return Ok(claim),
            Ok(None) => {
                (away_since, refused_since) = (None, None);
                backoff.reset();
                continue;
            }
            Err(error) => error,
        };
        let (since, limit) = match &source {
            Error::Unavailable { .. } | Error::Full { .. } => (&mut away_since, *unavailable_limit),
            // A restarted Valkey has forgotten the user; the operator is restoring it.
            Error::Denied { .. } => (&mut refused_since, *denied_limit),
            Error::Closed { .. } => return Err(ClaimError::Closed { source }),
            Error::Config { .. } => return Err(ClaimError::Settings { source }),
            Error::Lost { .. } | Error::Server { .. } | Error::Reply { .. } | Error::Page { .. } => {
                return Err(ClaimError::Broken { source });
            }
        };
        let left = limit.saturating_sub(since.get_or_insert_with(Instant::now).elapsed());
        if left.is_zero() {
            return Err(match source {
                Error::Denied { .. } => ClaimError::Denied { limit, source },
                _ => ClaimError::Unreachable { limit, source },
            });
        }
        let wait = backoff.wait().min(left);
        eprintln!("try again in {wait:.1?}: {}", chain(&source).escape_debug());
        tokio::time::sleep(wait).await;
    }
}
