//! Names that must fit into a limit of Kubernetes: shortened the same way everywhere, and still unique.

use sha2::{Digest, Sha256};

/// Longest label value.
pub const LABEL_VALUE_MAX: usize = 63;

/// Hex digits of the hash that replaces the part that was cut off. With these 40 bits, a namespace needs
/// about a million long names with the same beginning before two collide.
const HASH_DIGITS: usize = 10;

/// Returns `text` if it fits into `max` bytes, otherwise its beginning and a hash of the whole. `text` is
/// ASCII.
pub fn shorten(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let hash: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    let beginning: String = text.chars().take(max.saturating_sub(HASH_DIGITS + 1)).collect();
    format!("{}-{}", beginning.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()), &hash[..HASH_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_fits_is_kept() {
        assert_eq!(shorten(&"a".repeat(63), 63), "a".repeat(63));
    }

    #[test]
    fn a_long_name_is_cut_and_stays_unique() {
        let (one, two) = (format!("{}1", "a.".repeat(100)), format!("{}2", "a.".repeat(100)));
        for name in [&one, &two] {
            let short = shorten(name, 63);
            assert!(short.len() <= 63, "{short}");
            assert!(short.ends_with(|c: char| c.is_ascii_alphanumeric()), "{short}");
        }
        assert_ne!(shorten(&one, 63), shorten(&two, 63));
    }
}
