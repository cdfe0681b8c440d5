//! Keys of two kinds of Secrets: those that users write for a bucket, and the one with the Valkey user of a
//! run's workers.

/// Name of the Valkey user.
pub const USERNAME: &str = "username";
/// Password of the Valkey user.
pub const PASSWORD: &str = "password";
/// Access key of a bucket.
pub const ACCESS_KEY_ID: &str = "accessKeyId";
/// Secret key of a bucket.
pub const SECRET_ACCESS_KEY: &str = "secretAccessKey";
