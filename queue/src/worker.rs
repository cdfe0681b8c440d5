//! The worker's side of the queue: claim one file. It can do nothing else, and its user may do nothing else.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::streams::StreamReadReply;

use crate::Error;
use crate::connection::Server;
use crate::message::Claim;

/// A consumer of one run: a pod.
pub struct Worker {
    server: Server,
    stream: String,
    group: String,
    consumer: String,
    connection: Option<(MultiplexedConnection, Duration)>,
}

impl Worker {
    /// A consumer that is not connected yet; the first claim connects, and so does each claim after an error.
    pub fn new(
        server: Server,
        stream: impl Into<String>,
        group: impl Into<String>,
        consumer: impl Into<String>,
    ) -> Self {
        Self {
            server,
            stream: stream.into(),
            group: group.into(),
            consumer: consumer.into(),
            connection: None,
        }
    }

    /// Claims a file, waiting for one as long as `wait`. A worker that holds a file already gets the same one again: its
    /// reply was lost, or its container was restarted.
    pub async fn claim(&mut self, wait: Duration) -> Result<Option<Claim>, Error> {
        let mut connection = match self.connection.take() {
            // Its replies may take as long as the wait it was made for.
            Some((connection, longest)) if longest >= wait => connection,
            _ => self.server.connect_blocking(wait).await?,
        };
        let mut claim = self.read(&mut connection, None).await?;
        if claim.is_none() && self.read(&mut connection, Some(wait)).await?.is_some() {
            // Not what was just handed out, but the first that we hold: an earlier request of ours, whose connection broke
            // while it waited, may have been served meanwhile. Whoever asks for our entry gets the same answer.
            claim = self.read(&mut connection, None).await?;
        }
        // Only a connection whose replies were all read is kept.
        self.connection = Some((connection, wait));
        claim.map(|entry| Claim::read("claim a file", entry)).transpose()
    }

    /// Own pending entry (`None`), or a new one within a time.
    async fn read(
        &self,
        connection: &mut MultiplexedConnection,
        wait: Option<Duration>,
    ) -> Result<Option<redis::streams::StreamId>, Error> {
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(&self.group).arg(&self.consumer).arg("COUNT").arg(1);
        if let Some(wait) = wait {
            // BLOCK 0 would wait without a limit.
            command.arg("BLOCK").arg(wait.as_millis().max(1).to_string());
        }
        command.arg("STREAMS").arg(&self.stream).arg(if wait.is_some() { ">" } else { "0" });
        let reply: Option<StreamReadReply> =
            command.query_async(connection).await.map_err(|error| match error.code() {
                // The stream was deleted while we waited for it, or before.
                Some("NOGROUP" | "UNBLOCKED") => Error::Closed { stream: self.stream.clone() },
                _ => Error::from_redis("claim a file", error),
            })?;
        Ok(reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids).next())
    }
}
