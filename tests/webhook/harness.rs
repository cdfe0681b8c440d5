//! A webhook on loopback whose world tests fill directly, and a client that trusts its certificate.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "shared by a suite and a bench"
)]

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use crds::policy::Policy;
use crds::rules::{BucketKeys, SecretProblem};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use webhook::admit::{Admission, Live, Lookup, Settings};
use webhook::health::Health;
use webhook::metrics::Metrics;
use webhook::server::{Limits, Server, router};
use webhook::tls::Certificates;
use webhook::tls::issue::Material;
use webhook::world::{KnownNamespace, KnownPipeline, World};

/// Answers to lookups: the object, or a transient error.
type Answers<K, V> = Mutex<HashMap<K, Result<V, String>>>;

/// Objects that a test provides for the webhook's lookups.
#[derive(Default)]
pub struct Known {
    pub secrets: Answers<(String, String), Vec<&'static str>>,
    /// Namespaces that no watch has brought.
    pub namespaces: Answers<String, BTreeMap<String, String>>,
    /// Pipelines that no watch has brought.
    pub pipelines: Answers<(String, String), Value>,
    /// Where requests wait that look up a namespace.
    pub gate: Gate,
}

/// Lets requests pass, or holds them until it is opened again.
pub struct Gate {
    open: watch::Sender<bool>,
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl Default for Gate {
    fn default() -> Self {
        Self { open: watch::Sender::new(true), inside: AtomicUsize::new(0), most: AtomicUsize::new(0) }
    }
}

impl Gate {
    pub fn close(&self) {
        self.open.send_replace(false);
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// Waits until this many requests are held.
    pub async fn holds(&self, number: usize) {
        let held = || async { self.inside.load(Ordering::SeqCst) == number };
        tests::eventually(&format!("{number} requests are held"), held).await;
    }

    /// The most requests that were ever inside at once.
    pub fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    async fn pass(&self) {
        self.most.fetch_max(self.inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        // It always opens again, because the sender lives as long as the gate.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Live for Known {
    fn secret_problem<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, SecretProblem> {
        let found = self.secrets.lock().unwrap().get(&(namespace.to_owned(), name.to_owned())).cloned();
        Box::pin(async move {
            let value = |key: &str| (key.to_owned(), ByteString(b"x".to_vec()));
            let secret = |keys: Vec<&str>| Secret {
                data: Some(keys.into_iter().map(value).collect()),
                ..Secret::default()
            };
            found.transpose().map(|found| BucketKeys::read(found.map(secret).as_ref()).err())
        })
    }

    fn namespace<'a>(&'a self, name: &'a str) -> Lookup<'a, KnownNamespace> {
        let found = self.namespaces.lock().unwrap().get(name).cloned();
        Box::pin(async move {
            self.gate.pass().await;
            let known = |labels| KnownNamespace::new(name, labels, BTreeMap::new());
            found.transpose().map(|found| found.map(known))
        })
    }

    fn pipeline<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, KnownPipeline> {
        let found = self.pipelines.lock().unwrap().get(&(namespace.to_owned(), name.to_owned())).cloned();
        Box::pin(async move { found.transpose().map(|found| found.and_then(KnownPipeline::read)) })
    }
}

/// A running webhook.
pub struct Webhook {
    pub address: SocketAddr,
    pub world: Arc<World>,
    pub live: Arc<Known>,
    pub metrics: Arc<Metrics>,
    pub certificates: Arc<Certificates>,
    pub health: Health,
    pub material: Material,
    server: Server,
}

pub fn names() -> Vec<String> {
    vec!["localhost".to_owned(), "127.0.0.1".to_owned()]
}

impl Webhook {
    pub fn start() -> Self {
        Self::with(Settings::default(), Limits::default())
    }

    pub fn with(settings: Settings, limits: Limits) -> Self {
        Self::at("127.0.0.1", settings, limits)
    }

    pub fn at(host: &str, settings: Settings, limits: Limits) -> Self {
        let (world, live, metrics) =
            (Arc::new(World::default()), Arc::new(Known::default()), Arc::new(Metrics::default()));
        let (certificates, health) = (Arc::new(Certificates::default()), Health::waiting_for(["policies"]));
        let material = Material::create(&names(), OffsetDateTime::now_utc()).unwrap();
        certificates.take_up(material.certificate.as_bytes(), material.key.as_bytes()).unwrap();
        let asked: Arc<dyn Live> = Arc::clone(&live) as _;
        let admission = Admission::new(Arc::clone(&world), asked, settings, Arc::clone(&metrics));
        let router = router(admission, Arc::clone(&metrics), limits, health.clone());
        let listener = TcpListener::bind((host, 0)).unwrap();
        let server = Server::start(listener, Some(certificates.server_config().unwrap()), router).unwrap();
        Self { address: server.address, world, live, metrics, certificates, health, material, server }
    }

    /// Provides a Secret with these keys.
    pub fn secret(&self, namespace: &str, name: &str, keys: &[&'static str]) {
        self.live.secrets.lock().unwrap().insert((namespace.into(), name.into()), Ok(keys.to_vec()));
    }

    pub fn policy(&self, object: &Value) {
        self.world.write().set_policy(Policy::compile(&serde_json::from_value(object.clone()).unwrap()));
    }

    pub fn pipeline(&self, object: &Value) {
        let text = |pointer: &str| object.pointer(pointer).unwrap().as_str().unwrap().to_owned();
        let key = (text("/metadata/namespace"), text("/metadata/name"));
        let known = KnownPipeline::read(object.clone()).unwrap();
        self.world.write().pipelines.insert(key, Arc::new(known));
    }

    pub fn run(&self, object: &Value) {
        self.world.write().set_run(&serde_json::from_value(object.clone()).unwrap());
    }

    pub fn grant(&self, object: &Value) {
        let text = |pointer: &str| object.pointer(pointer).unwrap().as_str().unwrap().to_owned();
        let key = (text("/metadata/namespace"), text("/metadata/name"));
        self.world.write().grants.insert(key, serde_json::from_value(object.clone()).unwrap());
    }

    pub fn namespace(&self, name: &str, labels: &[(&str, &str)]) {
        let labels: BTreeMap<String, String> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let known = KnownNamespace::new(name, labels, BTreeMap::new());
        self.world.write().namespaces.insert(name.to_owned(), Arc::new(known));
    }

    pub fn client(&self) -> Client {
        Client::new(self.address, &self.material.bundle)
    }

    pub fn announce_stop(&self) {
        self.server.announce_stop();
    }

    pub async fn stop(self) {
        self.server.stop().await.unwrap();
    }
}

/// Calls the webhook.
#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    roots: Arc<RootCertStore>,
}

pub type Http1 = http1::SendRequest<Full<Bytes>>;
pub type Http2 = http2::SendRequest<Full<Bytes>>;

impl Client {
    pub fn new(address: SocketAddr, bundle: &str) -> Self {
        let mut roots = RootCertStore::empty();
        roots
            .add_parsable_certificates(CertificateDer::pem_slice_iter(bundle.as_bytes()).map(Result::unwrap));
        Self { address, roots: Arc::new(roots) }
    }

    async fn tls(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        alpn: &[u8],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(Arc::clone(&self.roots))
            .with_no_client_auth();
        config.alpn_protocols = vec![alpn.to_vec()];
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("localhost").unwrap(), stream).await
    }

    /// Sends one request on its own connection.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        body: Vec<u8>,
    ) -> std::io::Result<(StatusCode, Bytes)> {
        self.send_with(&[&rustls::version::TLS13], method, path, body).await
    }

    pub async fn send_with(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        method: &str,
        path: &str,
        body: Vec<u8>,
    ) -> std::io::Result<(StatusCode, Bytes)> {
        let stream = self.tls(versions, b"http/1.1").await?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        tokio::spawn(connection);
        let request = request(method, path, body);
        let response = sender.send_request(request).await.map_err(std::io::Error::other)?;
        read(response).await
    }

    /// Begins a request on its own connection; its announced length may exceed the body that is sent.
    pub async fn begin(&self, path: &str, body: &[u8], announced: usize) -> TlsStream<TcpStream> {
        let mut stream = self.tls(&[&rustls::version::TLS13], b"http/1.1").await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {announced}\r\n\r\n");
        stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
        stream.flush().await.unwrap();
        stream
    }

    /// A connection that carries one request after the other, like each of the API server's connections.
    pub async fn http1(&self) -> Http1 {
        let stream = self.tls(&[&rustls::version::TLS13], b"http/1.1").await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// A connection that carries many concurrent requests.
    pub async fn http2(&self) -> Http2 {
        let stream = self.tls(&[&rustls::version::TLS13], b"h2").await.unwrap();
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// Asks about an object; returns the `response` of the answer.
    pub async fn ask(&self, path: &str, review: &Value) -> Value {
        let (status, body) = self.send("POST", path, serde_json::to_vec(review).unwrap()).await.unwrap();
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        let answer: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(answer["response"]["uid"], review["request"]["uid"]);
        answer["response"].clone()
    }

    /// Asks whether this object may be created; returns the `response` of the answer.
    pub async fn create(&self, object: &Value) -> Value {
        self.ask(&path("validate", object), &review("CREATE", object)).await
    }
}

pub fn request(method: &str, path: &str, body: Vec<u8>) -> Request<Full<Bytes>> {
    let builder = Request::builder().method(method).uri(format!("https://localhost{path}"));
    builder
        .header("content-type", "application/json")
        .header("host", "localhost")
        .body(Full::from(body))
        .unwrap()
}

/// Sends a request over a shared connection.
pub async fn over(connection: &mut Http2, path: &str, body: Vec<u8>) -> std::io::Result<(StatusCode, Bytes)> {
    connection.ready().await.map_err(std::io::Error::other)?;
    let response =
        connection.send_request(request("POST", path, body)).await.map_err(std::io::Error::other)?;
    read(response).await
}

/// Sends a request over a connection that carries one after the other.
pub async fn over_http1(
    connection: &mut Http1,
    path: &str,
    body: Vec<u8>,
) -> std::io::Result<(StatusCode, Bytes)> {
    connection.ready().await.map_err(std::io::Error::other)?;
    let response =
        connection.send_request(request("POST", path, body)).await.map_err(std::io::Error::other)?;
    read(response).await
}

async fn read(response: http::Response<hyper::body::Incoming>) -> std::io::Result<(StatusCode, Bytes)> {
    let status = response.status();
    let body = response.into_body().collect().await.map_err(std::io::Error::other)?;
    Ok((status, body.to_bytes()))
}

/// The endpoint for an object.
pub fn path(step: &str, object: &Value) -> String {
    format!("/{step}/{}", object["kind"].as_str().unwrap().to_lowercase())
}

/// A review about this object.
pub fn review(operation: &str, object: &Value) -> Value {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let stored = if operation == "DELETE" { json!(null) } else { object.clone() };
    let old = if operation == "CREATE" { json!(null) } else { object.clone() };
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": { "group": "filter.plainsight.ai", "version": "v1alpha1", "kind": text("/kind") },
            "resource": { "group": "filter.plainsight.ai", "version": "v1alpha1", "resource": "any" },
            "name": text("/metadata/name"), "namespace": text("/metadata/namespace"), "operation": operation,
            "userInfo": { "username": "kim", "groups": ["system:authenticated"] },
            "object": stored, "oldObject": old, "dryRun": false, "options": null
        }
    })
}

/// A review about a change from one object to another.
pub fn update(old: &Value, new: &Value) -> Value {
    let mut review = review("UPDATE", new);
    review["request"]["oldObject"] = old.clone();
    review
}

/// The same review as a dry run.
pub fn dry(mut review: Value) -> Value {
    review["request"]["dryRun"] = json!(true);
    review
}
