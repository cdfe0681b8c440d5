//! The command line and the environment, parsed into settings that need no second look. Every setting is a flag and an
//! environment variable; an empty value is as good as none. Secrets are never printed, not even by `--help`.

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

/// What to do.
#[derive(Debug)]
pub enum Command {
    /// Claim a file and fetch it.
    Claim(Box<ClaimSettings>),
    /// Upload the results.
    Publish(Box<PublishSettings>),
    /// Make a pod ready that processes many files.
    Install(Box<InstallSettings>),
    /// Process many files.
    Serve(Box<ServeSettings>),
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// Do this; the report goes into the file.
    Run(Command, PathBuf),
    /// Print this: help or version.
    Print(String),
}

/// Settings of `claim`.
#[derive(Debug)]
pub struct ClaimSettings {
    /// The queue.
    pub queue: QueueSettings,
    /// Where the file is.
    pub bucket: Bucket,
    /// What the keys of files begin with.
    pub prefix: String,
    /// Shared folder of the pod.
    pub workspace: PathBuf,
    /// Filters whose folders are made.
    pub filters: Vec<String>,
    /// Objects of the bucket that this run has fetched before, the newest first.
    pub canary_keys: Vec<String>,
    /// Folder that gets the shim, if filters want it.
    pub install_to: Option<PathBuf>,
}

/// Settings of `publish`.
#[derive(Debug)]
pub struct PublishSettings {
    /// Where the results go.
    pub destination: Destination,
    /// Bucket of the file.
    pub source_bucket: String,
    /// Shared folder of the pod.
    pub workspace: PathBuf,
    /// Objects of the sink that this run has published before, the newest first.
    pub canary_keys: Vec<String>,
}

/// Where the shim is in our image.
pub(crate) const SHIM: &str = "/shim";
/// Where kubelet looks for the termination message.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Claims one file of a run and fetches it (claim), or uploads the results (publish). Without a command it claims.
#[derive(Parser)]
#[command(name = "claimer", version)]
struct Cli {
    #[command(subcommand)]
    command: CommandArgs,
    /// Folder that the containers of the pod share
    #[arg(long, env = env::WORKSPACE, default_value = "/ws", global = true)]
    workspace: PathBuf,
    /// Where the one-line report is written at the end, if the file exists
    #[arg(long, env = env::TERMINATION_LOG, default_value = TERMINATION_LOG, global = true)]
    termination_log: PathBuf,
}

#[derive(Subcommand)]
enum CommandArgs {
    /// Claim one file and fetch it to <workspace>/input (the default)
    Claim(Box<ClaimArgs>),
    /// Upload everything below <workspace>/out/<from>
    Publish(Box<PublishArgs>),
    /// Make a pod ready whose filters process many files
    Install(Box<InstallArgs>),
    /// Process many files: claim, fetch, let the filters work, publish
    Serve(Box<ServeArgs>),
}

#[derive(Args)]
struct InstallArgs {
    /// The shim
    #[arg(long, default_value = SHIM)]
    shim: PathBuf,
    /// Folder that gets the shim and the filters' sockets
    #[arg(long, env = env::LINKS, default_value = "/.openfilter")]
    to: PathBuf,
    /// Filters of the pod, separated by commas
    #[arg(long, env = env::FILTERS)]
    filters: String,
}

#[derive(Args)]
struct ServeArgs {
    #[command(flatten)]
    claim: ClaimArgs,
    /// How the filters of a file relate in time: Sequential or Concurrent
    #[arg(long, env = env::ORDER, default_value = "Sequential", value_parser = parse_order)]
    order: Order,
    /// How long the filters may take for one file; any time when empty
    #[arg(long, env = env::FILE_TIMEOUT, default_value = "")]
    file_timeout: String,
    /// Bytes of files that are fetched before their turn
    #[arg(long, env = env::PREFETCH_BYTES, default_value = "268435456")]
    prefetch_bytes: u64,
    /// How many files the filters get before the pod ends
    #[arg(long, env = env::MAX_FILES, default_value = "10000", value_parser = clap::value_parser!(u64).range(1..))]
    max_files: u64,
    /// How old the pod gets
    #[arg(long, env = env::MAX_AGE, default_value = "1h", value_parser = parse_duration)]
    max_age: Duration,
    /// Folder with the shim and the filters' sockets
    #[arg(long, env = env::LINKS, default_value = "/.openfilter")]
    links: PathBuf,
    /// The filter whose results are uploaded; none are when empty
    #[arg(long, env = env::SINK_FROM, default_value = "")]
    sink_from: String,
}

/// The settings of the sink, which a pipeline need not have: read from the environment alone.
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
    /// Its password
    #[arg(long, env = env::VALKEY_PASSWORD, default_value = "", hide_env_values = true)]
    valkey_password: String,
    /// CA of Valkey's certificate, in PEM (not a path); the machine's trust store when empty
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
    /// How long Valkey may refuse the user, which the operator restores after a restart of Valkey
    #[arg(long, env = env::QUEUE_DENIED_TIMEOUT, default_value = "2m", value_parser = parse_duration)]
    queue_denied_timeout: Duration,
    /// Filters whose folders are made below <workspace>/out, separated by commas
    #[arg(long, env = env::FILTERS, default_value = "")]
    filters: String,
    /// Files that this run has fetched before, one per line: one byte tells a storage that is down from a file that cannot be had
    #[arg(long, env = env::SOURCE.canary_key, default_value = "")]
    s3_canary_key: String,
    /// Prefix of the source, below which another file is looked for if all of these were deleted
    #[arg(long, env = env::SOURCE.prefix, default_value = "")]
    s3_prefix: String,
    /// Folder that the shim is copied into; empty if no filter wants it
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
    /// Put before every name in the sink
    #[arg(long, env = env::SINK.prefix, default_value = "")]
    sink_s3_prefix: String,
    /// Bucket that the file came from
    #[arg(long, env = env::SOURCE.bucket)]
    s3_bucket: String,
    /// Prefix of the source, which is cut off the file's key
    #[arg(long, env = env::SOURCE.prefix, default_value = "")]
    s3_prefix: String,
    /// Results that this run has published before, one per line, looked up after a failure
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
    /// Its first paragraph names the setting; the rest is usage.
    fn from(error: clap::Error) -> Self {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        Self(first.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Where to report that the settings are unusable.
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

/// A DNS label: it becomes the name of a folder, so nothing else is let in.
fn filter_name(setting: &str, name: &str) -> Result<String, SettingsError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if (1..=63).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(name.to_owned());
    }
    Err(SettingsError(format!("{setting}: {name:?} is not the name of a filter")))
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
