//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use ipnet::IpNet;

/// OpenFilter Pipelines on the command line.
#[derive(Debug, Parser)]
#[command(name = "openfilter", version)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check manifests as the admission webhook would, without a cluster.
    ///
    /// Exit code 0: nothing is wrong; 1: something is wrong with the objects; 2: something is wrong with the call.
    Validate(ValidateArgs),
}

/// What to check.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// File, folder (every .yaml, .yml and .json below it), or - for standard input, for example the output of kustomize.
    #[arg(short, long = "filename", required = true, value_name = "FILE|DIR|-")]
    pub files: Vec<PathBuf>,

    /// File or folder with the PipelinePolicies to enforce.
    #[arg(long, value_name = "DIR")]
    pub policies: Vec<PathBuf>,

    /// Namespace of objects that name none.
    #[arg(short, long, default_value = "default")]
    pub namespace: String,

    /// Label of namespaces that are not among the files, for the selectors of policies.
    #[arg(long = "namespace-label", value_name = "KEY=VALUE", value_parser = label)]
    pub namespace_labels: Vec<(String, String)>,

    /// Network that endpoints may be in although it is loopback, link-local or metadata, as for the webhook.
    #[arg(long = "allow-endpoint-network", value_name = "NETWORK", value_delimiter = ',')]
    pub allowed_networks: Vec<IpNet>,

    /// Host that endpoints may name although it is refused by default, as for the webhook.
    #[arg(long = "allow-endpoint-host", value_name = "HOST", value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,

    /// How to print what is wrong.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// One line per mistake, for people.
    Text,
    /// One object with everything, for programs.
    Json,
    /// Annotations of GitHub Actions.
    Github,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}
