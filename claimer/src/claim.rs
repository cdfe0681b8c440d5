//! Claims the file that the operator handed to this pod, however long Valkey takes to return. A restarted
//! container gets the same file again, and nothing is ever acknowledged here.

use std::time::{Duration, Instant};

use protocol::Exit;
use queue::{Claim, Error, Server, Worker};
use storage::chain;

use crate::backoff::Backoff;

/// One blocking read. It is bounded because a connection that a middlebox dropped would otherwise wait
/// forever.
const BLOCK: Duration = Duration::from_secs(5);
/// The wait before the second try to connect; it doubles with each try.
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
/// The longest wait between two tries.
const BACKOFF_LONGEST: Duration = Duration::from_secs(30);

/// The queue, the user, and how long to wait for Valkey.
#[derive(Clone, Debug)]
pub struct QueueSettings {
    /// Valkey.
    pub server: Server,
    /// Stream of the run.
    pub stream: String,
    /// The pod's name, which is also its consumer name.
    pub consumer: String,
    /// How long Valkey may be unreachable.
    pub unavailable_limit: Duration,
    /// How long Valkey may refuse us.
    pub denied_limit: Duration,
}

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("Valkey has not answered for {limit:?}")]
    Unreachable { limit: Duration, source: Error },
    #[error("Valkey has refused the user for {limit:?}")]
    Denied { limit: Duration, source: Error },
    #[error("Valkey's answer is unusable")]
    Broken { source: Error },
    #[error("the settings of the queue are unusable")]
    Settings { source: Error },
}

impl ClaimError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { .. } => Exit::QueueUnreachable,
            Self::Denied { .. } => Exit::QueueDenied,
            Self::Broken { .. } => Exit::QueueBroken,
            Self::Settings { .. } => Exit::BadSettings,
        }
    }
}

/// Waits until the operator hands over a file, and claims it.
pub(crate) async fn claim(settings: &QueueSettings) -> Result<Claim, ClaimError> {
    let QueueSettings { server, stream, consumer, .. } = settings;
    let mut worker = Worker::new(server.clone(), stream, consumer);
    let mut patience = Patience::new(settings);
    loop {
        match worker.claim(BLOCK).await {
            Ok(Some(claim)) => return Ok(claim),
            Ok(None) => patience.restore(),
            Err(error) => patience.wait_after(error).await?,
        }
    }
}

/// How much longer to wait for Valkey.
pub(crate) struct Patience {
    unavailable_limit: Duration,
    denied_limit: Duration,
    backoff: Backoff,
    // One timer each: a server that alternates between unreachable and refusing must not be waited for
    // forever.
    unavailable_since: Option<Instant>,
    refused_since: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(settings: &QueueSettings) -> Self {
        let QueueSettings { unavailable_limit, denied_limit, .. } = *settings;
        let backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_LONGEST);
        Self { unavailable_limit, denied_limit, backoff, unavailable_since: None, refused_since: None }
    }

    /// Valkey has answered, so both timers start over.
    pub(crate) fn restore(&mut self) {
        (self.unavailable_since, self.refused_since) = (None, None);
        self.backoff.reset();
    }

    /// Waits before the next try, unless the failure has lasted too long.
    pub(crate) async fn wait_after(&mut self, source: Error) -> Result<(), ClaimError> {
        let (since, limit) = match &source {
            Error::Unavailable { .. } | Error::Full { .. } => {
                (&mut self.unavailable_since, self.unavailable_limit)
            }
            // A restarted Valkey has forgotten the user, and the operator restores it.
            Error::Denied { .. } => (&mut self.refused_since, self.denied_limit),
            Error::Config { .. } => return Err(ClaimError::Settings { source }),
            // A worker calls no scripts, so it does not expect their answers any more than the other errors
            // here.
            Error::Closed { .. }
            | Error::Lost { .. }
            | Error::Server { .. }
            | Error::Reply { .. }
            | Error::Page { .. } => return Err(ClaimError::Broken { source }),
        };
        let left = limit.saturating_sub(since.get_or_insert_with(Instant::now).elapsed());
        if left.is_zero() {
            return Err(match source {
                Error::Denied { .. } => ClaimError::Denied { limit, source },
                _ => ClaimError::Unreachable { limit, source },
            });
        }
        let wait = self.backoff.wait().min(left);
        eprintln!("trying again in {wait:.1?}: {}", chain(&source).escape_debug());
        tokio::time::sleep(wait).await;
        Ok(())
    }
}
