//! Follows one kind of Kubernetes object: a watch feeds a [`Sink`], round by round. A round lists everything that exists,
//! and then brings every change until the watch has to start over. It decides nothing, and never ends by itself: a watch
//! that breaks starts again with back-off, and what is known stays in use meanwhile.

mod listed;

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Config, Resource};
use serde::de::DeserializeOwned;

pub use listed::{Listed, version};

/// Seconds after which the API server ends a watch, which then goes on where it was. A half-open connection looks like one on
/// which nothing happens, so a watch that stays silent 5 seconds longer is given up: that is noticed within a minute.
const WATCH_SECONDS: u32 = 50;

/// Longer than a watch is silent, and than the API server works on any request (60 s).
pub const SILENCE_MAX: Duration = Duration::from_secs(75);

/// Makes a client give up an API server that has died without a word, also while it waits for a list.
pub fn notice_silence(config: &mut Config) {
    config.read_timeout = Some(SILENCE_MAX);
    config.reset_reader_on_write = true;
}

/// Takes what a watch brings.
pub trait Sink<K: Resource>: Send + Sync {
    /// An object exists, or has changed.
    fn put(&self, object: K);
    /// An object was deleted. Its last state may not fit its type, so only its metadata is known.
    fn forget(&self, object: &ObjectMeta);
    /// An object was deleted; this is its last state, for sinks that need it.
    fn remove(&self, object: K) {
        self.forget(object.meta());
    }
    /// A round has listed everything that exists: whatever it lacks is gone.
    fn listed(&self, listed: &Listed);
    /// An object exists, but does not fit its type. By default it stays as it was last known.
    fn unreadable(&self, _object: &ObjectMeta) {}
    /// The watch broke, and will start again.
    fn broke(&self) {}
}

impl<K: Resource, S: Sink<K> + ?Sized> Sink<K> for Arc<S> {
    fn put(&self, object: K) {
        self.as_ref().put(object);
    }

    fn forget(&self, object: &ObjectMeta) {
        self.as_ref().forget(object);
    }

    fn remove(&self, object: K) {
        self.as_ref().remove(object);
    }

    fn listed(&self, listed: &Listed) {
        self.as_ref().listed(listed);
    }

    fn unreadable(&self, object: &ObjectMeta) {
        self.as_ref().unreadable(object);
    }

    fn broke(&self) {
        self.as_ref().broke();
    }
}

/// Follows whole objects; with `labels`, only those that the selector matches. `synced` is called once, after the first
/// round. An object that does not fit its type does not stop the watch of the others.
pub async fn objects<K>(
    api: Api<DeserializeGuard<K>>,
    labels: Option<&str>,
    sink: impl Sink<K>,
    synced: impl FnOnce() + Send,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let read = |guard: DeserializeGuard<K>| {
        guard.0.map_err(|invalid| Box::new(Unreadable { metadata: invalid.metadata, error: invalid.error }))
    };
    follow(api, labels, read, sink, synced).await;
}

/// Follows the metadata of objects. The type asks the API server for nothing else, which a guard around it would hide.
pub async fn metadata<K>(
    api: Api<PartialObjectMeta<K>>,
    labels: Option<&str>,
    sink: impl Sink<PartialObjectMeta<K>>,
    synced: impl FnOnce() + Send,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + 'static,
{
    follow(api, labels, Ok, sink, synced).await;
}

/// An object that does not fit its type.
struct Unreadable {
    metadata: ObjectMeta,
    error: String,
}

async fn follow<R, K>(
    api: Api<R>,
    labels: Option<&str>,
    read: fn(R) -> Result<K, Box<Unreadable>>,
    sink: impl Sink<K>,
    synced: impl FnOnce() + Send,
) where
    R: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K: Resource,
{
    let path = api.resource_url().to_owned();
    let put = |object: R| match read(object) {
        Ok(object) => sink.put(object),
        Err(unreadable) => {
            let Unreadable { metadata, error } = *unreadable;
            let (namespace, name) = (&metadata.namespace, &metadata.name);
            tracing::warn!(path, namespace, name, error, "an object cannot be read");
            sink.unreadable(&metadata);
        }
    };
    let namespace = api.namespace().map(ToOwned::to_owned);
    let config =
        labels.into_iter().fold(watcher::Config::default().timeout(WATCH_SECONDS), watcher::Config::labels);
    let mut events = watcher(api, config).default_backoff().boxed();
    let (mut listed, mut synced) = (Listed::new(namespace.clone()), Some(synced));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed = Listed::new(namespace.clone()),
            Ok(Event::InitApply(object)) => {
                listed.add(object.meta());
                put(object);
            }
            Ok(Event::InitDone) => {
                sink.listed(&listed);
                // The names are needed only until the round is over.
                listed = Listed::new(namespace.clone());
                if let Some(synced) = synced.take() {
                    synced();
                }
            }
            Ok(Event::Apply(object)) => put(object),
            Ok(Event::Delete(object)) => match read(object) {
                Ok(object) => sink.remove(object),
                Err(unreadable) => sink.forget(&unreadable.metadata),
            },
            Err(error) => {
                tracing::warn!(path, %error, cause = %cause(&error), "a watch broke, and starts again");
                sink.broke();
            }
        }
    }
}

/// The innermost error: the outer ones say only which request failed.
fn cause<'a>(mut error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    while let Some(source) = error.source() {
        error = source;
    }
    error
}
