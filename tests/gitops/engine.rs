//! What Argo CD and Flux have in common: an object that says which part of Git is applied, and its state.

use std::collections::BTreeMap;
use std::time::Instant;

use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::discovery::Discovery;
use kube::{Api, ResourceExt};
use serde_json::Value;
use testbed::Doing;
use tokio::process::Child;

use crate::lab::{LONG, Lab};

/// A running engine. Its programs end when it is dropped.
pub struct Engine {
    pub name: &'static str,
    /// The namespace of its objects.
    pub namespace: &'static str,
    /// The kind that applies a folder of a repository.
    pub application: ApiResource,
    /// The field manager of applied objects.
    pub manager: &'static str,
    pub read: fn(&Value) -> Report,
    /// The kinds, with a common name, that are told to read Git now, and the value to write into them at a
    /// given time.
    pub told: Vec<ApiResource>,
    pub refresh: fn(&str) -> Value,
    /// The value to write into an application to apply all of it again.
    pub again: fn(&str) -> Value,
    pub _programs: Vec<Child>,
    /// Folders and servers that live as long as the engine.
    pub _belongings: Vec<Box<dyn std::any::Any>>,
}

/// An application's state, as the engine reports it.
#[derive(Debug, Default)]
pub struct Report {
    /// The commit that is applied.
    pub revision: String,
    /// Whether all of it is applied and healthy.
    pub healthy: bool,
    /// All its messages for people.
    pub message: String,
    /// Who last asked to apply everything again.
    pub asked: String,
    /// The objects that it manages.
    pub objects: Vec<Managed>,
}

/// An object that came from Git.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Managed {
    pub group: String,
    pub version: String,
    pub kind: String,
    pub namespace: String,
    pub name: String,
}

impl Engine {
    fn api(&self, lab: &Lab, kind: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(lab.testbed.client(), self.namespace, kind)
    }

    pub async fn report(&self, lab: &Lab, application: &str) -> Report {
        self.try_report(lab, application).await.unwrap()
    }

    async fn try_report(&self, lab: &Lab, application: &str) -> testbed::Result<Report> {
        let found = self.api(lab, &self.application).get_opt(application).await;
        let found = found.doing(|| format!("look at the application {application}"))?;
        Ok(found.map(|found| (self.read)(&serde_json::to_value(found).unwrap())).unwrap_or_default())
    }

    /// Makes it read Git now, as a webhook of the Git server would.
    pub async fn refresh(&self, lab: &Lab, application: &str) {
        for kind in &self.told {
            self.patch(lab, kind, application, (self.refresh)(&now())).await;
        }
    }

    /// Applies everything again, and waits until that is done.
    pub async fn apply_again(&self, lab: &Lab, application: &str) -> Report {
        let now = now();
        self.patch(lab, &self.application, application, (self.again)(&now)).await;
        self.until(lab, application, "applied again", |report| report.healthy && report.asked == now).await
    }

    async fn patch(&self, lab: &Lab, kind: &ApiResource, name: &str, patch: Value) {
        let patched = self.api(lab, kind).patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        patched.unwrap_or_else(|error| panic!("tell {name}: {error}"));
    }

    /// Waits until it reports something.
    pub async fn until(
        &self,
        lab: &Lab,
        application: &str,
        what: &str,
        is_so: impl Fn(&Report) -> bool,
    ) -> Report {
        let probe =
            async || Ok(Some(self.try_report(lab, application).await?).filter(|report| is_so(report)));
        let what = format!("{} says of {application}: {what}", self.name);
        match lab.testbed.eventually(&what, LONG, probe).await {
            Ok(report) => report,
            Err(error) => panic!("{error}; it says {:#?}", self.report(lab, application).await),
        }
    }

    /// Waits until an application is applied and healthy, at any commit.
    pub async fn until_healthy(&self, lab: &Lab, application: &str) -> Report {
        self.until(lab, application, "healthy", |report| report.healthy).await
    }

    /// Does the same for this commit.
    pub async fn until_healthy_at(&self, lab: &Lab, application: &str, commit: &str) -> Report {
        self.refresh(lab, application).await;
        let is_so = |report: &Report| report.healthy && report.revision == commit;
        self.until(lab, application, &format!("healthy at {commit}"), is_so).await
    }

    /// The state of each object of an application, and when the engine last changed it.
    pub async fn versions(&self, lab: &Lab, application: &str) -> BTreeMap<Managed, String> {
        let discovery = Discovery::new(lab.testbed.client()).run().await.unwrap();
        let mut versions = BTreeMap::new();
        for object in self.report(lab, application).await.objects {
            let Managed { group, version, kind, namespace, name } = &object;
            let (kind, _) = discovery.resolve_gvk(&GroupVersionKind::gvk(group, version, kind)).unwrap();
            let api: Api<DynamicObject> = match namespace.as_str() {
                "" => Api::all_with(lab.testbed.client(), &kind),
                namespace => Api::namespaced_with(lab.testbed.client(), namespace, &kind),
            };
            let found = api.get(name).await.unwrap();
            let fields =
                found.managed_fields().iter().filter(|entry| entry.manager.as_deref() == Some(self.manager));
            let times: Vec<_> = fields.filter_map(|entry| entry.time.clone()).collect();
            assert!(!times.is_empty(), "{object:?} is not applied by {}", self.manager);
            let found =
                format!("{:?} generation {:?}, applied {times:?}", found.uid(), found.metadata.generation);
            versions.insert(object, found);
        }
        versions
    }
}

/// Different at every call.
fn now() -> String {
    format!("{:?}", Instant::now())
}

/// A text in a status, if there is one.
pub fn text(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The list at a path of a status.
pub fn list<'a>(value: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    value.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}
