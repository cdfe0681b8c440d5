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

/// The default capacity of a pipe.
const PIPE_BYTES: usize = 64 * 1024;

/// Data that is written to stdin as fast as the filter reads it.
#[derive(Default)]
pub(crate) struct Feed {
    /// None for `Exec`, and after the end of input.
    to: Option<OwnedFd>,
    /// The pipe's reading end, to find out what was not read.
    other: Option<OwnedFd>,
    waiting: Vec<u8>,
    /// The length of the last line.
    length: usize,
    /// Whether the end of input follows this line.
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

    /// Whether the process ended without reading the last line.
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

    /// Closes stdin once everything is written.
    pub(crate) fn close(&mut self) {
        self.is_last = true;
    }

    pub(crate) fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let to = self.to.as_ref().filter(|_| !self.waiting.is_empty())?;
        Some((to.as_fd(), PollFlags::POLLOUT))
    }

    /// Writes once, little enough for a pipe that polls as writable.
    pub(crate) fn advance(&mut self) {
        let Some(to) = &self.to else { return };
        match write(to, &self.waiting[..self.waiting.len().min(PIPE_BUF)]) {
            Ok(written) => drop(self.waiting.drain(..written)),
            // This cannot happen while we also hold the reading end; if it does, no file can be written.
            Err(_) => self.to = None,
        }
        if self.is_last && self.waiting.is_empty() {
            self.to = None;
        }
    }
}
