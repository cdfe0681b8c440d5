//! Certificates: their sources, and how they are replaced while requests are served.
//!
//! By default the webhook issues them itself and keeps them in a Secret (`managed`); with `--cert-dir`
//! another program such as cert-manager does, and the webhook reads files (`files`). In both cases a new one
//! is taken up without a restart.

pub mod bundle;
pub mod files;
pub mod issue;
pub mod managed;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;

/// A problem with a certificate or key.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// The certificate is not PEM.
    #[error("cannot read the certificate: {0}")]
    Certificate(String),
    /// The key is not PEM, or of an unsupported kind.
    #[error("cannot read the private key: {0}")]
    Key(String),
    /// The certificate and the key do not belong together.
    #[error("cannot use the certificate with its key: {0}")]
    Pair(#[source] rustls::Error),
}

/// The certificate in use. Open connections keep the one that they started with; new ones get the newest.
#[derive(Default)]
pub struct Certificates {
    current: RwLock<Option<Current>>,
}

struct Current {
    key: Arc<CertifiedKey>,
    chain: Vec<u8>,
}

impl Certificates {
    /// Takes up a certificate; returns when it expires, or `None` if it is already in use.
    pub fn take_up(&self, chain: &[u8], key: &[u8]) -> Result<Option<i64>, PemError> {
        let in_use =
            |current: &Option<Current>| current.as_ref().is_some_and(|current| current.chain == chain);
        if in_use(&self.current.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(None);
        }
        let (certified, expires) = certified(chain, key)?;
        let next = Current { key: Arc::new(certified), chain: chain.to_owned() };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(next);
        Ok(Some(expires))
    }

    /// The certificate in use, unchanged; `None` if there is none.
    pub fn chain(&self) -> Option<Vec<u8>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|current| current.chain.clone())
    }

    /// TLS 1.3 and 1.2, HTTP/2 and 1.1, with the certificate that is in use when a client connects.
    pub fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, rustls::Error> {
        let resolver: Arc<dyn ResolvesServerCert> = Arc::clone(self) as _;
        let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|current| Arc::clone(&current.key))
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

fn certified(chain: &[u8], key: &[u8]) -> Result<(CertifiedKey, i64), PemError> {
    let certificates: Vec<CertificateDer<'static>> = certificates(chain)?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| PemError::Key(error.to_string()))?;
    let expires = certificates.first().map(expiry).transpose()?.unwrap_or_default();
    let certified =
        CertifiedKey::from_der(certificates, key, &aws_lc_rs::default_provider()).map_err(PemError::Pair)?;
    certified.keys_match().map_err(PemError::Pair)?;
    Ok((certified, expires))
}

/// The certificates of a PEM text, at least one.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if all.is_empty() => Err(PemError::Certificate("no certificate found".to_owned())),
        Ok(all) => Ok(all),
        Err(error) => Err(PemError::Certificate(error.to_string())),
    }
}

/// When a certificate expires, in Unix seconds.
pub fn expiry(certificate: &CertificateDer<'_>) -> Result<i64, PemError> {
    validity(certificate).map(|(_, expires)| expires)
}

/// The validity of a certificate, in Unix seconds.
pub(crate) fn validity(certificate: &CertificateDer<'_>) -> Result<(i64, i64), PemError> {
    let (_, parsed) =
        parse_x509_certificate(certificate).map_err(|error| PemError::Certificate(error.to_string()))?;
    let validity = parsed.validity();
    Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
}
