//! Follows one kind of Kubernetes object: a watch feeds a [`Sink`], round by round. A round lists all
//! existing objects, and then delivers every change until the watch must start over. It makes no decisions
//! and never ends on its own: a broken watch restarts with back-off, and known objects stay in use meanwhile.

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

/// Seconds after which the API server ends a watch, which then continues where it stopped. A half-open
/// connection looks like one without events, so a watch that stays silent 5 seconds longer is given up: this
/// detects it within a minute.
const WATCH_SECONDS: u32 = 50;

/// Longer than a watch stays silent, and longer than the API server works on any request (60 s).
pub const SILENCE_MAX: Duration = Duration::from_secs(75);

/// Makes a client give up an API server that died silently, even while it waits for a list.
pub fn notice_silence(config: &mut Config) {
    config.read_timeout = Some(SILENCE_MAX);
    config.reset_reader_on_write = true;
}

/// Receives the events of a watch.
pub trait Sink<K: Resource>: Send + Sync {
    /// Handles an object that exists or has changed.
    fn put(&self, object: K);
    /// Handles a deleted object. Its last state may not fit its type, so only its metadata is known.
    fn forget(&self, object: &ObjectMeta);
    /// Handles a deleted object, given its last state, for sinks that need it.
    fn remove(&self, object: K) {
        self.forget(object.meta());
    }
    /// Handles a complete list of all existing objects: any object that it lacks is gone.
    fn listed(&self, listed: &Listed);
    /// Handles an object that exists but does not fit its type. By default, its last known state stays.
    fn unreadable(&self, _object: &ObjectMeta) {}
    /// Handles a broken watch, which will restart.
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

/// Follows whole objects; with `labels`, only those that the selector matches. `synced` is called once, after
/// the first round. An object that does not fit its type does not stop the watch of the others.
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

/// Follows the metadata of objects. Their type makes the client request only metadata, which a guard around
/// the type would hide.
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
                // The names are needed only until the round is complete.
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
                tracing::warn!(path, %error, cause = %cause(&error), "a watch broke and is restarted");
                sink.broke();
            }
        }
    }
}

/// The innermost error: the outer ones name only the failed request.
fn cause<'a>(mut error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    while let Some(source) = error.source() {
        error = source;
    }
    error
}
