//! The operator's HTTP port: probes for the kubelet, metrics for Prometheus. Requests change nothing.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

use crate::metrics::Metrics;

/// The format that Prometheus requests and the registry writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long requests in progress may take when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Returns whether the process is ready, and if not, why.
type Readiness = dyn Fn() -> Result<(), String> + Send + Sync;

#[derive(Clone)]
struct Shared {
    metrics: Arc<Metrics>,
    ready: Arc<Readiness>,
}

/// Serves until `stop` becomes true or its sender is dropped.
///
/// `/livez` answers as long as the process runs, because a restart does not help a process that waits for
/// Valkey or the API server. `/readyz` returns the answer of `ready`.
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(figures))
        .with_state(Shared { metrics, ready: Arc::new(ready) });
    let server = axum::serve(listener, routes).with_graceful_shutdown(stopped(stop.clone()));
    tokio::select! {
        served = server.into_future() => served,
        () = async {
            stopped(stop).await;
            sleep(GRACE).await;
        } => {
            warn!("a client of the HTTP port has not finished in time");
            Ok(())
        }
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which counts as a stop.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn readyz(State(shared): State<Shared>) -> impl IntoResponse {
    match (shared.ready)() {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

async fn figures(State(shared): State<Shared>) -> impl IntoResponse {
    match shared.metrics.encode() {
        Ok(text) => Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text)),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))),
    }
}
