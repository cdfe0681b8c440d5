//! The claimed files, and the pods that hold them.

use std::time::Duration;

use crate::Error;
use crate::calls::Pending;
use crate::error::has_code;
use crate::message::EntryId;
use crate::run_queue::{BATCH_MAX, RunQueue, bytes};
use crate::script::Script;
use crate::stats::{State, Stats};
use crate::worker::STOP;

/// How long a message to end is kept: a live pod reads it at once.
const STOP_LIFETIME: Duration = Duration::from_secs(60);

impl RunQueue {
    /// Gives a file to each of these pods that holds none, as long as there are files. Returns the pods that
    /// now have one; each finds it in its inbox.
    pub async fn hand_out(&self, pods: &[String]) -> Result<Vec<String>, Error> {
        self.fill(pods, 1).await
    }

    /// Gives each of these pods files until it holds `most`, as long as there are files. Returns the pods
    /// that now have any.
    pub async fn fill(&self, pods: &[String], most: usize) -> Result<Vec<String>, Error> {
        let mut served = Vec::new();
        for batch in pods.chunks(self.batch) {
            let most = std::iter::once(bytes(&most.to_string()));
            let arguments: Vec<_> = most.chain(batch.iter().map(|pod| bytes(pod))).collect();
            let mut reply = self.call(Script::HandOut, &arguments).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
            served.extend(reply.next::<Vec<String>>()?);
        }
        Ok(served)
    }

    /// Tells pods to finish their current file and end. They get no further files. Repeat the call until they
    /// have ended, because the message is lost if the inbox is.
    pub async fn stop(&self, pods: &[String]) -> Result<(), Error> {
        let lifetime = STOP_LIFETIME.as_millis().to_string();
        for batch in pods.chunks(self.batch) {
            let arguments = [STOP, &lifetime].into_iter().chain(batch.iter().map(String::as_str));
            let reply = self.call(Script::Stop, &arguments.map(bytes).collect::<Vec<_>>()).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
        }
        Ok(())
    }

    /// Visits every entry that has been pending for at least `min_idle`, in the order of their ids. Consumers
    /// that cannot be pods are removed along the way (claimers of older versions can use any name), and their
    /// entries are queued again; returns the number of such consumers. Entries that are claimed meanwhile are
    /// not visited, so that the visit ends.
    pub async fn for_each_pending(
        &self,
        min_idle: Duration,
        mut visit: impl FnMut(&Pending),
    ) -> Result<u64, Error> {
        let idle = min_idle.as_millis().to_string();
        let (mut removed, mut start, mut end) = (0, "-".to_owned(), String::new());
        loop {
            let arguments = [self.run.as_str(), &start, &end, &idle, &self.batch.to_string()].map(bytes);
            let mut reply = self.call(Script::Pending, &arguments).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
            for (entry, consumer, idle) in reply.next::<Vec<(String, String, u64)>>()? {
                visit(&Pending { entry: EntryId(entry), consumer, idle: Duration::from_millis(idle) });
            }
            start = reply.next()?;
            end = reply.next()?;
            removed += reply.next::<u64>()?;
            if start.is_empty() {
                return Ok(removed);
            }
        }
    }

    /// The entries that these consumers hold, in the order of their ids, in one round trip.
    ///
    /// A worker processes the first of its entries. Claimers of older versions, which requested files
    /// themselves, can hold another one: settle it as [`crate::Verdict::Released`].
    pub async fn claims_of(&self, consumers: &[String]) -> Result<Vec<Pending>, Error> {
        const DOING: &str = "find the files of pods";
        let mut claims = Vec::new();
        for batch in consumers.chunks(self.batch) {
            let mut pipeline = redis::pipe();
            for consumer in batch {
                let command = pipeline.cmd("XPENDING").arg(&self.keys.work).arg(&self.keys.group);
                command.arg("-").arg("+").arg(BATCH_MAX).arg(consumer);
            }
            let rows: Vec<Vec<PendingRow>> = match self.connection.pipeline(DOING, &pipeline).await {
                Ok(rows) => rows,
                Err(error) => return Err(self.explained(DOING, error).await),
            };
            claims.extend(rows.into_iter().flatten().map(pending_of));
        }
        Ok(claims)
    }

    /// Explains a missing group, which must not look like an empty one: its data is lost, unless the run is
    /// closed.
    async fn explained(&self, doing: &'static str, error: Error) -> Error {
        if !matches!(&error, Error::Server { source, .. } if has_code(source, "NOGROUP")) {
            return error;
        }
        match self.stats().await {
            Ok(Stats { state: State::Closed, .. }) => Error::Closed { stream: self.keys.work.clone() },
            Ok(_) | Err(Error::Lost { .. }) => Error::Lost { doing },
            Err(other) => other,
        }
    }
}

type PendingRow = (String, String, u64, u64);

fn pending_of((entry, consumer, idle, _deliveries): PendingRow) -> Pending {
    Pending { entry: EntryId(entry), consumer, idle: Duration::from_millis(idle) }
}
