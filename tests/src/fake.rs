//! A server that says what a test wants, for what no real server can be made to say: it keeps the requests it got, as they
//! were on the wire.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

type Answer = dyn Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Send + Sync;

/// A running server. Dropping it ends it.
pub struct Fake {
    /// Where it listens.
    pub address: String,
    seen: Arc<Mutex<Vec<http::request::Parts>>>,
    task: JoinHandle<()>,
}

impl Fake {
    /// Starts a server on loopback.
    pub async fn start(
        answer: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Send + Sync + 'static,
    ) -> Self {
        Self::listen("127.0.0.1:0", None, Arc::new(answer)).await
    }

    /// With TLS: certificate and key in PEM.
    pub async fn start_tls(
        address: &str,
        certificate: &str,
        key: &str,
        answer: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Send + Sync + 'static,
    ) -> Self {
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        Self::listen(address, Some(TlsAcceptor::from(Arc::new(config))), Arc::new(answer)).await
    }

    async fn listen(address: &str, tls: Option<TlsAcceptor>, answer: Arc<Answer>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, kept, tls) = (Arc::clone(&answer), Arc::clone(&kept), tls.clone());
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                        let response = answer(&request);
                        kept.lock().unwrap().push(request.into_parts().0);
                        async move { Ok::<_, std::convert::Infallible>(response) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    // How a connection ends is the client's business.
                    match tls {
                        None => drop(http.serve_connection(TokioIo::new(stream), service).await),
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                drop(http.serve_connection(TokioIo::new(stream), service).await);
                            }
                        }
                    }
                });
            }
        });
        Self { address, seen, task }
    }

    /// Path and query of every request so far, unchanged.
    pub fn paths(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|request| request.uri.to_string()).collect()
    }

    /// A header of the first request.
    pub fn header(&self, name: &str) -> String {
        let seen = self.seen.lock().unwrap();
        let value = seen.first().and_then(|request| request.headers.get(name));
        value.map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An object with an etag.
pub fn object(content: &[u8], etag: &str) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::copy_from_slice(content));
    Response::builder().header("etag", etag).body(body).unwrap()
}
