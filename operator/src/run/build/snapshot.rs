//! The Pipeline as it was when the run started. All objects of a run are built from it: editing or deleting
//! the Pipeline affects later runs only.

use crds::v1alpha1::{Bucket, Filter, Mode, Pipeline, PipelineRun, PipelineSpec, Protocol, SecretReference};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::ResourceExt;
use protocol::RunId;
use queue::Rights;
use serde::{Deserialize, Serialize};

use super::owner;
use crate::names;

/// A Pipeline at one point in time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// The Pipeline's namespace; its Secrets are there too, unless it names another.
    pub namespace: String,
    /// The Pipeline's name.
    pub name: String,
    /// The Pipeline's spec.
    pub spec: PipelineSpec,
}

impl Snapshot {
    /// The Pipeline as it is now.
    pub fn of(pipeline: &Pipeline) -> Self {
        Self {
            namespace: pipeline.namespace().unwrap_or_default(),
            name: pipeline.name_any(),
            spec: pipeline.spec.clone(),
        }
    }

    /// Parses a stored snapshot.
    pub fn read(stored: &ControllerRevision) -> Result<Self, serde_json::Error> {
        let data = stored.data.clone().map(|RawExtension(data)| data).unwrap_or_default();
        serde_json::from_value(data)
    }

    /// The snapshot as the object to be stored.
    pub fn stored(&self, run: &PipelineRun, run_id: &RunId) -> Result<ControllerRevision, serde_json::Error> {
        Ok(ControllerRevision {
            metadata: owner::metadata(run, run_id, names::snapshot(&run.name_any())),
            data: Some(RawExtension(serde_json::to_value(self)?)),
            revision: 1,
        })
    }

    /// The rights that the run's workers need on the queue.
    pub fn worker_rights(&self) -> Rights {
        if self.is_warm() { Rights::Serve } else { Rights::Claim }
    }

    /// Whether each pod processes many files.
    pub fn is_warm(&self) -> bool {
        self.spec.mode == Mode::Warm
    }

    /// Whether any filter speaks the `Lines` protocol.
    pub fn speaks_lines(&self) -> bool {
        self.spec.filters.iter().any(|filter| filter.protocol == Protocol::Lines)
    }

    /// Whether a filter has a memory limit.
    pub fn has_memory_limit(&self, filter: &str) -> bool {
        let named = self.spec.filters.iter().find(|named| named.name == filter);
        let limits = named.and_then(|filter| filter.resources.as_ref()?.limits.as_ref());
        limits.is_some_and(|limits| limits.contains_key("memory"))
    }

    /// The prefix of this run's files: its own, or the Pipeline's.
    pub fn prefix<'a>(&'a self, run: &'a PipelineRun) -> &'a str {
        let own = run.spec.source.as_ref().and_then(|source| source.prefix.as_deref());
        own.unwrap_or(&self.spec.source.bucket.prefix)
    }

    /// The globs of this run: its own, or the Pipeline's.
    pub fn globs<'a>(&'a self, run: &'a PipelineRun) -> (&'a [String], &'a [String]) {
        let own = run.spec.source.as_ref();
        let include = own.and_then(|source| source.include.as_ref()).unwrap_or(&self.spec.source.include);
        let exclude = own.and_then(|source| source.exclude.as_ref()).unwrap_or(&self.spec.source.exclude);
        (include, exclude)
    }

    /// The filter whose results are published.
    pub fn published_filter(&self) -> Option<&str> {
        let sink = self.spec.sink.as_ref()?;
        sink.from.as_deref().or_else(|| self.spec.filters.last().map(|filter: &Filter| filter.name.as_str()))
    }

    /// The namespaces of the Pipeline and its Secrets, whose grants decide which runs may use them.
    pub fn namespaces(&self) -> Vec<String> {
        let secrets = self.secrets().into_iter().map(|secret| secret.namespace);
        std::iter::once(self.namespace.clone()).chain(secrets).collect()
    }

    /// The Secrets of both buckets, each with its role and namespace.
    pub fn secrets(&self) -> Vec<Credentials> {
        let buckets = [Role::Source, Role::Sink].into_iter().zip(self.spec.buckets());
        let named = |(role, bucket): (Role, &Bucket)| {
            let SecretReference { name, namespace } = bucket.credentials_secret.clone()?;
            Some(Credentials { role, name, namespace: namespace.unwrap_or_else(|| self.namespace.clone()) })
        };
        buckets.filter_map(named).collect()
    }
}

/// One of the two buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::AsRefStr)]
#[strum(serialize_all = "lowercase")]
pub enum Role {
    /// Where files come from.
    Source,
    /// Where results go.
    Sink,
}

/// A Secret with keys, and the bucket that they are for.
#[derive(Clone, Debug, PartialEq)]
pub struct Credentials {
    /// The bucket.
    pub role: Role,
    /// The Secret's name.
    pub name: String,
    /// The Secret's namespace.
    pub namespace: String,
}
