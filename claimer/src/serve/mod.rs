//! Processes many files, one after the other: while filters work on one, the next are fetched, and the results of those before
//! are published. What became of each is reported, never acknowledged: the operator decides.

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
    /// What the keys of files begin with.
    pub source_prefix: String,
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
    /// Files that the filters get before the pod ends.
    pub max_files: u64,
    /// How old the pod gets.
    pub max_age: Duration,
    /// Root of the volume that filters see a part of.
    pub room: PathBuf,
    /// Folder with a folder for the socket of each filter.
    pub links: PathBuf,
}

/// Processes files until it is told to stop, has done enough or has no disk space left, and returns when all of them are settled.
pub(crate) async fn serve(settings: ServeSettings) -> Result<(), Failure> {
    // On one thread, apart from storage: there is far more to wait for than to compute.
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
    // Storage has a thread of its own: a filter that is ready for the next file does not wait behind the requests of others.
    let background = LocalPoolHandle::new(1);
    let (files, handed_out) = mpsc::channel(HELD_MAX);
    // What is fetched before its turn is bounded by its bytes, and by how many files the operator hands to a pod.
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
    // What this pod knows is said before it goes, if that is possible at all.
    let _ = tokio::time::timeout(SAID_WITHIN, reports.all_said()).await;
    writing.abort();
    outcome
}

/// A pod that is deleted, evicted or drained has some seconds: it finishes its file, if that is enough.
async fn stop_on_a_signal(stop: &Stop) -> Result<(), Failure> {
    match crate::terminated().await {
        Failure::Terminated => {
            stop.set("it is told to by a signal");
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
    /// Files that the filters still get.
    files_left: u64,
    transfers: Arc<Transfers>,
    reports: Arc<Reports>,
    stop: Stop,
    publishing: FuturesUnordered<JoinHandle<()>>,
    background: LocalPoolHandle,
}

impl Work {
    /// Until the pod is to stop, or a filter is gone. What is published then is published to its end.
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
                // It has its share of the room until it is processed.
                Ok(Some(Fetched { slot, share: _share })) => outcome = self.process(&claim, slot).await,
                // It could not be fetched, and that was said when it happened.
                Ok(None) => {}
                // Only a pod that ends cancels its tasks.
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
            self.stop.set("it has processed as many files as it may");
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
        // Its filters are done: one that dies from now on dies of another file. Said before the upload begins, and on this thread, so
        // that it goes into the same write as the start of the next file, if that is here.
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

/// A full disk may be this node's, or hold what filters have left: another pod has a better chance.
fn say_failed(reports: &Reports, stop: &Stop, entry: &EntryId, failure: TransferFailure) {
    if failure.exit == Exit::DiskFull {
        stop.set("its disk is full");
    }
    reports.say(entry, State::TransferFailed(failure));
}
