//! The keys of a bucket, which never appear in logs.

use std::fmt;

/// A pair of keys, never printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessKeys {
    /// Access key.
    pub id: Secret,
    /// Secret key.
    pub secret: Secret,
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_never_printed() {
        let keys = AccessKeys { id: "AKIA123".to_owned().into(), secret: "hunter2".to_owned().into() };
        let printed = format!("{keys:?}");
        assert!(!printed.contains("hunter2") && !printed.contains("AKIA123"), "{printed}");
    }
}
