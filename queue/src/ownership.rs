//! Ownership of queues: opening one, taking it over, remembering that its run exists, and deleting it.

use protocol::RunId;

use crate::calls::{Opened, Owner, Retention};
use crate::connection::Connection;
use crate::run_queue::{BATCH_MAX, RunQueue, bytes, finished, ledger_ms};
use crate::script::Script;
use crate::{Error, QueueKeys, random};

impl RunQueue {
    /// Opens the queue of a run, or returns why it cannot be opened. `spec` is the hash that identifies the
    /// run's work. If the run is finished, the ledger remembers it for another `retention`.
    pub async fn open(
        connection: &Connection,
        run: &RunId,
        owner: &Owner,
        spec: &str,
        retention: &Retention,
    ) -> Result<Opened, Error> {
        let queue = Self::of_epoch(connection, run, &random::hex()?);
        let Owner { uid, namespace, name } = owner;
        let arguments = [uid, namespace, name, spec, &ledger_ms(retention)].map(bytes);
        let mut reply = queue.call(Script::Open, &arguments).await?;
        match reply.word() {
            "CREATED" => Ok(Opened::Created(queue)),
            "RESUMED" => Ok(Opened::Resumed(Self { epoch: reply.next()?, ..queue })),
            "FINISHED" => Ok(Opened::Finished(finished(&mut reply)?)),
            "TAKEN" => {
                let owner = reply.next()?;
                let known = |text: String| Some(text).filter(|text| !text.is_empty());
                Ok(Opened::Taken { owner, namespace: known(reply.next()?), name: known(reply.next()?) })
            }
            "USED" => Ok(Opened::Used),
            _ => reply.unexpected(),
        }
    }

    /// Gives the queue of a run to the same run under another UID, after it was restored from a backup, or
    /// deleted and created again. The queue must still belong to `old_uid`, and to the same namespace and
    /// name. Returns whether the queue is ours now; if so, open it. The caller must know that no run with the
    /// old UID exists.
    pub async fn take_over(
        connection: &Connection,
        run: &RunId,
        old_uid: &str,
        owner: &Owner,
    ) -> Result<bool, Error> {
        let Owner { uid, namespace, name } = owner;
        let arguments = [old_uid, uid, namespace, name].map(bytes);
        let reply = Self::of_epoch(connection, run, "").call(Script::TakeOver, &arguments).await?;
        match reply.word() {
            "OK" => Ok(true),
            "REFUSED" => Ok(false),
            _ => reply.unexpected(),
        }
    }

    /// Tells the ledger that the PipelineRuns of these finished runs still exist, so that it remembers each
    /// for another `retention`.
    pub async fn seen(connection: &Connection, runs: &[RunId], retention: &Retention) -> Result<(), Error> {
        for batch in runs.chunks(BATCH_MAX) {
            let mut pipeline = redis::pipe();
            for run in batch {
                let ledger = QueueKeys::of(run).ledger;
                match retention.ledger {
                    Some(_) => pipeline.cmd("PEXPIRE").arg(ledger).arg(ledger_ms(retention)).ignore(),
                    None => pipeline.cmd("PERSIST").arg(ledger).ignore(),
                };
            }
            connection.pipeline::<()>("renew the record of finished runs", &pipeline).await?;
        }
        Ok(())
    }

    /// Removes everything of a run except its entry in the ledger, if it still belongs to `owner`.
    pub async fn delete(connection: &Connection, run: &RunId, owner: &str) -> Result<(), Error> {
        let mut reply = Self::of_epoch(connection, run, "").call(Script::Delete, &[bytes(owner)]).await?;
        match reply.word() {
            // Another run has taken the id, so the keys are not ours.
            "DELETED" | "TAKEN" => reply.next::<redis::Value>().map(|_| ()),
            _ => reply.unexpected(),
        }
    }
}
