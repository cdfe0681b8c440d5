//! The operator's side of the queue. Each method is one atomic transition; calling it again after a crash or a lost
//! reply is always safe.

use std::time::Duration;

use protocol::RunId;
use redis::streams::StreamRangeReply;

use crate::calls::{
    Closed, Ending, Enqueued, Finished, Opened, Page, Pending, Promoted, Reclaimed, Retention,
};
use crate::connection::Connection;
use crate::error::has_code;
use crate::message::{DeadLetter, EntryId, File};
use crate::outcome::{Fate, RetryPolicy, Settlement, Verdict, truncated};
use crate::reply::Reply;
use crate::script::Script;
use crate::stats::{FinalCounts, Listing, State, Stats};
use crate::{Error, Keys, random};

/// Entries of one script call: one page of ListObjectsV2, and short enough never to block the server noticeably.
pub const BATCH_MAX: usize = 1_000;

/// The open queue of one run.
#[derive(Clone)]
pub struct RunQueue {
    connection: Connection,
    run: RunId,
    keys: Keys,
    epoch: String,
    batch: usize,
}

impl RunQueue {
    /// Opens the queue of a run, or says why it cannot be opened. `owner` is the UID of the PipelineRun, `spec` the hash
    /// of what makes the run this run.
    pub async fn open(
        connection: &Connection,
        run: &RunId,
        owner: &str,
        spec: &str,
    ) -> Result<Opened, Error> {
        let queue = Self {
            connection: connection.clone(),
            run: run.clone(),
            keys: Keys::of(run),
            epoch: random::hex()?,
            batch: BATCH_MAX,
        };
        let mut reply = queue.call(Script::Open, &[owner, spec].map(bytes)).await?;
        match reply.word() {
            "CREATED" => Ok(Opened::Created(queue)),
            "RESUMED" => Ok(Opened::Resumed(Self { epoch: reply.next()?, ..queue })),
            "FINISHED" => Ok(Opened::Finished(finished(&mut reply)?)),
            "TAKEN" => Ok(Opened::Taken { owner: reply.next()? }),
            "USED" => Ok(Opened::Used),
            _ => reply.unexpected(),
        }
    }

    /// The queue of an epoch that the caller has written down, without asking the server. If it is another one by now,
    /// every call says that it is lost.
    pub fn of_epoch(connection: &Connection, run: &RunId, epoch: &str) -> Self {
        Self {
            connection: connection.clone(),
            run: run.clone(),
            keys: Keys::of(run),
            epoch: epoch.to_owned(),
            batch: BATCH_MAX,
        }
    }

    /// The same queue with smaller batches: for tests of what can happen between two of them.
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch: batch.clamp(1, BATCH_MAX), ..self }
    }

    /// Names this queue among all that ever were under its runId. Write it down: a queue that is opened with another
    /// one has lost its data.
    pub fn epoch(&self) -> &str {
        &self.epoch
    }

    /// The keys of the run.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Adds a page of files and moves the listing's cursor.
    pub async fn enqueue(&self, page: &Page) -> Result<Enqueued, Error> {
        let Page { after, next, files } = page;
        if files.len() > BATCH_MAX {
            let detail = format!("it has {} files, and a page has at most {BATCH_MAX}", files.len());
            return Err(Error::Page { detail });
        }
        // A cursor that does not move would let the same page in twice.
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
        ];
        for File { key, size, etag } in files {
            arguments.extend([bytes(key), bytes(&size.to_string()), bytes(etag)]);
        }
        let mut reply = self.call(Script::Enqueue, &arguments).await?;
        match reply.word() {
            "ADDED" => Ok(Enqueued::Added { total: reply.next()? }),
            "SUPERSEDED" => Ok(Enqueued::Superseded(listing(&mut reply)?)),
            _ => reply.unexpected(),
        }
    }

    /// Settles entries whose attempt has ended. The fates are in the order of the settlements.
    pub async fn settle(&self, settlements: &[Settlement], policy: &RetryPolicy) -> Result<Vec<Fate>, Error> {
        let mut fates = Vec::with_capacity(settlements.len());
        for batch in settlements.chunks(self.batch) {
            let mut arguments = self.attempt_arguments(policy);
            for Settlement { entry, consumer, verdict } in batch {
                let (word, failure) = match verdict {
                    Verdict::Succeeded => ("succeeded", None),
                    Verdict::Failed(failure) => ("failed", Some(failure)),
                    Verdict::Rejected(failure) => ("rejected", Some(failure)),
                    Verdict::Released => ("released", None),
                };
                arguments.extend([bytes(entry.as_str()), bytes(consumer), bytes(word)]);
                if let Some(failure) = failure {
                    let exit_code = failure.exit_code().map(|code| code.to_string()).unwrap_or_default();
                    arguments.extend([
                        bytes(failure.reason()),
                        bytes(&exit_code),
                        bytes(&random::fraction()?),
                    ]);
                }
            }
            fates.extend(read_fates(self.call(Script::Settle, &arguments).await?)?);
        }
        Ok(fates)
    }

    /// Settles entries of dead consumers as failed attempts. `judge` is asked about every entry that is pending, and
    /// gives the reason if its consumer is dead. An entry that has been idle for less than `min_idle` is left alone.
    /// Pages through the whole pending list, so that no number of living consumers hides a dead one, and then queues
    /// again what was handed out and is held by nobody.
    pub async fn reclaim(
        &self,
        min_idle: Duration,
        policy: &RetryPolicy,
        mut judge: impl FnMut(&Pending) -> Option<String>,
    ) -> Result<Reclaimed, Error> {
        let mut fates = Vec::new();
        let mut after = None;
        loop {
            let page = self.pending(after.as_ref(), min_idle, self.batch).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.entry.clone());
            let dead: Vec<(&Pending, String)> =
                page.iter().filter_map(|pending| Some((pending, judge(pending)?))).collect();
            fates.extend(self.reclaim_from(&dead, min_idle, policy).await?);
            if page.len() < self.batch {
                break;
            }
        }
        Ok(Reclaimed { fates, held_by_nobody: self.recover().await? })
    }

    /// Settles entries whose consumers were judged dead, each with the reason, if they are still held and idle. A part of
    /// [`Self::reclaim`], for tests of what can happen between judging and doing.
    pub async fn reclaim_from(
        &self,
        dead: &[(&Pending, String)],
        min_idle: Duration,
        policy: &RetryPolicy,
    ) -> Result<Vec<Fate>, Error> {
        if dead.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = self.attempt_arguments(policy);
        for (pending, reason) in dead {
            arguments.extend([
                bytes(pending.entry.as_str()),
                bytes(&pending.consumer),
                bytes(&min_idle.as_millis().to_string()),
                bytes(truncated(reason)),
                bytes(&random::fraction()?),
            ]);
        }
        read_fates(self.call(Script::Reclaim, &arguments).await?)
    }

    /// Queues again what was handed out and is held by nobody. A part of [`Self::reclaim`], too.
    pub async fn recover(&self) -> Result<u64, Error> {
        let (mut recovered, mut start) = (0, "-".to_owned());
        loop {
            let arguments = [self.run.as_str(), &start, &self.batch.to_string()].map(bytes);
            let mut reply = self.call(Script::Recover, &arguments).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
            recovered += reply.next::<u64>()?;
            let last: String = reply.next()?;
            if last.is_empty() {
                return Ok(recovered);
            }
            start = format!("({last}");
        }
    }

    /// A page of the pending entries that have been idle for at least `min_idle`, in the order of their ids.
    pub async fn pending(
        &self,
        after: Option<&EntryId>,
        min_idle: Duration,
        count: usize,
    ) -> Result<Vec<Pending>, Error> {
        const DOING: &str = "list claimed files";
        let start = after.map_or_else(|| "-".to_owned(), |entry| format!("({entry}"));
        let mut command = redis::cmd("XPENDING");
        command.arg(&self.keys.work).arg(&self.keys.group).arg("IDLE").arg(min_idle.as_millis().to_string());
        command.arg(start).arg("+").arg(count);
        match self.connection.command::<Vec<PendingRow>>(DOING, &command).await {
            Ok(rows) => Ok(rows.into_iter().map(pending_of).collect()),
            Err(error) => Err(self.explained(DOING, error).await),
        }
    }

    /// The entries that these consumers hold, in the order of their ids. One round trip for all of them.
    ///
    /// A worker processes the first of its entries. It can hold another one, which was handed to it while nobody listened
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

    /// Moves files whose back-off is over to the stream, at most 1,000.
    pub async fn promote(&self) -> Result<Promoted, Error> {
        let arguments = [bytes(self.run.as_str()), bytes(&self.batch.to_string())];
        let mut reply = self.call(Script::Promote, &arguments).await?;
        match reply.word() {
            "OK" => Ok(Promoted { moved: reply.next()?, next: duration(reply.next()?) }),
            _ => reply.unexpected(),
        }
    }

    /// Ends the run. `outcome` is written into the ledger for whoever asks later.
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
        let ledger = retention.ledger.map_or(0, |ledger| ledger.as_millis().max(1));
        let arguments = [
            self.run.as_str(),
            reason,
            outcome,
            &retention.details.as_millis().max(1).to_string(),
            &ledger.to_string(),
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

    /// Every count at one instant, in one round trip. Exact, or an error.
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
            delayed: reply.next()?,
            next_retry: duration(reply.next()?),
        })
    }

    /// A page of the dead letters, in the order in which they failed.
    pub async fn dead_letters(
        &self,
        after: Option<&EntryId>,
        count: usize,
    ) -> Result<Vec<DeadLetter>, Error> {
        const DOING: &str = "list dead letters";
        let start = after.map_or_else(|| "-".to_owned(), |entry| format!("({entry}"));
        let mut pipeline = redis::pipe();
        pipeline.cmd("HGET").arg(&self.keys.meta).arg("epoch");
        pipeline.cmd("XRANGE").arg(&self.keys.dlq).arg(start).arg("+").arg("COUNT").arg(count);
        let (epoch, entries): (Option<String>, StreamRangeReply) =
            self.connection.pipeline(DOING, &pipeline).await?;
        // No dead letters and no queue must not look alike.
        if epoch.as_ref() != Some(&self.epoch) {
            return Err(Error::Lost { doing: DOING });
        }
        entries.ids.into_iter().map(|entry| DeadLetter::read(DOING, entry)).collect()
    }

    /// Removes everything of a run but its entry in the ledger, if it still belongs to `owner`.
    pub async fn delete(connection: &Connection, run: &RunId, owner: &str) -> Result<(), Error> {
        let mut reply = Self::of_epoch(connection, run, "").call(Script::Delete, &[bytes(owner)]).await?;
        match reply.word() {
            // Taken by another run: its keys are none of ours.
            "DELETED" | "TAKEN" => reply.next::<redis::Value>().map(|_| ()),
            _ => reply.unexpected(),
        }
    }

    fn attempt_arguments(&self, policy: &RetryPolicy) -> Vec<Vec<u8>> {
        let RetryPolicy { max_attempts, backoff_initial, backoff_max, keep_results } = policy;
        let numbers = [
            max_attempts.to_string(),
            backoff_initial.as_millis().to_string(),
            backoff_max.as_millis().to_string(),
            keep_results.to_string(),
        ];
        std::iter::once(bytes(self.run.as_str())).chain(numbers.iter().map(|number| bytes(number))).collect()
    }

    async fn call(&self, script: Script, arguments: &[Vec<u8>]) -> Result<Reply, Error> {
        let mut all = vec![bytes(&self.keys.group), bytes(&self.epoch)];
        all.extend_from_slice(arguments);
        let reply =
            Reply::read(script.doing(), self.connection.script(script, &self.keys.in_order(), &all).await?)?;
        match (script, reply.word()) {
            (Script::Reclaim | Script::Recover, "CLOSED") => {
                Err(Error::Closed { stream: self.keys.work.clone() })
            }
            _ => Ok(reply),
        }
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

fn read_fates(mut reply: Reply) -> Result<Vec<Fate>, Error> {
    if reply.word() != "OK" {
        return reply.unexpected();
    }
    let doing = Script::Settle.doing();
    let fates: Vec<redis::Value> = reply.next()?;
    fates
        .into_iter()
        .map(|fate| {
            let mut fate = Reply::read(doing, fate)?;
            match fate.word() {
                "SUCCEEDED" => Ok(Fate::Succeeded),
                "RELEASED" => Ok(Fate::Released),
                "RETRYING" => Ok(Fate::Retrying {
                    file: fate.next()?,
                    attempts: fate.next()?,
                    delay: Duration::from_millis(fate.next()?),
                }),
                "DEAD" => Ok(Fate::DeadLettered { file: fate.next()?, attempts: fate.next()? }),
                "IGNORED" => Ok(Fate::Ignored),
                _ => fate.unexpected(),
            }
        })
        .collect()
}

fn finished(reply: &mut Reply) -> Result<Finished, Error> {
    Ok(Finished {
        outcome: reply.next()?,
        counts: FinalCounts {
            total: reply.next()?,
            succeeded: reply.next()?,
            failed: reply.next()?,
            retried: reply.next()?,
            reclaimed: reply.next()?,
        },
    })
}

fn listing(reply: &mut Reply) -> Result<Listing, Error> {
    let cursor: String = reply.next()?;
    let complete: String = reply.next()?;
    Ok(if complete == "1" { Listing::Complete } else { Listing::UpTo(cursor) })
}

/// Scripts say -1 for "none".
fn duration(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

fn bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}
