//! Runs as pid 1 of a filter's container and starts the filter's command once per file, so that a pod lasts
//! for many files and the filter's image needs no change.
//!
//! It knows nothing of queues, buckets or Kubernetes: the pod's worker announces each file over a socket
//! ([`wire`]), and the shim reports how it ended. A file never sees processes or temporary files of an
//! earlier one.

use std::{convert::Infallible, ffi::OsString};

mod answer;
mod answers;
mod args;
mod end;
mod exec;
mod family;
mod feed;
mod files;
mod host;
mod limit;
mod lines;
mod link;
mod once;
mod output;
mod poll;
mod program;
mod results;
mod scratch;
mod serve;
mod signals;
mod spawn;
mod text;
mod usage;
mod verdict;
pub mod wire;
mod workspace;

use args::{Args, Mode};
use end::End;
use program::Program;
use signals::Signals;
use workspace::Workspace;

/// Exit code for a file that no retry can help: the filter answered `"retry":false`.
pub const REJECTED: u8 = 65;

/// Exit code for a command that cannot be executed. It is not 126 or 127, as in shells, because a filter that
/// is a script may end with those, and its file is then to blame. It is above 192, the highest code that a
/// signal can cause.
pub const UNUSABLE: u8 = 213;

/// Exit code for a failed file, and for a shim that cannot work.
pub const FAILED: u8 = 1;

/// Exit code for a wrong command line, as is customary.
const BAD_ARGS: u8 = 2;

/// Runs the program with its arguments (without its own name); returns its exit code.
pub fn run(arguments: impl Iterator<Item = OsString>) -> u8 {
    let args = match Args::parse(arguments) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("shim: {error}");
            return BAD_ARGS;
        }
    };
    let Args { mode, filter, workspace, termination_log, lines, command } = args;
    let workspace = Workspace::new(workspace, &filter, termination_log);
    let program = Program::find(command);
    let ran = Signals::block().map_err(End::from).and_then(|signals| match mode {
        Mode::Serve { socket } => {
            serve::serve(program, &socket, &workspace, lines, signals).map(|never: Infallible| match never {})
        }
        Mode::Once => once::run(program, &workspace, signals),
    });
    match ran {
        Ok(code) => code,
        Err(End::Finished) => 0,
        Err(end) => {
            eprintln!("shim: {end}");
            workspace.write_termination_text(&end.to_string());
            match end {
                End::Unusable(_) => UNUSABLE,
                End::Finished | End::Broken(_) => FAILED,
            }
        }
    }
}
