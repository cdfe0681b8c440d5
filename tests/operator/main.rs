//! Parts of the operator in isolation, on real servers if these run without a cluster.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lease;
mod lease_api;
mod listing;
mod process;
mod server;
mod turns;
mod watches;
