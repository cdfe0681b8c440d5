//! The HTTP port of the operator: probes for kubelet, figures for Prometheus. Nothing here changes anything.

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

/// What Prometheus asks for, and what the registry writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long requests that are being answered may take when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Says whether the process is of use, and if not, why.
type Readiness = dyn Fn() -> Result<(), String> + Send + Sync;

#[derive(Clone)]
struct Shared {
    metrics: Arc<Metrics>,
    ready: Arc<Readiness>,
}

/// Serves until `stop` becomes true, or whoever could say so is gone.
///
/// `/livez` answers as long as anything does: a process that waits for Valkey or the API server is not helped by a
/// restart. `/readyz` answers what `ready` says.
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
            warn!("a client of the HTTP port does not come to an end");
            Ok(())
        }
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is as good.
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
