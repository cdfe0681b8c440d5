//! Certificates that another program keeps in a folder: `tls.crt` and `tls.key`, as in cert-manager's
//! Secrets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::{Certificates, PemError};
use crate::metrics::Metrics;

/// A kubelet brings a changed Secret to a pod within a minute or so; checking every few seconds adds little.
const LOOK: Duration = Duration::from_secs(5);

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// One of the files cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The files are not a certificate and its key.
    #[error("cannot use {path}: {source}")]
    Use {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: PemError,
    },
}

/// Reads the files; returns whether they were new.
pub async fn load(folder: &Path, certificates: &Certificates, metrics: &Metrics) -> Result<bool, FilesError> {
    let read = async |name: &str| {
        let path = folder.join(name);
        tokio::fs::read(&path).await.map_err(|source| FilesError::Read { path, source })
    };
    let (chain, key) = (read("tls.crt").await?, read("tls.key").await?);
    let taken = certificates.take_up(&chain, &key);
    let expires = taken.map_err(|source| FilesError::Use { path: folder.to_owned(), source })?;
    if let Some(expires) = expires {
        metrics.certificate_expires(expires);
        info!(folder = %folder.display(), expires, "loaded a certificate");
    }
    Ok(expires.is_some())
}

/// Checks for new files forever. Half a change (a new certificate beside the old key) is a transient error:
/// the next check finds both, and until then the old pair is served.
pub async fn follow(folder: PathBuf, certificates: Arc<Certificates>, metrics: Arc<Metrics>) {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Err(error) = load(&folder, &certificates, &metrics).await {
            warn!(%error, "the certificate could not be reloaded; the old one is served");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::issue::Material;

    fn write(folder: &Path, certificate: &str, key: &str) {
        std::fs::write(folder.join("tls.crt"), certificate).unwrap();
        std::fs::write(folder.join("tls.key"), key).unwrap();
    }

    #[tokio::test]
    async fn files_are_taken_up_when_they_change_and_half_a_change_is_refused() {
        let (folder, certificates, metrics) =
            (tempfile::tempdir().unwrap(), Certificates::default(), Metrics::default());
        let make = || Material::create(&["a".to_owned()], time::OffsetDateTime::now_utc()).unwrap();
        let (one, two) = (make(), make());
        assert!(matches!(load(folder.path(), &certificates, &metrics).await, Err(FilesError::Read { .. })));
        write(folder.path(), &one.certificate, &one.key);
        assert!(load(folder.path(), &certificates, &metrics).await.unwrap());
        assert!(!load(folder.path(), &certificates, &metrics).await.unwrap());
        write(folder.path(), &two.certificate, &one.key);
        assert!(matches!(load(folder.path(), &certificates, &metrics).await, Err(FilesError::Use { .. })));
        write(folder.path(), &two.certificate, &two.key);
        assert!(load(folder.path(), &certificates, &metrics).await.unwrap());
        assert!(metrics.text().contains("certificate_expiry_timestamp_seconds"));
    }
}
