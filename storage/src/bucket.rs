//! A bucket and its client: the service's address, the identity, and the time limits. If keys are given, the
//! environment (`AWS_*`) has no influence; otherwise the pod's own identity is used, and only for
//! credentials.

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

/// A connection within a cluster or a region takes milliseconds; one to a host that is gone never succeeds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The wait before the second try of a request; it doubles from try to try.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// The longest wait between two tries.
pub const BACKOFF_LONGEST: Duration = Duration::from_secs(10);
/// The region that services without regions expect in a signature.
const NO_REGION: &str = "us-east-1";

/// A bucket of a service.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Its name.
    pub name: String,
    /// The address of the service; AWS when absent.
    pub endpoint: Option<Url>,
    /// Region; `us-east-1` for services that have none.
    pub region: Option<String>,
    /// Whether the bucket is part of the path.
    pub path_style: bool,
    /// Whether any certificate is accepted.
    pub skip_tls_verify: bool,
    /// The keys; the pod's own identity when absent.
    pub keys: Option<AccessKeys>,
    /// How long the service may be silent.
    pub timeout: Duration,
    /// How often a request is tried.
    pub max_attempts: u32,
    /// Whether an etag that looks like an MD5 is one.
    pub etag_is_md5: bool,
    /// The addresses of the service that connections may use; any when absent. Credentials are requested
    /// elsewhere.
    pub addresses: Option<AddressGuard>,
}

impl Bucket {
    /// The URI of an object.
    pub fn uri(&self, key: &str) -> String {
        format!("s3://{}/{key}", self.name)
    }

    /// Creates a client; nothing is sent yet, except requests for ambient credentials.
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
            // By default, all clients of a process share a budget of retries: one tenant's failing service
            // would use up the tries of all others.
            .retry_partition(RetryPartition::custom("own").token_bucket(TokenBucket::unlimited()).build())
            .timeout_config(
                TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(self.timeout).build(),
            )
            .stalled_stream_protection(
                StalledStreamProtectionConfig::enabled().grace_period(self.timeout).build(),
            )
            // Checksums are requested only where needed: some services refuse the default trailers, and the
            // checksum of a whole object would be compared with a part of it.
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
            // Without TLS, the machine's trust store need not be loaded.
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
