//! Buckets: names, region, endpoint, credentials, prefix and globs.

use globset::GlobBuilder;

use super::path::Path;
use super::reference::{self, Reference};
use super::rule::Rule;
use super::violation::{Findings, quote};
use super::{Context, endpoint, names};
use crate::v1alpha1::{Bucket, GrantFromKind, GrantToKind};

/// S3's limit for a key, in bytes; a longer prefix cannot match anything.
const KEY_BYTES_MAX: usize = 1024;

pub(super) fn check(
    field: &Path,
    bucket: &Bucket,
    namespace: &str,
    context: &Context<'_>,
    out: &mut Findings,
) {
    check_name(&field.field("name"), &bucket.name, out);
    check_prefix(&field.field("prefix"), &bucket.prefix, out);
    if !bucket.endpoint.is_empty() {
        endpoint::check(&field.field("endpoint"), &bucket.endpoint, &context.endpoints, out);
    } else if bucket.region.is_empty() {
        let message = "it is empty, but without an endpoint the bucket is on AWS, which needs a region";
        let fix = "write the bucket's region, for example eu-central-1, or the endpoint of another S3-compatible service";
        out.add(&field.field("region"), Rule::BucketRegion, message, fix);
    }
    if !bucket.region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
        let message = format!("{} is not a region", quote(&bucket.region));
        out.add(&field.field("region"), Rule::BucketRegion, message, "write for example eu-central-1");
    }
    if let Some(secret) = &bucket.credentials_secret {
        let at = field.field("credentialsSecret");
        names::check_object(&at.field("name"), &secret.name, out);
        let reference = Reference {
            from: GrantFromKind::Pipeline,
            from_namespace: namespace,
            to: GrantToKind::Secret,
            to_namespace: secret.namespace.as_deref(),
            to_name: &secret.name,
        };
        reference::check(&at.field("namespace"), &reference, context, out);
    }
}

fn check_name(field: &Path, name: &str, out: &mut Findings) {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-');
    let at_ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let why = if name.len() < 3 || name.len() > 63 {
        "is not 3 to 63 characters long"
    } else if !name.chars().all(allowed) || !name.starts_with(at_ends) || !name.ends_with(at_ends) {
        "must contain only lowercase letters, digits, dots and hyphens, and must start and end with a letter or digit"
    } else if name.contains("..") {
        "has two dots in a row"
    } else if looks_like_an_address(name) {
        "looks like an IP address"
    } else {
        return;
    };
    let fix = match name.strip_prefix("s3://") {
        Some(rest) => format!("write the bucket alone: {}", quote(rest.split('/').next().unwrap_or(rest))),
        None if name.contains('/') => "write the bucket alone and put the folder into prefix".to_owned(),
        None => "write the name as your S3 service shows it, for example camera-images".to_owned(),
    };
    out.add(field, Rule::BucketName, format!("{} {why}", quote(name)), fix);
}

/// S3 refuses four numbers with dots even if they are too large for an address.
fn looks_like_an_address(name: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    name.split('.').count() == 4 && name.split('.').all(is_number)
}

pub(super) fn check_prefix(field: &Path, prefix: &str, out: &mut Findings) {
    if prefix.len() > KEY_BYTES_MAX {
        let message = format!(
            "{} is {} bytes long, but keys have at most {KEY_BYTES_MAX}",
            quote(prefix),
            prefix.len()
        );
        out.add(field, Rule::Prefix, message, "write a shorter prefix");
    } else if let Some(rest) = prefix.strip_prefix("s3://") {
        let message = format!("{} is a URL, but keys do not begin with s3://", quote(prefix));
        let fix = format!(
            "write only what follows the bucket: {}",
            quote(rest.split_once('/').map_or("", |(_, key)| key))
        );
        out.add(field, Rule::Prefix, message, fix);
    }
}

pub(super) fn check_globs(field: &Path, globs: &[String], out: &mut Findings) {
    for (index, glob) in globs.iter().enumerate() {
        if let Err(error) = GlobBuilder::new(glob).literal_separator(true).build() {
            let message = format!("{} is not a glob ({})", quote(glob), error.kind());
            let fix =
                "write for example *.jpg, **/*.jpg or {a,b}/*; put a special character into brackets: [*]";
            out.add(&field.index(index), Rule::Glob, message, fix);
        } else if glob.starts_with('/') {
            let message = format!(
                "{} begins with a slash, but globs are matched against the key after the prefix",
                quote(glob)
            );
            let fix = format!(
                "write {}, or [/] if the keys really begin with a slash",
                quote(glob.trim_start_matches('/'))
            );
            out.add(&field.index(index), Rule::Glob, message, fix);
        }
    }
}
