//! Buckets as the operator sees them: listed exactly, whatever the keys and the service, and never through an address
//! that is not allowed. On a real S3 server, and on servers that say what no real one can be made to say.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answers;
mod endpoints;
mod guard;
mod harness;
mod listing;
mod pages;
