//! The API: the answers of the rules, of the CRDs' schemas, and of a real API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod accepted;
mod rules;
mod schema;
mod server;
