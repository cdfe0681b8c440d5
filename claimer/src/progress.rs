//! What this process knows about its file, for the termination message: a process that a signal ends reports
//! its entry too.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use protocol::{Exit, Report};
use storage::chain;

use crate::exit::Failure;

/// The start of the process and, once claimed, its file.
pub(crate) struct Progress {
    started: Moment,
    file: OnceLock<Attempt>,
}

struct Attempt {
    entry: Option<String>,
    number: u64,
    since: Moment,
}

impl Progress {
    pub(crate) fn start() -> Self {
        Self { started: Moment::now(), file: OnceLock::new() }
    }

    /// Records that the file of this entry is ours from now on.
    pub(crate) fn claimed(&self, entry: &str, attempt: u64) {
        self.set(Attempt { entry: Some(entry.to_owned()), number: attempt, since: Moment::now() });
    }

    /// Records that this attempt's results are being published. The workspace does not know the entry,
    /// because filters can write there.
    pub(crate) fn publishing(&self, attempt: u64) {
        self.set(Attempt { entry: None, number: attempt, since: self.started });
    }

    fn set(&self, attempt: Attempt) {
        // A process has one file, so this is never set twice.
        let _ = self.file.set(attempt);
    }

    /// Reports how the process ended, in the termination log and, for people, on standard error; returns the
    /// exit code.
    pub(crate) fn report(&self, ended: Result<String, Failure>, log: &Path) -> i32 {
        let attempt = self.file.get();
        let since = attempt.map_or(&self.started, |attempt| &attempt.since);
        let (outcome, canary, text) = match &ended {
            Ok(key) => (Ok(()), None, key.clone()),
            Err(failure) => (Err(failure.exit()), failure.canary(), chain(failure)),
        };
        let report = Report {
            entry: attempt.and_then(|attempt| attempt.entry.clone()),
            attempt: attempt.map_or(0, |attempt| attempt.number),
            outcome,
            canary,
            started_ms: since.ms(),
            ended_ms: since.ms().saturating_add(since.elapsed_ms()),
            text,
        };
        if let Some(reason) = report.reason() {
            eprintln!("{reason}");
        }
        // Never created: outside a pod, nothing reads it.
        if let Ok(mut file) = OpenOptions::new().write(true).truncate(true).open(log) {
            let _ = file.write_all(report.to_string().as_bytes());
        }
        outcome.map_or_else(Exit::code, |()| 0)
    }
}

/// A time of day, advanced by a clock that is never adjusted.
#[derive(Clone, Copy)]
struct Moment {
    time: SystemTime,
    instant: Instant,
}

impl Moment {
    fn now() -> Self {
        Self { time: SystemTime::now(), instant: Instant::now() }
    }

    /// In milliseconds since 1970.
    fn ms(&self) -> u64 {
        self.time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }

    fn elapsed_ms(&self) -> u64 {
        self.instant.elapsed().as_millis() as u64
    }
}
