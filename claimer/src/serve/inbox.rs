//! Reads the inbox of this pod as long as it lives: new files go on, and files that are gone from it are settled.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use protocol::State;
use queue::{Claim, EntryId, Inbox, Worker};
use tokio::sync::mpsc;

use super::reports::Reports;
use super::stop::Stop;
use crate::claim::{ClaimError, Patience, QueueSettings};

/// How long one read blocks, and how often the whole inbox is read.
const BLOCK: Duration = Duration::from_secs(1);
/// The same once nothing new is to come: the pod only waits for its files to be settled.
const BLOCK_AT_THE_END: Duration = Duration::from_millis(50);
/// More than a pod is ever given.
const MOST: usize = 100;

/// Reads without end. Once the pod is to stop it passes on nothing more.
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
    /// Where files go, unless the pod is to stop.
    files: Option<mpsc::Sender<Claim>>,
    /// What was passed on and is still in the inbox.
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
            self.stop.set("it is told to");
            self.files = None;
        }
        for claim in inbox.claims {
            if !self.known.insert(claim.entry.clone()) {
                continue;
            }
            match &self.files {
                // The receiver goes only with the pod.
                Some(files) => drop(files.send(claim).await),
                None => self.reports.say(&claim.entry, State::Released),
            }
        }
    }

    /// What is gone from the inbox is settled, or was taken back. A file that was taken back may be handed to this pod again,
    /// and so may one that a queue forgot which lost its last second: it is new once more, although its id is not.
    async fn compare(&mut self, inbox: Inbox) {
        let held: HashSet<EntryId> = inbox.claims.iter().map(|claim| claim.entry.clone()).collect();
        self.known.retain(|entry| held.contains(entry));
        self.reports.keep(&held);
        self.pass_on(inbox).await;
    }
}
