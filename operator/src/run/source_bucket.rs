//! The source bucket of a run, as the operator reaches it: only at addresses that the operator's settings
//! allow.

use std::time::Duration;

use crds::v1alpha1::Bucket;
use storage::{AccessKeys, AddressGuard};

use crate::args::Settings;
use crate::error::{Obstacle, Reason};

/// How long the operator waits for an answer from the storage.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How many times the operator tries a request.
const ATTEMPTS_MAX: u32 = 6;

/// The bucket to list.
pub fn source_bucket(
    settings: &Settings,
    bucket: &Bucket,
    keys: Option<AccessKeys>,
) -> Result<storage::Bucket, Obstacle> {
    let endpoint = Some(bucket.endpoint.as_str()).filter(|endpoint| !endpoint.is_empty());
    let endpoint = endpoint.map(storage::parse_endpoint).transpose();
    let endpoint = endpoint
        .map_err(|error| Reason::PipelineInvalid.because(format!("source.bucket.endpoint: {error}")))?;
    let networks = settings.allowed_networks.clone();
    let guard = AddressGuard::new(move |address| {
        crds::rules::EndpointPolicy { allowed_networks: &networks, allowed_hosts: &[] }.allows(address)
    });
    // A host that an administrator allows by name may have any address.
    let by_name = endpoint
        .as_ref()
        .and_then(|url| url.host_str())
        .is_some_and(|host| settings.allowed_hosts.iter().any(|allowed| allowed == host));
    Ok(storage::Bucket {
        name: bucket.name.clone(),
        endpoint,
        region: Some(bucket.region.clone()).filter(|region| !region.is_empty()),
        path_style: bucket.use_path_style,
        skip_tls_verify: bucket.insecure_skip_tls_verify,
        keys,
        timeout: TIMEOUT,
        max_attempts: ATTEMPTS_MAX,
        // The operator fetches no objects.
        etag_is_md5: true,
        addresses: (!by_name).then_some(guard),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::Args;
    use clap::Parser;
    use serde_json::{Value, json};

    fn listed(bucket: Value, settings: &[&str]) -> storage::Bucket {
        let needed = ["operator", "--valkey-url", "redis://v:6379", "--claimer-image", "c:1"];
        let settings = Args::try_parse_from(needed.iter().chain(settings)).unwrap().usable().unwrap();
        source_bucket(&settings, &serde_json::from_value(bucket).unwrap(), None).unwrap()
    }

    /// The author of a Pipeline must not be able to make the operator query the metadata service.
    #[test]
    fn the_operator_asks_only_allowed_addresses() {
        let metadata_service: std::net::IpAddr = "169.254.169.254".parse().unwrap();
        let bucket = json!({"name": "bkt", "endpoint": "http://inside.example:9000"});
        let is_asked = |settings: &[&str]| {
            let guard = listed(bucket.clone(), settings).addresses;
            guard.is_none_or(|guard| guard.allows(metadata_service))
        };
        assert!(!is_asked(&[]));
        assert!(is_asked(&["--allowed-endpoint-networks", "169.254.0.0/16"]));
        assert!(is_asked(&["--allowed-endpoint-hosts", "inside.example"]));
        assert!(!is_asked(&["--allowed-endpoint-hosts", "other.example"]));
    }

    #[test]
    fn the_bucket_is_listed_as_the_pipeline_says() {
        let all = listed(
            json!({"name": "bkt", "endpoint": "s3.example", "region": "eu-1", "usePathStyle": true,
                "insecureSkipTLSVerify": true}),
            &[],
        );
        assert_eq!(all.endpoint.unwrap().as_str(), "https://s3.example/");
        assert_eq!((all.name.as_str(), all.region.as_deref()), ("bkt", Some("eu-1")));
        assert!(all.path_style && all.skip_tls_verify);
        let least = listed(json!({"name": "bkt"}), &[]);
        assert!(least.endpoint.is_none() && least.region.is_none(), "those of AWS");
        assert!(!least.skip_tls_verify && least.keys.is_none());
    }
}
