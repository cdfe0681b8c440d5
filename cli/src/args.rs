//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use ipnet::IpNet;

/// OpenFilter Pipelines on the command line.
#[derive(Debug, Parser)]
#[command(name = "openfilter", version)]
pub struct Args {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check manifests without a cluster, as the admission webhook would.
    ///
    /// Exit codes: 0 if all objects are valid, 1 if an object is not, 2 if the command line is wrong or a
    /// file cannot be read.
    Validate(ValidateArgs),
}

/// Arguments of `validate`.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// File, folder (every .yaml, .yml and .json below it), or - for standard input, for example the output
    /// of kustomize.
    #[arg(short, long = "filename", required = true, value_name = "FILE|DIR|-")]
    pub files: Vec<PathBuf>,

    /// File or folder with the PipelinePolicies to enforce.
    #[arg(long, value_name = "DIR")]
    pub policies: Vec<PathBuf>,

    /// Namespace of objects that do not name one.
    #[arg(short, long, default_value = "default")]
    pub namespace: String,

    /// Label of namespaces that are not among the files, for policies' selectors.
    #[arg(long = "namespace-label", value_name = "KEY=VALUE", value_parser = label)]
    pub namespace_labels: Vec<(String, String)>,

    /// Loopback, link-local or metadata network that endpoints may use anyway, as in the webhook's setting.
    #[arg(long = "allow-endpoint-network", value_name = "NETWORK", value_delimiter = ',')]
    pub allowed_networks: Vec<IpNet>,

    /// Host that endpoints may use although it is refused by default, as in the webhook's setting.
    #[arg(long = "allow-endpoint-host", value_name = "HOST", value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,

    /// How to print the mistakes.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// The output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// One line per mistake, for people.
    Text,
    /// One JSON object with everything, for programs.
    Json,
    /// Annotations of GitHub Actions.
    Github,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}
