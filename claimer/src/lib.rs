//! Runs in worker pods. As an init container it claims one file and fetches it to `/ws/input`; as the main
//! container of a pipeline with a sink it publishes the results. In a pod that processes many files it does
//! both for all of them, beside the filters.
//!
//! It never talks to Kubernetes and never acknowledges a file: the operator learns how an attempt ended from
//! the exit code ([`protocol::Exit`]) and from the one-line termination message.

pub mod args;
mod backoff;
mod bucket_args;
mod canary;
mod claim;
mod exit;
mod fetch;
mod install;
mod progress;
mod publish;
mod serve;
pub mod steps;
mod upload;
mod verify;
mod walk;
mod workspace;

use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

use tokio::signal::unix::{SignalKind, signal};

use args::{ClaimSettings, Command, Parsed};
use canary::Canary;
use exit::Failure;
use progress::Progress;
use workspace::Workspace;

/// Runs the command that the command line and the environment describe, and returns the exit code.
pub async fn run(argv: impl IntoIterator<Item = OsString>, started: Instant) -> i32 {
    let progress = Progress::start();
    let (command, log) = match args::parse(argv) {
        Ok(Parsed::Run(command, log)) => (command, log),
        Ok(Parsed::Print(text)) => {
            println!("{text}");
            return 0;
        }
        Err(error) => return progress.report(Err(error.into()), &args::termination_log()),
    };
    // `serve` decides itself what a signal ends.
    let is_ended_by_signals = !matches!(command, Command::Serve(_));
    let work = async {
        match command {
            Command::Claim(settings) => claim_and_fetch(&settings, &progress, started).await,
            Command::Publish(settings) => publish::publish(&settings, &progress).await.map_err(Failure::from),
            Command::Install(settings) => {
                install::install(&settings).map(|()| String::new()).map_err(Failure::from)
            }
            Command::Serve(settings) => serve::serve(*settings).await.map(|()| String::new()),
        }
    };
    let outcome = tokio::select! {
        // A container's first process has no default action for signals: without this, it would ignore
        // SIGTERM.
        biased;
        failure = terminated(), if is_ended_by_signals => Err(failure),
        outcome = work => outcome,
    };
    progress.report(outcome, &log)
}

/// Returns the key of the claimed file.
async fn claim_and_fetch(
    settings: &ClaimSettings,
    progress: &Progress,
    started: Instant,
) -> Result<String, Failure> {
    let workspace = Workspace::new(&settings.workspace);
    workspace.prepare(&settings.filters)?;
    if let Some(folder) = &settings.install_to {
        install::install_shim(Path::new(args::SHIM), folder)?;
    }
    let claim = claim::claim(&settings.queue).await?;
    let (uri, attempt) = (settings.bucket.uri(&claim.file.key), u64::from(claim.attempts) + 1);
    progress.claimed(claim.entry.as_str(), attempt);
    let after = started.elapsed();
    eprintln!("claimed {} (attempt {attempt}) after {after:?}", uri.escape_debug());
    // Created only now, so that nothing delays the claim.
    let client = settings.bucket.client().await;
    let fetched = fetch::fetch(&client, &settings.bucket, &claim.file, &workspace.partial()).await;
    if let Err(error) = fetched {
        workspace.discard();
        let canary = Canary { client: &client, bucket: &settings.bucket.name, keys: &settings.canary_keys };
        let canary = canary.read(&claim.file.key, error.exit(), &settings.prefix).await;
        return Err(error.at(&uri, canary).into());
    }
    workspace.complete(&uri, attempt)?;
    eprintln!("fetched {} bytes in {:?}", claim.file.size, started.elapsed().saturating_sub(after));
    Ok(claim.file.key)
}

async fn terminated() -> Failure {
    let (mut term, mut int) = match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(term), Ok(int)) => (term, int),
        (Err(error), _) | (_, Err(error)) => return Failure::Signals(error),
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Failure::Terminated
}
