//! Keeps the [`World`] up to date: one watch per kind, each in a task of its own. A watch that breaks is started again
//! with back-off, and what was known stays in use meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::Arc;

use crds::policy::{Policy, PolicySet};
use crds::v1alpha1::{Pipeline, PipelinePolicy, PipelineRun, ReferenceGrant};
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

impl Watches {
    /// Starts all of them. Policies that were compiled go to `compiled`, for their status.
    pub fn start(&self, compiled: mpsc::UnboundedSender<PipelinePolicy>) {
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

    async fn policies(self, compiled: mpsc::UnboundedSender<PipelinePolicy>) {
        let (metrics, api) = (Arc::clone(&self.metrics), self.objects::<PipelinePolicy>());
        self.follow("policies", api, move |world, change| {
            let compile = |object: DynamicObject| {
                let policy = compile(&object);
                if let Some(policy) = typed(object) {
                    // Nobody listens where no status is written; that is fine.
                    let _ = compiled.send(policy);
                }
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

fn compile(object: &DynamicObject) -> Policy {
    let name = object.name_any();
    let read = serde_json::to_value(object).and_then(serde_json::from_value::<PipelinePolicy>);
    let policy = match read {
        Ok(policy) => Policy::compile(&policy),
        Err(error) => Policy::unreadable(&name, &error.to_string()),
    };
    match policy.problems().first() {
        None => info!(policy = name, "compiled"),
        Some(problem) => {
            warn!(policy = name, %problem, "the policy cannot be used, and denies what it selects")
        }
    }
    policy
}
