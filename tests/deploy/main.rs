//! The deployment: what kustomize builds, and how it behaves on a real cluster. Nearly all of these tests
//! need the testbed's kubectl, and are ignored without root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod harness;
mod lifecycle;
mod manifests;
mod namespaced;
mod plugin;
mod replicas;
mod upgrade;
