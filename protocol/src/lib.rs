//! The contract between the programs of OpenFilter Pipelines: the id of a run, the claimer's exit codes and
//! report, and the names of variables, Secret keys and containers in a worker pod. Each is defined once,
//! here.
//!
//! Small enough for every program: it depends on no Kubernetes, Valkey, storage or policy engine.

pub mod container;
pub mod env;
mod exit;
pub mod names;
mod report;
mod run_id;
pub mod secret;
mod state;

pub use exit::Exit;
pub use report::Report;
pub use run_id::{RUN_ID_MAX, RunId, RunIdError};
pub use state::{FileState, FilterEnding, FilterFailure, State, Transfer, TransferFailure};
