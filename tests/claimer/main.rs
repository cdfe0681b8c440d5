//! The claimer as a process, with real Valkey, real S3 and real TLS. Every run also checks that no secret is
//! printed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod canary;
mod claim;
mod dependencies;
mod endpoints;
mod faults;
mod fetch;
mod harness;
mod publish;
mod report;
mod serve;
mod sink;
