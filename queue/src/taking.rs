//! What workers say about the files that they hold: taken by the operator, who decides.

use std::time::Duration;

use protocol::RunId;

use crate::Error;
use crate::connection::Connection;
use crate::message::EntryId;
use crate::outcome::RetryPolicy;
use crate::run_queue::{RunQueue, bytes};
use crate::script::Script;

/// What all reports of a run may take together. A worker can write anything, so that more of it is no report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportsLimit {
    /// How many.
    pub reports: u64,
    /// How many bytes of the server's memory.
    pub bytes: u64,
}

/// What was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Files that were reported as succeeded, and are settled.
    pub succeeded: u64,
    /// The pods that these belonged to: they have room for others.
    pub served: Vec<String>,
    /// The key of one of them, which `stats` has as the canary from now on.
    pub newest: Option<String>,
    /// Of all files that were fetched, whatever became of them since, how long ago the last was handed out: it was fetched after
    /// that.
    pub fetched_within: Option<Duration>,
    /// Files that ended in any other way. They stay until they are settled.
    pub reports: Vec<Reported>,
    /// Whether there was more than reports can be, so that all of it was dropped.
    pub is_flooded: bool,
}

/// What the worker that holds a file says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The file's entry.
    pub entry: EntryId,
    /// Its words.
    pub report: String,
}

impl RunQueue {
    /// Settles what workers report as succeeded, and returns what else they report, all of it once.
    pub async fn take(&self, limit: ReportsLimit, policy: &RetryPolicy) -> Result<Taken, Error> {
        let mut taken = Taken::default();
        let mut cursor = "0".to_owned();
        loop {
            let mut arguments = self.attempt_arguments(policy);
            let limits = [limit.reports.to_string(), limit.bytes.to_string()];
            arguments.push(bytes(&cursor));
            arguments.extend(limits.iter().map(|number| bytes(number)));
            let mut reply = self.call(Script::Take, &arguments).await?;
            match reply.word() {
                "OK" => {}
                "FLOODED" => return Ok(Taken { is_flooded: true, ..taken }),
                _ => return reply.unexpected(),
            }
            cursor = reply.next()?;
            taken.succeeded += reply.next::<u64>()?;
            taken.served.extend(reply.next::<Vec<String>>()?);
            // A worker can write anything, also what is no text.
            for (entry, report) in reply.next::<Vec<(Vec<u8>, Vec<u8>)>>()? {
                let entry = EntryId(text(&entry));
                taken.reports.push(Reported { entry, report: text(&report) });
            }
            taken.newest = Some(reply.next::<String>()?).filter(|key| !key.is_empty()).or(taken.newest);
            let fetched = u64::try_from(reply.next::<i64>()?).ok().map(Duration::from_millis);
            taken.fetched_within = taken.fetched_within.into_iter().chain(fetched).min();
            if cursor == "0" {
                return Ok(taken);
            }
        }
    }

    /// Removes what workers said about the files of a run, if it still belongs to `owner`.
    pub(crate) async fn forget_reports(
        connection: &Connection,
        run: &RunId,
        owner: &str,
    ) -> Result<(), Error> {
        let reply = Self::of_epoch(connection, run, "").call(Script::Forget, &[bytes(owner)]).await?;
        match reply.word() {
            // Taken by another run: its reports are none of ours.
            "FORGOTTEN" | "TAKEN" => Ok(()),
            _ => reply.unexpected(),
        }
    }

    /// What workers last said about entries; nothing of those that they have not mentioned.
    pub async fn reports_of(&self, entries: &[EntryId]) -> Result<Vec<Option<String>>, Error> {
        const DOING: &str = "read the reports of workers";
        let mut reports = Vec::with_capacity(entries.len());
        for batch in entries.chunks(self.batch) {
            let mut command = redis::cmd("HMGET");
            command.arg(&self.keys.states).arg(batch.iter().map(EntryId::as_str).collect::<Vec<_>>());
            let found: Vec<Option<Vec<u8>>> = self.connection.command(DOING, &command).await?;
            reports.extend(found.into_iter().map(|report| report.as_deref().map(text)));
        }
        Ok(reports)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
