//! Names of the environment variables that the claimer reads. The operator sets most of them in the pod;
//! docs/claimer.md describes them.

/// Work stream of the run.
pub const STREAM: &str = "STREAM";
/// Consumer group of the run. Only claimers of older versions read it, in pods of a run whose operator was
/// rolled back.
pub const GROUP: &str = "GROUP";
/// Address of Valkey.
pub const VALKEY_URL: &str = "VALKEY_URL";
/// User of the run's workers.
pub const VALKEY_USERNAME: &str = "VALKEY_USERNAME";
/// Its password.
pub const VALKEY_PASSWORD: &str = "VALKEY_PASSWORD";
/// CA of Valkey's certificate.
pub const VALKEY_CA_CERTIFICATE: &str = "VALKEY_CA_CERTIFICATE";
/// Name of the consumer.
pub const CONSUMER_NAME: &str = "CONSUMER_NAME";
/// Name of the pod.
pub const POD_NAME: &str = "POD_NAME";
/// How long Valkey may be unreachable.
pub const QUEUE_TIMEOUT: &str = "QUEUE_TIMEOUT";
/// How long Valkey may refuse the user.
pub const QUEUE_DENIED_TIMEOUT: &str = "QUEUE_DENIED_TIMEOUT";
/// Names of the filters.
pub const FILTERS: &str = "OPENFILTER_FILTERS";
/// The filter whose results are published.
pub const SINK_FROM: &str = "SINK_FROM";
/// The order in which the filters process a file.
pub const ORDER: &str = "OPENFILTER_ORDER";
/// How long one file may take.
pub const FILE_TIMEOUT: &str = "OPENFILTER_FILE_TIMEOUT";
/// The most bytes of files that are fetched ahead of their turn.
pub const PREFETCH_BYTES: &str = "OPENFILTER_PREFETCH_BYTES";
/// The number of files that a pod processes before it ends.
pub const MAX_FILES: &str = "OPENFILTER_MAX_FILES";
/// The age at which a pod ends.
pub const MAX_AGE: &str = "OPENFILTER_MAX_AGE";
/// Folder into which a claimer copies the shim, if filters of its pod use `Lines`.
pub const INSTALL_TO: &str = "OPENFILTER_INSTALL_TO";
/// Folder with the shim, and a socket for each filter.
pub const LINKS: &str = "OPENFILTER_LINKS";
/// Folder that the containers share.
pub const WORKSPACE: &str = "WORKSPACE";
/// File to which the termination message is written.
pub const TERMINATION_LOG: &str = "TERMINATION_LOG";

/// Names of the variables that describe a bucket.
pub struct Bucket {
    /// Name of the bucket.
    pub bucket: &'static str,
    /// Prefix of all keys.
    pub prefix: &'static str,
    /// Address of the service.
    pub endpoint: &'static str,
    /// Region.
    pub region: &'static str,
    /// Whether the bucket is part of the path.
    pub use_path_style: &'static str,
    /// Whether any certificate is accepted.
    pub insecure_skip_tls_verify: &'static str,
    /// Access key.
    pub access_key_id: &'static str,
    /// Secret key.
    pub secret_access_key: &'static str,
    /// How long the service may be silent.
    pub timeout: &'static str,
    /// How often a request is tried.
    pub max_attempts: &'static str,
    /// Whether an etag may be an MD5.
    pub etag_is_md5: &'static str,
    /// Keys of objects that this run has already fetched or published, newest first, separated by
    /// [`CANARY_SEPARATOR`].
    pub canary_key: &'static str,
}

/// Separates the keys of canaries. A key with control characters never becomes a canary.
pub const CANARY_SEPARATOR: char = '\n';

macro_rules! bucket {
    ($start:literal) => {
        Bucket {
            bucket: concat!($start, "BUCKET"),
            prefix: concat!($start, "PREFIX"),
            endpoint: concat!($start, "ENDPOINT"),
            region: concat!($start, "REGION"),
            use_path_style: concat!($start, "USE_PATH_STYLE"),
            insecure_skip_tls_verify: concat!($start, "INSECURE_SKIP_TLS_VERIFY"),
            access_key_id: concat!($start, "ACCESS_KEY_ID"),
            secret_access_key: concat!($start, "SECRET_ACCESS_KEY"),
            timeout: concat!($start, "TIMEOUT"),
            max_attempts: concat!($start, "MAX_ATTEMPTS"),
            etag_is_md5: concat!($start, "ETAG_IS_MD5"),
            canary_key: concat!($start, "CANARY_KEY"),
        }
    };
}

/// The bucket that files come from.
pub const SOURCE: Bucket = bucket!("S3_");
/// The bucket that results go to.
pub const SINK: Bucket = bucket!("SINK_S3_");
