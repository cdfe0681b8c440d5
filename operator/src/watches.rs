//! Follows Kubernetes: one watch per kind and namespace feeds the [`World`]. Watches break and start again by themselves.

use std::sync::Arc;

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::names::RUN_UID_LABEL;
use crate::world::{Follows, Scope, World};

/// Starts all watches. Returns once each of them has shown everything that is there.
pub async fn start(client: &Client, namespaces: &[String], world: &Arc<World>, tasks: &mut JoinSet<()>) {
    let scopes: Vec<Scope> = match namespaces {
        [] => vec![None],
        names => names.iter().map(|name| Some(name.as_str().into())).collect(),
    };
    let ours = watcher::Config::default().labels(RUN_UID_LABEL);
    let all = watcher::Config::default();
    let (synced, mut done) = mpsc::channel::<()>(1);
    for scope in scopes {
        let follow =
            Follow { client: client.clone(), scope, world: Arc::clone(world), synced: synced.clone() };
        tasks.spawn(follow.clone().run::<Pipeline>(all.clone()));
        tasks.spawn(follow.clone().run::<ReferenceGrant>(all.clone()));
        tasks.spawn(follow.clone().run::<Job>(ours.clone()));
        tasks.spawn(follow.clone().run::<Pod>(ours.clone()));
        tasks.spawn(follow.run::<PipelineRun>(all.clone()));
    }
    drop(synced);
    // Each watch drops its sender after its first round.
    while done.recv().await.is_some() {}
}

#[derive(Clone)]
struct Follow {
    client: Client,
    scope: Scope,
    world: Arc<World>,
    synced: mpsc::Sender<()>,
}

impl Follow {
    async fn run<K>(self, config: watcher::Config)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
        World: Follows<K>,
    {
        let Self { client, scope, world, synced } = self;
        let kind = K::kind(&());
        let api: Api<DeserializeGuard<K>> = match &scope {
            None => Api::all(client),
            Some(namespace) => Api::namespaced(client, namespace),
        };
        let mut synced = Some(synced);
        let mut events = watch(api, config).default_backoff().into_stream().boxed();
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    let ended = matches!(event, Event::InitDone);
                    hand_over(&world, &scope, event);
                    if ended {
                        synced.take();
                    }
                }
                Ok(None) => return,
                // The stream waits and goes on by itself.
                Err(error) => tracing::warn!(kind = %kind, error = crate::chain(&error), "a watch broke"),
            }
        }
    }
}

fn hand_over<K>(world: &World, scope: &Scope, event: Event<DeserializeGuard<K>>)
where
    K: Resource<DynamicType = ()>,
    World: Follows<K>,
{
    let readable = |object: DeserializeGuard<K>| match object.0 {
        Ok(object) => Some(object),
        Err(error) => {
            let (namespace, name) = (error.metadata.namespace, error.metadata.name);
            tracing::warn!(kind = %K::kind(&()), namespace, name, error = error.error, "an object cannot be read");
            None
        }
    };
    match event {
        Event::Init => world.begin(scope),
        Event::InitApply(object) | Event::Apply(object) => {
            if let Some(object) = readable(object) {
                world.put(scope, object);
            }
        }
        Event::Delete(object) => {
            if let Some(object) = readable(object) {
                world.remove(object);
            }
        }
        Event::InitDone => world.end(scope),
    }
}
