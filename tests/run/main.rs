//! Runs on a real cluster: every file is accounted for, whatever happens.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a suite that cannot go on stops, loudly"
)]

#[macro_use]
mod modes;

mod blame;
mod control;
mod failures;
mod harness;
mod images;
mod large;
mod lifecycle;
mod neighbours;
mod player;
mod storms;
// The last by name, because tests run in the order of their names.
mod warm;
mod whole_cluster;
