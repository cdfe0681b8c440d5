//! `openfilter`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(cli::run(std::env::args_os(), std::io::stdin(), &mut std::io::stdout().lock()))
}
