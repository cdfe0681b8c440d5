//! Checks that the Secret of a bucket is usable, for the webhook and the operator alike.

use k8s_openapi::api::core::v1::Secret;
use protocol::secret::{ACCESS_KEY_ID, SECRET_ACCESS_KEY};

use super::rule::Rule;
use super::violation::Violation;

/// The keys of a bucket, from its Secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BucketKeys<'a> {
    /// The access key.
    pub id: &'a str,
    /// The secret key.
    pub secret: &'a str,
}

/// Why a Secret has no keys for a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretProblem {
    /// The Secret does not exist.
    Missing,
    /// These keys are missing, empty or not text.
    Lacks(Vec<&'static str>),
}

impl<'a> BucketKeys<'a> {
    /// Reads the keys.
    pub fn read(secret: Option<&'a Secret>) -> Result<Self, SecretProblem> {
        let data = secret.ok_or(SecretProblem::Missing)?.data.as_ref();
        let text = |key| {
            let bytes = &data?.get(key)?.0;
            str::from_utf8(bytes).ok().filter(|text| !text.is_empty())
        };
        match (text(ACCESS_KEY_ID), text(SECRET_ACCESS_KEY)) {
            (Some(id), Some(secret)) => Ok(Self { id, secret }),
            (id, secret) => {
                let keys = [(ACCESS_KEY_ID, id), (SECRET_ACCESS_KEY, secret)];
                let lacking = keys.into_iter().filter(|(_, text)| text.is_none());
                Err(SecretProblem::Lacks(lacking.map(|(key, _)| key).collect()))
            }
        }
    }
}

impl SecretProblem {
    /// The problem with the Secret of this name, and how to fix it.
    pub fn of(&self, namespace: &str, name: &str) -> String {
        let (message, fix) = self.words(namespace, name);
        format!("{message}; {fix}")
    }

    /// The same as a violation of the field that names the Secret.
    pub fn violation(&self, field: String, namespace: &str, name: &str) -> Violation {
        let (message, fix) = self.words(namespace, name);
        Violation { field, rule: Rule::CredentialsSecret, message, fix }
    }

    fn words(&self, namespace: &str, name: &str) -> (String, String) {
        let title = format!("Secret \"{namespace}/{name}\"");
        match self {
            Self::Missing => (
                format!("{title} does not exist"),
                format!(
                    "create it first, with the keys {ACCESS_KEY_ID} and {SECRET_ACCESS_KEY}, or leave credentialsSecret out to use ambient identities: the operator's to list, the worker's to fetch"
                ),
            ),
            Self::Lacks(keys) => (
                format!("{title} has no {}, or it is empty", keys.join(" and ")),
                format!("a bucket's Secret has the keys {ACCESS_KEY_ID} and {SECRET_ACCESS_KEY}"),
            ),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;

    fn secret(data: &[(&str, &[u8])]) -> Secret {
        let data = data.iter().map(|(key, value)| ((*key).to_owned(), ByteString(value.to_vec())));
        Secret { data: Some(data.collect()), ..Secret::default() }
    }

    fn lacking(data: &[(&str, &[u8])]) -> Vec<&'static str> {
        match BucketKeys::read(Some(&secret(data))).err() {
            Some(SecretProblem::Lacks(keys)) => keys,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_secret_has_both_keys_as_text() {
        let usable = secret(&[(ACCESS_KEY_ID, b"id"), (SECRET_ACCESS_KEY, b"s3cret"), ("other", b"")]);
        let BucketKeys { id, secret } = BucketKeys::read(Some(&usable)).ok().unwrap();
        assert_eq!((id, secret), ("id", "s3cret"));
        assert_eq!(lacking(&[(ACCESS_KEY_ID, b"id")]), [SECRET_ACCESS_KEY]);
        assert_eq!(
            lacking(&[(ACCESS_KEY_ID, b""), (SECRET_ACCESS_KEY, b"\xff")]),
            [ACCESS_KEY_ID, SECRET_ACCESS_KEY]
        );
        assert!(BucketKeys::read(Some(&Secret::default())).is_err());
        assert_eq!(BucketKeys::read(None).err(), Some(SecretProblem::Missing));
    }

    #[test]
    fn a_problem_names_the_secret_and_what_to_add() {
        let words = SecretProblem::Lacks(vec![SECRET_ACCESS_KEY]).of("team-a", "keys");
        assert!(
            words.starts_with("Secret \"team-a/keys\" has no secretAccessKey, or it is empty;"),
            "{words}"
        );
        let words = SecretProblem::Missing.of("team-a", "keys");
        assert!(words.starts_with("Secret \"team-a/keys\" does not exist; create it first"), "{words}");
    }
}
