//! Buckets as the operator sees them: listed exactly, whatever the keys and the service, and never through a
//! forbidden address. Tested on a real S3 server, and on fake servers with answers that no real server can be
//! made to give.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answers;
mod endpoints;
mod guard;
mod harness;
mod listing;
mod pages;
