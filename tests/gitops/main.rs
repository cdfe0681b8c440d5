//! Tests GitOps with real engines: Argo CD and Flux install the operator from this project's overlay and
//! apply a team's repository.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a suite that cannot go on stops, loudly"
)]

mod argocd;
mod engine;
mod flux;
mod git;
mod health;
mod lab;
mod manifests;
mod story;
