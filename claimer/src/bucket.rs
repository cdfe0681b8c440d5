//! A bucket and the client for it: where the service is, as whom, and how patiently. With keys given, nothing of the
//! environment (`AWS_*`) has a say; without them, the pod's own identity is asked for, and only for credentials.

use std::time::Duration;

use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use queue::Password;
use url::Url;

use crate::args::SettingsError;
use crate::insecure;

/// A connection within a cluster or a region takes milliseconds; a host that is gone takes for ever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Waits between tries of one request: doubling from the first to the last.
pub(crate) const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// What services that have no regions expect in a signature.
const NO_REGION: &str = "us-east-1";

/// A bucket of a service.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Its name.
    pub name: String,
    /// The service; AWS when absent.
    pub endpoint: Option<Url>,
    /// Region; `us-east-1` for services that have none.
    pub region: Option<String>,
    /// Whether the bucket goes into the path.
    pub path_style: bool,
    /// Whether any certificate is accepted.
    pub skip_tls_verify: bool,
    /// Keys; the pod's own identity when absent.
    pub keys: Option<Keys>,
    /// How long the service may be silent.
    pub timeout: Duration,
    /// How often a request is tried.
    pub max_attempts: u32,
    /// Whether an etag that looks like an MD5 is one.
    pub etag_is_md5: bool,
}

/// A pair of keys, never printed.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Access key.
    pub id: Password,
    /// Secret key.
    pub secret: Password,
}

impl Bucket {
    /// How an object of it is called.
    pub fn uri(&self, key: &str) -> String {
        format!("s3://{}/{key}", self.name)
    }

    /// A client; nothing is sent yet, except for ambient credentials.
    pub(crate) async fn client(&self) -> Client {
        let mut config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .force_path_style(self.path_style)
            .retry_config(
                RetryConfig::standard()
                    .with_max_attempts(self.max_attempts)
                    .with_initial_backoff(BACKOFF.0)
                    .with_max_backoff(BACKOFF.1),
            )
            .timeout_config(
                TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(self.timeout).build(),
            )
            .stalled_stream_protection(
                StalledStreamProtectionConfig::enabled().grace_period(self.timeout).build(),
            )
            // Asked for where they are wanted: the default trailers are refused by some services, and a checksum of the
            // whole object would be compared with a part of it.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
        let mut region = self.region.clone();
        match &self.keys {
            Some(Keys { id, secret }) => {
                let keys = Credentials::new(id.reveal(), secret.reveal(), None, None, "settings");
                config = config.credentials_provider(keys);
            }
            None => {
                let mut loader = aws_config::defaults(BehaviorVersion::latest());
                if let (None, Some(region)) = (&self.endpoint, &self.region) {
                    loader = loader.region(Region::new(region.clone()));
                }
                let ambient = loader.load().await;
                config.set_credentials_provider(ambient.credentials_provider());
                region = region.or_else(|| Some(ambient.region()?.to_string()));
            }
        }
        config = config.region(Region::new(region.unwrap_or_else(|| NO_REGION.to_owned())));
        if let Some(endpoint) = &self.endpoint {
            config = config.endpoint_url(endpoint.as_str().trim_end_matches('/'));
        }
        if self.endpoint.as_ref().is_some_and(|endpoint| endpoint.scheme() == "http") {
            // Without TLS there is no need to load the machine's trust store.
            config = config.http_client(aws_smithy_http_client::Builder::new().build_http());
        } else if self.skip_tls_verify {
            config = config.http_client(insecure::http_client());
        }
        Client::from_conf(config.build())
    }
}

/// Reads an endpoint as the API's validation does: https where no scheme is written, and nothing after the host.
pub(crate) fn parse_endpoint(setting: &str, text: &str) -> Result<Url, SettingsError> {
    let refuse =
        |why: &str| Err(SettingsError(format!("{setting} {why}: write [http://|https://]host[:port]")));
    let parsed = if text.contains("://") { Url::parse(text) } else { Url::parse(&format!("https://{text}")) };
    // The value is not repeated: it may hold a password.
    let Ok(url) = parsed else { return refuse("is not an endpoint") };
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return refuse("is not an http or https address");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refuse("contains credentials");
    }
    if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
        return refuse("is more than a host");
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_scheme_is_https() {
        let parsed = |text| parse_endpoint("S3_ENDPOINT", text).map(|url| url.to_string()).ok();
        assert_eq!(parsed("minio:9000").as_deref(), Some("https://minio:9000/"));
        assert_eq!(parsed("10.0.0.7:9000").as_deref(), Some("https://10.0.0.7:9000/"));
        assert_eq!(parsed("http://minio:9000/").as_deref(), Some("http://minio:9000/"));
        for wrong in ["ftp://x", "https://h/path", "https://h?x=y", "https://", "a b"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn credentials_in_an_endpoint_are_refused_and_not_repeated() {
        let error = parse_endpoint("S3_ENDPOINT", "https://me:hunter2@s3").unwrap_err();
        assert!(!error.to_string().contains("hunter2"));
    }

    #[test]
    fn keys_are_never_printed() {
        let keys = Keys { id: "AKIA123".to_owned().into(), secret: "hunter2".to_owned().into() };
        let printed = format!("{keys:?}");
        assert!(!printed.contains("hunter2") && !printed.contains("AKIA123"), "{printed}");
    }
}
