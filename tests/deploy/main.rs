//! The deployment: what kustomize builds, and what becomes of it on a real cluster. Nearly all of it needs the kubectl
//! of the testbed, and is ignored where there is no root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod harness;
mod lifecycle;
mod manifests;
mod namespaced;
mod plugin;
mod replicas;
mod upgrade;
