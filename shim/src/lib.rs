//! Runs as pid 1 of a filter's container and starts the filter's command once per file, so that a pod lasts for many
//! files and the filter's image needs no change.
//!
//! It refuses to know anything of queues, buckets or Kubernetes: the pod's worker says over a socket when the next file
//! is there ([`wire`]), and the shim says how it ended. A file never sees processes or temporary files of the one
//! before.

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

/// Exit code for a file that no retry will help: the filter answered `"retry":false`.
pub const REJECTED: u8 = 65;

/// Exit code for a command that cannot be executed. Not 126 or 127, as shells have it: a filter that is a script ends so by
/// itself, and then its file is to blame. Above 192, the last one that a signal can cause.
pub const UNUSABLE: u8 = 213;

/// Exit code for a file that failed, and for a shim that cannot work.
pub const FAILED: u8 = 1;

/// Exit code for a command line that is wrong, as is usual.
const BAD_ARGS: u8 = 2;

/// Runs the program with its arguments (without its own name); gives its exit code.
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
