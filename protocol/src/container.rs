//! Names of our own containers in a worker pod. A filter of that pod cannot have one of them.

/// The container that claims and fetches the file.
pub const CLAIMER: &str = "claimer";
/// The container that uploads the results.
pub const PUBLISHER: &str = "publisher";
/// In a Warm pod, the container that prepares its volumes.
pub const INSTALL: &str = "install";
/// In a Warm pod, the container that claims files, serves the filters and reports.
pub const WORKER: &str = "worker";
