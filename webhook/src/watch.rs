//! Keeps the [`World`] up to date: one watch per kind, each in its own task.

use std::fmt::Debug;
use std::sync::Arc;

use crds::policy::{Policy, PolicySet};
use crds::v1alpha1::{Pipeline, PipelinePolicy, PipelinePolicyStatus, PipelineRun, ReferenceGrant};
use follow::{Listed, Sink};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ApiResource, DynamicObject};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::health::Health;
use crate::metrics::Metrics;
use crate::world::{Key, KnownNamespace, KnownPipeline, World};

/// The watches that `/readyz` waits for.
pub const KINDS: [&str; 5] = ["grants", "namespaces", "pipelines", "policies", "runs"];

/// The state that the watches share.
#[derive(Clone)]
pub struct Watches {
    /// The client.
    pub client: Client,
    /// The view that they fill.
    pub world: Arc<World>,
    /// Reports that a watch is complete.
    pub health: Health,
    /// Counts events and errors.
    pub metrics: Arc<Metrics>,
}

/// A policy in use, and the generation and status of its stored object.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The policy, even if it cannot be used.
    pub policy: Arc<Policy>,
    /// The generation from which it was compiled.
    pub generation: Option<i64>,
    /// Its status; `None` if it has no readable one.
    pub status: Option<PipelinePolicyStatus>,
}

impl Watches {
    /// Starts all watches. Compiled policies go to `compiled`, for their status.
    pub fn start(&self, compiled: mpsc::UnboundedSender<Compiled>) {
        let Self { client, world, metrics, .. } = self;
        let policies = Policies { world: Arc::clone(world), compiled, metrics: Arc::clone(metrics) };
        let stored = Api::all_with(client.clone(), &ApiResource::erase::<PipelinePolicy>(&()));
        self.follow::<DynamicObject>("policies", stored, policies);
        let stored = Api::all_with(client.clone(), &ApiResource::erase::<Pipeline>(&()));
        self.follow::<DynamicObject>("pipelines", stored, Pipelines(Arc::clone(world)));
        self.follow::<PipelineRun>("runs", Api::all(client.clone()), Arc::clone(world));
        self.follow::<ReferenceGrant>("grants", Api::all(client.clone()), Arc::clone(world));
        let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
        let (sink, synced) = self.counted("namespaces", Arc::clone(world));
        tokio::spawn(follow::metadata(namespaces, None, sink, synced));
    }

    fn follow<K>(&self, kind: &'static str, api: Api<DeserializeGuard<K>>, sink: impl Sink<K> + 'static)
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let (sink, synced) = self.counted(kind, sink);
        tokio::spawn(follow::objects(api, None, sink, synced));
    }

    fn counted<S>(&self, kind: &'static str, sink: S) -> (Counted<S>, impl FnOnce() + Send + use<S>) {
        let health = self.health.clone();
        (Counted { kind, metrics: Arc::clone(&self.metrics), sink }, move || health.have(kind))
    }
}

/// Counts the events that go to another sink.
struct Counted<S> {
    kind: &'static str,
    metrics: Arc<Metrics>,
    sink: S,
}

impl<K: Resource, S: Sink<K>> Sink<K> for Counted<S> {
    fn put(&self, object: K) {
        self.metrics.watch_news(self.kind);
        self.sink.put(object);
    }

    fn forget(&self, object: &ObjectMeta) {
        self.metrics.watch_news(self.kind);
        self.sink.forget(object);
    }

    fn remove(&self, object: K) {
        self.metrics.watch_news(self.kind);
        self.sink.remove(object);
    }

    fn listed(&self, listed: &Listed) {
        self.metrics.watch_news(self.kind);
        info!(kind = self.kind, objects = listed.len(), "watching");
        self.sink.listed(listed);
    }

    fn unreadable(&self, object: &ObjectMeta) {
        self.metrics.watch_news(self.kind);
        self.sink.unreadable(object);
    }

    fn broke(&self) {
        self.metrics.watch_broke(self.kind);
        self.sink.broke();
    }
}

fn key(object: &ObjectMeta) -> Key {
    (object.namespace.clone().unwrap_or_default(), object.name.clone().unwrap_or_default())
}

fn lacks(listed: &Listed, (namespace, name): &Key) -> bool {
    listed.lacks_name(Some(namespace), name)
}

impl Sink<PipelineRun> for World {
    fn put(&self, run: PipelineRun) {
        self.write().set_run(&run);
    }

    fn forget(&self, run: &ObjectMeta) {
        self.write().remove_run(&key(run));
    }

    fn listed(&self, listed: &Listed) {
        let mut index = self.write();
        let gone: Vec<Key> = index.runs.keys().filter(|key| lacks(listed, key)).cloned().collect();
        gone.iter().for_each(|key| index.remove_run(key));
    }
}

impl Sink<ReferenceGrant> for World {
    fn put(&self, grant: ReferenceGrant) {
        self.write().grants.insert(key(&grant.metadata), grant);
    }

    fn forget(&self, grant: &ObjectMeta) {
        self.write().grants.remove(&key(grant));
    }

    fn listed(&self, listed: &Listed) {
        self.write().grants.retain(|key, _| !lacks(listed, key));
    }

    /// A grant that cannot be read permits nothing.
    fn unreadable(&self, grant: &ObjectMeta) {
        Sink::<ReferenceGrant>::forget(self, grant);
    }
}

impl Sink<PartialObjectMeta<Namespace>> for World {
    fn put(&self, namespace: PartialObjectMeta<Namespace>) {
        let name = namespace.name_any();
        let (labels, annotations) = (namespace.labels().clone(), namespace.annotations().clone());
        let known = KnownNamespace::new(&name, labels, annotations);
        self.write().namespaces.insert(name, Arc::new(known));
    }

    fn forget(&self, namespace: &ObjectMeta) {
        self.write().namespaces.remove(namespace.name.as_deref().unwrap_or_default());
    }

    fn listed(&self, listed: &Listed) {
        self.write().namespaces.retain(|name, _| !listed.lacks_name(None, name));
    }
}

/// Pipelines, also as stored JSON, which is what policies judge.
struct Pipelines(Arc<World>);

impl Sink<DynamicObject> for Pipelines {
    fn put(&self, object: DynamicObject) {
        let key = key(&object.metadata);
        let known = serde_json::to_value(object).ok().and_then(KnownPipeline::read);
        self.0.write().pipelines.extend(known.map(|known| (key, Arc::new(known))));
    }

    fn forget(&self, pipeline: &ObjectMeta) {
        self.0.write().pipelines.remove(&key(pipeline));
    }

    fn listed(&self, listed: &Listed) {
        self.0.write().pipelines.retain(|key, _| !lacks(listed, key));
    }
}

/// Policies, including unreadable ones, which deny what they select.
struct Policies {
    world: Arc<World>,
    compiled: mpsc::UnboundedSender<Compiled>,
    metrics: Arc<Metrics>,
}

impl Policies {
    fn count(&self) {
        let policies = self.world.policies();
        let broken = policies.iter().filter(|policy| !policy.problems().is_empty()).count();
        self.metrics.policies_known(policies.iter().count() - broken, broken);
    }
}

impl Sink<DynamicObject> for Policies {
    fn put(&self, object: DynamicObject) {
        // Compiled before the lock is taken, because requests must not wait for it.
        let found = known_or_compiled(&self.world.policies(), &object);
        self.world.write().set_policy(Arc::clone(&found.policy));
        // There is no receiver if no status is written.
        let _ = self.compiled.send(found);
        self.count();
    }

    fn forget(&self, policy: &ObjectMeta) {
        let name = policy.name.as_deref().unwrap_or_default();
        Arc::make_mut(&mut self.world.write().policies).remove(name);
        self.count();
    }

    fn listed(&self, listed: &Listed) {
        let known = self.world.policies();
        let gone = known.iter().filter(|policy| listed.lacks_name(None, policy.name()));
        let gone: Vec<String> = gone.map(|policy| policy.name().to_owned()).collect();
        if !gone.is_empty() {
            let mut index = self.world.write();
            let policies = Arc::make_mut(&mut index.policies);
            gone.iter().for_each(|name| policies.remove(name));
        }
        self.count();
    }
}

/// Compiles a policy unless it is already known. A status write is a change too, but no reason to compile. A
/// policy that could not be compiled is tried again, because a thread may have been missing.
fn known_or_compiled(known: &PolicySet, object: &DynamicObject) -> Compiled {
    let known = known.get(&object.name_any()).filter(|known| known.is_of(&object.metadata));
    let policy = match known.filter(|known| known.problems().is_empty()) {
        Some(known) => Arc::clone(known),
        None => Arc::new(compile(object)),
    };
    let status = object.data.get("status").cloned().and_then(|status| serde_json::from_value(status).ok());
    Compiled { policy, generation: object.metadata.generation, status }
}

fn compile(object: &DynamicObject) -> Policy {
    let read = serde_json::to_value(object).and_then(serde_json::from_value::<PipelinePolicy>);
    let policy = match read {
        Ok(policy) => Policy::compile(&policy),
        Err(error) => Policy::unreadable(&object.metadata, &error.to_string()),
    };
    match policy.problems().first() {
        None => info!(policy = policy.name(), "compiled"),
        Some(problem) => {
            warn!(policy = policy.name(), %problem, "the policy cannot be used, and denies what it selects")
        }
    }
    policy
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn stored(uid: &str, generation: i64, cel: &str, status: Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelinePolicy",
            "metadata": { "name": "p", "uid": uid, "generation": generation },
            "spec": { "appliesTo": ["Pipeline"], "rules": [{ "name": "r", "message": "m", "cel": cel }] },
            "status": status
        }))
        .unwrap()
    }

    #[test]
    fn a_policy_is_compiled_when_its_spec_changes_and_not_when_its_status_does() {
        let first = known_or_compiled(&PolicySet::default(), &stored("a", 1, "true", json!({})));
        let known: PolicySet = [Arc::clone(&first.policy)].into_iter().collect();
        let is_compiled =
            |object: &DynamicObject| !Arc::ptr_eq(&known_or_compiled(&known, object).policy, &first.policy);
        let written = stored("a", 1, "true", json!({ "observedGeneration": 1 }));
        assert!(!is_compiled(&written));
        assert_eq!(known_or_compiled(&known, &written).status.unwrap().observed_generation, Some(1));
        assert!(is_compiled(&stored("a", 2, "false", json!({}))), "it was changed");
        assert!(is_compiled(&stored("b", 1, "false", json!({}))), "it was deleted and made again");
    }

    #[test]
    fn what_could_not_be_compiled_is_tried_again() {
        let object = stored("a", 1, "objekt", json!({}));
        let first = known_or_compiled(&PolicySet::default(), &object).policy;
        assert_eq!(first.problems().len(), 1);
        let known: PolicySet = [Arc::clone(&first)].into_iter().collect();
        assert!(!Arc::ptr_eq(&known_or_compiled(&known, &object).policy, &first));
    }

    #[test]
    fn a_policy_that_cannot_be_read_is_known_with_its_name_and_generation() {
        let mut object = stored("a", 7, "true", json!("nonsense"));
        object.data["spec"] = json!("nonsense");
        let Compiled { policy, generation, status } = known_or_compiled(&PolicySet::default(), &object);
        assert_eq!((policy.name(), generation, status), ("p", Some(7), None));
        assert!(policy.problems()[0].to_string().contains("cannot be read"), "{:?}", policy.problems());
    }
}
