//! Warm mode in a Pipeline: pods that stay up for many files, and how their filters are started.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantNames;

use super::cel;

/// How many files a pod processes.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, VariantNames)]
pub enum Mode {
    /// One: a pod per file.
    #[default]
    PodPerFile,
    /// Many, one after the other: pods stay up.
    Warm,
}

/// How a filter receives its files.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, VariantNames)]
pub enum Protocol {
    /// Its command runs once per file.
    #[default]
    Exec,
    /// Its command keeps running and reads one line of JSON per file.
    Lines,
}

impl Protocol {
    /// Whether this is the default protocol.
    pub fn is_exec(&self) -> bool {
        *self == Self::Exec
    }
}

/// When Warm pods are replaced, so that slow leaks in filters stay bounded, and how much they prefetch.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WarmOptions {
    /// How many files a pod processes before it is replaced.
    #[serde(default = "default::max_files_per_pod")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_files_per_pod: i32,

    /// How old a pod may get before it is replaced; it finishes its current file first. Written like `90s`,
    /// `15m` or `1h30m`.
    #[serde(default = "default::max_pod_age")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = cel::duration("maxPodAge"), validation = cel::duration_range("maxPodAge", "1m"))]
    pub max_pod_age: String,

    /// How many bytes of the next files a pod fetches while it processes one, for example `256Mi`.
    #[serde(default = "default::prefetch_bytes")]
    #[schemars(extend("maxLength" = 32))]
    #[x_kube(validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1Mi')) >= 0")
        .message("prefetchBytes is a quantity of at least 1Mi, for example 256Mi [quantity]"))]
    pub prefetch_bytes: Quantity,
}

impl Default for WarmOptions {
    fn default() -> Self {
        Self {
            max_files_per_pod: default::max_files_per_pod(),
            max_pod_age: default::max_pod_age(),
            prefetch_bytes: default::prefetch_bytes(),
        }
    }
}

mod default {
    use super::Quantity;

    pub(super) fn max_files_per_pod() -> i32 {
        10_000
    }
    pub(super) fn max_pod_age() -> String {
        "1h".into()
    }
    pub(super) fn prefetch_bytes() -> Quantity {
        Quantity("256Mi".into())
    }
}
