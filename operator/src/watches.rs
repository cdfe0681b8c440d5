//! Follows Kubernetes objects: one watch per kind and namespace feeds the [`World`].

use std::fmt::Debug;
use std::sync::Arc;

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use follow::Sink;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::names::RUN_UID_LABEL;
use crate::world::World;

/// Starts all watches. Returns once each of them has delivered all existing objects.
pub async fn start(client: &Client, namespaces: &[String], world: &Arc<World>, tasks: &mut JoinSet<()>) {
    let namespaces: Vec<Option<&str>> = match namespaces {
        [] => vec![None],
        names => names.iter().map(|name| Some(name.as_str())).collect(),
    };
    let (synced, mut done) = mpsc::channel::<()>(1);
    for namespace in namespaces {
        let watches =
            Watches { client: client.clone(), namespace, world: Arc::clone(world), synced: synced.clone() };
        tasks.spawn(watches.follow::<Pipeline>(None));
        tasks.spawn(watches.follow::<ReferenceGrant>(None));
        tasks.spawn(watches.follow::<Job>(Some(RUN_UID_LABEL)));
        tasks.spawn(watches.follow::<Pod>(Some(RUN_UID_LABEL)));
        tasks.spawn(watches.follow::<PipelineRun>(None));
    }
    drop(synced);
    // Each watch drops its sender after its first round.
    while done.recv().await.is_some() {}
}

/// The shared parts of the watches of one namespace, or of all.
struct Watches<'a> {
    client: Client,
    namespace: Option<&'a str>,
    world: Arc<World>,
    synced: mpsc::Sender<()>,
}

impl Watches<'_> {
    fn follow<K>(&self, labels: Option<&'static str>) -> impl Future<Output = ()> + Send + 'static + use<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
        World: Sink<K>,
    {
        let client = self.client.clone();
        let api: Api<DeserializeGuard<K>> = match self.namespace {
            None => Api::all(client),
            Some(namespace) => Api::namespaced(client, namespace),
        };
        let (world, synced) = (Arc::clone(&self.world), self.synced.clone());
        follow::objects(api, labels, world, move || drop(synced))
    }
}
