//! The API of OpenFilter Pipelines: the types of `filter.plainsight.ai/v1alpha1`, and the rules that decide
//! whether an object is valid. It contains no Kubernetes client: everything here is a pure function.

pub mod definitions;
pub mod policy;
pub mod rights;
pub mod rules;
pub mod v1alpha1;
