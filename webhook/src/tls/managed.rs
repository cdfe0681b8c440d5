//! Certificates that the webhook issues itself, kept in one Secret for all replicas. There is no leader: a
//! replica that finds something to renew writes it with the version that it has read. Of several replicas one
//! succeeds, and the others take up what it wrote.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use time::OffsetDateTime;
use tracing::{info, warn};

use super::issue::{IssueError, Material};
use super::{Certificates, PemError, bundle};
use crate::metrics::Metrics;

/// Often enough that every replica serves a new certificate, and trusts a new authority, well within the
/// overlap.
const LOOK: Duration = Duration::from_secs(60);
/// Without a certificate, or before any client trusts it, nothing can be served.
const LOOK_AT_START: Duration = Duration::from_secs(2);

/// Keeps the certificates.
#[derive(Clone)]
pub struct Managed {
    /// The client.
    pub client: Client,
    /// Namespace of the Secret.
    pub namespace: String,
    /// Name of the Secret.
    pub secret: String,
    /// Names and addresses that the certificate is for.
    pub names: Vec<String>,
    /// Name of the webhook configurations whose `caBundle` is kept up to date.
    pub configuration: String,
    /// The certificates in use.
    pub certificates: Arc<Certificates>,
    /// Records when they expire.
    pub metrics: Arc<Metrics>,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum ManagedError {
    /// The Secret could not be read or written.
    #[error("cannot keep the certificates in Secret {name}: {source}")]
    Secret {
        /// Namespace and name.
        name: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// No certificate could be created.
    #[error(transparent)]
    Issue(#[from] IssueError),
    /// The certificate could not be used.
    #[error(transparent)]
    Use(#[from] PemError),
    /// The API server could not be told which authorities to trust.
    #[error("the API server may not trust the webhook: {0}")]
    Untrusted(#[source] Box<kube::Error>),
    /// Another replica wrote at the same moment; the next pass reads what it wrote.
    #[error("another replica renews the certificates")]
    Beaten,
}

impl Managed {
    /// Maintains the certificates forever; calls `ready` once the first is taken up and trusted.
    pub async fn keep(self, ready: impl FnOnce()) {
        let (mut ready, mut trusted) = (Some(ready), None);
        loop {
            match self.pass(trusted.as_deref()).await {
                Ok(bundle) => {
                    trusted = Some(bundle);
                    if let Some(ready) = ready.take() {
                        ready();
                    }
                }
                Err(ManagedError::Beaten) => {}
                Err(error) => warn!(%error, "the certificates could not be maintained"),
            }
            tokio::time::sleep(if ready.is_some() { LOOK_AT_START } else { LOOK }).await;
        }
    }

    /// One pass: renews the certificates if it is time, makes sure that the API server trusts them, and takes
    /// them up. `trusted` is the bundle that the previous pass left with the API server; returns that of this
    /// pass.
    pub async fn pass(&self, trusted: Option<&str>) -> Result<String, ManagedError> {
        let now = OffsetDateTime::now_utc();
        let material = self.current(now).await?;
        // Trusted before it is served. If the API server cannot be told now (not every API server knows newly
        // granted rights at once), the webhook is not ready, but serves clients that already trust it.
        let told = bundle::publish(&self.client, &self.configuration, &material.bundle).await;
        let known = matches!(told, Ok(false)).then_some(material.bundle.as_str());
        let good = |chain: Vec<u8>| material.accepts(&chain, now.unix_timestamp());
        if is_to_be_taken_up(known, trusted, self.certificates.chain().is_some_and(good)) {
            let taken =
                self.certificates.take_up(material.certificate.as_bytes(), material.key.as_bytes())?;
            if let Some(expires) = taken {
                self.metrics.certificate_expires(expires);
                info!(secret = self.secret, expires, "loaded a certificate");
            }
        }
        told.map(|_changed| material.bundle).map_err(|error| ManagedError::Untrusted(Box::new(error)))
    }

    async fn current(&self, now: OffsetDateTime) -> Result<Material, ManagedError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let Some(stored) = api.get_opt(&self.secret).await.map_err(|error| self.failed(error))? else {
            let material = self.still_trusting(Material::create(&self.names, now)?, now).await?;
            let created = api.create(&PostParams::default(), &self.write(&material, None)).await;
            return created.map(|_| material).map_err(|error| self.failed(error));
        };
        let read = read(&stored);
        let renewed = match &read {
            Some(material) => material.renewed(&self.names, now)?,
            None => Some(Material::create(&self.names, now)?),
        };
        match (renewed, read) {
            (Some(material), _) => {
                let material = self.still_trusting(material, now).await?;
                let secret = self.write(&material, stored.resource_version());
                let written = api.replace(&self.secret, &PostParams::default(), &secret).await;
                info!(secret = self.secret, "renewed the certificates");
                written.map(|_| material).map_err(|error| self.failed(error))
            }
            // Even with an unchanged Secret: it may have been replaced, for example from a backup.
            (None, Some(material)) => self.still_trusting(material, now).await,
            (None, None) => Err(ManagedError::Beaten),
        }
    }

    /// Keeps the authorities that the API server trusts now. Even if the Secret was lost or replaced, other
    /// replicas serve their previous certificate until their next pass.
    async fn still_trusting(
        &self,
        material: Material,
        now: OffsetDateTime,
    ) -> Result<Material, ManagedError> {
        let trusted = bundle::published(&self.client, &self.configuration).await;
        let trusted = trusted.map_err(|error| ManagedError::Untrusted(Box::new(error)))?;
        Ok(material.trusting(&trusted, now))
    }

    fn write(&self, material: &Material, version: Option<String>) -> Secret {
        let Material { bundle, authority_key, certificate, key } = material;
        let data =
            [("ca.crt", bundle), ("ca.key", authority_key), ("tls.crt", certificate), ("tls.key", key)];
        let data =
            data.into_iter().map(|(name, text)| (name.to_owned(), ByteString(text.clone().into_bytes())));
        let mut secret = Secret { type_: Some("kubernetes.io/tls".to_owned()), ..Secret::default() };
        secret.metadata.name = Some(self.secret.clone());
        secret.metadata.namespace = Some(self.namespace.clone());
        secret.metadata.resource_version = version;
        secret.metadata.labels = Some(BTreeMap::from([(
            "app.kubernetes.io/managed-by".to_owned(),
            "openfilter-webhook".to_owned(),
        )]));
        secret.data = Some(data.collect());
        secret
    }

    fn failed(&self, error: kube::Error) -> ManagedError {
        match &error {
            kube::Error::Api(status) if status.code == 409 => ManagedError::Beaten,
            _ => ManagedError::Secret {
                name: format!("{}/{}", self.namespace, self.secret),
                source: Box::new(error),
            },
        }
    }
}

/// A certificate is taken up if the API server already had its bundle in this pass and in the previous one. A
/// bundle that this or another replica has just written may not be known everywhere, because every API server
/// has its own copy of the configuration. Until then the current certificate stays, unless no client would
/// accept it.
fn is_to_be_taken_up(known: Option<&str>, told_before: Option<&str>, serves_something_good: bool) -> bool {
    !serves_something_good || known.is_some() && known == told_before
}

fn read(secret: &Secret) -> Option<Material> {
    let data = secret.data.as_ref()?;
    let text = |name: &str| String::from_utf8(data.get(name)?.0.clone()).ok();
    Some(Material {
        bundle: text("ca.crt")?,
        authority_key: text("ca.key")?,
        certificate: text("tls.crt")?,
        key: text("tls.key")?,
    })
}

/// The names by which the API server calls a service.
pub fn service_names(service: &str, namespace: &str) -> Vec<String> {
    let short = format!("{service}.{namespace}.svc");
    vec![
        short.clone(),
        format!("{short}.cluster.local"),
        format!("{service}.{namespace}"),
        service.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Option<&str> = Some("old");
    const NEW: Option<&str> = Some("new, old");

    #[test]
    fn a_certificate_is_taken_up_when_its_authority_was_trusted_at_the_look_before() {
        assert!(is_to_be_taken_up(NEW, NEW, true));
        assert!(!is_to_be_taken_up(NEW, OLD, true), "the API server was told a moment ago");
        assert!(!is_to_be_taken_up(NEW, None, true), "by somebody, nobody knows when");
        assert!(!is_to_be_taken_up(None, NEW, true), "it was told at this look, or could not be");
        assert!(!is_to_be_taken_up(None, None, true));
    }

    #[test]
    fn where_nothing_good_is_served_a_certificate_is_taken_up_at_once() {
        for (told, before) in [(NEW, NEW), (NEW, OLD), (NEW, None), (None, None)] {
            assert!(is_to_be_taken_up(told, before, false));
        }
    }
}
