//! A bucket and the client for it: where the service is, as whom, and how patiently. With keys given, nothing of the
//! environment (`AWS_*`) has a say; without them, the pod's own identity is asked for, and only for credentials.

use std::time::Duration;

use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::{RetryConfig, RetryPartition, TokenBucket};
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use url::Url;

use crate::guard::{self, AddressGuard};
use crate::insecure;
use crate::keys::AccessKeys;
use crate::retry::RetryByStatus;

/// A connection within a cluster or a region takes milliseconds; a host that is gone takes for ever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The wait before the second try of a request; it doubles from try to try.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// No wait between two tries is longer.
pub const BACKOFF_LONGEST: Duration = Duration::from_secs(10);
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
    pub keys: Option<AccessKeys>,
    /// How long the service may be silent.
    pub timeout: Duration,
    /// How often a request is tried.
    pub max_attempts: u32,
    /// Whether an etag that looks like an MD5 is one.
    pub etag_is_md5: bool,
    /// Which addresses of the service may be connected to; any when absent. Credentials are asked for elsewhere.
    pub addresses: Option<AddressGuard>,
}

impl Bucket {
    /// How an object of it is called.
    pub fn uri(&self, key: &str) -> String {
        format!("s3://{}/{key}", self.name)
    }

    /// A client; nothing is sent yet, except for ambient credentials.
    pub async fn client(&self) -> Client {
        let mut config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .force_path_style(self.path_style)
            .retry_config(
                RetryConfig::standard()
                    .with_max_attempts(self.max_attempts)
                    .with_initial_backoff(BACKOFF_FIRST)
                    .with_max_backoff(BACKOFF_LONGEST),
            )
            .retry_classifier(RetryByStatus)
            // By default all clients of a process share a budget of retries: one tenant's service that fails would use up
            // the tries of all others.
            .retry_partition(RetryPartition::custom("own").token_bucket(TokenBucket::unlimited()).build())
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
            Some(AccessKeys { id, secret }) => {
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
        let plain = self.endpoint.as_ref().is_some_and(|endpoint| endpoint.scheme() == "http");
        match &self.addresses {
            // Without TLS there is no need to load the machine's trust store.
            None if plain => config = config.http_client(aws_smithy_http_client::Builder::new().build_http()),
            guard if self.skip_tls_verify => {
                config = config.http_client(insecure::http_client(guard.as_ref()))
            }
            Some(guard) => config = config.http_client(guard::http_client(guard)),
            None => {}
        }
        Client::from_conf(config.build())
    }
}
