//! Processes many files, one after the other: while filters work on one, the next are fetched, and the results of those before
//! are published. What became of each is reported, never acknowledged: the operator decides.

mod filters;
mod inbox;
mod reports;
mod room;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use protocol::{Exit, State, Transfer, TransferFailure};
use queue::{Claim, Reporter};
use storage::{Bucket, chain};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{self, JoinError, JoinHandle, JoinSet, LocalSet};

use crate::canary::Canary;
use crate::claim::QueueSettings;
use crate::exit::Failure;
use crate::fetch;
use crate::publish::Destination;
use crate::workspace::WorkspaceError;
use filters::Filters;
use filters::FiltersError;
pub use filters::Order;
use reports::Reports;
pub(crate) use room::make as make_room;
use room::{Room, Slot};

/// Objects that were reached last: few enough to be tried one after the other.
const CANARIES: usize = 3;
/// More than a pod is ever given.
const HELD_MAX: usize = 100;
/// The operator settles what a pod said last within this time, or finds it when the pod is gone.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
/// A queue that does not take it within this time does not answer.
const SAID_WITHIN: Duration = Duration::from_secs(2);

/// Why a pod cannot go on. The file that it works on is judged by how its containers ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error(transparent)]
    Filters(#[from] FiltersError),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error("a task of the worker ended")]
    Task(#[source] JoinError),
}

impl ServeError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Filters(error) => error.exit(),
            Self::Workspace(error) => error.exit(),
            Self::Task(_) => Exit::LocalIo,
        }
    }
}

/// Settings of `serve`.
#[derive(Debug)]
pub struct ServeSettings {
    /// The queue.
    pub queue: QueueSettings,
    /// Where files come from.
    pub source: Bucket,
    /// Objects of it that the run has fetched before.
    pub source_canaries: Vec<String>,
    /// Where results go.
    pub destination: Option<Destination>,
    /// Objects there that the run has published before.
    pub sink_canaries: Vec<String>,
    /// The filters, in their order.
    pub filters: Vec<String>,
    /// How they relate in time.
    pub order: Order,
    /// How long the filters may take for one file.
    pub file_timeout: Option<Duration>,
    /// Bytes of files that are fetched before their turn.
    pub prefetch_bytes: u64,
    /// Root of the volume that filters see a part of.
    pub room: PathBuf,
    /// Folder with a folder for the socket of each filter.
    pub links: PathBuf,
}

/// Storage, as all files use it.
struct Transfers {
    source: Reach,
    sink: Option<(Destination, Reach)>,
}

/// A bucket, and objects of it that were reached last.
struct Reach {
    bucket: Bucket,
    client: Client,
    /// Keys, the newest first.
    canaries: Mutex<VecDeque<String>>,
}

/// A file that is being fetched, or is.
struct Next {
    claim: Claim,
    fetched: JoinHandle<Result<Slot, TransferFailure>>,
    /// Its part of what may be fetched before its turn.
    share: OwnedSemaphorePermit,
}

/// Processes files until it is told to stop, and returns when all of them are settled.
pub(crate) async fn serve(settings: ServeSettings) -> Result<(), Failure> {
    // On one thread: there is far more to wait for than to compute.
    LocalSet::new().run_until(process_files(settings)).await
}

async fn process_files(settings: ServeSettings) -> Result<(), Failure> {
    let ServeSettings { queue, filters: names, order, file_timeout, prefetch_bytes, room, links, .. } =
        &settings;
    let (stop, told_to_stop) = watch::channel(false);
    let filters = tokio::select! {
        connected = Filters::connect(links, names, *order) => connected.map_err(ServeError::from)?,
        ended = crate::terminated() => return Err(ended),
    };
    eprintln!("{} filters are ready", names.len());
    let reports = Arc::new(Reports::new(&queue.consumer));
    let writing = task::spawn_local({
        let (reports, reporter) = (Arc::clone(&reports), Reporter::new(queue.server.clone(), &queue.stream));
        async move { reports.write(reporter).await }
    });
    let transfers = Arc::new(Transfers::of(&settings).await);
    let (files, handed_out) = mpsc::channel(HELD_MAX);
    // What is fetched before its turn is bounded by its bytes, and by how many files the operator hands to a pod.
    let (ready, next) = mpsc::channel(HELD_MAX);
    let work = Work {
        room: Room::new(room),
        filters,
        names: names.clone(),
        file_timeout: *file_timeout,
        transfers: Arc::clone(&transfers),
        reports: Arc::clone(&reports),
        publishing: JoinSet::new(),
    };
    let ahead = FetchAhead::new(Room::new(room), transfers, *prefetch_bytes);
    let outcome = tokio::select! {
        read = inbox::read(queue, &reports, files, &stop) => read.map_err(Failure::from),
        never = ahead.run(handed_out, ready) => match never {},
        never = stop_on_a_signal(&stop) => never,
        worked = work.run(next, told_to_stop) => worked.map_err(Failure::from),
    };
    // What this pod knows is said before it goes, if that is possible at all.
    let _ = tokio::time::timeout(SAID_WITHIN, reports.all_said()).await;
    writing.abort();
    outcome
}

/// A pod that is deleted, evicted or drained has some seconds: it finishes its file, if that is enough.
async fn stop_on_a_signal(stop: &watch::Sender<bool>) -> Result<(), Failure> {
    match crate::terminated().await {
        Failure::Terminated => {
            stop.send_replace(true);
            std::future::pending().await
        }
        failure => Err(failure),
    }
}

/// Fetches files before their turn.
struct FetchAhead {
    room: Room,
    transfers: Arc<Transfers>,
    /// In KiB.
    bytes: Arc<Semaphore>,
    most: u32,
}

impl FetchAhead {
    fn new(room: Room, transfers: Arc<Transfers>, prefetch_bytes: u64) -> Self {
        let most = u32::try_from(prefetch_bytes / 1024).unwrap_or(u32::MAX).max(1);
        Self { room, transfers, bytes: Arc::new(Semaphore::new(most as usize)), most }
    }

    /// Goes on as long as the pod lives.
    async fn run(&self, mut files: mpsc::Receiver<Claim>, ready: mpsc::Sender<Next>) -> Infallible {
        let mut number = 0;
        while let Some(claim) = files.recv().await {
            // A file that is larger than all that may be fetched ahead is fetched alone.
            let size = u32::try_from(claim.file.size / 1024 + 1).unwrap_or(u32::MAX).min(self.most);
            let Ok(share) = Arc::clone(&self.bytes).acquire_many_owned(size).await else { break };
            number += 1;
            let (room, transfers, wanted) = (self.room.clone(), Arc::clone(&self.transfers), claim.clone());
            let fetched = task::spawn_local(async move { transfers.fetch(&room, number, &wanted).await });
            // Nobody takes it: the pod ends.
            if ready.send(Next { claim, fetched, share }).await.is_err() {
                break;
            }
        }
        drop(ready);
        std::future::pending().await
    }
}

/// Runs the filters over one file after the other.
struct Work {
    room: Room,
    filters: Filters,
    names: Vec<String>,
    file_timeout: Option<Duration>,
    transfers: Arc<Transfers>,
    reports: Arc<Reports>,
    publishing: JoinSet<()>,
}

impl Work {
    /// Until the pod is told to stop, or a filter is gone. What is published then is published to its end.
    async fn run(
        mut self,
        mut next: mpsc::Receiver<Next>,
        told_to_stop: watch::Receiver<bool>,
    ) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        while let Some(Next { claim, fetched, share }) = next.recv().await {
            if *told_to_stop.borrow() {
                self.reports.say(&claim.entry, State::Released);
                continue;
            }
            match fetched.await {
                Ok(Ok(_)) if *told_to_stop.borrow() => self.reports.say(&claim.entry, State::Released),
                Ok(Ok(slot)) => outcome = self.process(&claim, slot).await,
                Ok(Err(failure)) => self.reports.say(&claim.entry, State::TransferFailed(failure)),
                // Only a pod that ends cancels its tasks.
                Err(error) => outcome = Err(ServeError::Task(error)),
            }
            drop(share);
            if outcome.is_err() {
                break;
            }
            while self.publishing.try_join_next().is_some() {}
        }
        while self.publishing.join_next().await.is_some() {}
        if outcome.is_ok() {
            let _ = tokio::time::timeout(SETTLED_WITHIN, self.reports.all_settled()).await;
        }
        outcome
    }

    async fn process(&mut self, claim: &Claim, slot: Slot) -> Result<(), ServeError> {
        // A filter that is gone has not seen this file.
        self.filters.check()?;
        self.reports.say(&claim.entry, State::Started);
        let uri = self.transfers.source.bucket.uri(&claim.file.key);
        self.room.activate(&slot, &self.names, &uri, u64::from(claim.attempts) + 1)?;
        let ended = self.filters.run(self.file_timeout).await?;
        self.room.clear(&slot)?;
        match ended {
            Ok(()) => self.publish(claim.clone(), slot),
            Err(failure) => self.reports.say(&claim.entry, State::FilterFailed(failure)),
        }
        Ok(())
    }

    fn publish(&mut self, claim: Claim, slot: Slot) {
        if self.transfers.sink.is_none() {
            self.reports.say(&claim.entry, State::Succeeded);
            return;
        }
        let (transfers, reports) = (Arc::clone(&self.transfers), Arc::clone(&self.reports));
        self.publishing.spawn_local(async move {
            let state = match transfers.publish(&claim, &slot).await {
                Ok(()) => State::Succeeded,
                Err(failure) => State::TransferFailed(failure),
            };
            reports.say(&claim.entry, state);
        });
    }
}

impl Transfers {
    async fn of(settings: &ServeSettings) -> Self {
        let source = Reach::new(&settings.source, &settings.source_canaries).await;
        let sink = match &settings.destination {
            Some(destination) => {
                let reach = Reach::new(&destination.sink, &settings.sink_canaries).await;
                Some((destination.clone(), reach))
            }
            None => None,
        };
        Self { source, sink }
    }

    async fn fetch(&self, room: &Room, number: u64, claim: &Claim) -> Result<Slot, TransferFailure> {
        let Reach { bucket, client, .. } = &self.source;
        let (began, key) = (Instant::now(), &claim.file.key);
        let failed = |exit, canary, text| TransferFailure {
            transfer: Transfer::Fetch,
            exit,
            canary,
            took: began.elapsed(),
            text,
        };
        let slot = room.slot(number).map_err(|error| failed(error.exit(), None, chain(&error)))?;
        if let Err(error) = fetch::fetch(client, bucket, &claim.file, &slot.input()).await {
            let known = self.source.known();
            let canary = Canary { client, bucket: &bucket.name, keys: &known };
            let canary = canary.read(key, error.exit()).await;
            let error = error.at(&bucket.uri(key), canary);
            return Err(failed(error.exit(), canary, chain(&error)));
        }
        self.source.reached(key);
        Ok(slot)
    }

    async fn publish(&self, claim: &Claim, slot: &Slot) -> Result<(), TransferFailure> {
        let Some((destination, reach)) = &self.sink else { return Ok(()) };
        let (began, key) = (Instant::now(), &claim.file.key);
        let folder = slot.results_of(&destination.from);
        match destination.publish(&reach.client, key, &folder, &reach.known()).await {
            Ok(last) => {
                reach.reached(&last);
                Ok(())
            }
            Err(error) => Err(TransferFailure {
                transfer: Transfer::Publish,
                exit: error.exit(),
                canary: error.canary(),
                took: began.elapsed(),
                text: chain(&error),
            }),
        }
    }
}

impl Reach {
    async fn new(bucket: &Bucket, canaries: &[String]) -> Self {
        let canaries = Mutex::new(canaries.iter().cloned().collect());
        Self { client: bucket.client().await, bucket: bucket.clone(), canaries }
    }

    fn reached(&self, key: &str) {
        let mut canaries = self.canaries.lock().unwrap_or_else(PoisonError::into_inner);
        canaries.retain(|known| known != key);
        canaries.push_front(key.to_owned());
        canaries.truncate(CANARIES);
    }

    fn known(&self) -> Vec<String> {
        self.canaries.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}
