//! Parses the command line and the environment into settings that need no further checks. Every setting is a
//! flag and an environment variable; an empty value counts as unset. Secrets are never printed, not even by
//! `--help`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use protocol::env;
use queue::{Password, Server};
use storage::Bucket;

use crate::bucket_args::{SinkArgs, SourceArgs};
use crate::claim::QueueSettings;
use crate::install::InstallSettings;
use crate::publish::Destination;
use crate::serve::{Order, ServeSettings};

/// The settings are unusable.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(pub(crate) String);

/// A subcommand with its settings.
#[derive(Debug)]
pub enum Command {
    /// Claim a file and fetch it.
    Claim(Box<ClaimSettings>),
    /// Upload the results.
    Publish(Box<PublishSettings>),
    /// Prepare a pod that processes many files.
    Install(Box<InstallSettings>),
    /// Process many files.
    Serve(Box<ServeSettings>),
}

/// The meaning of a command line.
#[derive(Debug)]
pub enum Parsed {
    /// Run this command, and write the report to the file.
    Run(Command, PathBuf),
    /// Print this text: help or version.
    Print(String),
}

/// Settings of `claim`.
#[derive(Debug)]
pub struct ClaimSettings {
    /// The queue.
    pub queue: QueueSettings,
    /// Where the file is.
    pub bucket: Bucket,
    /// The prefix of the file keys.
    pub prefix: String,
    /// The folder that the pod's containers share.
    pub workspace: PathBuf,
    /// Filters whose folders are created.
    pub filters: Vec<String>,
    /// Objects of the bucket that this run has fetched before, newest first.
    pub canary_keys: Vec<String>,
    /// Folder to copy the shim to, if a filter needs it.
    pub install_to: Option<PathBuf>,
}

/// Settings of `publish`.
#[derive(Debug)]
pub struct PublishSettings {
    /// Where the results go.
    pub destination: Destination,
    /// Bucket that the file came from.
    pub source_bucket: String,
    /// The folder that the pod's containers share.
    pub workspace: PathBuf,
    /// Objects of the sink that this run has published before, newest first.
    pub canary_keys: Vec<String>,
    /// Objects of the source that this run has fetched before, newest first.
    pub source_canaries: Vec<String>,
}

/// Path of the shim in our image.
pub(crate) const SHIM: &str = "/shim";
/// Path from which the kubelet reads the termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Claims one file of a run and fetches it (claim), or uploads the results (publish). Without a command, it
/// claims.
#[derive(Parser)]
#[command(name = "claimer", version)]
struct Cli {
    #[command(subcommand)]
    command: CommandArgs,
    /// Folder that the containers of the pod share
    #[arg(long, env = env::WORKSPACE, default_value = "/ws", global = true)]
    workspace: PathBuf,
    /// File that receives the one-line report at the end, if it exists
    #[arg(long, env = env::TERMINATION_LOG, default_value = TERMINATION_LOG, global = true)]
    termination_log: PathBuf,
}

#[derive(Subcommand)]
enum CommandArgs {
    /// Claim one file and fetch it to <workspace>/input (the default)
    Claim(Box<ClaimArgs>),
    /// Upload everything below <workspace>/out/<from>
    Publish(Box<PublishArgs>),
    /// Prepare a pod whose filters process many files
    Install(Box<InstallArgs>),
    /// Process many files: claim and fetch each one, run the filters, publish the results
    Serve(Box<ServeArgs>),
}

#[derive(Args)]
struct InstallArgs {
    /// Path of the shim
    #[arg(long, default_value = SHIM)]
    shim: PathBuf,
    /// Folder to put the shim and the filters' sockets in
    #[arg(long, env = env::LINKS, default_value = "/.openfilter")]
    to: PathBuf,
    /// Names of the pod's filters, separated by commas
    #[arg(long, env = env::FILTERS)]
    filters: String,
}

#[derive(Args)]
struct ServeArgs {
    #[command(flatten)]
    claim: ClaimArgs,
    /// Whether the filters process a file one after the other or at once: Sequential or Concurrent
    #[arg(long, env = env::ORDER, default_value = "Sequential", value_parser = parse_order)]
    order: Order,
    /// How long the filters may take for one file; no limit when empty
    #[arg(long, env = env::FILE_TIMEOUT, default_value = "")]
    file_timeout: String,
    /// How many bytes of files to fetch before their turn
    #[arg(long, env = env::PREFETCH_BYTES, default_value = "268435456")]
    prefetch_bytes: u64,
    /// How many files the filters process before the pod ends
    #[arg(long, env = env::MAX_FILES, default_value = "10000", value_parser = clap::value_parser!(u64).range(1..))]
    max_files: u64,
    /// How old the pod may get before it ends
    #[arg(long, env = env::MAX_AGE, default_value = "1h", value_parser = parse_duration)]
    max_age: Duration,
    /// Folder with the shim and the filters' sockets
    #[arg(long, env = env::LINKS, default_value = "/.openfilter")]
    links: PathBuf,
    /// The filter whose results are uploaded; nothing is uploaded when empty
    #[arg(long, env = env::SINK_FROM, default_value = "")]
    sink_from: String,
}

/// The settings of the sink, read from the environment only, because a pipeline need not have one.
#[derive(Parser)]
struct SinkOfServe {
    #[command(flatten)]
    publish: PublishArgs,
}

#[derive(Args)]
struct ClaimArgs {
    /// Work stream of the run
    #[arg(long, env = env::STREAM)]
    stream: String,
    /// redis://host:port, or with TLS rediss://host:port
    #[arg(long, env = env::VALKEY_URL, hide_env_values = true)]
    valkey_url: String,
    /// User of the run's workers
    #[arg(long, env = env::VALKEY_USERNAME, default_value = "")]
    valkey_username: String,
    /// Password of that user
    #[arg(long, env = env::VALKEY_PASSWORD, default_value = "", hide_env_values = true)]
    valkey_password: String,
    /// CA of Valkey's certificate, as PEM text (not a path); the machine's trust store when empty
    #[arg(long, env = env::VALKEY_CA_CERTIFICATE, default_value = "", hide_env_values = true)]
    valkey_ca_certificate: String,
    /// Consumer name; POD_NAME when empty
    #[arg(long, env = env::CONSUMER_NAME, default_value = "")]
    consumer_name: String,
    /// Name of the pod
    #[arg(long, env = env::POD_NAME, default_value = "")]
    pod_name: String,
    /// How long Valkey may be unreachable
    #[arg(long, env = env::QUEUE_TIMEOUT, default_value = "5m", value_parser = parse_duration)]
    queue_timeout: Duration,
    /// How long Valkey may refuse the user; the operator restores users after a restart of Valkey
    #[arg(long, env = env::QUEUE_DENIED_TIMEOUT, default_value = "2m", value_parser = parse_duration)]
    queue_denied_timeout: Duration,
    /// Filters whose folders to create below <workspace>/out, separated by commas
    #[arg(long, env = env::FILTERS, default_value = "")]
    filters: String,
    /// Files that this run has fetched before, one per line; reading one byte of them tells a storage outage
    /// from a bad file
    #[arg(long, env = env::SOURCE.canary_key, default_value = "")]
    s3_canary_key: String,
    /// Prefix of the source; if all these files were deleted, others below it are tried
    #[arg(long, env = env::SOURCE.prefix, default_value = "")]
    s3_prefix: String,
    /// Folder to copy the shim to; empty if no filter needs it
    #[arg(long, env = env::INSTALL_TO, default_value = "")]
    install_to: String,
    #[command(flatten)]
    bucket: SourceArgs,
}

#[derive(Args)]
struct PublishArgs {
    /// The filter whose results are uploaded
    #[arg(long, env = env::SINK_FROM)]
    from: String,
    /// Prefix of every name in the sink
    #[arg(long, env = env::SINK.prefix, default_value = "")]
    sink_s3_prefix: String,
    /// Bucket that the file came from
    #[arg(long, env = env::SOURCE.bucket)]
    s3_bucket: String,
    /// Prefix of the source, which is removed from the file's key
    #[arg(long, env = env::SOURCE.prefix, default_value = "")]
    s3_prefix: String,
    /// Files that this run has fetched before, one per line; their results may be in the sink
    #[arg(long, env = env::SOURCE.canary_key, default_value = "")]
    s3_canary_key: String,
    /// Results that this run has published before, one per line; writing beside them tells a sink outage from
    /// a bad result
    #[arg(long, env = env::SINK.canary_key, default_value = "")]
    sink_s3_canary_key: String,
    #[command(flatten)]
    sink: SinkArgs,
}

/// Reads the command line and the environment.
pub fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Parsed, SettingsError> {
    let cli = match Cli::try_parse_from(with_default_command(argv)) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => return Ok(Parsed::Print(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let Cli { command, workspace, termination_log } = cli;
    let command = match command {
        CommandArgs::Claim(args) => Command::Claim(Box::new(args.usable(workspace)?)),
        CommandArgs::Publish(args) => Command::Publish(Box::new(args.usable(workspace)?)),
        CommandArgs::Install(args) => Command::Install(Box::new(args.usable(workspace)?)),
        CommandArgs::Serve(args) => Command::Serve(Box::new(args.usable(workspace)?)),
    };
    Ok(Parsed::Run(command, termination_log))
}

impl From<clap::Error> for SettingsError {
    /// clap's first paragraph names the setting; the rest is usage.
    fn from(error: clap::Error) -> Self {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        Self(first.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Where to report unusable settings.
pub(crate) fn termination_log() -> PathBuf {
    std::env::var_os(env::TERMINATION_LOG).map_or_else(|| TERMINATION_LOG.into(), PathBuf::from)
}

/// `claimer` and `claimer --flag …` mean `claimer claim …`.
fn with_default_command(argv: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut argv: Vec<OsString> = argv.into_iter().collect();
    let first = argv.get(1).and_then(|word| word.to_str());
    let about = matches!(first, Some("-h" | "--help" | "-V" | "--version" | "help"));
    if first.is_none_or(|word| word.starts_with('-')) && !about {
        argv.insert(1.min(argv.len()), "claim".into());
    }
    argv
}

impl ClaimArgs {
    fn usable(self, workspace: PathBuf) -> Result<ClaimSettings, SettingsError> {
        required(env::STREAM, &self.stream)?;
        required(env::VALKEY_URL, &self.valkey_url)?;
        let consumer = filled(self.consumer_name).or(filled(self.pod_name)).unwrap_or_default();
        required(env::CONSUMER_NAME, &consumer)?;
        let mut server = Server::at(self.valkey_url);
        server.username = filled(self.valkey_username);
        server.password = filled(self.valkey_password).map(Password::from);
        server.ca_certificate = filled(self.valkey_ca_certificate).map(String::into_bytes);
        let queue = QueueSettings {
            server,
            stream: self.stream,
            consumer,
            unavailable_limit: self.queue_timeout,
            denied_limit: self.queue_denied_timeout,
        };
        let filters = filter_names(&self.filters)?;
        let canary_keys = canary_keys(&self.s3_canary_key);
        let install_to = filled(self.install_to).map(PathBuf::from);
        Ok(ClaimSettings {
            queue,
            bucket: self.bucket.usable()?,
            prefix: self.s3_prefix,
            workspace,
            filters,
            canary_keys,
            install_to,
        })
    }
}

impl PublishArgs {
    fn usable(self, workspace: PathBuf) -> Result<PublishSettings, SettingsError> {
        required(env::SOURCE.bucket, &self.s3_bucket)?;
        Ok(PublishSettings {
            destination: Destination {
                sink: self.sink.usable()?,
                prefix: self.sink_s3_prefix,
                from: filter_name(env::SINK_FROM, &self.from)?,
                source_prefix: self.s3_prefix,
            },
            source_bucket: self.s3_bucket,
            workspace,
            canary_keys: canary_keys(&self.sink_s3_canary_key),
            source_canaries: canary_keys(&self.s3_canary_key),
        })
    }
}

impl InstallArgs {
    fn usable(self, workspace: PathBuf) -> Result<InstallSettings, SettingsError> {
        let filters = filter_names(&self.filters)?;
        Ok(InstallSettings { shim: self.shim, to: self.to, room: workspace, filters })
    }
}

impl ServeArgs {
    fn usable(self, workspace: PathBuf) -> Result<ServeSettings, SettingsError> {
        required(env::FILTERS, &self.claim.filters)?;
        let ClaimSettings { queue, bucket, prefix, workspace, filters, canary_keys, .. } =
            self.claim.usable(workspace)?;
        let sink = match filled(self.sink_from) {
            Some(_) => Some(SinkOfServe::try_parse_from(["serve"])?.publish.usable(workspace.clone())?),
            None => None,
        };
        let (destination, sink_canaries) = sink
            .map(|sink| (sink.destination, sink.canary_keys))
            .map_or_else(Default::default, |(to, keys)| (Some(to), keys));
        let file_timeout = filled(self.file_timeout).map(|text| parse_duration(&text)).transpose();
        Ok(ServeSettings {
            queue,
            source: bucket,
            source_prefix: prefix,
            source_canaries: canary_keys,
            destination,
            sink_canaries,
            filters,
            order: self.order,
            file_timeout: file_timeout
                .map_err(|fix| SettingsError(format!("{}: {fix}", env::FILE_TIMEOUT)))?,
            prefetch_bytes: self.prefetch_bytes,
            max_files: self.max_files,
            max_age: self.max_age,
            room: workspace,
            links: self.links.join("link"),
        })
    }
}

fn filter_names(list: &str) -> Result<Vec<String>, SettingsError> {
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(|name| filter_name(env::FILTERS, name)).collect()
}

fn parse_order(text: &str) -> Result<Order, String> {
    match text {
        "Sequential" => Ok(Order::Sequential),
        "Concurrent" => Ok(Order::Concurrent),
        _ => Err("write Sequential or Concurrent".to_owned()),
    }
}

fn canary_keys(lines: &str) -> Vec<String> {
    let keys = lines.split(env::CANARY_SEPARATOR).filter(|key| !key.is_empty());
    keys.map(ToOwned::to_owned).collect()
}

pub(crate) fn required(name: &str, value: &str) -> Result<(), SettingsError> {
    if value.is_empty() { Err(SettingsError(format!("{name} is empty"))) } else { Ok(()) }
}

pub(crate) fn filled(value: String) -> Option<String> {
    Some(value).filter(|value| !value.is_empty())
}

/// A DNS label: the name becomes a folder name, so nothing else is allowed.
fn filter_name(setting: &str, name: &str) -> Result<String, SettingsError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if (1..=63).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(name.to_owned());
    }
    Err(SettingsError(format!("{setting}: {name:?} is not a valid filter name")))
}

pub(crate) fn parse_flag(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" => Ok(true),
        "false" | "0" | "" => Ok(false),
        _ => Err("write true or false".to_owned()),
    }
}

/// `500ms`, `30s`, `2m`, `1h`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("write 500ms, 30s, 2m or 1h".to_owned()),
    };
    let number: u32 = number.parse().map_err(|_| "write 500ms, 30s, 2m or 1h".to_owned())?;
    Ok(Duration::from_millis(u64::from(number) * millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["", "5", "m", "-1s", "1d", "1.5s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn without_a_command_it_claims() {
        let words = |argv: &[&str]| with_default_command(argv.iter().map(OsString::from));
        assert_eq!(words(&["claimer"]), ["claimer", "claim"]);
        assert_eq!(words(&["claimer", "--workspace", "/x"]), ["claimer", "claim", "--workspace", "/x"]);
        assert_eq!(words(&["claimer", "publish"]), ["claimer", "publish"]);
        assert_eq!(words(&["claimer", "--help"]), ["claimer", "--help"]);
    }

    #[test]
    fn a_filters_name_cannot_leave_its_folder() {
        assert!(filter_name("F", "detect-2").is_ok());
        for wrong in ["", "..", "a/b", "A", "a.b"] {
            assert!(filter_name("F", wrong).is_err(), "{wrong}");
        }
    }
}
