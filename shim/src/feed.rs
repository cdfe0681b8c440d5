//! The stdin of a `Lines` filter.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use nix::{
    libc::PIPE_BUF,
    poll::PollFlags,
    unistd::{read, write},
};

use crate::poll::poll_until;

/// What a pipe holds, unless someone asked for more.
const PIPE_BYTES: usize = 64 * 1024;

/// What is written to it, as fast as it reads.
#[derive(Default)]
pub(crate) struct Feed {
    /// None for `Exec`, and after the end of input.
    to: Option<OwnedFd>,
    /// The other end, to see what was not read.
    other: Option<OwnedFd>,
    waiting: Vec<u8>,
    /// Of the last line.
    length: usize,
    /// Whether the end of input follows.
    is_last: bool,
}

impl Feed {
    pub(crate) fn new(pipe: Option<(OwnedFd, OwnedFd)>) -> Self {
        let (other, to) = pipe.unzip();
        Self { to, other, ..Self::default() }
    }

    pub(crate) fn push(&mut self, line: &str) {
        self.waiting.extend_from_slice(line.as_bytes());
        self.length = line.len();
    }

    /// Whether the last line was not read, by a process that has ended.
    pub(crate) fn is_unread(&self) -> bool {
        self.waiting.len() + self.left_in_pipe() >= self.length
    }

    fn left_in_pipe(&self) -> usize {
        let Some(other) = &self.other else { return 0 };
        let is_ready = poll_until([Some((other.as_fd(), PollFlags::POLLIN))], Some(Instant::now()));
        match is_ready {
            Ok([true]) => read(other, &mut [0; PIPE_BYTES]).unwrap_or(0),
            _ => 0,
        }
    }

    /// Closes stdin when everything is written.
    pub(crate) fn close(&mut self) {
        self.is_last = true;
    }

    pub(crate) fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let to = self.to.as_ref().filter(|_| !self.waiting.is_empty())?;
        Some((to.as_fd(), PollFlags::POLLOUT))
    }

    /// One write, small enough for a pipe that polls as writable.
    pub(crate) fn advance(&mut self) {
        let Some(to) = &self.to else { return };
        match write(to, &self.waiting[..self.waiting.len().min(PIPE_BUF)]) {
            Ok(written) => drop(self.waiting.drain(..written)),
            // Not possible while we have the other end too; without a way to write there is no file to write.
            Err(_) => self.to = None,
        }
        if self.is_last && self.waiting.is_empty() {
            self.to = None;
        }
    }
}
