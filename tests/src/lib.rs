//! The base of the suites: real servers as child processes, and a model of the queue to compare them with.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a suite that cannot continue fails at once"
)]

pub mod crds_on_cluster;
pub mod examples;
pub mod fake;
pub mod listing;
pub mod model;
pub mod program;
pub mod registry;
pub mod rule_cases;
pub mod s3;
pub mod valkey;

use std::path::Path;
use std::time::{Duration, Instant};

/// The root of the project.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the project")
}

/// Repeats a check until it succeeds, and panics after a limit.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let limit = Duration::from_secs(20);
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < limit, "timed out after {limit:?} waiting until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
