//! `openfilter`, the command line of OpenFilter Pipelines. Installed under the name `kubectl-openfilter` it is a plugin:
//! `kubectl openfilter validate`. It needs no cluster: what it says, the webhook would say.

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

/// Nothing is wrong.
pub const OK: u8 = 0;
/// Something is wrong with the objects.
pub const VIOLATIONS: u8 = 1;
/// Something is wrong with how it was called.
pub const USAGE: u8 = 2;

/// Does what the command line says; returns the exit code.
pub fn run(argv: impl IntoIterator<Item = OsString>, stdin: impl Read, out: &mut impl Write) -> u8 {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let args = match parse(&argv) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are not errors, and clap knows where to print which.
            let _ = error.print();
            return if error.use_stderr() { USAGE } else { OK };
        }
    };
    let Command::Validate(args) = args.command;
    match validate::validate(&args, stdin) {
        Ok(result) => match report::write(&result, args.output, out) {
            Ok(()) if result.has_errors() => VIOLATIONS,
            Ok(()) => OK,
            Err(error) => fail(&format!("write the result: {error}")),
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
    // kubectl finds plugins by the name of their file, and its users type another.
    let called = argv.first().and_then(|name| Path::new(name).file_stem()?.to_str());
    if called == Some("kubectl-openfilter") {
        command = command.bin_name("kubectl openfilter");
    }
    Args::from_arg_matches(&command.try_get_matches_from(argv)?)
}
