//! `testbed`: starts and stops the cluster.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use testbed::{
    ARGOCD, Found, KUSTOMIZE, KUSTOMIZE_CONTROLLER, Paths, Result, SOURCE_CONTROLLER, Testbed, Up, Whose,
    images::{self, Set},
    programs::Profile,
    services::{S3_IP_URL, S3_URL, VALKEY_HOST, VALKEY_IP},
};

/// A real multi-node Kubernetes on this machine, for tests.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a cluster, unless it is already up.
    Up {
        /// Number of real nodes.
        #[arg(long, default_value_t = 1)]
        nodes: u8,
        /// Number of fake nodes beside them, for scale.
        #[arg(long, default_value_t = 0)]
        kwok: u32,
    },
    /// Stop the cluster and remove every trace of it except its logs.
    Down {
        /// Also take down a running cluster of another checkout.
        #[arg(long)]
        any: bool,
    },
    /// Build a release image of every program, and load it into every node of the cluster, if one is up.
    Images,
    /// Build Argo CD and Flux, unless this machine already has them: half an hour on two cores.
    Engines,
    /// Start Valkey and S3 in the cluster, and the cluster if it is not up.
    Services,
    /// Report whether a cluster is up, whose it is, and which of its processes are not running.
    Status,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse().command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testbed: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<()> {
    let paths = Paths::find()?;
    match command {
        Command::Up { nodes, kwok } => match testbed::up(&paths, nodes, kwok).await? {
            Up::Started(record) => {
                println!("the cluster is up (nodes: {}, fake nodes: {})", record.nodes, record.kwok)
            }
            Up::Already(record) => {
                println!(
                    "the cluster is already up, nothing changed (nodes: {}, fake nodes: {})",
                    record.nodes, record.kwok
                );
                if (record.nodes, record.kwok) != (nodes, kwok) {
                    println!("  (to get {nodes} and {kwok} instead, take it down first)");
                }
                print_dead();
            }
        },
        Command::Down { any } => {
            match testbed::down(&paths, if any { Whose::Anyone } else { Whose::Ours })? {
                Some(record) => println!("the cluster of {} is down", record.root.display()),
                None => println!("no cluster was up, and nothing of one is left"),
            }
        }
        Command::Images => return images(&paths).await,
        Command::Engines => {
            for engine in [&KUSTOMIZE, &SOURCE_CONTROLLER, &KUSTOMIZE_CONTROLLER, &ARGOCD] {
                println!("{}", engine.program(&paths)?.display());
            }
            return Ok(());
        }
        Command::Services => {
            let services = Testbed::start_or_reuse().await?.services().await?;
            println!(
                "Valkey: {VALKEY_HOST}:6379 (from the host {VALKEY_IP}), password {}",
                services.valkey_password
            );
            println!("S3: {S3_URL} (from the host {S3_IP_URL})");
            println!("  access key {}, secret key {}", services.s3.access_key, services.s3.secret_key);
        }
        Command::Status => return status(),
    }
    if matches!(testbed::find(), Found::Up(_)) {
        println!("  export KUBECONFIG={}", paths.kubeconfig().display());
        println!("  {} get nodes,pods -A", paths.bin("kubectl").display());
        println!("  logs: {}", paths.logs().display());
    }
    Ok(())
}

async fn images(paths: &Paths) -> Result<()> {
    let sets = [Set::Base, Set::Services, Set::Worker, Set::Product, Set::Filters];
    let running = match testbed::find() {
        Found::Up(record) if record.root == paths.root => Some(Testbed::start_or_reuse().await?),
        _ => None,
    };
    for archive in images::build(paths, &sets, Profile::Release)? {
        let loaded = running.as_ref().map(|testbed| testbed.load_image(&archive)).transpose()?;
        println!("built {}{}", archive.display(), loaded.map_or("", |()| " and loaded it into every node"));
    }
    Ok(())
}

fn status() -> Result<()> {
    match testbed::find() {
        Found::Nothing => println!("no cluster is up"),
        Found::Stale(_) => {
            println!("a cluster crashed or did not finish starting: `testbed down` removes it")
        }
        Found::Up(record) => {
            println!(
                "up (nodes: {}, fake nodes: {}), of {}",
                record.nodes,
                record.kwok,
                record.root.display()
            );
            print_dead();
        }
    }
    Ok(())
}

fn print_dead() {
    for name in testbed::dead() {
        println!("  not running: {name}");
    }
}
