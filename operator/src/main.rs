//! The operator's process: settings in, exit code out.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    // One provider for everything that uses TLS. An error means that one is already installed, which is just
    // as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let settings = match operator::Args::parse().usable() {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("operator: {error}");
            return ExitCode::from(2);
        }
    };
    operator::start_logging(&settings);
    match operator::run(settings).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = operator::chain(&error), "the operator stopped");
            ExitCode::FAILURE
        }
    }
}
