//! The filter's output on its way to the container's log.
//!
//! Nothing here blocks, and nothing grows: what was read is written before more is read, so that a slow log slows the
//! filter and not the shim's timers. Descriptors stay in blocking mode (they are shared with others), so reads and
//! writes follow a poll, and a write is small enough for a pipe that polls as writable.

use std::{
    io::{Stderr, Stdout, stderr, stdout},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    libc::PIPE_BUF,
    poll::PollFlags,
    unistd::{read, write},
};

use crate::{
    answer::Answer,
    answers::{Answers, MARKER},
    text::{Tail, one_line},
};

/// As much as a pipe holds.
const READ_BYTES: usize = 64 * 1024;

/// Marks are dropped while this much waits for a log that nothing reads.
const WAITING_BYTES_MAX: usize = 64 * 1024;

/// Both streams of the filter.
pub(crate) struct Output {
    streams: [Stream; 2],
    /// The end of both.
    pub(crate) tail: Tail,
    /// Picks a `Lines` filter's answers out of its stdout.
    answers: Option<Answers>,
    buffer: Vec<u8>,
}

impl Output {
    /// With `lines`, lines that start with the marker are answers; otherwise everything is log.
    pub(crate) fn new(lines: bool) -> Self {
        Self {
            streams: [Stream::to(Log::Stdout(stdout())), Stream::to(Log::Stderr(stderr()))],
            tail: Tail::default(),
            answers: lines.then(Answers::default),
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Takes the pipes of a process that was just started.
    pub(crate) fn attach(&mut self, stdout: OwnedFd, stderr: OwnedFd) {
        let [to_stdout, to_stderr] = &mut self.streams;
        (to_stdout.from, to_stderr.from) = (Some(stdout), Some(stderr));
        // What the process before it said late is no answer of this one.
        self.take_answers();
    }

    /// Gives up what has not been read. The next output starts on a line of its own.
    pub(crate) fn detach(&mut self) {
        if let Some(answers) = &mut self.answers {
            let log = answers.finish();
            self.streams[0].pass_on(&log);
        }
        for stream in &mut self.streams {
            stream.from = None;
            stream.end_line();
        }
    }

    /// Whether anything is still to be read or written.
    pub(crate) fn is_busy(&self) -> bool {
        self.streams.iter().any(|stream| stream.interest().is_some())
    }

    /// Whether an answer came that has not been taken yet.
    pub(crate) fn is_answered(&self) -> bool {
        self.answers.as_ref().is_some_and(|answers| !answers.is_empty())
    }

    /// The answers that came since the last call; `None` is one that cannot be understood.
    pub(crate) fn take_answers(&mut self) -> Vec<Option<Answer>> {
        self.answers.as_mut().map(Answers::take).unwrap_or_default()
    }

    /// Writes a line of our own.
    pub(crate) fn mark(&mut self, text: &str) {
        let stream = &mut self.streams[0];
        stream.end_line();
        if stream.waiting.len() < WAITING_BYTES_MAX {
            stream.waiting.extend_from_slice(format!("{MARKER} {}\n", one_line(text)).as_bytes());
        }
    }

    /// What each stream waits for.
    pub(crate) fn interests(&self) -> [Option<(BorrowedFd<'_>, PollFlags)>; 2] {
        let [stdout, stderr] = &self.streams;
        [stdout.interest(), stderr.interest()]
    }

    /// One read or write for each stream that is ready for it.
    pub(crate) fn advance(&mut self, ready: [bool; 2]) {
        for (index, stream) in self.streams.iter_mut().enumerate().filter(|(index, _)| ready[*index]) {
            if !stream.waiting.is_empty() {
                stream.write();
                continue;
            }
            let Some(from) = &stream.from else { continue };
            // An error is as good as the end: there is no more to be read.
            let Some(bytes) = read(from, &mut self.buffer).ok().and_then(|length| self.buffer.get(..length))
            else {
                stream.from = None;
                continue;
            };
            match &mut self.answers {
                _ if bytes.is_empty() => stream.from = None,
                Some(answers) if index == 0 => {
                    let log = answers.sift(bytes);
                    self.tail.push(&log);
                    stream.pass_on(&log);
                }
                _ => {
                    self.tail.push(bytes);
                    stream.pass_on(bytes);
                }
            }
        }
    }
}

enum Log {
    Stdout(Stdout),
    Stderr(Stderr),
}

impl AsFd for Log {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Stdout(stdout) => stdout.as_fd(),
            Self::Stderr(stderr) => stderr.as_fd(),
        }
    }
}

struct Stream {
    from: Option<OwnedFd>,
    to: Log,
    /// What was read, of which this much is written.
    waiting: Vec<u8>,
    written: usize,
    /// Whether the last byte was not a newline.
    is_within_line: bool,
}

impl Stream {
    fn to(to: Log) -> Self {
        Self { from: None, to, waiting: Vec::new(), written: 0, is_within_line: false }
    }

    fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        if self.waiting.is_empty() {
            return self.from.as_ref().map(|from| (from.as_fd(), PollFlags::POLLIN));
        }
        Some((self.to.as_fd(), PollFlags::POLLOUT))
    }

    fn pass_on(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last() {
            self.is_within_line = *last != b'\n';
            self.waiting.extend_from_slice(bytes);
        }
    }

    fn end_line(&mut self) {
        if std::mem::take(&mut self.is_within_line) {
            self.waiting.push(b'\n');
        }
    }

    fn write(&mut self) {
        let rest = &self.waiting[self.written..];
        let written = write(&self.to, &rest[..rest.len().min(PIPE_BUF)]);
        // A log that has gone takes nothing more; the filter goes on.
        self.written += written.unwrap_or(rest.len());
        if self.written == self.waiting.len() {
            self.waiting.clear();
            self.written = 0;
        }
    }
}
