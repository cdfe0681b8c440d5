//! Which files are claimed, by which pods.

use std::time::Duration;

use crate::Error;
use crate::calls::Pending;
use crate::error::has_code;
use crate::message::EntryId;
use crate::run_queue::{BATCH_MAX, RunQueue, bytes};
use crate::script::Script;
use crate::stats::{State, Stats};

impl RunQueue {
    /// Visits every entry that has been pending for at least `min_idle`, in the order of their ids. Consumers that cannot be
    /// pods are removed on the way, because a worker may call itself anything, and what they hold is queued again; returns
    /// how many these were.
    pub async fn for_each_pending(
        &self,
        min_idle: Duration,
        mut visit: impl FnMut(&Pending),
    ) -> Result<u64, Error> {
        let idle = min_idle.as_millis().to_string();
        let (mut removed, mut start) = (0, "-".to_owned());
        loop {
            let arguments = [self.run.as_str(), &start, &idle, &self.batch.to_string()].map(bytes);
            let mut reply = self.call(Script::Pending, &arguments).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
            for (entry, consumer, idle) in reply.next::<Vec<(String, String, u64)>>()? {
                visit(&Pending { entry: EntryId(entry), consumer, idle: Duration::from_millis(idle) });
            }
            start = reply.next()?;
            removed += reply.next::<u64>()?;
            if start.is_empty() {
                return Ok(removed);
            }
        }
    }

    /// The entries that these consumers hold, in the order of their ids. One round trip for all of them.
    ///
    /// A worker processes the first of its entries. It can hold another one, which was handed to it when its connection was broken
    /// (a connection that broke while it waited): settle that one as [`Verdict::Released`].
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

    /// A group that is not there must not look like an empty one: it is lost, unless the run is closed.
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
