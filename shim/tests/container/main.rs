//! Tests the shim with real processes, as pid 1 of a container with its own process and mount namespaces and
//! its own `/tmp`. Needs root.
//!
//! The filter of most tests is a shell that runs the file itself, so that each file determines what its
//! process does.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod ends;
mod environment;
mod harness;
mod leftovers;
mod lines;
mod once;
mod output;
mod samples;
mod unusable;
