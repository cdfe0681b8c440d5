//! A server that answers whatever a test wants, for answers that no real server can be made to give. It keeps
//! the requests as they arrived on the wire.

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

type Later = Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;
type Answer = dyn Fn(&Request<Bytes>) -> Later + Send + Sync;

/// A running server. Dropping it ends it.
pub struct Fake {
    /// The address that it listens on.
    pub address: String,
    seen: Arc<Mutex<Vec<Request<Bytes>>>>,
    task: JoinHandle<()>,
}

impl Fake {
    /// Starts a server on loopback.
    pub async fn start(
        answer: impl Fn(&Request<Bytes>) -> Response<Full<Bytes>> + Send + Sync + 'static,
    ) -> Self {
        Self::listen("127.0.0.1:0", None, at_once(answer)).await
    }

    /// Does the same for answers that take time.
    pub async fn start_slow<F: Future<Output = Response<Full<Bytes>>> + Send + 'static>(
        answer: impl Fn(&Request<Bytes>) -> F + Send + Sync + 'static,
    ) -> Self {
        Self::listen("127.0.0.1:0", None, Arc::new(move |request| Box::pin(answer(request)))).await
    }

    /// Does the same with TLS: certificate and key in PEM.
    pub async fn start_tls(
        address: &str,
        certificate: &str,
        key: &str,
        answer: impl Fn(&Request<Bytes>) -> Response<Full<Bytes>> + Send + Sync + 'static,
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
        Self::listen(address, Some(TlsAcceptor::from(Arc::new(config))), at_once(answer)).await
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
                        let (answer, kept) = (Arc::clone(&answer), Arc::clone(&kept));
                        async move {
                            let (head, body) = request.into_parts();
                            // Read the whole request first: a client that is still sending does not expect an
                            // answer.
                            let request = Request::from_parts(head, body.collect().await?.to_bytes());
                            kept.lock().unwrap().push(request.clone());
                            Ok::<_, hyper::Error>(answer(&request).await)
                        }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    // The client may end its connection in any way.
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

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request<Bytes>> {
        self.seen.lock().unwrap().clone()
    }

    /// Path and query of every request so far, unchanged.
    pub fn paths(&self) -> Vec<String> {
        self.requests().iter().map(|request| request.uri().to_string()).collect()
    }

    /// A header of the first request.
    pub fn header(&self, name: &str) -> String {
        self.requests().first().map(|request| header(request, name).to_owned()).unwrap_or_default()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn at_once(answer: impl Fn(&Request<Bytes>) -> Response<Full<Bytes>> + Send + Sync + 'static) -> Arc<Answer> {
    Arc::new(move |request| Box::pin(std::future::ready(answer(request))))
}

/// A header of a request; empty if there is none.
pub fn header<'a>(request: &'a Request<Bytes>, name: &str) -> &'a str {
    request.headers().get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
}

/// An answer with only a status.
pub fn status(code: u16) -> Response<Full<Bytes>> {
    Response::builder().status(code).body(Full::default()).unwrap()
}

/// The requested part of an object: all of it, or a range.
pub fn part_of(request: &Request<Bytes>, content: &[u8], etag: &str) -> Response<Full<Bytes>> {
    let Some(range) = header(request, "range").strip_prefix("bytes=") else { return object(content, etag) };
    let (first, last) = range.split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let mut response = object(&content[first..=last], etag);
    *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    response
}

/// An object with an etag.
pub fn object(content: &[u8], etag: &str) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::copy_from_slice(content));
    Response::builder().header("etag", etag).body(body).unwrap()
}

/// A page of a listing with unencoded keys; it is the last one unless it has a continuation token.
pub fn listed_page(token: Option<&str>, keys: &[impl AsRef<str>]) -> Response<Full<Bytes>> {
    let more = token.is_some();
    let token = token.map(|token| format!("<NextContinuationToken>{token}</NextContinuationToken>"));
    let object =
        |key: &str| format!("<Contents><Key>{key}</Key><Size>7</Size><ETag>&quot;e&quot;</ETag></Contents>");
    let contents: String = keys.iter().map(|key| object(key.as_ref())).collect();
    xml(&format!(
        "<ListBucketResult><IsTruncated>{more}</IsTruncated>{}{contents}</ListBucketResult>",
        token.unwrap_or_default()
    ))
}

/// An answer in XML.
pub fn xml(text: &str) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
    Response::builder().header("content-type", "application/xml").body(body).unwrap()
}

/// A parameter of a request's query, decoded; empty if there is none.
pub fn parameter(request: &Request<Bytes>, name: &str) -> String {
    let parts = request.uri().query().unwrap_or_default().split('&');
    let mut values = parts.filter_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    let mut sent = values.next().unwrap_or_default().bytes();
    let mut text = Vec::new();
    while let Some(byte) = sent.next() {
        let digits = (byte == b'%').then(|| String::from_utf8(sent.by_ref().take(2).collect()).unwrap());
        text.push(digits.map_or(byte, |digits| u8::from_str_radix(&digits, 16).unwrap()));
    }
    String::from_utf8(text).unwrap()
}
