//! Builds the objects of a run from its snapshot. Pure: the same run gives the same objects.

pub mod job;
pub mod owner;
pub mod pod;
pub mod secret;
pub mod snapshot;
mod warm;
