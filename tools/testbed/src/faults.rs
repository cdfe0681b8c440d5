//! A proxy in front of the S3 server that makes its answers slow, wrong, short or forbidden on demand.
//!
//! Pods and the host can reach it, and it forwards everything unchanged, the `Host` header included, so that
//! signatures stay valid. It disturbs only the requests that a rule selects.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::stream;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, JoinSet},
};

use crate::{
    error::{Doing, Result},
    network::HOST_IP,
};

type Body = BoxBody<Bytes, io::Error>;

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The answer is delayed by this much.
    Slow(Duration),
    /// The answer waits until the server is healed.
    Stuck,
    /// 500 `InternalError`, without forwarding the request.
    InternalError,
    /// 503 `SlowDown`, as from an overloaded server.
    SlowDown,
    /// 404 `NoSuchKey`.
    Missing,
    /// 403 `AccessDenied`.
    Forbidden,
    /// This status with a page of its own, as from a gateway that does not reach the server.
    Gateway(u16),
    /// The headers promise the whole body, but the connection ends after this many bytes of it.
    Truncated(usize),
}

/// Which requests fail, and how.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The fault.
    pub fault: Fault,
    /// Only requests with this method.
    pub method: Option<Method>,
    /// Only requests whose path and query contain this.
    pub path: String,
    /// Only this many requests; then the rule is used up.
    pub times: Option<u32>,
}

impl Rule {
    /// Matches every request whose path and query contain `path`.
    pub fn every(fault: Fault, path: &str) -> Self {
        Self { fault, method: None, path: path.to_owned(), times: None }
    }

    /// Limits the rule to the next `times` requests.
    pub fn times(self, times: u32) -> Self {
        Self { times: Some(times), ..self }
    }

    /// Limits the rule to requests with this method.
    pub fn method(self, method: Method) -> Self {
        Self { method: Some(method), ..self }
    }

    fn matches(&self, method: &Method, path: &str) -> bool {
        self.times != Some(0)
            && self.method.as_ref().is_none_or(|own| own == method)
            && path.contains(&self.path)
    }
}

/// A running proxy; it ends when dropped.
#[derive(Debug)]
pub struct FaultyS3 {
    /// Its address, for pods and the host.
    pub url: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    rules: Mutex<Vec<Rule>>,
    seen: Mutex<Vec<String>>,
    healed: Notify,
}

impl FaultyS3 {
    /// Starts a proxy in front of the server at this `http://` URL.
    pub async fn start(server: &str) -> Result<Self> {
        Self::listen(&format!("{HOST_IP}:0"), server).await
    }

    /// Does the same at a given address, where there is no cluster.
    pub async fn listen(address: &str, server: &str) -> Result<Self> {
        let doing = || format!("listen on {address}");
        let listener = TcpListener::bind(address).await.doing(doing)?;
        let url = format!("http://{}", listener.local_addr().doing(doing)?);
        let shared = Arc::new(Shared::default());
        let server: Arc<str> = server.trim_start_matches("http://").trim_end_matches('/').into();
        let task = tokio::spawn(accept(listener, server, Arc::clone(&shared)));
        Ok(Self { url, shared, task })
    }

    /// Makes requests that the rule selects fail from now on. The first rule that matches decides.
    pub fn inject(&self, rule: Rule) {
        lock(&self.shared.rules).push(rule);
    }

    /// Stops all faults.
    pub fn heal(&self) {
        lock(&self.shared.rules).clear();
        self.shared.healed.notify_waiters();
    }

    /// Every request so far: `METHOD path`.
    pub fn seen(&self) -> Vec<String> {
        lock(&self.shared.seen).clone()
    }
}

impl Drop for FaultyS3 {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// All connections end with this task, even those that a client keeps open for its next request.
async fn accept(listener: TcpListener, server: Arc<str>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let (server, shared) = (Arc::clone(&server), Arc::clone(&shared));
        let service = hyper::service::service_fn(move |request| {
            let (server, shared) = (Arc::clone(&server), Arc::clone(&shared));
            async move { handle(request, &server, &shared).await }
        });
        // Connections that end early are the purpose of this proxy.
        connections.spawn(
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
        );
    }
}

async fn handle(request: Request<Incoming>, server: &str, shared: &Shared) -> io::Result<Response<Body>> {
    let path = request.uri().path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
    lock(&shared.seen).push(format!("{} {path}", request.method()));
    // Created before a rule is selected, so that no later healing is missed.
    let healed = shared.healed.notified();
    match shared.pick(request.method(), &path) {
        None => pass_on(request, server, None).await,
        Some(Fault::Slow(delay)) => {
            tokio::time::sleep(delay).await;
            pass_on(request, server, None).await
        }
        Some(Fault::Stuck) => {
            healed.await;
            pass_on(request, server, None).await
        }
        Some(Fault::Truncated(length)) => pass_on(request, server, Some(length)).await,
        Some(Fault::InternalError) => {
            refuse(request, StatusCode::INTERNAL_SERVER_ERROR, "InternalError").await
        }
        Some(Fault::SlowDown) => refuse(request, StatusCode::SERVICE_UNAVAILABLE, "SlowDown").await,
        Some(Fault::Missing) => refuse(request, StatusCode::NOT_FOUND, "NoSuchKey").await,
        Some(Fault::Forbidden) => refuse(request, StatusCode::FORBIDDEN, "AccessDenied").await,
        Some(Fault::Gateway(status)) => {
            let status = StatusCode::from_u16(status).map_err(io::Error::other)?;
            answer(request, status, "text/plain", "no service behind this gateway\n".to_owned()).await
        }
    }
}

impl Shared {
    fn pick(&self, method: &Method, path: &str) -> Option<Fault> {
        let mut rules = lock(&self.rules);
        let rule = rules.iter_mut().find(|rule| rule.matches(method, path))?;
        rule.times = rule.times.map(|times| times - 1);
        Some(rule.fault)
    }
}

async fn pass_on(request: Request<Incoming>, server: &str, cut: Option<usize>) -> io::Result<Response<Body>> {
    let stream = TcpStream::connect(server).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    let (parts, body) = response.into_parts();
    let Some(length) = cut else {
        return Ok(Response::from_parts(parts, body.map_err(io::Error::other).boxed()));
    };
    let whole = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let start = whole.slice(..length.min(whole.len()));
    // The error makes the server drop the connection in the middle of the body.
    let frames = [Ok(Frame::data(start)), Err(io::Error::other("cut off on purpose"))];
    Ok(Response::from_parts(parts, BodyExt::boxed(StreamBody::new(stream::iter(frames)))))
}

/// Fails as an S3 server does.
async fn refuse(request: Request<Incoming>, status: StatusCode, code: &str) -> io::Result<Response<Body>> {
    let xml = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>injected</Message></Error>");
    answer(request, status, "application/xml", xml).await
}

/// Answers once the whole request has arrived: a client that is still writing its body would otherwise see a
/// broken pipe.
async fn answer(
    request: Request<Incoming>,
    status: StatusCode,
    content_type: &'static str,
    text: String,
) -> io::Result<Response<Body>> {
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        frame.map_err(io::Error::other)?;
    }
    let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", http::HeaderValue::from_static(content_type));
    Ok(response)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::s3::S3;

    /// A server that answers every request with the same ten bytes.
    async fn ten_bytes() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answer = hyper::service::service_fn(async |_: Request<Incoming>| {
                    Ok::<_, io::Error>(Response::new(Full::new(Bytes::from_static(b"0123456789"))))
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer),
                );
            }
        });
        url
    }

    #[tokio::test]
    async fn only_what_a_rule_picks_fails_and_only_as_often_as_it_says() {
        let proxy = FaultyS3::listen("127.0.0.1:0", &ten_bytes().await).await.unwrap();
        let s3 = S3::new(&proxy.url, "key", "secret");
        let status = async |path| s3.request(Method::GET, path, Bytes::new()).await.unwrap().0;
        assert_eq!(status("/b/good").await, 200);
        proxy.inject(Rule::every(Fault::Missing, "/bad").times(1).method(Method::GET));
        assert_eq!(status("/b/good").await, 200);
        assert_eq!(status("/b/bad").await, 404);
        assert_eq!(status("/b/bad").await, 200, "the rule is used up");
        proxy.inject(Rule::every(Fault::Forbidden, ""));
        assert_eq!(status("/b/good").await, 403);
        proxy.heal();
        assert_eq!(status("/b/good").await, 200);
        assert_eq!(proxy.seen().len(), 6);
    }

    #[tokio::test]
    async fn a_proxy_that_is_gone_serves_no_connection_that_was_kept_open() {
        let proxy = FaultyS3::listen("127.0.0.1:0", &ten_bytes().await).await.unwrap();
        let mut kept = TcpStream::connect(proxy.url.trim_start_matches("http://")).await.unwrap();
        let ask = b"GET /b/file HTTP/1.1\r\nHost: s3\r\n\r\n";
        let mut answer = [0; 1_000];
        kept.write_all(ask).await.unwrap();
        assert!(kept.read(&mut answer).await.unwrap() > 0);
        drop(proxy);
        // The connection may end during the write.
        let _ = kept.write_all(ask).await;
        assert!(matches!(kept.read(&mut answer).await, Ok(0) | Err(_)), "the connection was answered again");
    }

    #[tokio::test]
    async fn a_truncated_body_breaks_its_promise() {
        let proxy = FaultyS3::listen("127.0.0.1:0", &ten_bytes().await).await.unwrap();
        proxy.inject(Rule::every(Fault::Truncated(4), "/b/short"));
        let s3 = S3::new(&proxy.url, "key", "secret");
        assert!(s3.get("b", "short").await.is_err());
        assert_eq!(s3.get("b", "whole").await.unwrap(), "0123456789");
    }
}
