//! The shared context of every pass: clients, settings, the watched objects, and events for users.

use std::sync::Arc;
use std::time::Duration;

use crds::rules::EndpointPolicy;
use crds::v1alpha1::PipelineRun;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::core::NamespaceResourceScope;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource, ResourceExt};
use queue::{Connection, KnownRuns};
use tokio::sync::OnceCell;

use crate::args::Settings;
use crate::budget;
use crate::fair::Permits;
use crate::metrics::Metrics;
use crate::names::MANAGER;
use crate::turns::Turns;
use crate::world::World;

/// The longest note of an event, in bytes, that the API server accepts.
const NOTE_BYTES_MAX: usize = 1_024;

/// The shared context of every pass.
pub struct Context {
    /// The Kubernetes client.
    pub client: Client,
    /// The connection to Valkey.
    pub valkey: Connection,
    /// The operator's settings.
    pub settings: Settings,
    /// The objects that the watches have reported.
    pub world: Arc<World>,
    /// The operator's metrics.
    pub metrics: Arc<Metrics>,
    /// Limits how many passes run at once; namespaces take turns.
    pub passes: Permits,
    /// Limits how many listings request or add pages at once; namespaces take turns.
    pub turns: Turns,
    /// The runs that this installation knows, once its id was read; `None` if it may not have one.
    pub known_runs: OnceCell<Option<KnownRuns>>,
    recorder: Recorder,
}

impl Context {
    /// Bundles the parts.
    pub fn new(
        client: Client,
        valkey: Connection,
        settings: Settings,
        world: Arc<World>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let reporter = Reporter { controller: MANAGER.to_owned(), instance: Some(settings.identity.clone()) };
        let recorder = Recorder::new(client.clone(), reporter);
        let passes = Permits::new(settings.concurrency);
        let turns = Turns::new(settings.max_listings);
        let known_runs = OnceCell::new();
        Self { client, valkey, settings, world, metrics, passes, turns, known_runs, recorder }
    }

    /// The API for objects of a kind in the run's namespace.
    pub fn api<K>(&self, run: &PipelineRun) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &run.namespace().unwrap_or_default())
    }

    /// The interval between two reports of a run's counts: the more active runs, the longer.
    pub fn publish_every(&self) -> Duration {
        budget::publish_every(self.world.active_runs())
    }

    /// The interval between two reports of its Job.
    pub fn publish_job_every(&self) -> Duration {
        budget::publish_job_every(self.world.active_runs())
    }

    /// The policy that decides which endpoints are allowed.
    pub fn endpoints(&self) -> EndpointPolicy<'_> {
        EndpointPolicy {
            allowed_networks: &self.settings.allowed_networks,
            allowed_hosts: &self.settings.allowed_hosts,
        }
    }

    /// Publishes a normal event about a run's progress.
    pub fn tell(&self, run: &PipelineRun, reason: &str, note: impl Into<String>) {
        self.publish(run, EventType::Normal, reason, note.into(), None);
    }

    /// Publishes a warning about a run.
    pub fn warn(&self, run: &PipelineRun, reason: &str, note: impl Into<String>) {
        self.publish(run, EventType::Warning, reason, note.into(), None);
    }

    /// Publishes a warning about a run, concerning a file in one of its pods. Warnings for the same reason
    /// are merged under the text of the first, unless they concern different things: without the file, those
    /// of a pod that processes many files would be one.
    pub fn warn_about(&self, run: &PipelineRun, pod: &str, file: &str, reason: &str, note: String) {
        let pod = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.to_owned()),
            namespace: run.namespace(),
            field_path: Some(format!("files{{{file}}}")),
            ..ObjectReference::default()
        };
        self.publish(run, EventType::Warning, reason, note, Some(pod));
    }

    /// Publishes in the background: a lost event is no reason to stop.
    fn publish(
        &self,
        run: &PipelineRun,
        type_: EventType,
        reason: &str,
        mut note: String,
        secondary: Option<ObjectReference>,
    ) {
        note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
        let (recorder, about) = (self.recorder.clone(), run.object_ref(&()));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note).filter(|note| !note.is_empty()),
            action: "Reconcile".to_owned(),
            secondary,
        };
        tokio::spawn(async move {
            let sent = tokio::time::timeout(Duration::from_secs(10), recorder.publish(&event, &about)).await;
            if let Ok(Err(error)) = sent {
                tracing::debug!(error = crate::chain(&error), "could not record an event");
            }
        });
    }
}
