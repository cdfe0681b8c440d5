//! Lookups at the API server while a request waits, for objects that no watch provides: Secrets, which are
//! never kept, and namespaces and Pipelines that are too new for the watch.

use std::future::Future;
use std::pin::Pin;

use crds::rules::SecretProblem;

use crate::world::{KnownNamespace, KnownPipeline};

/// A pending answer; an error is transient.
pub type Lookup<'a, T> = Pin<Box<dyn Future<Output = Result<Option<T>, String>> + Send + 'a>>;

/// Looks up single objects.
pub trait Live: Send + Sync {
    /// Why a Secret has no keys for a bucket; `None` if it has them. The keys themselves do not matter here.
    fn secret_problem<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, SecretProblem>;

    /// A namespace; `None` if there is no such namespace.
    fn namespace<'a>(&'a self, name: &'a str) -> Lookup<'a, KnownNamespace>;

    /// A Pipeline; `None` if there is no such Pipeline.
    fn pipeline<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, KnownPipeline>;
}
