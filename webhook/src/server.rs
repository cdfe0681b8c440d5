//! The HTTPS server: reads reviews, passes them to [`Admission`], and writes the answers. It limits the size
//! of a body, the time for an answer, the number of concurrent requests, and the memory for their bodies.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request as HttpRequest, State};
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use crds::rules::Kind;
use http_body_util::{BodyExt, Collected, Limited};
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::admit::Admission;
use crate::health::Health;
use crate::metrics::{Metrics, ReviewOutcome};
use crate::review::{Answer, Request};

/// An object and its old version, each as large as the API server accepts (3 MiB), and the text around them.
const BODY_MAX: usize = 8 * 1024 * 1024;

/// How long connections stay open for requests that are already on their way when the server stops.
const DRAIN: Duration = Duration::from_secs(20);

/// Limits of the server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long an answer may take. The API server waits 10 seconds by default; this is less.
    pub answer: Duration,
    /// How long a body may take to arrive, once there is room for it.
    pub body: Duration,
    /// Requests that are processed concurrently; others wait.
    pub concurrent: usize,
    /// Bytes of the bodies that are processed concurrently; others wait. There is always room for one body of
    /// the largest size.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // The API server sends a body at once; two seconds allow for a network that has to retry. Processing
        // a body takes up to ten times its size in memory, which fits into a small pod.
        let (answer, body) = (Duration::from_secs(8), Duration::from_secs(2));
        Self { answer, body, concurrent: 128, bytes: 2 * BODY_MAX }
    }
}

/// The state that requests share.
pub struct Shared {
    admission: Admission,
    metrics: Arc<Metrics>,
    limits: Limits,
    /// Requests that were begun: it limits the memory for small bodies to this number times [`Room::SMALL`].
    begun: Semaphore,
    slots: Semaphore,
    room: Room,
}

/// Requests that may wait, for each one that is processed.
const BEGUN: usize = 8;

/// Memory for large bodies, which wait until there is room for them. Small bodies, which are almost all, do
/// not use it: a client that announces large bodies and never sends them delays only large ones, and not for
/// long.
struct Room(Semaphore);

impl Room {
    /// The unit is 1 KiB, because a body takes more memory than its few hundred bytes.
    const UNIT: usize = 1024;
    /// The memory for the allowed number of small bodies fits beside the large ones.
    const SMALL: usize = 32 * 1024;

    fn new(bytes: usize) -> Self {
        Self(Semaphore::new(bytes.max(BODY_MAX).div_ceil(Self::UNIT)))
    }

    /// Waits for room for a body of the announced size, or of the largest size if none is announced. A small
    /// body needs none.
    async fn take(&self, said: Option<u64>) -> Option<SemaphorePermit<'_>> {
        let bytes = said.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(BODY_MAX).min(BODY_MAX);
        if bytes <= Self::SMALL {
            return None;
        }
        let units = bytes.div_ceil(Self::UNIT);
        self.0.acquire_many(u32::try_from(units).unwrap_or(u32::MAX)).await.ok()
    }
}

/// The two questions that the API server asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Mutate,
    Validate,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Mutate => "mutate",
            Self::Validate => "validate",
        }
    }
}

/// The endpoints: `/mutate/<kind>` and `/validate/<kind>`, each kind in lower case.
pub fn router(admission: Admission, metrics: Arc<Metrics>, limits: Limits, health: Health) -> Router {
    let slots = Semaphore::new(limits.concurrent.max(1));
    let begun = Semaphore::new(limits.concurrent.max(1) * BEGUN);
    let room = Room::new(limits.bytes);
    let shared = Arc::new(Shared { admission, metrics: Arc::clone(&metrics), limits, begun, slots, room });
    let mut router = Router::new();
    for kind in [Kind::Pipeline, Kind::PipelineRun, Kind::PipelinePolicy, Kind::ReferenceGrant] {
        for step in [Step::Mutate, Step::Validate] {
            let path = format!("/{}/{}", step.name(), kind.to_string().to_lowercase());
            let answer =
                move |State(shared): State<Arc<Shared>>, body: Body| answer(shared, step, kind, body);
            router = router.route(&path, post(answer));
        }
    }
    router.with_state(shared).merge(health_router(metrics, health))
}

/// `/livez`, `/readyz` and `/metrics`: also on a separate port without TLS, for the kubelet and Prometheus.
pub fn health_router(metrics: Arc<Metrics>, health: Health) -> Router {
    let ready = move || {
        let missing = health.missing();
        async move {
            match missing.as_slice() {
                [] => (StatusCode::OK, "ok\n".to_owned()),
                missing => (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", missing.join(", "))),
            }
        }
    };
    let text = move || {
        let text = metrics.text();
        async move {
            ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
        }
    };
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(text))
}

async fn answer(shared: Arc<Shared>, step: Step, kind: Kind, body: Body) -> Response {
    let (started, _counted) = (Instant::now(), InFlight::new(&shared.metrics));
    let limited = timeout(shared.limits.answer, async {
        let _begun = shared.begun.acquire().await;
        let _room = shared.room.take(body.size_hint().upper()).await;
        let body = match read(body, shared.limits.body).await {
            Ok(body) => body,
            Err(malformed) => return (malformed, ReviewOutcome::Malformed),
        };
        // Acquired after the body: otherwise a client that announces a body and never sends it would delay
        // everyone. Waiting for a slot counts towards the limit of the answer, because the API server's
        // timeout counts it too.
        let _slot = shared.slots.acquire().await;
        review(&shared, step, kind, &body).await
    });
    let (response, outcome) = limited.await.unwrap_or_else(|_elapsed| {
        warn!(%kind, step = step.name(), "no answer in time");
        let message = format!("the webhook had no answer within {:?}; try again", shared.limits.answer);
        (failure(StatusCode::SERVICE_UNAVAILABLE, &message), ReviewOutcome::Late)
    });
    shared.metrics.answered(kind, step.name(), outcome, started.elapsed());
    response
}

/// Counts a request that is being answered, until this is dropped, which also happens when the caller goes
/// away.
struct InFlight<'a>(&'a Metrics);

impl<'a> InFlight<'a> {
    fn new(metrics: &'a Metrics) -> Self {
        metrics.in_flight.inc();
        Self(metrics)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.dec();
    }
}

/// Reads a body to its end even if it is too large: answering a caller that is still sending would close the
/// connection, and the caller would see a broken pipe instead of the answer.
async fn read(mut body: Body, limit: Duration) -> Result<Bytes, Response> {
    let whole = async {
        let collected = Limited::new(&mut body, BODY_MAX).collect().await.map(Collected::to_bytes);
        if collected.is_err() {
            while let Some(Ok(_)) = body.frame().await {}
        }
        collected
    };
    match timeout(limit, whole).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) => {
            let message = format!("cannot read the body, of at most {BODY_MAX} bytes: {error}");
            Err(failure(StatusCode::PAYLOAD_TOO_LARGE, &message))
        }
        Err(_elapsed) => {
            let message = format!("the body did not arrive within {limit:?}; send it again");
            Err(failure(StatusCode::REQUEST_TIMEOUT, &message))
        }
    }
}

async fn review(shared: &Shared, step: Step, kind: Kind, body: &[u8]) -> (Response, ReviewOutcome) {
    let request = match Request::read(body, kind) {
        Ok(request) => request,
        Err(error) => {
            return (failure(StatusCode::BAD_REQUEST, &error.to_string()), ReviewOutcome::Malformed);
        }
    };
    let (uid, title, operation, dry_run) =
        (request.uid.clone(), request.title(), request.operation, request.dry_run);
    let answer = match step {
        Step::Mutate => shared.admission.mutate(request).await,
        Step::Validate => shared.admission.validate(request).await,
    };
    let outcome = outcome(&answer);
    debug!(object = title, %operation, dry_run, step = step.name(), ?outcome, "answered");
    let review = answer.into_review(&uid, &title, operation);
    (([(header::CONTENT_TYPE, "application/json")], review.to_string()).into_response(), outcome)
}

fn outcome(answer: &Answer) -> ReviewOutcome {
    if !answer.allowed() {
        ReviewOutcome::Denied
    } else if answer.patch.as_ref().is_some_and(|patch| !patch.0.is_empty()) {
        ReviewOutcome::Patched
    } else if !answer.warnings.is_empty() {
        ReviewOutcome::Warned
    } else {
        ReviewOutcome::Allowed
    }
}

/// An HTTP error in the format that the API server prints.
fn failure(status: StatusCode, message: &str) -> Response {
    let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status.as_u16() });
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// Tells an HTTP/1.1 client to close the connection. HTTP/2 has its own message for that, which the server
/// sends when it stops.
async fn say_if_it_is_the_last(
    State(going): State<Arc<AtomicBool>>,
    request: HttpRequest,
    next: Next,
) -> Response {
    let version = request.version();
    let mut response = next.run(request).await;
    if going.load(Ordering::Relaxed) && version <= Version::HTTP_11 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// A listening server.
pub struct Server {
    /// The address that it listens on.
    pub address: SocketAddr,
    handle: Handle<SocketAddr>,
    going: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Server {
    /// Serves over TLS if there is a configuration, and otherwise plain HTTP.
    pub fn start(
        listener: TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
        router: Router,
    ) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (address, handle) = (listener.local_addr()?, Handle::new());
        let going = Arc::new(AtomicBool::new(false));
        let last = middleware::from_fn_with_state(Arc::clone(&going), say_if_it_is_the_last);
        let service = router.layer(last).into_make_service();
        let task = match tls {
            Some(tls) => {
                let server = axum_server::from_tcp_rustls(listener, RustlsConfig::from_config(tls))?;
                tokio::spawn(server.handle(handle.clone()).serve(service))
            }
            None => tokio::spawn(axum_server::from_tcp(listener)?.handle(handle.clone()).serve(service)),
        };
        Ok(Self { address, handle, going, task })
    }

    /// Keeps serving, but asks clients to send further requests elsewhere. An HTTP/1.1 client such as the API
    /// server keeps a connection for its next request, which fails if we close the connection just then.
    /// Therefore an answer tells the client to close it.
    pub fn announce_stop(&self) {
        self.going.store(true, Ordering::Relaxed);
    }

    /// Accepts no new connections, finishes the current requests, and returns when they are done.
    pub async fn stop(self) -> std::io::Result<()> {
        self.handle.graceful_shutdown(Some(DRAIN));
        self.task.await.map_err(std::io::Error::other)?
    }

    /// Waits until the server ends, which happens only by an error.
    pub async fn failed(&mut self) -> std::io::Error {
        match (&mut self.task).await {
            Ok(Ok(())) => std::io::Error::other("the server ended"),
            Ok(Err(error)) => error,
            Err(error) => std::io::Error::other(error),
        }
    }
}
