//! The protocol `Lines`: one line of JSON per file on stdin, one answer for each on stdout. Copy this file as it is.
//!
//! Everything else that is written to stdout or stderr is log. A filter that panics or exits fails only the file that it
//! works on, and is started again.

use std::io::{self, Write};

use serde_json::{Value, json};

/// What an answer begins with, at the beginning of a line.
const MARKER: &str = "::openfilter::";

/// The file that is to be processed.
pub struct File {
    /// Where it is: `/ws/input`.
    pub input: String,
    /// The folder for its results, which is empty: `/ws/out/<filter>`.
    pub out: String,
    /// Where it came from: `s3://bucket/key`.
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
        // Rust writes stdout out at the end of each line. In other languages flush it: an answer that waits in a buffer is none.
        writeln!(io::stdout(), "{MARKER}{answer}")?;
    }
    Ok(())
}

impl File {
    /// There are more fields, `attempt` for one, and there may be more in the future.
    fn parse(line: &str) -> io::Result<Self> {
        let fields: Value = serde_json::from_str(line)?;
        let text = |name: &str| {
            let value = fields[name].as_str().map(ToOwned::to_owned);
            value.ok_or_else(|| io::Error::other(format!("the line {line} has no text {name}")))
        };
        Ok(Self { input: text("input")?, out: text("out")?, source: text("source")? })
    }
}
