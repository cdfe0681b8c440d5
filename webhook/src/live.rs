//! Looks up single objects of the cluster while a request waits.

use std::time::Duration;

use crds::rules::{BucketKeys, SecretProblem};
use crds::v1alpha1::Pipeline;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{ApiResource, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt};

use crate::admit::{Live, Lookup};
use crate::world::{KnownNamespace, KnownPipeline};

/// A lookup fails if it takes longer, because the request has its own deadline.
const LIMIT: Duration = Duration::from_secs(3);

/// Live lookups at the API server.
pub(crate) struct Cluster(pub(crate) Client);

impl Live for Cluster {
    fn secret_problem<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, SecretProblem> {
        Box::pin(async move {
            let api: Api<Secret> = Api::namespaced(self.0.clone(), namespace);
            let found = in_time(api.get_opt(name)).await?;
            Ok(BucketKeys::read(found.as_ref()).err())
        })
    }

    fn namespace<'a>(&'a self, name: &'a str) -> Lookup<'a, KnownNamespace> {
        Box::pin(async move {
            let api: Api<PartialObjectMeta<Namespace>> = Api::all(self.0.clone());
            let found = in_time(api.get_opt(name)).await?;
            Ok(found
                .map(|found| KnownNamespace::new(name, found.labels().clone(), found.annotations().clone())))
        })
    }

    fn pipeline<'a>(&'a self, namespace: &'a str, name: &'a str) -> Lookup<'a, KnownPipeline> {
        Box::pin(async move {
            let resource = ApiResource::erase::<Pipeline>(&());
            let api: Api<DynamicObject> = Api::namespaced_with(self.0.clone(), namespace, &resource);
            let found = in_time(api.get_opt(name)).await?;
            Ok(found.and_then(|found| KnownPipeline::read(serde_json::to_value(found).ok()?)))
        })
    }
}

async fn in_time<T>(lookup: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    let found =
        tokio::time::timeout(LIMIT, lookup).await.map_err(|_elapsed| "no answer in time".to_owned())?;
    found.map_err(|error| error.to_string())
}
