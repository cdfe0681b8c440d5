//! The operator: it lists the buckets of runs, queues their files, creates their pods, and accounts for every
//! file. It does not rely on the webhook, but validates again. It never deletes a PipelineRun, because a
//! GitOps engine would create it again.

mod args;
mod budget;
mod context;
mod error;
mod fair;
pub mod lease;
pub mod listing;
pub mod metrics;
mod names;
mod pipelines;
mod pods;
pub mod rights;
mod run;
pub mod server;
mod supervisor;
pub mod turns;
mod watches;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use kube::api::PostParams;
use kube::client::ClientBuilder;
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::util::MapRequestLayer;

pub use args::{Args, LogFormat, PullPolicy, Settings, SettingsError, WorkerSettings};
pub use error::chain;

use context::Context;
use lease::Election;
use metrics::Metrics;
use names::MANAGER;
use queue::Server;
use run::build::job::is_managed;
use world::World;

/// An error that ends the operator.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// No configuration for the API server was found.
    #[error("cannot find the Kubernetes API: set KUBECONFIG, or run in a pod with a service account")]
    Config(#[source] kube::config::InferConfigError),
    /// The client cannot be created.
    #[error("cannot connect to Kubernetes")]
    Client(#[source] kube::Error),
    /// The cluster lacks a required feature.
    #[error(
        "cannot use this cluster: it drops managedBy from Jobs; its feature JobManagedBy must be on, as it is by default in the tested version 1.36"
    )]
    NotManaged,
    /// The settings of Valkey are unusable.
    #[error("cannot use Valkey")]
    Valkey(#[source] queue::Error),
    /// The Valkey address for workers is unusable.
    #[error("cannot use --worker-valkey-url")]
    WorkerValkey(#[source] queue::Error),
    /// The address is in use, or does not belong to this machine.
    #[error("cannot listen on {0}")]
    Listen(std::net::SocketAddr, #[source] std::io::Error),
    /// Another replica may lead by now.
    #[error("cannot keep the Lease: it could not be renewed in time, so another replica may lead by now")]
    LeadershipLost,
    /// A task that must never end has ended.
    #[error("cannot continue: a task of the operator has ended")]
    TaskEnded,
    /// The system does not let us listen for signals.
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
}

/// Starts logging as configured.
pub fn start_logging(settings: &Settings) {
    let filter = tracing_subscriber::EnvFilter::try_new(&settings.log).unwrap_or_else(|error| {
        eprintln!("operator: --log {:?}: {error}; using info", settings.log);
        tracing_subscriber::EnvFilter::new("info")
    });
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    match settings.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

/// The Lease that decides which replica works.
const LEASE: &str = "openfilter-operator";

/// Runs until a signal ends it.
pub async fn run(settings: Settings) -> Result<(), Fatal> {
    let mut end = signal(SignalKind::terminate()).map_err(Fatal::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Fatal::Signals)?;
    let config = Config::infer().await.map_err(Fatal::Config)?;
    let metrics = Arc::new(Metrics::default());
    let client = client(config, &metrics)?;
    let valkey = settings.valkey.connect().map_err(Fatal::Valkey)?;
    // Anyone who can read pods can read the workers' address, so an address with a password is refused up
    // front.
    let of_workers = Server { url: settings.worker.valkey_url.clone(), ..settings.valkey.clone() };
    of_workers.connect().map_err(Fatal::WorkerValkey)?;
    let (stop, stopped) = watch::channel(false);
    let listener =
        TcpListener::bind(settings.listen).await.map_err(|source| Fatal::Listen(settings.listen, source))?;
    let ready = Arc::new(AtomicBool::new(false));
    let server = tokio::spawn(server::serve(listener, Arc::clone(&metrics), readiness(&ready), stopped));
    let (end_work, work_ends) = watch::channel(false);
    let ended = async {
        tokio::select! {
            _ = end.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("ending");
    };
    let worked = async {
        let mut work = std::pin::pin!(work(client, valkey, settings, metrics, &ready, work_ends));
        tokio::select! {
            () = ended => {
                let _ = end_work.send(true);
                work.await
            }
            failed = &mut work => failed,
        }
    };
    let worked = worked.await;
    // Connections end first, with a moment to finish their requests.
    let _ = stop.send(true);
    let _ = server.await;
    worked
}

/// A client that counts its requests, gives up an API server that died silently, and never retries: only the
/// caller knows what a failure means and when to try again.
fn client(mut config: Config, metrics: &Arc<Metrics>) -> Result<Client, Fatal> {
    follow::notice_silence(&mut config);
    config.default_retry = false;
    let metrics = Arc::clone(metrics);
    let count = MapRequestLayer::new(move |request| {
        metrics.kubernetes_request();
        request
    });
    Ok(ClientBuilder::try_from(config).map_err(Fatal::Client)?.with_layer(&count).build())
}

fn readiness(ready: &Arc<AtomicBool>) -> impl Fn() -> Result<(), String> + Send + Sync + 'static {
    let ready = Arc::clone(ready);
    move || {
        if ready.load(Ordering::Relaxed) { Ok(()) } else { Err("not connected to Kubernetes yet".to_owned()) }
    }
}

/// Waits until this replica leads, and works as long as it does. Stopping at any point loses nothing, because
/// the next operator can repeat every step.
async fn work(
    client: Client,
    valkey: queue::Connection,
    settings: Settings,
    metrics: Arc<Metrics>,
    ready: &AtomicBool,
    mut ends: watch::Receiver<bool>,
) -> Result<(), Fatal> {
    let mut waits = ends.clone();
    let prepared = async {
        // Check where Jobs will be created: with a list of namespaces, the operator may create none
        // elsewhere.
        let namespace = settings.namespaces.first().unwrap_or(&settings.operator_namespace);
        check_managed_jobs(&client, namespace).await?;
        // A waiting replica is as ready as the leader.
        ready.store(true, Ordering::Relaxed);
        let election = Election::new(client.clone(), &settings.operator_namespace, LEASE, &settings.identity);
        Ok(if settings.leader_election { Some(election.acquire().await) } else { None })
    };
    let leadership = tokio::select! {
        leadership = prepared => leadership?,
        _ = waits.wait_for(|ends| *ends) => return Ok(()),
    };
    metrics.set_leader(true);
    let (world, touched) = World::new();
    let ctx = Arc::new(Context::new(client, valkey, settings, world, metrics));
    let mut tasks = JoinSet::new();
    let watching = async {
        watches::start(&ctx.client, &ctx.settings.namespaces, &ctx.world, &mut tasks).await;
        tracing::info!("watching");
        tasks.spawn(supervisor::supervise(Arc::clone(&ctx), touched));
        tasks.spawn(supervisor::sweep(Arc::clone(&ctx)));
        tasks.spawn(pipelines::keep_statuses(Arc::clone(&ctx)));
        // None of these tasks ends on its own.
        tasks.join_next().await
    };
    let lost = async {
        match &leadership {
            Some(leadership) => {
                let _ = leadership.lost().wait_for(|lost| *lost).await;
            }
            None => std::future::pending().await,
        }
    };
    let outcome = tokio::select! {
        _ = watching => Err(Fatal::TaskEnded),
        () = lost => Err(Fatal::LeadershipLost),
        _ = ends.wait_for(|ends| *ends) => Ok(()),
    };
    // After this, all work of the leader has stopped, so that the next one may begin at once.
    tasks.shutdown().await;
    if let (Some(leadership), Ok(())) = (leadership, &outcome) {
        leadership.release().await;
    }
    outcome
}

/// The longest wait between two tries while the API server does not answer.
const ASK_AGAIN_MAX: Duration = Duration::from_secs(30);

/// Asks the API server, until it answers, how it would treat a Job that the operator manages.
async fn check_managed_jobs(client: &Client, namespace: &str) -> Result<(), Fatal> {
    let pod =
        json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "probe", "image": "probe"}]}});
    let metadata = json!({"generateName": "openfilter-probe-"});
    let probe = json!({"metadata": metadata, "spec": {"managedBy": MANAGER, "template": pod}});
    let Ok(probe) = serde_json::from_value::<Job>(probe) else { return Ok(()) };
    let jobs: Api<Job> = Api::namespaced(client.clone(), namespace);
    let mut wait = Duration::from_secs(1);
    loop {
        match jobs.create(&PostParams { dry_run: true, ..PostParams::default() }, &probe).await {
            Ok(made) if is_managed(&made) => return Ok(()),
            Ok(_) => return Err(Fatal::NotManaged),
            // The operator checks each Job again when it creates it.
            Err(error @ kube::Error::Api(_)) => {
                tracing::warn!(
                    error = chain(&error),
                    "could not check whether the cluster supports managedBy"
                );
                return Ok(());
            }
            Err(error) => {
                tracing::warn!(error = chain(&error), ?wait, "Kubernetes does not answer");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MAX);
            }
        }
    }
}
