//! The webhook: see the library.

use clap::Parser;
use webhook::args::Args;

fn main() -> std::process::ExitCode {
    // This fails only if a provider is already installed, which is just as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(webhook::run(args)).map_err(|error| error.to_string()),
        Err(error) => Err(format!("cannot start: {error}")),
    };
    match ended {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("webhook: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
