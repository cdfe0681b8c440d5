//! The settings of a bucket on the command line and in the environment: once for the source, and once more for the sink.

use std::time::Duration;

use clap::Args;
use storage::{Bucket, Keys, parse_endpoint};

use crate::args::{SettingsError, filled, parse_duration, parse_flag, required};

/// The same settings for the source and, with `SINK_` in front, for the sink.
macro_rules! bucket_args {
    ($name:ident, $flag:literal, $env:literal) => {
        #[derive(Args)]
        pub(crate) struct $name {
            /// Bucket
            #[arg(long = concat!($flag, "s3-bucket"), env = concat!($env, "S3_BUCKET"))]
            bucket: String,
            /// [http://|https://]host[:port] of an S3-compatible service, https when no scheme is written; empty is AWS
            #[arg(long = concat!($flag, "s3-endpoint"), env = concat!($env, "S3_ENDPOINT"), default_value = "")]
            endpoint: String,
            /// Region, which AWS needs
            #[arg(long = concat!($flag, "s3-region"), env = concat!($env, "S3_REGION"), default_value = "")]
            region: String,
            /// Whether the bucket goes into the path instead of the host name
            #[arg(long = concat!($flag, "s3-use-path-style"), env = concat!($env, "S3_USE_PATH_STYLE"),
                  default_value = "false", value_parser = parse_flag, action = clap::ArgAction::Set)]
            path_style: bool,
            /// Whether any certificate of the service is accepted
            #[arg(long = concat!($flag, "s3-insecure-skip-tls-verify"), env = concat!($env, "S3_INSECURE_SKIP_TLS_VERIFY"),
                  default_value = "false", value_parser = parse_flag, action = clap::ArgAction::Set)]
            skip_tls_verify: bool,
            /// Access key; without the two keys the pod's own identity is used
            #[arg(long = concat!($flag, "s3-access-key-id"), env = concat!($env, "S3_ACCESS_KEY_ID"),
                  default_value = "", hide_env_values = true)]
            access_key_id: String,
            /// Secret key
            #[arg(long = concat!($flag, "s3-secret-access-key"), env = concat!($env, "S3_SECRET_ACCESS_KEY"),
                  default_value = "", hide_env_values = true)]
            secret_access_key: String,
            /// How long the service may be silent
            #[arg(long = concat!($flag, "s3-timeout"), env = concat!($env, "S3_TIMEOUT"),
                  default_value = "30s", value_parser = parse_duration)]
            timeout: Duration,
            /// How often a request is tried while the service is away, busy or cut off
            #[arg(long = concat!($flag, "s3-max-attempts"), env = concat!($env, "S3_MAX_ATTEMPTS"),
                  default_value = "6", value_parser = clap::value_parser!(u32).range(1..=20))]
            max_attempts: u32,
            /// Whether an etag of 32 hexadecimal digits is the MD5 of the content, as in most services
            #[arg(long = concat!($flag, "s3-etag-is-md5"), env = concat!($env, "S3_ETAG_IS_MD5"),
                  default_value = "true", value_parser = parse_flag, action = clap::ArgAction::Set)]
            etag_is_md5: bool,
        }

        impl $name {
            /// Parses the values.
            pub(crate) fn usable(self) -> Result<Bucket, SettingsError> {
                let name = |setting: &str| format!("{}S3_{setting}", $env);
                let Self { bucket, endpoint, region, path_style, skip_tls_verify, timeout, max_attempts, .. } = self;
                required(&name("BUCKET"), &bucket)?;
                let endpoint = filled(endpoint).map(|text| parse_endpoint(&text)).transpose();
                let endpoint = endpoint.map_err(|error| SettingsError(format!("{} {error}", name("ENDPOINT"))))?;
                let keys = match (filled(self.access_key_id), filled(self.secret_access_key)) {
                    (Some(id), Some(secret)) => Some(Keys { id: id.into(), secret: secret.into() }),
                    (None, None) => None,
                    _ => {
                        let (id, secret) = (name("ACCESS_KEY_ID"), name("SECRET_ACCESS_KEY"));
                        return Err(SettingsError(format!("set both {id} and {secret}, or neither")));
                    }
                };
                let region = filled(region);
                if region.is_none() && endpoint.is_none() && keys.is_some() {
                    return Err(SettingsError(format!("AWS needs {}", name("REGION"))));
                }
                let etag_is_md5 = self.etag_is_md5;
                Ok(Bucket {
                    name: bucket, endpoint, region, path_style, skip_tls_verify, keys, timeout, max_attempts, etag_is_md5,
                    addresses: None,
                })
            }
        }
    };
}

bucket_args!(SourceArgs, "", "");
bucket_args!(SinkArgs, "sink-", "SINK_");
