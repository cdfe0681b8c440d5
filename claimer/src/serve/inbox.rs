//! Reads the pod's inbox as long as the pod lives: passes on new files, and drops files that are gone from it
//! because they are settled.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use protocol::State;
use queue::{Claim, EntryId, Inbox, Worker};
use tokio::sync::mpsc;

use super::reports::Reports;
use super::stop::Stop;
use crate::claim::{ClaimError, Patience, QueueSettings};

/// How long one read blocks, which is also how often the whole inbox is read.
const BLOCK: Duration = Duration::from_secs(1);
/// The same once the pod takes no new files and only waits for its files to be settled.
const BLOCK_AT_THE_END: Duration = Duration::from_millis(50);
/// More than a pod is ever given.
const MOST: usize = 100;

/// Reads until the task is dropped. Once the pod is about to stop, it passes on nothing new.
pub(crate) async fn read(
    settings: &QueueSettings,
    reports: &Reports,
    files: mpsc::Sender<Claim>,
    stop: &Stop,
) -> Result<(), ClaimError> {
    let mut worker = Worker::new(settings.server.clone(), &settings.stream, &settings.consumer);
    let mut patience = Patience::new(settings);
    let mut reader = Reader { files: Some(files), known: HashSet::new(), reports, stop };
    let (mut last, mut looked) = (None, Instant::now());
    loop {
        let wait = reader.wait();
        let read = async {
            let new = worker.claim_after(last.as_ref(), MOST, wait).await?;
            let look = looked.elapsed() >= wait;
            Ok((new, if look { Some(worker.held(MOST).await?) } else { None }))
        };
        let (new, all): (Inbox, Option<Inbox>) = match read.await {
            Ok(both) => both,
            Err(error) => {
                patience.wait_after(error).await?;
                continue;
            }
        };
        patience.restore();
        last = new.last.clone().or(last);
        reader.pass_on(new).await;
        if let Some(all) = all {
            looked = Instant::now();
            reader.compare(all).await;
        }
    }
}

struct Reader<'a> {
    /// Receives files, unless the pod is about to stop.
    files: Option<mpsc::Sender<Claim>>,
    /// Entries that were passed on and are still in the inbox.
    known: HashSet<EntryId>,
    reports: &'a Reports,
    stop: &'a Stop,
}

impl Reader<'_> {
    fn wait(&mut self) -> Duration {
        if self.stop.is_set() {
            self.files = None;
        }
        if self.files.is_some() { BLOCK } else { BLOCK_AT_THE_END }
    }

    async fn pass_on(&mut self, inbox: Inbox) {
        if inbox.is_told_to_stop {
            self.stop.set("the operator told it to");
            self.files = None;
        }
        for claim in inbox.claims {
            if !self.known.insert(claim.entry.clone()) {
                continue;
            }
            match &self.files {
                // The receiver lives as long as the pod.
                Some(files) => drop(files.send(claim).await),
                None => self.reports.say(&claim.entry, State::Released),
            }
        }
    }

    /// An entry that is gone from the inbox was settled or taken back. The operator may hand a file that it
    /// took back to this pod again. So may a queue that lost its last second: the file is then new again,
    /// although its id is not.
    async fn compare(&mut self, inbox: Inbox) {
        let held: HashSet<EntryId> = inbox.claims.iter().map(|claim| claim.entry.clone()).collect();
        self.known.retain(|entry| held.contains(entry));
        self.reports.keep(&held);
        self.pass_on(inbox).await;
    }
}
