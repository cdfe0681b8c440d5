//! `openfilter`, the command line of OpenFilter Pipelines. Installed as `kubectl-openfilter` it is a plugin:
//! `kubectl openfilter validate`. It needs no cluster, and reports exactly what the webhook would.

pub mod args;
mod document;
mod report;
mod source;
mod validate;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::Path;

use clap::{CommandFactory, FromArgMatches};

use args::{Args, Command};

/// Exit code: all objects are valid.
pub const OK: u8 = 0;
/// Exit code: an object is not valid.
pub const VIOLATIONS: u8 = 1;
/// Exit code: the command line is wrong or a file cannot be read.
pub const USAGE: u8 = 2;

/// Runs the command line, and returns the exit code.
pub fn run(argv: impl IntoIterator<Item = OsString>, stdin: impl Read, out: &mut impl Write) -> u8 {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let args = match parse(&argv) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are not errors, and clap knows which stream each belongs to.
            let _ = error.print();
            return if error.use_stderr() { USAGE } else { OK };
        }
    };
    let Command::Validate(args) = args.command;
    match validate::validate(&args, stdin) {
        Ok(result) => match report::write(&result, args.output, out) {
            Ok(()) if result.has_errors() => VIOLATIONS,
            Ok(()) => OK,
            Err(error) => fail(&format!("cannot write the result: {error}")),
        },
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(message: &str) -> u8 {
    eprintln!("openfilter: {message}");
    USAGE
}

fn parse(argv: &[OsString]) -> Result<Args, clap::Error> {
    let mut command = Args::command();
    // kubectl finds plugins by their file name, but its users type another name.
    let called = argv.first().and_then(|name| Path::new(name).file_stem()?.to_str());
    if called == Some("kubectl-openfilter") {
        command = command.bin_name("kubectl openfilter");
    }
    Args::from_arg_matches(&command.try_get_matches_from(argv)?)
}
