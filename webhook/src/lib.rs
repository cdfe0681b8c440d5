//! The admission webhook: fills in defaults, refuses mistakes before they are stored, and enforces policies.
//!
//! It never writes the objects that it is asked about, and writes nothing while it answers: a dry run and a
//! real request take the same path. It writes only its own data: certificates, the `caBundle` of its
//! configurations, and the status of policies.

pub mod admit;
pub mod args;
pub mod health;
mod live;
pub mod metrics;
pub mod review;
pub mod rights;
pub mod server;
mod status;
pub mod tls;
pub mod watch;
pub mod world;

use std::net::TcpListener;
use std::sync::Arc;

use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::info;
use tracing_subscriber::EnvFilter;

use admit::Admission;
use args::Args;
use health::Health;
use live::Cluster;
use metrics::Metrics;
use server::Server;
use tls::Certificates;
use tls::managed::{Managed, service_names};
use watch::Watches;
use world::World;

/// The name of the certificate in `/readyz`.
const CERTIFICATE: &str = "certificate";

/// Why the webhook ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The log filter cannot be parsed.
    #[error("cannot read --log {0:?}: {1}")]
    Log(String, #[source] tracing_subscriber::filter::ParseError),
    /// The API server cannot be found.
    #[error("cannot find the API server: {0}")]
    Config(#[source] kube::config::InferConfigError),
    /// The client cannot be created.
    #[error("cannot connect to the API server: {0}")]
    Client(#[source] Box<kube::Error>),
    /// The server cannot listen on an address.
    #[error("cannot listen on {0}: {1}")]
    Listen(std::net::SocketAddr, #[source] std::io::Error),
    /// TLS cannot be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(#[source] rustls::Error),
    /// The files of `--cert-dir` cannot be used.
    #[error(transparent)]
    Files(#[from] tls::files::FilesError),
    /// Signals cannot be received.
    #[error("cannot wait for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// The server ended.
    #[error("serve: {0}")]
    Serve(#[source] std::io::Error),
}

/// Serves until a signal stops it.
pub async fn run(args: Args) -> Result<(), Error> {
    let filter = EnvFilter::try_new(&args.log).map_err(|error| Error::Log(args.log.clone(), error))?;
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    // A second subscriber is refused, which is fine: the first one logs.
    let _ = if args.log_json { log.json().try_init() } else { log.try_init() };

    let mut config = Config::infer().await.map_err(Error::Config)?;
    follow::notice_silence(&mut config);
    let client = Client::try_from(config).map_err(|error| Error::Client(Box::new(error)))?;
    let (world, metrics) = (Arc::new(World::default()), Arc::new(Metrics::default()));
    let health = Health::waiting_for(watch::KINDS.into_iter().chain([CERTIFICATE]));
    let listen = |address| TcpListener::bind(address).map_err(|error| Error::Listen(address, error));
    let health_router = server::health_router(Arc::clone(&metrics), health.clone());
    // Started first, so that `/readyz` shows from the start what is missing.
    let probes = Server::start(listen(args.health_listen)?, None, health_router).map_err(Error::Serve)?;

    let certificates = keep_certificates(&args, &client, &health, &metrics).await?;
    let (compiled, policies) = mpsc::unbounded_channel();
    let watches = Watches {
        client: client.clone(),
        world: Arc::clone(&world),
        health: health.clone(),
        metrics: Arc::clone(&metrics),
    };
    watches.start(compiled);
    tokio::spawn(status::write(client.clone(), policies));

    let admission = Admission::new(world, Arc::new(Cluster(client)), args.settings(), Arc::clone(&metrics));
    let router = server::router(admission, metrics, args.limits(), health);
    let tls = certificates.server_config().map_err(Error::Tls)?;
    let mut server = Server::start(listen(args.listen)?, Some(tls), router).map_err(Error::Serve)?;
    info!(address = %server.address, "serving");

    tokio::select! {
        error = server.failed() => return Err(Error::Serve(error)),
        told = told_to_stop() => told?,
    }
    // For a moment the service's endpoints still list this replica, so it keeps answering until they do not.
    info!(delay = ?args.shutdown_delay, "stopping");
    server.announce_stop();
    tokio::time::sleep(args.shutdown_delay).await;
    server.stop().await.map_err(Error::Serve)?;
    probes.stop().await.map_err(Error::Serve)
}

/// Keeps the certificates up to date, from files or self-issued.
async fn keep_certificates(
    args: &Args,
    client: &Client,
    health: &Health,
    metrics: &Arc<Metrics>,
) -> Result<Arc<Certificates>, Error> {
    let certificates = Arc::new(Certificates::default());
    match &args.cert_dir {
        Some(folder) => {
            tls::files::load(folder, &certificates, metrics).await?;
            health.have(CERTIFICATE);
            tokio::spawn(tls::files::follow(folder.clone(), Arc::clone(&certificates), Arc::clone(metrics)));
        }
        None => {
            let managed = Managed {
                client: client.clone(),
                namespace: args.namespace.clone(),
                secret: args.cert_secret.clone(),
                names: service_names(&args.service, &args.namespace)
                    .into_iter()
                    .chain(args.names.clone())
                    .collect(),
                configuration: args.configuration.clone(),
                certificates: Arc::clone(&certificates),
                metrics: Arc::clone(metrics),
            };
            let health = health.clone();
            tokio::spawn(managed.keep(move || health.have(CERTIFICATE)));
        }
    }
    Ok(certificates)
}

async fn told_to_stop() -> Result<(), Error> {
    let listen = |kind| signal(kind).map_err(Error::Signals);
    let (mut term, mut int) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
