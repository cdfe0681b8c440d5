//! Keeps the [`World`] up to date: one watch per kind, each in a task of its own. A watch that breaks is started again
//! with back-off, and what was known stays in use meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::Arc;

use crds::policy::{Policy, PolicySet};
use crds::v1alpha1::{Pipeline, PipelinePolicy, PipelinePolicyStatus, PipelineRun, ReferenceGrant};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ApiResource, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::health::Health;
use crate::metrics::Metrics;
use crate::world::{Key, KnownNamespace, KnownPipeline, World};

/// What `/readyz` waits for.
pub const KINDS: [&str; 5] = ["grants", "namespaces", "pipelines", "policies", "runs"];

/// What the watches share.
#[derive(Clone)]
pub struct Watches {
    /// The client.
    pub client: Client,
    /// What they fill.
    pub world: Arc<World>,
    /// Where they report that they are complete.
    pub health: Health,
    /// Where they count.
    pub metrics: Arc<Metrics>,
}

/// A policy in use, and what its stored object says of itself.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The policy, also one that cannot be used.
    pub policy: Arc<Policy>,
    /// The generation it was made of.
    pub generation: Option<i64>,
    /// Its status; `None` if it has none that can be read.
    pub status: Option<PipelinePolicyStatus>,
}

impl Watches {
    /// Starts all of them. Policies that were compiled go to `compiled`, for their status.
    pub fn start(&self, compiled: mpsc::UnboundedSender<Compiled>) {
        let this = self.clone();
        tokio::spawn(async move { this.policies(compiled).await });
        let this = self.clone();
        tokio::spawn(async move {
            let api = this.objects::<Pipeline>();
            this.follow("pipelines", api, |world, change| {
                let mut index = world.write();
                match change {
                    Change::All(all) => {
                        index.pipelines = all.into_iter().filter_map(known_pipeline).collect()
                    }
                    Change::Set(object) => index.pipelines.extend(known_pipeline(object)),
                    Change::Gone(object) => drop(index.pipelines.remove(&key(&object))),
                }
            })
            .await;
        });
        let this = self.clone();
        tokio::spawn(async move {
            let api = this.objects::<PipelineRun>();
            this.follow("runs", api, |world, change| {
                let mut index = world.write();
                match change {
                    Change::All(all) => {
                        index.clear_runs();
                        all.into_iter().filter_map(typed).for_each(|run| index.set_run(&run));
                    }
                    Change::Set(object) => typed(object).iter().for_each(|run| index.set_run(run)),
                    Change::Gone(object) => index.remove_run(&key(&object)),
                }
            })
            .await;
        });
        let this = self.clone();
        tokio::spawn(async move {
            let api = this.objects::<ReferenceGrant>();
            let grant = |object: DynamicObject| Some((key(&object), typed(object)?));
            this.follow("grants", api, move |world, change| {
                let mut index = world.write();
                match change {
                    Change::All(all) => index.grants = all.into_iter().filter_map(grant).collect(),
                    // A grant that cannot be read permits nothing.
                    Change::Set(object) => {
                        index.grants.remove(&key(&object));
                        index.grants.extend(grant(object));
                    }
                    Change::Gone(object) => drop(index.grants.remove(&key(&object))),
                }
            })
            .await;
        });
        let this = self.clone();
        tokio::spawn(async move {
            let api: Api<PartialObjectMeta<Namespace>> = Api::all(this.client.clone());
            this.follow("namespaces", api, |world, change| {
                let mut index = world.write();
                match change {
                    Change::All(all) => {
                        index.namespaces = all.iter().map(known_namespace).collect::<HashMap<_, _>>()
                    }
                    Change::Set(object) => index.namespaces.extend([known_namespace(&object)]),
                    Change::Gone(object) => drop(index.namespaces.remove(&object.name_any())),
                }
            })
            .await;
        });
    }

    /// Objects as they are: one that does not fit its type must not stop the watch for all.
    fn objects<K: Resource<DynamicType = ()>>(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<K>(&()))
    }

    async fn policies(self, compiled: mpsc::UnboundedSender<Compiled>) {
        let (metrics, api) = (Arc::clone(&self.metrics), self.objects::<PipelinePolicy>());
        self.follow("policies", api, move |world, change| {
            let known = world.policies();
            let compile = |object: DynamicObject| {
                let found = known_or_compiled(&known, &object);
                let policy = Arc::clone(&found.policy);
                // Nobody listens where no status is written; that is fine.
                let _ = compiled.send(found);
                policy
            };
            match change {
                Change::All(all) => {
                    let set: PolicySet = all.into_iter().map(compile).collect();
                    world.write().policies = Arc::new(set);
                }
                Change::Set(object) => {
                    // Compiled before the lock is taken: requests must not wait for it.
                    let policy = compile(object);
                    world.write().set_policy(policy);
                }
                Change::Gone(object) => Arc::make_mut(&mut world.write().policies).remove(&object.name_any()),
            }
            let policies = world.policies();
            let broken = policies.iter().filter(|policy| !policy.problems().is_empty()).count();
            metrics.policies_known(policies.iter().count() - broken, broken);
        })
        .await;
    }

    async fn follow<K>(&self, kind: &'static str, api: Api<K>, mut change: impl FnMut(&World, Change<K>))
    where
        Api<K>: Watched<K>,
        K: Resource + Clone + Debug + Send + 'static,
    {
        let mut events = Box::pin(api.events());
        let mut listed = Vec::new();
        while let Some(event) = events.next().await {
            self.metrics.watched(kind, &event);
            match event {
                Ok(Event::Init) => listed = Vec::new(),
                Ok(Event::InitApply(object)) => listed.push(object),
                Ok(Event::InitDone) => {
                    info!(kind, objects = listed.len(), "watching");
                    change(&self.world, Change::All(std::mem::take(&mut listed)));
                    self.health.have(kind);
                }
                Ok(Event::Apply(object)) => change(&self.world, Change::Set(object)),
                Ok(Event::Delete(object)) => change(&self.world, Change::Gone(object)),
                Err(error) => warn!(kind, %error, "the watch broke, and is started again"),
            }
        }
    }
}

/// What a watch brings.
enum Change<K> {
    All(Vec<K>),
    Set(K),
    Gone(K),
}

/// Both forms of a watch behind one name: of whole objects, and of their metadata.
trait Watched<K> {
    fn events(self) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + Send;
}

impl Watched<DynamicObject> for Api<DynamicObject> {
    fn events(self) -> impl Stream<Item = Result<Event<DynamicObject>, watcher::Error>> + Send {
        watcher(self, watcher::Config::default()).default_backoff()
    }
}

impl Watched<PartialObjectMeta<Namespace>> for Api<PartialObjectMeta<Namespace>> {
    fn events(
        self,
    ) -> impl Stream<Item = Result<Event<PartialObjectMeta<Namespace>>, watcher::Error>> + Send {
        watcher(self, watcher::Config::default()).default_backoff()
    }
}

fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn typed<T: DeserializeOwned>(object: DynamicObject) -> Option<T> {
    serde_json::from_value(serde_json::to_value(object).ok()?).ok()
}

fn known_pipeline(object: DynamicObject) -> Option<(Key, Arc<KnownPipeline>)> {
    let key = key(&object);
    let known = KnownPipeline::read(serde_json::to_value(object).ok()?)?;
    Some((key, Arc::new(known)))
}

fn known_namespace(object: &PartialObjectMeta<Namespace>) -> (String, Arc<KnownNamespace>) {
    let name = object.name_any();
    let copy = |map: &BTreeMap<String, String>| map.clone();
    let known = KnownNamespace::new(&name, copy(object.labels()), copy(object.annotations()));
    (name, Arc::new(known))
}

/// A status write is a change too, and no reason to compile anything. What could not be compiled is tried again: there may
/// have been no thread for it.
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
