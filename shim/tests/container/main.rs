//! The shim with real processes, as pid 1 of a container: namespaces of its own for processes and mounts, and a `/tmp`
//! of its own. Needs root.
//!
//! The filter of most tests is a shell that runs the file itself, so that each file says what its process does.
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
