//! The protocol `Lines`: one line of JSON per file on stdin, one answer for each on stdout. Copy this file
//! unchanged.
//!
//! All other output on stdout or stderr is log. A filter that panics or exits fails only the current file,
//! and is started again.

use std::io::{self, Write};

use serde_json::{Value, json};

/// Every answer starts with this, at the beginning of a line.
const MARKER: &str = "::openfilter::";

/// The file to process.
pub struct File {
    /// Path of the file: `/ws/input`.
    pub input: String,
    /// The empty folder for its results: `/ws/out/<filter>`.
    pub out: String,
    /// Origin of the file: `s3://bucket/key`.
    pub source: String,
}

/// Why a file cannot be processed.
pub struct Refusal {
    reason: String,
    retry: bool,
}

impl Refusal {
    /// Another attempt may succeed; it costs the file one of its attempts.
    pub fn retry(reason: String) -> Self {
        Self { reason, retry: true }
    }

    /// No attempt will succeed: the file becomes a dead letter at once.
    pub fn last(reason: String) -> Self {
        Self { reason, retry: false }
    }
}

/// Processes files until there are no more.
pub fn serve(mut process: impl FnMut(&File) -> Result<(), Refusal>) -> io::Result<()> {
    for line in io::stdin().lines() {
        let file = File::parse(&line?)?;
        let answer = match process(&file) {
            Ok(()) => json!({ "ok": true }),
            Err(Refusal { reason, retry }) => json!({ "ok": false, "reason": reason, "retry": retry }),
        };
        // Rust flushes stdout at the end of each line. In other languages flush it: an answer that stays in a
        // buffer does not count.
        writeln!(io::stdout(), "{MARKER}{answer}")?;
    }
    Ok(())
}

impl File {
    /// Reads the fields that are needed here. There are more, for example `attempt`, and future versions may
    /// add others.
    fn parse(line: &str) -> io::Result<Self> {
        let fields: Value = serde_json::from_str(line)?;
        let text = |name: &str| {
            let value = fields[name].as_str().map(ToOwned::to_owned);
            value.ok_or_else(|| io::Error::other(format!("the line {line} has no text {name}")))
        };
        Ok(Self { input: text("input")?, out: text("out")?, source: text("source")? })
    }
}
