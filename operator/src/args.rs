//! The settings: flags with equivalent environment variables, parsed into values that need no further check.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use crds::rules::parse_duration;
use ipnet::IpNet;
use queue::Server;

use crate::run::RunSettings;

/// Executes PipelineRuns: lists the bucket, queues one message per file, creates one Job per run, and
/// accounts for every file.
///
/// Several replicas are safe: a Lease selects one leader, and the others wait. The operator connects to the
/// cluster of KUBECONFIG, or with the service account of its pod.
#[derive(Parser, Debug)]
#[command(name = "operator", version)]
pub struct Args {
    /// URL of Valkey: redis://host:port, or rediss://host:port with TLS
    #[arg(long, env = "VALKEY_URL", help_heading = "Valkey")]
    valkey_url: String,
    /// Valkey user of the operator, which must be allowed to manage users; if omitted, the server's default
    /// user
    #[arg(long, env = "VALKEY_USERNAME", default_value = "", help_heading = "Valkey")]
    valkey_username: String,
    /// Password of the Valkey user
    #[arg(
        long,
        env = "VALKEY_PASSWORD",
        default_value = "",
        hide_env_values = true,
        help_heading = "Valkey"
    )]
    valkey_password: String,
    /// File with the CA of Valkey's certificate, in PEM; if omitted, the machine's trust store
    #[arg(long, env = "VALKEY_CA_FILE", help_heading = "Valkey")]
    valkey_ca_file: Option<PathBuf>,
    /// How long Valkey may take to reply
    #[arg(long, env = "VALKEY_TIMEOUT", default_value = "5s", value_parser = duration, help_heading = "Valkey")]
    valkey_timeout: Duration,
    /// URL at which worker pods reach Valkey; if omitted, the same as --valkey-url
    #[arg(long, env = "WORKER_VALKEY_URL", default_value = "", help_heading = "Valkey")]
    worker_valkey_url: String,

    /// Image of the claimer, which runs in every worker pod
    #[arg(long, env = "CLAIMER_IMAGE", help_heading = "Worker pods")]
    claimer_image: String,
    /// When to pull the claimer's image
    #[arg(
        long,
        env = "CLAIMER_IMAGE_PULL_POLICY",
        default_value = "IfNotPresent",
        help_heading = "Worker pods"
    )]
    claimer_image_pull_policy: PullPolicy,
    /// How long a pod may fail to start (an image that cannot be pulled, a node without a network) before it
    /// is replaced
    #[arg(long, env = "START_TIMEOUT", default_value = "5m", value_parser = duration, help_heading = "Worker pods")]
    start_timeout: Duration,
    /// How many failed pods to keep for their logs during a run
    #[arg(long, env = "KEEP_FAILED_PODS", default_value_t = 5, help_heading = "Worker pods")]
    keep_failed_pods: usize,

    /// Loopback, link-local or metadata networks that endpoints may use anyway; separated by commas
    #[arg(long, env = "ALLOWED_ENDPOINT_NETWORKS", value_delimiter = ',', help_heading = "Storage")]
    allowed_endpoint_networks: Vec<IpNet>,
    /// Hosts that endpoints may use although they are refused by default (for example localhost); separated
    /// by commas
    #[arg(long, env = "ALLOWED_ENDPOINT_HOSTS", value_delimiter = ',', help_heading = "Storage")]
    allowed_endpoint_hosts: Vec<String>,

    /// How long to keep the Job of a finished run
    #[arg(long, env = "JOB_RETENTION", default_value = "24h", value_parser = duration, help_heading = "Retention")]
    job_retention: Duration,
    /// How long to keep dead letters and counters of a finished run in Valkey, and the queue of a run whose
    /// finalizer was removed by hand
    #[arg(long, env = "DETAILS_RETENTION", default_value = "168h", value_parser = duration, help_heading = "Retention")]
    details_retention: Duration,
    /// How long to remember a finished run after its PipelineRun was last seen, so that it is not executed
    /// again
    #[arg(long, env = "LEDGER_RETENTION", default_value = "2160h", value_parser = duration, help_heading = "Retention")]
    ledger_retention: Duration,
    /// How many of the newest file outcomes to keep in Valkey for each run, for programs that read them
    #[arg(long, env = "KEEP_RESULTS", default_value_t = 0, help_heading = "Retention")]
    keep_results: u32,

    /// Namespaces to work in, separated by commas; if omitted, all
    #[arg(long, env = "NAMESPACES", value_delimiter = ',', help_heading = "Operation")]
    namespaces: Vec<String>,
    /// How many runs the operator works on at the same time
    #[arg(long, env = "CONCURRENCY", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Operation")]
    concurrency: u16,
    /// How many listings may fetch or queue a page at the same time; the others wait for their turn
    // Valkey queues about a hundred pages a second: with eight, a call waits for at most seven others, far
    // less than its timeout.
    #[arg(long, env = "MAX_LISTINGS", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Operation")]
    max_listings: u16,
    /// How many files a run may have before it is stopped (TooManyFiles), as a safety net against a wrong
    /// prefix; 0 means no limit
    #[arg(long, env = "MAX_FILES", default_value_t = 0, help_heading = "Operation")]
    max_files: u64,
    /// How many files of a run may wait in Valkey: the listing pauses above this number, and continues below
    /// half of it
    // The default takes about 30 MiB of Valkey's memory for one run, and keeps thousands of pods busy during
    // the pause. With fewer than a hundred, pods would wait for the listing.
    #[arg(long, env = "QUEUE_HIGH_WATER", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(100..), help_heading = "Operation")]
    queue_high_water: u64,
    /// How many dead letters a run may have before it is stopped (TooManyFailures)
    // With reasons of half a kilobyte each, they must fit into the Valkey that is deployed by default.
    #[arg(long, env = "MAX_DEAD_LETTERS", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Operation")]
    max_dead_letters: u64,
    /// How many disruptions in a row (for example, drained nodes) are not charged to a file; the next one
    /// counts as an attempt
    #[arg(long, env = "MAX_DISRUPTIONS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Worker pods")]
    max_disruptions: u32,
    /// Whether a Lease decides which replica works
    #[arg(long, env = "LEADER_ELECTION", default_value_t = true, action = clap::ArgAction::Set, help_heading = "Operation")]
    leader_election: bool,
    /// Namespace of the operator, for its Lease and its notes about pending cleanup
    #[arg(long, env = "POD_NAMESPACE", default_value = "openfilter-system", help_heading = "Operation")]
    operator_namespace: String,
    /// Name of this replica in the Lease and in events; if omitted, host name and process id
    #[arg(long, env = "POD_NAME", default_value = "", help_heading = "Operation")]
    identity: String,
    /// Address of /livez, /readyz and /metrics
    #[arg(long, env = "LISTEN", default_value = "0.0.0.0:8080", help_heading = "Operation")]
    listen: SocketAddr,
    /// Format of the log
    #[arg(long, env = "LOG_FORMAT", default_value = "text", help_heading = "Operation")]
    log_format: LogFormat,
    /// What to log: a level, or levels by module (info,operator=debug)
    #[arg(long, env = "LOG", default_value = "info", help_heading = "Operation")]
    log: String,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// When the claimer's image is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, strum::AsRefStr)]
#[value(rename_all = "PascalCase")]
#[allow(missing_docs)]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// The settings, parsed.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Valkey, for the operator.
    pub valkey: Server,
    /// Settings of worker pods.
    pub worker: WorkerSettings,
    /// How long a container may fail to start.
    pub start_timeout: Duration,
    /// Failed pods to keep during their run.
    pub keep_failed_pods: usize,
    /// Settings of every run.
    pub runs: RunSettings,
    /// Networks that endpoints may use although they are refused by default.
    pub allowed_networks: Vec<IpNet>,
    /// Hosts that endpoints may use although they are refused by default.
    pub allowed_hosts: Vec<String>,
    /// How long dead letters and the ledger are kept.
    pub retention: queue::Retention,
    /// Namespaces to work in; all when empty.
    pub namespaces: Vec<String>,
    /// Runs to work on at the same time.
    pub concurrency: usize,
    /// Listings that may fetch or queue a page at the same time.
    pub max_listings: usize,
    /// Files of a run that may wait in Valkey.
    pub queue_high_water: u64,
    /// Whether a Lease decides which replica works.
    pub leader_election: bool,
    /// Namespace of the operator itself.
    pub operator_namespace: String,
    /// Name of this replica.
    pub identity: String,
    /// Address of the HTTP server.
    pub listen: SocketAddr,
    /// How the log is written.
    pub log_format: LogFormat,
    /// What to log.
    pub log: String,
}

/// Settings of worker pods.
#[derive(Clone, Debug)]
pub struct WorkerSettings {
    /// Image of the claimer.
    pub claimer_image: String,
    /// When to pull it.
    pub claimer_image_pull_policy: PullPolicy,
    /// URL at which pods reach Valkey.
    pub valkey_url: String,
    /// CA of Valkey, in PEM. Not a secret.
    pub valkey_ca: Option<String>,
    /// How long a finished Job is kept.
    pub job_retention: Duration,
}

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

impl Args {
    /// Parses the values.
    pub fn usable(self) -> Result<Settings, SettingsError> {
        let ca = self.valkey_ca_file.map(|path| {
            std::fs::read_to_string(&path)
                .map_err(|error| SettingsError(format!("--valkey-ca-file {}: {error}", path.display())))
        });
        let ca = ca.transpose()?;
        if self.claimer_image.is_empty() {
            return Err(SettingsError("--claimer-image is empty: name the image of the claimer".to_owned()));
        }
        let valkey = Server {
            url: self.valkey_url.clone(),
            username: filled(self.valkey_username),
            password: filled(self.valkey_password).map(Into::into),
            ca_certificate: ca.clone().map(String::into_bytes),
            timeout: self.valkey_timeout,
        };
        Ok(Settings {
            valkey,
            worker: WorkerSettings {
                claimer_image: self.claimer_image,
                claimer_image_pull_policy: self.claimer_image_pull_policy,
                valkey_url: filled(self.worker_valkey_url).unwrap_or(self.valkey_url),
                valkey_ca: ca,
                job_retention: self.job_retention,
            },
            start_timeout: self.start_timeout,
            keep_failed_pods: self.keep_failed_pods,
            runs: RunSettings {
                keep_results: self.keep_results,
                max_disruptions: self.max_disruptions,
                max_dead_letters: self.max_dead_letters,
                max_files: Some(self.max_files).filter(|max| *max > 0),
            },
            allowed_networks: self.allowed_endpoint_networks,
            allowed_hosts: self.allowed_endpoint_hosts,
            retention: queue::Retention {
                details: self.details_retention,
                ledger: Some(self.ledger_retention),
            },
            namespaces: self.namespaces.into_iter().filter(|name| !name.is_empty()).collect(),
            concurrency: usize::from(self.concurrency),
            max_listings: usize::from(self.max_listings),
            queue_high_water: self.queue_high_water,
            leader_election: self.leader_election,
            operator_namespace: self.operator_namespace,
            identity: filled(self.identity).unwrap_or_else(own_name),
            listen: self.listen,
            log_format: self.log_format,
            log: self.log,
        })
    }
}

fn filled(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Two replicas must never have the same name: both would lead.
fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("{text:?} is not a duration: write 500ms, 30s, 15m or 1h30m"))
}
