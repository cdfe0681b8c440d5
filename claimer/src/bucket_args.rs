//! A bucket's settings on the command line and in the environment, for the source and for the sink.

use std::time::Duration;

use clap::Args;
use protocol::env;
use storage::{AccessKeys, Bucket, parse_endpoint};

use crate::args::{SettingsError, filled, parse_duration, parse_flag, required};

/// Defines the settings for the source and, with the prefix `SINK_`, for the sink.
macro_rules! bucket_args {
    ($name:ident, $flag:literal, $env:ident) => {
        #[derive(Args)]
        pub(crate) struct $name {
            /// Name of the bucket
            #[arg(long = concat!($flag, "s3-bucket"), env = env::$env.bucket)]
            bucket: String,
            /// [http://|https://]host[:port] of an S3-compatible service; https without a scheme; AWS when
            /// empty
            #[arg(long = concat!($flag, "s3-endpoint"), env = env::$env.endpoint, default_value = "")]
            endpoint: String,
            /// Region; required for AWS
            #[arg(long = concat!($flag, "s3-region"), env = env::$env.region, default_value = "")]
            region: String,
            /// Whether to put the bucket into the path instead of the host name
            #[arg(long = concat!($flag, "s3-use-path-style"), env = env::$env.use_path_style,
                  default_value = "false", value_parser = parse_flag, action = clap::ArgAction::Set)]
            path_style: bool,
            /// Whether to accept any certificate of the service
            #[arg(long = concat!($flag, "s3-insecure-skip-tls-verify"), env = env::$env.insecure_skip_tls_verify,
                  default_value = "false", value_parser = parse_flag, action = clap::ArgAction::Set)]
            skip_tls_verify: bool,
            /// Access key; without both keys, the pod's own identity is used
            #[arg(long = concat!($flag, "s3-access-key-id"), env = env::$env.access_key_id,
                  default_value = "", hide_env_values = true)]
            access_key_id: String,
            /// Secret key
            #[arg(long = concat!($flag, "s3-secret-access-key"), env = env::$env.secret_access_key,
                  default_value = "", hide_env_values = true)]
            secret_access_key: String,
            /// How long the service may stay silent
            #[arg(long = concat!($flag, "s3-timeout"), env = env::$env.timeout,
                  default_value = "30s", value_parser = parse_duration)]
            timeout: Duration,
            // Waits between tries are random, up to 0.5, 1 and 2 s: four tries outlast a moment of overload,
            // and end within 4 s if connections are refused. That must be soon, because the operator learns
            // of an outage only from pods that ended.
            /// How often to try a request while the service is unreachable, busy or breaks off
            #[arg(long = concat!($flag, "s3-max-attempts"), env = env::$env.max_attempts,
                  default_value = "4", value_parser = clap::value_parser!(u32).range(1..=20))]
            max_attempts: u32,
            /// Whether an etag of 32 hexadecimal digits is the MD5 of the content, as with most services
            #[arg(long = concat!($flag, "s3-etag-is-md5"), env = env::$env.etag_is_md5,
                  default_value = "true", value_parser = parse_flag, action = clap::ArgAction::Set)]
            etag_is_md5: bool,
        }

        impl $name {
            /// Parses the values.
            pub(crate) fn usable(self) -> Result<Bucket, SettingsError> {
                let name = env::$env;
                let Self { bucket, endpoint, region, path_style, skip_tls_verify, timeout, max_attempts, .. } = self;
                required(name.bucket, &bucket)?;
                let endpoint = filled(endpoint).map(|text| parse_endpoint(&text)).transpose();
                let endpoint = endpoint.map_err(|error| SettingsError(format!("{} {error}", name.endpoint)))?;
                let keys = match (filled(self.access_key_id), filled(self.secret_access_key)) {
                    (Some(id), Some(secret)) => Some(AccessKeys { id: id.into(), secret: secret.into() }),
                    (None, None) => None,
                    _ => {
                        let (id, secret) = (name.access_key_id, name.secret_access_key);
                        return Err(SettingsError(format!("set both {id} and {secret}, or neither")));
                    }
                };
                let region = filled(region);
                if region.is_none() && endpoint.is_none() && keys.is_some() {
                    return Err(SettingsError(format!("AWS needs {}", name.region)));
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

bucket_args!(SourceArgs, "", SOURCE);
bucket_args!(SinkArgs, "sink-", SINK);
