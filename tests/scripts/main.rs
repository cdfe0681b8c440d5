//! Tests of the scripts in `tools/` that the Makefile calls.
#![allow(clippy::unwrap_used, clippy::panic)]

mod room;
mod suite;
