//! The runs whose queues an operator has opened. A run that is removed by force while no operator runs leaves
//! its queue and its workers' user behind: Kubernetes remembers nothing of it, so the server does.

use std::collections::BTreeMap;

use protocol::RunId;

use crate::Error;
use crate::calls::Owner;
use crate::connection::Connection;
use crate::run_queue::bytes;
use crate::script::Script;

/// Runs per request: an entry is longer than 100 bytes, and a reply stays small.
const SCAN_COUNT: usize = 1_000;

/// The runs that one installation of the operator knows.
#[derive(Clone)]
pub struct KnownRuns {
    connection: Connection,
    key: String,
}

impl KnownRuns {
    /// Those of the installation with this id. Others may use the same server, and their runs are none of our
    /// business.
    pub fn of(connection: &Connection, installation: &str) -> Self {
        // No id of a run is empty, so this is no run's key, and no worker may read it.
        Self { connection: connection.clone(), key: format!("pr::runs:{installation}") }
    }

    /// Adds a run, before its queue is opened: a crash in between leaves a name too many, and never one too
    /// few.
    pub async fn add(&self, run: &RunId, owner: &Owner) -> Result<(), Error> {
        let Owner { uid, namespace, name } = owner;
        let entry = format!("{namespace} {name} {}", run.key("work"));
        self.connection.script(Script::Remember, &[&self.key], &[bytes(uid), bytes(&entry)]).await?;
        Ok(())
    }

    /// Forgets a run of which nothing is left on the server.
    pub async fn remove(&self, uid: &str) -> Result<(), Error> {
        let mut remove = redis::cmd("HDEL");
        self.connection.command("forget a run", remove.arg(&self.key).arg(uid)).await
    }

    /// All of them, by UID. A run that is added meanwhile may be missing.
    pub async fn all(&self) -> Result<BTreeMap<String, (RunId, Owner)>, Error> {
        let (mut found, mut cursor) = (BTreeMap::new(), 0_u64);
        loop {
            let mut scan = redis::cmd("HSCAN");
            let scan = scan.arg(&self.key).arg(cursor).arg("COUNT").arg(SCAN_COUNT);
            let (next, entries): (u64, Vec<(String, String)>) =
                self.connection.command("read which runs are known", scan).await?;
            found.extend(
                entries.into_iter().filter_map(|(uid, entry)| Some((uid.clone(), read(uid, &entry)?))),
            );
            if next == 0 {
                return Ok(found);
            }
            cursor = next;
        }
    }
}

/// An entry, if it is one of ours.
fn read(uid: String, entry: &str) -> Option<(RunId, Owner)> {
    let mut words = entry.split(' ').map(str::to_owned);
    let (namespace, name, stream) = (words.next()?, words.next()?, words.next()?);
    let run = stream.strip_prefix("pr:")?.strip_suffix(":work")?.parse().ok()?;
    Some((run, Owner { uid, namespace, name }))
}
