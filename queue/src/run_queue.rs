//! The operator's side of the queue: listing, counting and ending a run. Its other parts are in
//! [`crate::ownership`], [`crate::settling`], [`crate::claims`] and [`crate::dead_letters`]. Each method is
//! one atomic transition or a series of them; calling it again after a crash or a lost reply is always safe.

use std::time::Duration;

use protocol::RunId;

use crate::calls::{Closed, Ending, Enqueued, Finished, Page, Promoted, Retention};
use crate::connection::Connection;
use crate::message::File;
use crate::outcome::truncated;
use crate::reply::Reply;
use crate::script::Script;
use crate::stats::{FinalCounts, Listing, Pause, State, Stats};
use crate::{Error, QueueKeys};

/// The most entries of one script call: a page of ListObjectsV2, and short enough never to block the server
/// noticeably.
pub const BATCH_MAX: usize = 1_000;

/// The open queue of one run.
#[derive(Clone)]
pub struct RunQueue {
    pub(crate) connection: Connection,
    pub(crate) run: RunId,
    pub(crate) keys: QueueKeys,
    pub(crate) epoch: String,
    pub(crate) batch: usize,
}

impl RunQueue {
    /// The queue of an epoch that the caller has recorded, without asking the server. If the epoch has
    /// changed, every call returns that the queue is lost.
    pub fn of_epoch(connection: &Connection, run: &RunId, epoch: &str) -> Self {
        Self {
            connection: connection.clone(),
            run: run.clone(),
            keys: QueueKeys::of(run),
            epoch: epoch.to_owned(),
            batch: BATCH_MAX,
        }
    }

    /// The same queue with smaller batches, for tests of events between two of them.
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch: batch.clamp(1, BATCH_MAX), ..self }
    }

    /// Distinguishes this queue from all earlier ones under its runId. Record it: a queue that opens with
    /// another epoch has lost its data.
    pub fn epoch(&self) -> &str {
        &self.epoch
    }

    /// The keys of the run.
    pub fn keys(&self) -> &QueueKeys {
        &self.keys
    }

    /// Adds a page of files and moves the listing's cursor, unless `high_water` files already wait or are
    /// being processed, or the server's memory runs short. A paused listing continues when half of them are
    /// done.
    pub async fn enqueue(&self, page: &Page, high_water: u64) -> Result<Enqueued, Error> {
        let Page { after, next, files, skipped } = page;
        if files.len() > BATCH_MAX {
            let detail = format!("it has {} files, and a page has at most {BATCH_MAX}", files.len());
            return Err(Error::Page { detail });
        }
        // If the cursor did not move, the same page could be added twice.
        if next.as_ref() == Some(after) {
            return Err(Error::Page {
                detail: format!("the next page begins where this one does, at {after:?}"),
            });
        }
        let complete = if next.is_none() { "1" } else { "0" };
        let mut arguments = vec![
            bytes(self.run.as_str()),
            bytes(after),
            bytes(next.as_deref().unwrap_or(after)),
            bytes(complete),
            // The number of files can never drop below a mark of 0.
            bytes(&high_water.max(1).to_string()),
            bytes(&BATCH_MAX.to_string()),
            bytes(&skipped.to_string()),
        ];
        for File { key, size, etag } in files {
            arguments.extend([bytes(key), bytes(&size.to_string()), bytes(etag)]);
        }
        let mut reply = self.call(Script::Enqueue, &arguments).await?;
        match reply.word() {
            "ADDED" => Ok(Enqueued::Added { total: reply.next()? }),
            "PAUSED" => {
                let reason: String = reply.next()?;
                Ok(Enqueued::Paused(pause(Script::Enqueue, &reason)?))
            }
            "SUPERSEDED" => Ok(Enqueued::Superseded(listing(&mut reply)?)),
            _ => reply.unexpected(),
        }
    }

    /// Moves files whose back-off is over to the stream, at most 1,000.
    pub async fn promote(&self) -> Result<Promoted, Error> {
        let arguments = [bytes(self.run.as_str()), bytes(&self.batch.to_string())];
        let mut reply = self.call(Script::Promote, &arguments).await?;
        match reply.word() {
            "OK" => Ok(Promoted { moved: reply.next()?, next: duration(reply.next()?) }),
            _ => reply.unexpected(),
        }
    }

    /// Ends the run. `outcome` is written to the ledger, for later calls of `open`.
    pub async fn close(
        &self,
        ending: Ending<'_>,
        outcome: &str,
        retention: &Retention,
    ) -> Result<Closed, Error> {
        let reason = match ending {
            Ending::Finish => "",
            Ending::Abort { reason: "" } => "Aborted",
            Ending::Abort { reason } => truncated(reason),
        };
        let arguments = [
            self.run.as_str(),
            reason,
            outcome,
            &retention.details.as_millis().max(1).to_string(),
            &ledger_ms(retention),
            &self.batch.to_string(),
        ];
        let mut reply = self.call(Script::Close, &arguments.map(bytes)).await?;
        match reply.word() {
            "CLOSED" => Ok(Closed::Closed(finished(&mut reply)?)),
            "MORE" => Ok(Closed::More { remaining: reply.next()? }),
            "UNFINISHED" => Ok(Closed::Unfinished { remaining: reply.next()? }),
            _ => reply.unexpected(),
        }
    }

    /// All counts at one instant, in one round trip. They are exact, or the call fails.
    pub async fn stats(&self) -> Result<Stats, Error> {
        let mut reply = self.call(Script::Stats, &[]).await?;
        if reply.word() != "OK" {
            return reply.unexpected();
        }
        let state = match reply.next::<String>()?.as_str() {
            "open" => State::Open,
            "closing" => State::Closing,
            "closed" => State::Closed,
            other => return Err(Error::reply(Script::Stats.doing(), format!("the state {other:?}"))),
        };
        Ok(Stats {
            state,
            listing: listing(&mut reply)?,
            total: reply.next()?,
            queued: reply.next()?,
            running: reply.next()?,
            succeeded: reply.next()?,
            failed: reply.next()?,
            retried: reply.next()?,
            reclaimed: reply.next()?,
            disrupted: reply.next()?,
            delayed: reply.next()?,
            next_retry: duration(reply.next()?),
            started: reply.next::<u64>()? == 1,
            paused: match reply.next::<String>()?.as_str() {
                "" => None,
                reason => Some(pause(Script::Stats, reason)?),
            },
            age: duration(reply.next()?),
            skipped: reply.next()?,
            canary: Some(reply.next::<String>()?).filter(|key| !key.is_empty()),
        })
    }

    /// Records that the run began this long ago, unless its start is already known; returns its age. From
    /// then on, `stats` includes it.
    pub async fn begin(&self, ago: Duration) -> Result<Duration, Error> {
        let mut reply = self.call(Script::Begin, &[bytes(&ago.as_millis().to_string())]).await?;
        match reply.word() {
            "OK" => Ok(Duration::from_millis(reply.next()?)),
            _ => reply.unexpected(),
        }
    }

    pub(crate) async fn call(&self, script: Script, arguments: &[Vec<u8>]) -> Result<Reply, Error> {
        let mut all = vec![bytes(&self.keys.group), bytes(&self.epoch)];
        all.extend_from_slice(arguments);
        let reply =
            Reply::read(script.doing(), self.connection.script(script, &self.keys.in_order(), &all).await?)?;
        match (script, reply.word()) {
            (
                Script::HandOut | Script::Take | Script::Reclaim | Script::Recover | Script::Pending,
                "CLOSED",
            ) => Err(Error::Closed { stream: self.keys.work.clone() }),
            _ => Ok(reply),
        }
    }
}

pub(crate) fn finished(reply: &mut Reply) -> Result<Finished, Error> {
    Ok(Finished {
        outcome: reply.next()?,
        counts: FinalCounts {
            total: reply.next()?,
            succeeded: reply.next()?,
            failed: reply.next()?,
            retried: reply.next()?,
            reclaimed: reply.next()?,
        },
        listed: reply.next::<String>()? == "1",
        cursor: reply.next()?,
    })
}

fn listing(reply: &mut Reply) -> Result<Listing, Error> {
    let cursor: String = reply.next()?;
    let complete: String = reply.next()?;
    Ok(if complete == "1" { Listing::Complete } else { Listing::UpTo(cursor) })
}

fn pause(script: Script, reason: &str) -> Result<Pause, Error> {
    reason.parse().map_err(|_| Error::reply(script.doing(), format!("the pause {reason:?}")))
}

/// The ledger's retention in the form that scripts read: 0 for no limit.
pub(crate) fn ledger_ms(retention: &Retention) -> String {
    retention.ledger.map_or(0, |ledger| ledger.as_millis().max(1)).to_string()
}

/// Scripts return -1 for "none".
fn duration(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

pub(crate) fn bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}
