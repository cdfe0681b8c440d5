//! The filters of a pod that processes many files. Each runs in its own container, behind a shim that starts
//! its command on request. There is one unix socket per filter, on a volume that only this filter and the
//! worker mount.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::stream::{FuturesUnordered, StreamExt};
use protocol::{Exit, FilterEnding, FilterFailure};
use shim::wire::{Done, Ending, LINE_BYTES_MAX, Message, OVERTIME_MAX, Request};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// Why filters cannot be used. None of these is a file's fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FiltersError {
    #[error("cannot create the socket {path} for the filter {filter}")]
    Listen { filter: String, path: String, source: io::Error },
    #[error("the filter {filter} cannot be executed: {text}")]
    Unusable { filter: String, text: String },
    #[error("the container of the filter {filter} is gone: {detail}")]
    Lost { filter: String, detail: String },
}

impl FiltersError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Listen { .. } => Exit::LocalIo,
            Self::Unusable { .. } => Exit::FilterUnusable,
            Self::Lost { .. } => Exit::FilterLost,
        }
    }
}

/// The order in which filters process a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One after the other.
    Sequential,
    /// All at once.
    Concurrent,
}

/// All filters of the pod, connected and ready.
pub(crate) struct Filters {
    links: Vec<Link>,
    order: Order,
}

struct Link {
    filter: String,
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Filters {
    /// Waits until every shim has reported that its filter's command can be executed.
    pub(crate) async fn connect(folder: &Path, names: &[String], order: Order) -> Result<Self, FiltersError> {
        let mut listeners = Vec::new();
        // Listen on all sockets before waiting for the first: containers start in any order.
        for filter in names {
            let path = folder.join(filter).join("socket");
            listeners.push((
                filter,
                listen(&path).map_err(|source| listen_failed(filter, &path, source))?,
                path,
            ));
        }
        let mut links = Vec::new();
        for (filter, listener, path) in listeners {
            let (stream, _) =
                listener.accept().await.map_err(|source| listen_failed(filter, &path, source))?;
            // Only processes of the filter could connect again, and none should.
            let _ = fs::remove_file(&path);
            let (reader, writer) = stream.into_split();
            links.push(Link { filter: filter.clone(), reader: BufReader::new(reader), writer });
        }
        for Link { filter, reader, .. } in &mut links {
            match receive(filter, reader).await? {
                Message::Hello => {}
                other => return Err(unexpected(filter, other)),
            }
        }
        Ok(Self { links, order })
    }

    /// Checks that all filters are still connected.
    pub(crate) fn check(&mut self) -> Result<(), FiltersError> {
        for Link { filter, reader, .. } in &mut self.links {
            match reader.fill_buf().now_or_never() {
                None => {}
                Some(Ok([])) => return Err(lost(filter, "its connection ended".to_owned())),
                Some(Ok(_)) => return Err(lost(filter, "it sent an unexpected message".to_owned())),
                Some(Err(error)) => return Err(lost(filter, error.to_string())),
            }
        }
        Ok(())
    }

    /// Runs the filters over the file in the workspace; returns how one failed, if one did.
    pub(crate) async fn run(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<Result<(), FilterFailure>, FiltersError> {
        match self.order {
            Order::Sequential => self.run_in_turn(limit).await,
            Order::Concurrent => self.run_together(limit).await,
        }
    }

    async fn run_in_turn(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<Result<(), FilterFailure>, FiltersError> {
        let started = Instant::now();
        for Link { filter, reader, writer } in &mut self.links {
            // Not zero, which would mean no limit.
            let left =
                limit.map(|limit| limit.saturating_sub(started.elapsed()).max(Duration::from_millis(1)));
            send(filter, writer, Request::File { timeout: left }).await?;
            if let Some(failure) = failure(filter, done(filter, reader, left).await?) {
                return Ok(Err(failure));
            }
        }
        Ok(Ok(()))
    }

    async fn run_together(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<Result<(), FilterFailure>, FiltersError> {
        for Link { filter, writer, .. } in &mut self.links {
            send(filter, writer, Request::File { timeout: limit }).await?;
        }
        let mut first = None;
        let (mut readers, mut writers) = (Vec::new(), Vec::new());
        for Link { filter, reader, writer } in &mut self.links {
            readers.push((filter.as_str(), reader));
            writers.push((filter.as_str(), writer));
        }
        let mut running: FuturesUnordered<_> = readers
            .into_iter()
            .map(|(filter, reader)| async move { (filter, done(filter, reader, limit).await) })
            .collect();
        let mut ended = Vec::new();
        while let Some((filter, done)) = running.next().await {
            ended.push(filter);
            let failure = failure(filter, done?);
            if failure.is_some() && first.is_none() {
                first = failure;
                for (filter, writer) in writers.iter_mut().filter(|(name, _)| !ended.contains(name)) {
                    send(filter, writer, Request::Stop).await?;
                }
            }
        }
        Ok(first.map_or(Ok(()), Err))
    }
}

/// Waits until a file has ended. The shim keeps its time; one that hangs itself, or whose filter cannot be
/// killed, is lost.
async fn done(
    filter: &str,
    reader: &mut BufReader<OwnedReadHalf>,
    limit: Option<Duration>,
) -> Result<Done, FiltersError> {
    let answer = receive(filter, reader);
    let answer = match limit.map(|limit| limit.saturating_add(OVERTIME_MAX)) {
        Some(wait) => match tokio::time::timeout(wait, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(lost(filter, format!("its shim has not answered for {wait:?}"))),
        },
        None => answer.await,
    };
    match answer? {
        Message::Done(done) => Ok(done),
        other => Err(unexpected(filter, other)),
    }
}

async fn send(filter: &str, writer: &mut OwnedWriteHalf, request: Request) -> Result<(), FiltersError> {
    let line = format!("{request}\n");
    writer.write_all(line.as_bytes()).await.map_err(|error| lost(filter, error.to_string()))
}

async fn receive(filter: &str, reader: &mut BufReader<OwnedReadHalf>) -> Result<Message, FiltersError> {
    let mut line = String::new();
    let read = reader.take(LINE_BYTES_MAX as u64).read_line(&mut line).await;
    read.map_err(|error| lost(filter, error.to_string()))?;
    match line.strip_suffix('\n') {
        Some(line) => line.parse().map_err(|error: shim::wire::Unreadable| lost(filter, error.to_string())),
        None => Err(lost(filter, "its connection ended".to_owned())),
    }
}

fn unexpected(filter: &str, message: Message) -> FiltersError {
    match message {
        Message::Unusable(text) => FiltersError::Unusable { filter: filter.to_owned(), text },
        other => lost(filter, format!("it sent an unexpected message: {other}")),
    }
}

fn lost(filter: &str, detail: String) -> FiltersError {
    FiltersError::Lost { filter: filter.to_owned(), detail }
}

fn listen_failed(filter: &str, path: &Path, source: io::Error) -> FiltersError {
    FiltersError::Listen { filter: filter.to_owned(), path: path.display().to_string(), source }
}

/// Any user may connect, because the users that filters run as are not known in advance.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

fn failure(filter: &str, done: Done) -> Option<FilterFailure> {
    let Done { ending, oom_killed, after_term, text, .. } = done;
    let ending = match ending {
        Ending::Exited(0) | Ending::Accepted => return None,
        Ending::Exited(code) => FilterEnding::Exited(code),
        Ending::Signaled(signal) => FilterEnding::Signaled(signal),
        Ending::TimedOut => FilterEnding::TimedOut,
        Ending::Refused { retry } => FilterEnding::Refused { retry },
        // It was stopped because another filter failed, and that failure is reported.
        Ending::Stopped | Ending::BadAnswer => FilterEnding::BadAnswer,
    };
    Some(FilterFailure { filter: filter.to_owned(), ending, oom_killed, after_term, text })
}
