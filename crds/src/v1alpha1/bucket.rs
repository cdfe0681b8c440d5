//! A bucket of an S3-compatible service: the source of the files, or the destination of the results.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::cel;

/// A bucket of an S3-compatible service.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.endpoint) && self.endpoint != '') || (has(self.region) && self.region != '')")
    .message("an empty endpoint means AWS, which needs a region: set region (for example eu-central-1), or endpoint for another S3-compatible service [bucket-region]")
    .field_path(".region"))]
pub struct Bucket {
    /// Name of the bucket.
    #[schemars(length(min = 3, max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9][a-z0-9.-]*[a-z0-9]$')")
        .message("a bucket name has lowercase letters, digits, dots and hyphens, and starts and ends with a letter or digit [bucket-name]"),
        validation = Rule::new("!self.contains('..') && !self.matches('^[0-9]+[.][0-9]+[.][0-9]+[.][0-9]+$')")
        .message("a bucket name has no two dots in a row and is not an IP address [bucket-name]"))]
    pub name: String,

    /// Prefix of all keys that are read or written. It is matched literally: `day=1` also matches `day=10/`,
    /// so end a folder with a slash.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = cel::key_prefix())]
    pub prefix: String,

    /// URL or host of the service, for example `https://minio.storage.svc:9000`. Without a scheme, https is
    /// used. Empty means AWS S3.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    #[x_kube(validation = Rule::new("!self.contains('@')")
        .message("an endpoint holds no credentials: put the keys into a Secret and name it in credentialsSecret [endpoint-credentials]"),
        validation = Rule::new("self == '' || self.matches('^([hH][tT][tT][pP][sS]?://)?[^/?# ]+/?$')")
        .message("an endpoint is [http://|https://]host[:port], without path, query or fragment: a path goes into prefix [endpoint]"))]
    pub endpoint: String,

    /// Region of the bucket. Required for AWS; other services mostly ignore it (without a region, requests
    /// are signed for `us-east-1`).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9-]*$')")
        .message("a region has letters, digits and hyphens, for example eu-central-1 [bucket-region]"))]
    pub region: String,

    /// Secret with the keys `accessKeyId` and `secretAccessKey`. Without it, worker pods use the ambient
    /// identity of their service account (IRSA, workload identity), and the operator lists the bucket with
    /// its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<SecretReference>,

    /// Accept any certificate from the endpoint. For test setups only.
    #[serde(default, rename = "insecureSkipTLSVerify")]
    pub insecure_skip_tls_verify: bool,

    /// Address objects as `endpoint/bucket/key` instead of `bucket.endpoint/key`. Most self-hosted services
    /// need it.
    #[serde(default)]
    pub use_path_style: bool,
}

/// A Secret, in this namespace unless another is named.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SecretReference {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub name: String,

    /// Namespace of the Secret, if it is not this one. A ReferenceGrant in that namespace must then allow the
    /// reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = cel::namespace_name())]
    pub namespace: Option<String>,
}
