//! Processes many files, one after the other: while the filters work on one, it fetches the next ones and
//! publishes the results of earlier ones. It reports the outcome of each but never acknowledges it: the
//! operator decides.

mod ahead;
mod filters;
mod inbox;
mod reports;
mod room;
mod stop;
mod transfers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::stream::{FuturesUnordered, StreamExt};
use protocol::{Exit, State, TransferFailure};
use queue::{Claim, EntryId, Reporter};
use storage::Bucket;
use tokio::sync::mpsc;
use tokio::task::{self, JoinError, JoinHandle, LocalSet};
use tokio_util::task::LocalPoolHandle;

use crate::claim::QueueSettings;
use crate::exit::Failure;
use crate::publish::Destination;
use crate::workspace::WorkspaceError;
use ahead::{FetchAhead, Fetched, Next};
pub use filters::Order;
use filters::{Filters, FiltersError};
use reports::Reports;
pub(crate) use room::make as make_room;
use room::{Room, Slot};
use stop::Stop;
use transfers::Transfers;

/// More than a pod is ever given.
const HELD_MAX: usize = 100;
/// The operator settles a pod's last reports within this time, or finds them once the pod is gone.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
/// A queue that does not take a report within this time counts as unresponsive.
const SAID_WITHIN: Duration = Duration::from_secs(2);

/// Why a pod cannot continue. How its containers ended decides the fate of its current file.
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
    /// The prefix of the file keys.
    pub source_prefix: String,
    /// Objects of the source that the run has fetched before.
    pub source_canaries: Vec<String>,
    /// Where results go, if anywhere.
    pub destination: Option<Destination>,
    /// Objects of the sink that the run has published before.
    pub sink_canaries: Vec<String>,
    /// The filters, in order.
    pub filters: Vec<String>,
    /// Whether they run one after the other or at once.
    pub order: Order,
    /// How long the filters may take for one file.
    pub file_timeout: Option<Duration>,
    /// How many bytes of files are fetched before their turn.
    pub prefetch_bytes: u64,
    /// How many files the filters process before the pod ends.
    pub max_files: u64,
    /// How old the pod may get.
    pub max_age: Duration,
    /// Root of the volume that filters see in part.
    pub room: PathBuf,
    /// Folder that contains a folder for each filter's socket.
    pub links: PathBuf,
}

/// Processes files until it is told to stop, reaches a limit or runs out of disk space, and returns when all
/// of its files are settled.
pub(crate) async fn serve(settings: ServeSettings) -> Result<(), Failure> {
    // Everything but storage runs on one thread: there is far more waiting than computing.
    LocalSet::new().run_until(process_files(settings)).await
}

async fn process_files(settings: ServeSettings) -> Result<(), Failure> {
    let ServeSettings { queue, filters: names, order, prefetch_bytes, max_age, room, links, .. } = &settings;
    let stop = Stop::default();
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
    // Storage has its own thread: a filter that is ready for the next file does not wait behind other files'
    // requests.
    let background = LocalPoolHandle::new(1);
    let (files, handed_out) = mpsc::channel(HELD_MAX);
    // Prefetching is bounded by its bytes, and by how many files the operator hands to a pod.
    let (ready, next) = mpsc::unbounded_channel();
    let work = Work {
        room: Room::new(room),
        filters,
        names: names.clone(),
        file_timeout: settings.file_timeout,
        files_left: settings.max_files,
        transfers: Arc::clone(&transfers),
        reports: Arc::clone(&reports),
        stop: stop.clone(),
        publishing: FuturesUnordered::new(),
        background: background.clone(),
    };
    let (said, ending) = (Arc::clone(&reports), stop.clone());
    let ahead = FetchAhead::new(Room::new(room), transfers, said, ending, background, *prefetch_bytes);
    let outcome = tokio::select! {
        read = inbox::read(queue, &reports, files, &stop) => read.map_err(Failure::from),
        never = ahead.run(handed_out, ready) => match never {},
        never = stop_on_a_signal(&stop) => never,
        never = stop.set_after(*max_age) => never,
        worked = work.run(next) => worked.map_err(Failure::from),
    };
    // Report everything this pod knows before it ends, if that is possible at all.
    let _ = tokio::time::timeout(SAID_WITHIN, reports.all_said()).await;
    writing.abort();
    outcome
}

/// A pod that is deleted, evicted or drained has some seconds, which may be enough to finish its file.
async fn stop_on_a_signal(stop: &Stop) -> Result<(), Failure> {
    match crate::terminated().await {
        Failure::Terminated => {
            stop.set("a signal told it to");
            std::future::pending().await
        }
        failure => Err(failure),
    }
}

/// Runs the filters over one file after the other.
struct Work {
    room: Room,
    filters: Filters,
    names: Vec<String>,
    file_timeout: Option<Duration>,
    /// How many more files the filters get.
    files_left: u64,
    transfers: Arc<Transfers>,
    reports: Arc<Reports>,
    stop: Stop,
    publishing: FuturesUnordered<JoinHandle<()>>,
    background: LocalPoolHandle,
}

impl Work {
    /// Runs until the pod is about to stop, or a filter is gone. Publishing that has begun is still
    /// completed.
    async fn run(mut self, mut next: mpsc::UnboundedReceiver<Next>) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        while let Some(Next { claim, fetched }) = next.recv().await {
            if self.stop.is_set() && !fetched.is_finished() {
                fetched.abort();
                self.reports.say(&claim.entry, State::Released);
                continue;
            }
            match fetched.await {
                Ok(Some(_)) if self.stop.is_set() => self.reports.say(&claim.entry, State::Released),
                // The file keeps its share of the room until it is processed.
                Ok(Some(Fetched { slot, share: _share })) => outcome = self.process(&claim, slot).await,
                // It could not be fetched, which was reported at that time.
                Ok(None) => {}
                // Tasks are cancelled only when the pod ends.
                Err(error) => outcome = Err(ServeError::Task(error)),
            }
            if outcome.is_err() {
                break;
            }
            while let Some(Some(_)) = self.publishing.next().now_or_never() {}
        }
        while self.publishing.next().await.is_some() {}
        if outcome.is_ok() {
            let _ = tokio::time::timeout(SETTLED_WITHIN, self.reports.all_settled()).await;
        }
        outcome
    }

    async fn process(&mut self, claim: &Claim, slot: Slot) -> Result<(), ServeError> {
        // A filter that is gone has not seen this file.
        self.filters.check()?;
        self.files_left = self.files_left.saturating_sub(1);
        if self.files_left == 0 {
            self.stop.set("it has processed its maximum number of files");
        }
        self.reports.say(&claim.entry, State::Started);
        let uri = self.transfers.uri(&claim.file.key);
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
        if !self.transfers.has_sink() {
            self.reports.say(&claim.entry, State::Succeeded);
            return;
        }
        // The filters are done with this file: one that dies from now on dies of another file. This is
        // reported before the upload begins, and on this thread, so that it shares a write with the start of
        // the next file, if that has arrived.
        self.reports.say(&claim.entry, State::Publishing);
        let (transfers, reports) = (Arc::clone(&self.transfers), Arc::clone(&self.reports));
        let stop = self.stop.clone();
        self.publishing.push(self.background.spawn_pinned(move || async move {
            match transfers.publish(&claim, &slot).await {
                Ok(()) => reports.say(&claim.entry, State::Succeeded),
                Err(failure) => say_failed(&reports, &stop, &claim.entry, failure),
            }
        }));
    }
}

/// A full disk may be specific to this node, or hold what filters have left: another pod has a better chance.
fn say_failed(reports: &Reports, stop: &Stop, entry: &EntryId, failure: TransferFailure) {
    if failure.exit == Exit::DiskFull {
        stop.set("its disk is full");
    }
    reports.say(entry, State::TransferFailed(failure));
}
