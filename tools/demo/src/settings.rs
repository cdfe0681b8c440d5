//! The demo's settings: `make demo` needs none; the user's own cluster needs its images and bucket.

use clap::{Parser, ValueEnum};
use storage::{AccessKeys, Bucket};

use crate::Result;

/// Runs a pipeline on a cluster, from nothing to a sheet of results. Every flag is also a variable of `make
/// demo`.
#[derive(Parser, Debug)]
#[command(name = "demo")]
pub struct Args {
    /// Remove everything that the demo made, instead
    #[arg(long)]
    pub down: bool,
    /// Whether to start a cluster on this machine, or to use the one of KUBECONFIG
    #[arg(long, env = "DEMO_CLUSTER", default_value = "testbed")]
    pub cluster: Where,
    /// (current) Registry and path below which the images are
    #[arg(long, env = "DEMO_REGISTRY", default_value = "")]
    registry: String,
    /// (current) Tag of the images
    #[arg(long, env = "DEMO_TAG", default_value = "latest")]
    tag: String,
    /// (current) Image of Valkey
    #[arg(long, env = "DEMO_VALKEY_IMAGE", default_value = "docker.io/valkey/valkey:8")]
    valkey_image: String,
    /// (current) S3 service, as the cluster and this machine reach it: http://host:port or https://host:port
    #[arg(long, env = "DEMO_S3_ENDPOINT", default_value = "")]
    s3_endpoint: String,
    /// (current) Its access key
    #[arg(long, env = "DEMO_S3_ACCESS_KEY", default_value = "", hide_env_values = true)]
    s3_access_key: String,
    /// (current) Its secret key
    #[arg(long, env = "DEMO_S3_SECRET_KEY", default_value = "", hide_env_values = true)]
    s3_secret_key: String,
    /// (current) Bucket, which is made if it is not there
    #[arg(long, env = "DEMO_S3_BUCKET", default_value = DEFAULT_BUCKET)]
    s3_bucket: String,
}

/// The cluster to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Where {
    /// One on this machine, which is started if it is not up.
    Testbed,
    /// The one that KUBECONFIG names.
    Current,
}

/// The bucket of `examples/demo`.
pub const DEFAULT_BUCKET: &str = "openfilter-demo";

/// The properties of a user's cluster that the demo needs.
#[derive(Clone, Debug)]
pub struct Foreign {
    /// `registry.example.com/team`
    pub registry: String,
    /// Tag of the images.
    pub tag: String,
    /// Image of Valkey.
    pub valkey_image: String,
    /// The endpoint, as the Pipeline names it.
    pub endpoint: String,
    /// The bucket.
    pub bucket: Bucket,
}

impl Args {
    /// The settings for a user's cluster; an error names all that are missing.
    pub fn foreign(&self) -> Result<Foreign> {
        let wanted = [
            (
                "DEMO_REGISTRY",
                &self.registry,
                "the registry to which operator, webhook, claimer, thumbnail and annotate were pushed",
            ),
            (
                "DEMO_S3_ENDPOINT",
                &self.s3_endpoint,
                "an S3 service that the cluster and this machine can reach",
            ),
            ("DEMO_S3_ACCESS_KEY", &self.s3_access_key, "its access key"),
            ("DEMO_S3_SECRET_KEY", &self.s3_secret_key, "its secret key"),
        ];
        let missing: Vec<String> = wanted
            .iter()
            .filter(|(_, value, _)| value.is_empty())
            .map(|(name, _, meaning)| format!("\n  {name}: {meaning}"))
            .collect();
        if !missing.is_empty() {
            return Err(format!("DEMO_CLUSTER=current needs more settings:{}", missing.concat()).into());
        }
        Ok(Foreign {
            registry: self.registry.trim_end_matches('/').to_owned(),
            tag: self.tag.clone(),
            valkey_image: self.valkey_image.clone(),
            endpoint: self.s3_endpoint.clone(),
            bucket: bucket(&self.s3_bucket, &self.s3_endpoint, &self.s3_access_key, &self.s3_secret_key)?,
        })
    }
}

/// A bucket of a self-hosted service.
pub fn bucket(name: &str, endpoint: &str, access_key: &str, secret_key: &str) -> Result<Bucket> {
    let url = storage::parse_endpoint(endpoint)
        .map_err(|error| format!("the S3 endpoint {endpoint:?} cannot be used: {error}"))?;
    let keys = AccessKeys { id: access_key.to_owned().into(), secret: secret_key.to_owned().into() };
    Ok(Bucket {
        name: name.to_owned(),
        endpoint: Some(url),
        region: None,
        path_style: true,
        skip_tls_verify: false,
        keys: Some(keys),
        timeout: std::time::Duration::from_secs(30),
        max_attempts: 5,
        etag_is_md5: true,
        addresses: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreign(words: &[&str]) -> Result<Foreign> {
        Args::parse_from([&["demo", "--cluster", "current"], words].concat()).foreign()
    }

    #[test]
    fn all_that_is_missing_is_named_at_once() {
        let error = foreign(&["--s3-access-key", "me"]).unwrap_err().to_string();
        assert!(error.contains("DEMO_REGISTRY") && error.contains("DEMO_S3_SECRET_KEY"), "{error}");
        assert!(error.contains("DEMO_S3_ENDPOINT") && !error.contains("DEMO_S3_ACCESS_KEY"), "{error}");
    }

    #[test]
    fn what_is_given_is_used_and_the_keys_stay_unseen() {
        let words = [
            "--registry=reg/team/",
            "--s3-endpoint=http://s3:9000",
            "--s3-access-key=me",
            "--s3-secret-key=hush",
        ];
        let found = foreign(&words).unwrap();
        assert_eq!((found.registry.as_str(), found.tag.as_str()), ("reg/team", "latest"));
        assert_eq!(found.bucket.name, DEFAULT_BUCKET);
        assert!(!format!("{found:?}").contains("hush"));
    }
}
