//! Names of our own containers in a worker pod. A filter cannot have one of them.

/// The container that claims and fetches the file.
pub const CLAIMER: &str = "claimer";
/// The container that uploads the results.
pub const PUBLISHER: &str = "publisher";
