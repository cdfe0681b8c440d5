//! Installs the CRDs on a cluster, for every suite that needs them.

use std::fs;
use std::time::Duration;

use crds::definitions;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use testbed::{Doing, Testbed};

use crate::root;

/// Applies the generated files, as a user does, and waits until the API server serves them.
pub async fn install(testbed: &Testbed) {
    for crd in definitions::all() {
        let path = root().join(format!("crds/{}.yaml", crd.spec.names.plural));
        testbed.apply(&fs::read_to_string(path).unwrap()).unwrap();
    }
    let api: Api<CustomResourceDefinition> = Api::all(testbed.client());
    for crd in definitions::all() {
        let name = crd.metadata.name.unwrap();
        let established = async || {
            let crd = api.get(&name).await.doing(|| format!("read the state of {name}"))?;
            let conditions = crd.status.and_then(|status| status.conditions).unwrap_or_default();
            Ok(conditions.iter().any(|c| c.type_ == "Established" && c.status == "True").then_some(()))
        };
        testbed
            .eventually(&format!("{name} is served"), Duration::from_secs(120), established)
            .await
            .unwrap();
    }
}
