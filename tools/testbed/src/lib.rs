//! A real multi-node Kubernetes on one machine, without Docker and a registry, for this project's suites.
//!
//! Suites use [`Testbed`]: it starts a cluster or reuses the one that is up. The modules below it are the
//! parts of the machine that a cluster consists of. See docs/testbed.md.

mod cgroup;
pub mod checkout;
mod cluster;
mod command;
mod control_plane;
mod definitions;
mod error;
mod eventually;
mod faults;
mod gobuild;
pub mod image;
pub mod images;
mod kwok;
mod mounts;
pub mod network;
mod node;
mod paths;
mod pki;
mod process;
pub mod programs;
mod s3;
pub mod services;
mod state;
mod suite;
mod traces;

pub use cluster::{Up, Whose, client, cut_power, down, leftovers, up};
pub use definitions::definitions;
pub use error::{Doing, Error, Result};
pub use eventually::eventually;
pub use faults::{Fault, FaultyS3, Rule};
pub use gobuild::{ARGOCD, KUSTOMIZE, KUSTOMIZE_CONTROLLER, Module, SOURCE_CONTROLLER};
pub use kwok::MARK as KWOK_MARK;
pub use node::Node;
pub use paths::{Paths, RUN, cache};
pub use pki::Authority;
pub use s3::S3;
pub use state::{Found, Record, dead, find};
pub use suite::{Namespace, PausedApiServer, PausedNode, Testbed};
