//! Takes the workers' reports on the files that they hold, for the operator to decide.

use std::time::Duration;

use protocol::RunId;

use crate::Error;
use crate::connection::Connection;
use crate::message::EntryId;
use crate::outcome::RetryPolicy;
use crate::run_queue::{RunQueue, bytes};
use crate::script::Script;

/// The most that all reports of a run may occupy together. A worker can write anything; data beyond the limit
/// is not treated as reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportsLimit {
    /// The number of reports.
    pub reports: u64,
    /// Their bytes in the server's memory.
    pub bytes: u64,
}

/// The result of taking reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Files that were reported as succeeded, and are settled.
    pub succeeded: u64,
    /// The pods that these files belonged to: they have room for more.
    pub served: Vec<String>,
    /// The key of one of these files, which is the canary of `stats` from now on.
    pub newest: Option<String>,
    /// How long ago the last of all fetched files was handed out, regardless of their fates: it was fetched
    /// after that.
    pub fetched_within: Option<Duration>,
    /// Files that ended in any other way. Their reports stay until they are settled.
    pub reports: Vec<Reported>,
    /// Whether the reports exceeded the limit, so that all of them were dropped.
    pub is_flooded: bool,
}

/// A report by the worker that holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The file's entry.
    pub entry: EntryId,
    /// The text of the report.
    pub report: String,
}

impl RunQueue {
    /// Settles files that workers report as succeeded, and returns all other reports once.
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
            // A worker can write anything, even invalid text.
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

    /// Removes the workers' reports on the files of a run, if it still belongs to `owner`.
    pub(crate) async fn forget_reports(
        connection: &Connection,
        run: &RunId,
        owner: &str,
    ) -> Result<(), Error> {
        let reply = Self::of_epoch(connection, run, "").call(Script::Forget, &[bytes(owner)]).await?;
        match reply.word() {
            // Another run has taken the id, so the reports are not ours.
            "FORGOTTEN" | "TAKEN" => Ok(()),
            _ => reply.unexpected(),
        }
    }

    /// The workers' latest reports on entries; `None` for entries without one.
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
