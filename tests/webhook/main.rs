//! The admission webhook, called as the API server calls it: over HTTPS, with reviews. In `cluster`, a real
//! API server calls it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alone;
mod cluster;
mod defaults;
mod fuzz;
mod gitops;
mod harness;
mod messages;
mod on_cluster;
mod policies;
mod protocol;
mod rotation;
mod tls;
