//! Checks that image references are well-formed: `[registry/]repository[:tag][@digest]`.

use oci_spec::distribution::{ParseError, Reference};

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};

pub(super) fn check(field: &Path, image: &str, out: &mut Findings) {
    let Err(error) = image.parse::<Reference>() else { return };
    let fix = match error {
        _ if image.trim() != image || image.contains(char::is_whitespace) => {
            "remove the white space".to_owned()
        }
        _ if image.contains("://") => {
            "write it without a scheme, for example ghcr.io/acme/resize:1.4".to_owned()
        }
        _ if image.to_lowercase().parse::<Reference>().is_ok() => {
            format!("write {}", quote(&image.to_lowercase()))
        }
        ParseError::DigestInvalidFormat | ParseError::DigestInvalidLength | ParseError::DigestUnsupported => {
            "write the digest as @sha256: and 64 hexadecimal digits".to_owned()
        }
        ParseError::NameContainsUppercase
        | ParseError::NameEmpty
        | ParseError::NameTooLong
        | ParseError::ReferenceInvalidFormat
        | ParseError::TagInvalidFormat => {
            "write [registry/]repository[:tag][@digest], for example ghcr.io/acme/resize:1.4".to_owned()
        }
    };
    out.add(field, Rule::Image, format!("{} is not an image reference ({error})", quote(image)), fix);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_every_common_form_are_accepted() {
        let digest = format!("ghcr.io/acme/resize@sha256:{}", "a".repeat(64));
        let both = format!("ghcr.io/acme/resize:1.4@sha256:{}", "a".repeat(64));
        for image in [
            "busybox",
            "acme/resize",
            "localhost:5000/a/b:dev",
            "ghcr.io/acme/resize:1.4_x-Y.z",
            &digest,
            &both,
        ] {
            let mut out = Findings::default();
            check(&Path::root(), image, &mut out);
            assert_eq!(out.into_vec(), [], "{image}");
        }
    }
}
