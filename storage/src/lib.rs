//! Buckets of S3-compatible services. The operator lists them and the claimer fetches from them, both through
//! the same [`Bucket`], so that an endpoint, a certificate or an identity that works for one works for the
//! other.
//!
//! This crate knows nothing of the queue or of Kubernetes.

mod bucket;
mod endpoint;
mod error;
mod guard;
mod insecure;
mod key;
mod keys;
mod limit;
mod lister;
mod page;
mod retry;
mod selection;

pub use bucket::{BACKOFF_FIRST, BACKOFF_LONGEST, Bucket};
pub use endpoint::{EndpointError, parse_endpoint};
pub use error::{StorageError, chain, has};
pub use guard::AddressGuard;
pub use keys::{AccessKeys, Secret};
pub use lister::{Lister, PAGE_BYTES_MAX};
pub use page::{ETAG_BYTES_MAX, KEY_BYTES_MAX, ListedFile, ListedPage, PAGE_MAX, Skipped};
pub use selection::{Selection, SelectionError};
