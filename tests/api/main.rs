//! The API: what the rules say, what the CRDs' schemas say, and what a real API server says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rules;
mod schema;
mod server;
