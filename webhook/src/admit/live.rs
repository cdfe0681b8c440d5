//! What is asked of the API server while a request waits, because no watch may know it: Secrets, which are never kept, and
//! namespaces and Pipelines that are so new that the watch has not brought them.

use std::future::Future;
use std::pin::Pin;

use crds::rules::SecretProblem;

use crate::world::{KnownNamespace, KnownPipeline};

/// An answer that is not there yet; the error is weather.
pub type Lookup<'a, T> = Pin<Box<dyn Future<Output = Result<Option<T>, String>> + Send + 'a>>;

/// A way to look at single objects.
pub trait Live: Send + Sync {
    /// Why a Secret has no keys of a bucket; `None` if it has them. The keys themselves are of no interest here.
    fn secret_problem<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, SecretProblem>;

    /// A namespace; `None` if there is no such namespace.
    fn namespace<'a>(&'a self, name: &'a str) -> Lookup<'a, KnownNamespace>;

    /// A Pipeline; `None` if there is no such Pipeline.
    fn pipeline<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, KnownPipeline>;
}
