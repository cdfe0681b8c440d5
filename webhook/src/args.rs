//! The command line. Every flag has an environment variable, for Deployments that prefer them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use crds::rules::parse_duration;
use ipnet::IpNet;

use crate::admit::Settings;
use crate::server::Limits;

/// Default name of the Secret with the certificates that the webhook makes. The webhook's rights name it too.
pub const SECRET: &str = "openfilter-webhook-tls";
/// Default name of the webhook configurations that the webhook maintains. The webhook's rights name them too.
pub const CONFIGURATION: &str = "openfilter-webhook";

/// Admission webhook for OpenFilter Pipelines: fills in defaults, refuses invalid objects with a message that
/// says what to write instead, and enforces PipelinePolicies. Replicas are equal; run as many as you like.
#[derive(Clone, Debug, Parser)]
#[command(name = "webhook", version)]
pub struct Args {
    /// Address that the API server calls (HTTPS).
    #[arg(long, env = "WEBHOOK_LISTEN", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,

    /// Address that the kubelet and Prometheus call (HTTP): /livez, /readyz, /metrics.
    #[arg(long, env = "WEBHOOK_HEALTH_LISTEN", default_value = "0.0.0.0:8080")]
    pub health_listen: SocketAddr,

    /// Folder with tls.crt and tls.key, for example a mounted Secret of cert-manager; the webhook picks up
    /// changes. If omitted, the webhook makes its own certificates.
    #[arg(long, env = "WEBHOOK_CERT_DIR")]
    pub cert_dir: Option<PathBuf>,

    /// Namespace that the webhook runs in and keeps its certificates in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "openfilter-system")]
    pub namespace: String,

    /// Service through which the API server calls the webhook; the certificate is issued for its name.
    #[arg(long, env = "WEBHOOK_SERVICE", default_value = "openfilter-webhook")]
    pub service: String,

    /// Additional names and addresses for the certificate.
    #[arg(long = "name", env = "WEBHOOK_NAMES", value_delimiter = ',')]
    pub names: Vec<String>,

    /// Secret that holds the certificates that the webhook makes.
    #[arg(long, env = "WEBHOOK_CERT_SECRET", default_value = SECRET)]
    pub cert_secret: String,

    /// Name of the ValidatingWebhookConfiguration and MutatingWebhookConfiguration whose caBundle the webhook
    /// keeps up to date.
    #[arg(long, env = "WEBHOOK_CONFIGURATION", default_value = CONFIGURATION)]
    pub configuration: String,

    /// Loopback, link-local or metadata network that endpoints may use anyway, for example 127.0.0.0/8.
    #[arg(long = "allow-endpoint-network", env = "WEBHOOK_ALLOW_ENDPOINT_NETWORKS", value_delimiter = ',')]
    pub allowed_networks: Vec<IpNet>,

    /// Host that endpoints may use although it is refused by default, for example localhost.
    #[arg(long = "allow-endpoint-host", env = "WEBHOOK_ALLOW_ENDPOINT_HOSTS", value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,

    /// How long the policies of one request may take; rules that are not evaluated by then count as broken.
    #[arg(long, env = "WEBHOOK_POLICY_TIMEOUT", default_value = "1s", value_parser = duration)]
    pub policy_timeout: Duration,

    /// How long an answer may take; keep it below the timeoutSeconds of the webhook configurations.
    #[arg(long, env = "WEBHOOK_ANSWER_TIMEOUT", default_value = "8s", value_parser = duration)]
    pub answer_timeout: Duration,

    /// How many requests to handle at once; others wait.
    #[arg(long, env = "WEBHOOK_CONCURRENCY", default_value_t = 128, value_parser = at_least_one)]
    pub concurrency: usize,

    /// How long to keep answering after SIGTERM before closing connections, because the cluster still sends
    /// requests to a replica that is about to stop.
    #[arg(long, env = "WEBHOOK_SHUTDOWN_DELAY", default_value = "5s", value_parser = duration)]
    pub shutdown_delay: Duration,

    /// What to log, for example info or webhook=debug.
    #[arg(long, env = "RUST_LOG", default_value = "info")]
    pub log: String,

    /// Log as JSON.
    #[arg(long, env = "LOG_JSON")]
    pub log_json: bool,
}

impl Args {
    /// The settings for decisions about requests.
    pub fn settings(&self) -> Settings {
        Settings {
            allowed_networks: self.allowed_networks.clone(),
            allowed_hosts: self.allowed_hosts.clone(),
            policy_timeout: self.policy_timeout,
            ..Settings::default()
        }
    }

    /// Limits of the server.
    pub fn limits(&self) -> Limits {
        Limits { answer: self.answer_timeout, concurrent: self.concurrency, ..Limits::default() }
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text)
        .ok_or_else(|| format!("{text:?} is not a duration: write for example 500ms, 8s or 1m"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number: Option<usize> = text.parse().ok();
    number.filter(|number| *number > 0).ok_or_else(|| format!("{text:?} is not a whole number above zero"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_has_help_and_an_environment_variable() {
        let command = Args::command();
        command.clone().debug_assert();
        for flag in
            command.get_arguments().filter(|flag| !["help", "version"].contains(&flag.get_id().as_str()))
        {
            assert!(flag.get_env().is_some() && flag.get_help().is_some(), "{}", flag.get_id());
        }
    }

    #[test]
    fn flags_that_make_no_sense_are_refused_with_an_example() {
        let refused =
            |flags: &[&str]| Args::try_parse_from([&["webhook"], flags].concat()).unwrap_err().to_string();
        assert!(refused(&["--policy-timeout", "soon"]).contains("500ms"));
        assert!(refused(&["--concurrency", "0"]).contains("above zero"));
        assert!(refused(&["--allow-endpoint-network", "localhost"]).contains("localhost"));
        assert!(
            Args::try_parse_from(["webhook", "--allow-endpoint-network", "10.0.0.0/8,127.0.0.0/8"]).is_ok()
        );
    }
}
