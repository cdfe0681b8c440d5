//! The worker's side of the queue: it reads the files that the operator handed to this pod, and, if the pod
//! processes many, reports on them. It can do nothing else, and its user has no other rights.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::streams::StreamReadReply;

use crate::Error;
use crate::connection::Server;
use crate::keys::{beside, inbox_beside};
use crate::message::{Claim, EntryId};

/// The field of an entry that tells a worker to end.
pub(crate) const STOP: &str = "stop";
const CLAIMING: &str = "claim a file";
const REPORTING: &str = "report the outcome of files";

/// The contents of a pod's inbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inbox {
    /// Its files, oldest first.
    pub claims: Vec<Claim>,
    /// Whether it was told to end: it gets no further files.
    pub is_told_to_stop: bool,
    /// The last entry that was read, whether a file or not.
    pub last: Option<EntryId>,
}

/// A consumer of one run: a pod.
pub struct Worker {
    server: Server,
    inbox: String,
    connection: Option<(MultiplexedConnection, Duration)>,
}

impl Worker {
    /// A consumer that is not connected yet; the first claim connects, and so does each claim after an error.
    pub fn new(server: Server, stream: &str, consumer: &str) -> Self {
        Self { server, inbox: inbox_beside(stream, consumer), connection: None }
    }

    /// The pod's file; waits up to `wait` for one. Until the file is settled, every call returns the same
    /// one, even to a restarted container and after a lost reply.
    pub async fn claim(&mut self, wait: Duration) -> Result<Option<Claim>, Error> {
        Ok(self.read(None, 1, Some(wait)).await?.claims.into_iter().next())
    }

    /// Files that were handed to this pod after `last`; waits up to `wait` for one.
    pub async fn claim_after(
        &mut self,
        last: Option<&EntryId>,
        most: usize,
        wait: Duration,
    ) -> Result<Inbox, Error> {
        self.read(last, most, Some(wait)).await
    }

    /// All files that this pod holds. A file that is missing was settled or taken back.
    pub async fn held(&mut self, most: usize) -> Result<Inbox, Error> {
        self.read(None, most, None).await
    }

    async fn read(
        &mut self,
        last: Option<&EntryId>,
        most: usize,
        wait: Option<Duration>,
    ) -> Result<Inbox, Error> {
        let longest_wait = wait.unwrap_or_default();
        let (mut connection, made_for) = match self.connection.take() {
            // Replies on this connection may take as long as the wait for which it was made.
            Some((connection, made_for)) if made_for >= longest_wait => (connection, made_for),
            _ => (self.server.connect_blocking(longest_wait).await?, longest_wait),
        };
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(most);
        if let Some(wait) = wait {
            // BLOCK 0 would wait without a limit.
            command.arg("BLOCK").arg(wait.as_millis().max(1).to_string());
        }
        command.arg("STREAMS").arg(&self.inbox).arg(last.map_or("0", EntryId::as_str));
        let reply: Option<StreamReadReply> =
            command.query_async(&mut connection).await.map_err(|error| Error::from_redis(CLAIMING, error))?;
        // A connection is kept only if all its replies were read.
        self.connection = Some((connection, made_for));
        let mut inbox = Inbox::default();
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            inbox.last = Some(entry.id.clone().into());
            if entry.map.contains_key(STOP) {
                inbox.is_told_to_stop = true;
            } else {
                inbox.claims.push(Claim::read(CLAIMING, entry)?);
            }
        }
        Ok(inbox)
    }
}

/// Reports on the files of a pod. It has its own connection, because that of a [`Worker`] is busy waiting.
pub struct Reporter {
    server: Server,
    states: String,
    connection: Option<MultiplexedConnection>,
}

impl Reporter {
    /// A reporter that is not connected yet.
    pub fn new(server: Server, stream: &str) -> Self {
        Self { server, states: beside(stream, "states"), connection: None }
    }

    /// Writes reports on entries, replacing earlier ones. Repeating a report changes nothing.
    pub async fn report(&mut self, reports: &[(EntryId, String)]) -> Result<(), Error> {
        if reports.is_empty() {
            return Ok(());
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.server.connect_blocking(Duration::ZERO).await?,
        };
        let mut command = redis::cmd("HSET");
        command.arg(&self.states);
        for (entry, report) in reports {
            command.arg(entry.as_str()).arg(report);
        }
        command
            .query_async::<u64>(&mut connection)
            .await
            .map_err(|error| Error::from_redis(REPORTING, error))?;
        self.connection = Some(connection);
        Ok(())
    }
}
