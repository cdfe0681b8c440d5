//! Tells the API server which authorities to trust: writes the `caBundle` of the webhook configurations, and
//! nothing else in them. It uses server-side apply, so that the owner of the other fields (a GitOps engine)
//! sees no drift in them.

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use tracing::info;

use crate::status::FIELD_MANAGER;

/// Writes the bundle into both configurations, where it is missing. A configuration that does not exist is
/// ignored: it may be applied later, and the next pass finds it. Returns whether there was anything to write.
pub async fn publish(client: &Client, name: &str, bundle: &str) -> Result<bool, kube::Error> {
    let validating = publish_one::<ValidatingWebhookConfiguration>(client, name, bundle).await?;
    let mutating = publish_one::<MutatingWebhookConfiguration>(client, name, bundle).await?;
    Ok(validating || mutating)
}

/// The authorities that the API server trusts now, from both configurations.
pub async fn published(client: &Client, name: &str) -> Result<String, kube::Error> {
    let validating = published_one::<ValidatingWebhookConfiguration>(client, name).await?;
    Ok(validating + &published_one::<MutatingWebhookConfiguration>(client, name).await?)
}

async fn published_one<K: Configuration>(client: &Client, name: &str) -> Result<String, kube::Error> {
    let api: Api<K> = Api::all(client.clone());
    Ok(api.get_opt(name).await?.map(|found| bundles(&found)).unwrap_or_default())
}

fn bundles<K: Configuration>(found: &K) -> String {
    let bundles = found.webhooks().into_iter().filter_map(|(_, client)| client.ca_bundle.as_ref());
    let texts = bundles.map(|bundle| String::from_utf8_lossy(&bundle.0).into_owned());
    texts.collect::<std::collections::BTreeSet<String>>().into_iter().map(|text| text + "\n").collect()
}

async fn publish_one<K: Configuration>(
    client: &Client,
    name: &str,
    bundle: &str,
) -> Result<bool, kube::Error> {
    let api: Api<K> = Api::all(client.clone());
    let Some(found) = api.get_opt(name).await? else { return Ok(false) };
    let Some(patch) = patch(name, &found, bundle) else { return Ok(false) };
    api.patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&patch)).await?;
    info!(kind = K::KIND, name, "updated the CA bundle that the API server trusts");
    Ok(true)
}

/// The fields to apply: the bundle of every webhook, and its name, which is the key of the list. `None` if
/// all have the bundle.
fn patch<K: Configuration>(name: &str, found: &K, bundle: &str) -> Option<Value> {
    let encoded = ByteString(bundle.as_bytes().to_owned());
    let webhooks = found.webhooks();
    if webhooks.is_empty() || webhooks.iter().all(|(_, client)| client.ca_bundle.as_ref() == Some(&encoded)) {
        return None;
    }
    let webhooks: Vec<Value> = webhooks
        .iter()
        .map(|(name, _)| json!({ "name": name, "clientConfig": { "caBundle": encoded } }))
        .collect();
    Some(json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": K::KIND,
        "metadata": { "name": name }, "webhooks": webhooks
    }))
}

/// The two kinds of configuration, which differ in nothing that matters here.
trait Configuration: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize {
    const KIND: &'static str;
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)>;
}

impl Configuration for ValidatingWebhookConfiguration {
    const KIND: &'static str = "ValidatingWebhookConfiguration";
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)> {
        self.webhooks
            .iter()
            .flatten()
            .map(|webhook| (webhook.name.as_str(), &webhook.client_config))
            .collect()
    }
}

impl Configuration for MutatingWebhookConfiguration {
    const KIND: &'static str = "MutatingWebhookConfiguration";
    fn webhooks(&self) -> Vec<(&str, &WebhookClientConfig)> {
        self.webhooks
            .iter()
            .flatten()
            .map(|webhook| (webhook.name.as_str(), &webhook.client_config))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(bundle: Option<&str>) -> ValidatingWebhookConfiguration {
        let bundle = bundle.map(|text| ByteString(text.as_bytes().to_owned()));
        let webhook = |name: &str| {
            json!({
                "name": name, "sideEffects": "None", "admissionReviewVersions": ["v1"],
                "clientConfig": { "service": { "name": "w", "namespace": "n" }, "caBundle": bundle }
            })
        };
        serde_json::from_value(
            json!({ "metadata": { "name": "w" }, "webhooks": [webhook("a"), webhook("b")] }),
        )
        .unwrap()
    }

    #[test]
    fn only_the_bundle_is_applied_and_only_where_it_differs() {
        let patch_of = |found: &ValidatingWebhookConfiguration| patch("w", found, "new");
        let applied = patch_of(&configuration(Some("old"))).unwrap();
        let bundle = json!(ByteString(b"new".to_vec()));
        assert_eq!(
            applied["webhooks"],
            json!([
                { "name": "a", "clientConfig": { "caBundle": bundle } },
                { "name": "b", "clientConfig": { "caBundle": bundle } },
            ])
        );
        assert!(patch_of(&configuration(None)).is_some());
        assert_eq!(patch_of(&configuration(Some("new"))), None);
        let empty: ValidatingWebhookConfiguration =
            serde_json::from_value(json!({ "metadata": {} })).unwrap();
        assert_eq!(patch_of(&empty), None);
    }

    #[test]
    fn what_is_published_is_read_back_once() {
        assert_eq!(bundles(&configuration(Some("old"))), "old\n");
        assert_eq!(bundles(&configuration(None)), "");
    }
}
