//! Secrets of the cluster, one at a time and only their keys.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};

use crate::admit::{SecretKeys, Secrets};

/// An answer that takes longer than this is not waited for: the request has a deadline of its own.
const LIMIT: Duration = Duration::from_secs(3);

/// Asks the API server.
pub(crate) struct ClusterSecrets(pub(crate) Client);

impl Secrets for ClusterSecrets {
    fn keys<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<Option<SecretKeys>, String>> + Send + 'a>> {
        Box::pin(async move {
            let api: Api<Secret> = Api::namespaced(self.0.clone(), namespace);
            let found = tokio::time::timeout(LIMIT, api.get_opt(name)).await;
            let found =
                found.map_err(|_| "no answer in time".to_owned())?.map_err(|error| error.to_string())?;
            Ok(found.map(|secret| {
                let data = secret.data.into_iter().flatten();
                data.filter(|(_, value)| !value.0.is_empty()).map(|(key, _)| key).collect()
            }))
        })
    }
}
