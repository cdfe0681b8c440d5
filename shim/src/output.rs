//! Moves the filter's output to the container's log.
//!
//! Nothing here blocks, and nothing grows: the shim writes what it has read before it reads more, so that a
//! slow log slows the filter and not the shim's timers. Descriptors stay in blocking mode (they are shared
//! with others), so reads and writes follow a poll, and a write is small enough for a pipe that polls as
//! writable.
//!
//! The container runtime pays for each write, so the lines around a file's output share its writes: a file
//! with little output takes one write in all. They also share its stream, because the runtime keeps order
//! only within a stream.

use std::{
    io::{Stderr, Stdout, stderr, stdout},
    mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
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
    wire::Ending,
};

/// The capacity of a pipe.
const READ_BYTES: usize = 64 * 1024;

/// Marks are dropped while this much waits for a log that nothing reads.
const WAITING_BYTES_MAX: usize = 64 * 1024;

/// How much output waits for the end of its file, so that the line about the end fits into the same write.
const HELD_BYTES_MAX: usize = PIPE_BUF - 64;

/// The log names a file that has been silent for this long, because it may hang.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Both streams of the filter.
pub(crate) struct Output {
    streams: [Stream; 2],
    /// The stream that was read last, which takes the shim's next line.
    last: usize,
    /// The line that names the current file, until it is written.
    begin: Option<Begin>,
    /// Whether output waits for the end of its file.
    is_held: bool,
    /// The end of both streams.
    pub(crate) tail: Tail,
    /// Extracts a `Lines` filter's answers from its stdout.
    answers: Option<Answers>,
    buffer: Vec<u8>,
}

impl Output {
    /// With `lines`, lines that start with the marker are answers; otherwise everything is log.
    pub(crate) fn new(lines: bool) -> Self {
        Self {
            streams: [Stream::to(Log::Stdout(stdout())), Stream::to(Log::Stderr(stderr()))],
            last: 0,
            begin: None,
            is_held: false,
            tail: Tail::default(),
            answers: lines.then(Answers::default),
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Takes the pipes of a newly started process.
    pub(crate) fn attach(&mut self, stdout: OwnedFd, stderr: OwnedFd) {
        let [to_stdout, to_stderr] = &mut self.streams;
        (to_stdout.from, to_stderr.from) = (Some(stdout), Some(stderr));
        // Late output of the previous process is no answer of this one.
        self.take_answers();
    }

    /// Drops unread output. The next output starts on a new line.
    pub(crate) fn detach(&mut self) {
        if let Some(answers) = &mut self.answers {
            let log = answers.finish();
            self.pass_on(0, &log);
        }
        for stream in &mut self.streams {
            stream.from = None;
            stream.end_line();
        }
    }

    /// Whether there is still something to read, or to write now.
    pub(crate) fn is_busy(&self) -> bool {
        self.interests().iter().any(Option::is_some)
    }

    /// Whether an answer has arrived that was not taken yet.
    pub(crate) fn is_answered(&self) -> bool {
        self.answers.as_ref().is_some_and(|answers| !answers.is_empty())
    }

    /// The answers since the last call; `None` is an answer that cannot be understood.
    pub(crate) fn take_answers(&mut self) -> Vec<Option<Answer>> {
        self.answers.as_mut().map(Answers::take).unwrap_or_default()
    }

    /// A file begins. The line that names it is written before its output, with its end, or after
    /// [`SILENCE_MAX`] of silence.
    pub(crate) fn begin(&mut self, source: &str) {
        self.tail.clear();
        self.begin = Some(Begin { text: format!("begin {source}"), due: Instant::now() + SILENCE_MAX });
    }

    /// When to write the line that names the file even without output.
    pub(crate) fn begin_due(&self) -> Option<Instant> {
        self.begin.as_ref().map(|begin| begin.due)
    }

    /// Writes the line that names the file, unless it is already written.
    pub(crate) fn mark_begin(&mut self) {
        if let Some(begin) = self.begin.take() {
            self.mark(&begin.text);
        }
    }

    /// Holds the rest of a file's output until [`Self::end`], as long as one write takes both.
    pub(crate) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Stops holding output.
    pub(crate) fn release(&mut self) {
        self.is_held = false;
    }

    /// The file has ended, and all its output was read.
    pub(crate) fn end(&mut self, ending: Ending) {
        self.mark_begin();
        self.mark(&format!("end {ending}"));
        self.release();
    }

    /// What each stream waits for.
    pub(crate) fn interests(&self) -> [Option<(BorrowedFd<'_>, PollFlags)>; 2] {
        [self.interest(0), self.interest(1)]
    }

    /// Performs one read or write for each stream that is ready for it.
    pub(crate) fn advance(&mut self, ready: [bool; 2]) {
        for index in (0..ready.len()).filter(|index| ready[*index]) {
            match self.is_to_write(index) {
                true => self.streams[index].write(),
                false => self.read(index),
            }
        }
    }

    fn interest(&self, index: usize) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let Stream { from, to, .. } = &self.streams[index];
        match self.is_to_write(index) {
            true => Some((to.as_fd(), PollFlags::POLLOUT)),
            false => from.as_ref().map(|from| (from.as_fd(), PollFlags::POLLIN)),
        }
    }

    /// Whether a stream writes before it reads more. Only the stream that was read last is held: earlier
    /// output of the other one is also written first.
    fn is_to_write(&self, index: usize) -> bool {
        let waiting = self.streams[index].waiting.len();
        let is_held = self.is_held && index == self.last && waiting < HELD_BYTES_MAX;
        waiting > 0 && !is_held
    }

    fn read(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let Some(from) = &stream.from else { return };
        let mut buffer = mem::take(&mut self.buffer);
        // An error counts as the end: there is nothing more to read.
        match read(from, &mut buffer).unwrap_or(0) {
            0 => stream.from = None,
            length => self.take_in(index, &buffer[..length]),
        }
        self.buffer = buffer;
    }

    fn take_in(&mut self, index: usize, bytes: &[u8]) {
        match &mut self.answers {
            Some(answers) if index == 0 => {
                let log = answers.sift(bytes);
                self.tail.push(&log);
                self.pass_on(index, &log);
            }
            _ => {
                self.tail.push(bytes);
                self.pass_on(index, bytes);
            }
        }
    }

    fn pass_on(&mut self, index: usize, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.last = index;
            self.mark_begin();
            self.streams[index].pass_on(bytes);
        }
    }

    /// Writes a line of the shim's own.
    fn mark(&mut self, text: &str) {
        let stream = &mut self.streams[self.last];
        stream.end_line();
        if stream.waiting.len() < WAITING_BYTES_MAX {
            stream.waiting.extend_from_slice(format!("{MARKER} {}\n", one_line(text)).as_bytes());
        }
    }
}

/// The line before a file's output.
struct Begin {
    text: String,
    due: Instant,
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
    /// Data that was read, and how much of it is written.
    waiting: Vec<u8>,
    written: usize,
    /// Whether the last byte was not a newline.
    is_within_line: bool,
}

impl Stream {
    fn to(to: Log) -> Self {
        Self { from: None, to, waiting: Vec::new(), written: 0, is_within_line: false }
    }

    fn pass_on(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last() {
            self.is_within_line = *last != b'\n';
            self.waiting.extend_from_slice(bytes);
        }
    }

    fn end_line(&mut self) {
        if mem::take(&mut self.is_within_line) {
            self.waiting.push(b'\n');
        }
    }

    fn write(&mut self) {
        let rest = &self.waiting[self.written..];
        let written = write(&self.to, &rest[..rest.len().min(PIPE_BUF)]);
        // A log that is gone takes nothing more; the filter continues.
        self.written += written.unwrap_or(rest.len());
        if self.written == self.waiting.len() {
            self.waiting.clear();
            self.written = 0;
        }
    }
}
