//! The connection to the worker.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;

use crate::{
    end::End,
    poll::poll_until,
    signals::Signals,
    wire::{LINE_BYTES_MAX, Message, Request},
};

/// The worker's container may start later, which takes far longer than this.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// The worker's image may have to be pulled first. A pod without a worker is useless.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Link {
    stream: UnixStream,
    /// A line that is still incomplete.
    line: Vec<u8>,
    requests: VecDeque<Request>,
}

impl Link {
    /// Waits for the worker to listen. A SIGTERM ends the wait, because there is no file to finish yet.
    pub(crate) fn connect(socket: &Path, signals: &mut Signals) -> Result<Self, End> {
        let give_up = Instant::now() + CONNECT_TIMEOUT;
        loop {
            let error = match UnixStream::connect(socket) {
                Ok(stream) => return Ok(Self { stream, line: Vec::new(), requests: VecDeque::new() }),
                Err(error) => error,
            };
            if Instant::now() >= give_up {
                let socket = socket.display();
                return Err(End::Broken(format!(
                    "no worker listened at the socket {socket} within {CONNECT_TIMEOUT:?}: {error}"
                )));
            }
            poll_until(
                [Some((signals.as_fd(), PollFlags::POLLIN))],
                Some(Instant::now() + CONNECT_INTERVAL),
            )?;
            if signals.was_terminated() {
                return Err(End::Finished);
            }
        }
    }

    pub(crate) fn send(&mut self, message: &Message) -> Result<(), End> {
        self.stream.write_all(format!("{message}\n").as_bytes()).map_err(gone)
    }

    /// The next request that was received.
    pub(crate) fn take(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Whether a stop was received, the only request that may arrive while a file is processed.
    pub(crate) fn take_stop(&mut self) -> Result<bool, End> {
        match self.take() {
            None => Ok(false),
            Some(Request::Stop) => Ok(true),
            Some(Request::File { .. }) => {
                Err(End::Broken("the worker sent a file before the last one ended".to_owned()))
            }
        }
    }

    /// Reads once. Call it only after a poll, because it would block.
    pub(crate) fn receive(&mut self) -> Result<(), End> {
        let mut buffer = [0; 256];
        let length = self.stream.read(&mut buffer).map_err(gone)?;
        if length == 0 {
            return Err(End::Finished);
        }
        for byte in &buffer[..length] {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = String::from_utf8_lossy(&self.line);
            self.requests.push_back(line.parse::<Request>().map_err(|error| End::Broken(error.to_string()))?);
            self.line.clear();
        }
        match self.line.len() < LINE_BYTES_MAX {
            true => Ok(()),
            false => Err(End::Broken(format!("the worker sent a line of more than {LINE_BYTES_MAX} bytes"))),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A killed worker closes its end, with a reset if it left something unread.
fn gone(error: io::Error) -> End {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => End::Finished,
        _ => End::Broken(format!("cannot talk to the worker: {error}")),
    }
}
