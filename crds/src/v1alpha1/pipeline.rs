//! `Pipeline`: the recipe, that is, which bucket, which filters, and in which order.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, LocalObjectReference, PodSecurityContext, ResourceRequirements, Toleration,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantNames;

use super::{Bucket, Mode, Phase, Protocol, WarmOptions, cel};

/// What to run over which files. Nothing runs until a PipelineRun refers to it.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "filter.plainsight.ai",
    version = "v1alpha1",
    kind = "Pipeline",
    namespaced,
    status = "PipelineStatus",
    shortname = "pl",
    category = "openfilter",
    doc = "A recipe: a chain of containers (filters) that processes every file of a bucket. A PipelineRun is one execution of it.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Bucket", type_ = "string", json_path = ".spec.source.bucket.name"),
    printcolumn(name = "Order", type_ = "string", json_path = ".spec.order"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "Last Run", type_ = "string", json_path = ".status.lastRun.name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode", priority = 1),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.sink) || self.order == 'Sequential'")
        .message("a sink needs order: Sequential, because results are uploaded after the last filter; set order: Sequential or remove the sink [sink-order]")
        .field_path(".order"),
    validation = Rule::new("!has(self.sink) || !has(self.sink.from) || self.filters.exists(f, f.name == self.sink.from)")
        .message("sink.from must name one of the filters; leave it out to upload what the last filter wrote [sink-from]")
        .field_path(".sink.from"),
    validation = Rule::new("!has(self.warm) || self.mode == 'Warm'")
        .message("warm needs mode: Warm, because only then pods stay up; set mode: Warm or remove warm [warm-mode]")
        .field_path(".warm"),
    validation = Rule::new("self.mode != 'Warm' || self.filters.all(f, has(f.command) && size(f.command) > 0)")
        .message("mode: Warm needs a command on every filter, because the operator does not know the entrypoints of images; write each image's entrypoint as command, or set mode: PodPerFile [warm-command]")
        .field_path(".filters"),
    validation = Rule::new("self.mode != 'Warm' || self.filters.all(f, !(f.name in ['install', 'worker']))")
        .message("with mode: Warm, install and worker are the names of the containers that prepare the pod and serve the filters; choose another name [filter-name-reserved]")
        .field_path(".filters")
)]
pub struct PipelineSpec {
    /// The files to process.
    pub source: Source,

    /// `Sequential` runs the filters one after the other; `Concurrent` starts them all together.
    #[serde(default)]
    pub order: Order,

    /// `PodPerFile` starts a pod for each file. `Warm` keeps pods up and runs the filters' commands once per
    /// file, which suits many small files; every filter then needs a `command`. A change affects later runs
    /// only.
    #[serde(default)]
    pub mode: Mode,

    /// When pods of `mode: Warm` are replaced, and how much they prefetch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<WarmOptions>,

    /// The containers that each file goes through, in order.
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub filters: Vec<Filter>,

    /// Where results are uploaded once all filters have succeeded. Without a sink, filters store their
    /// results themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sink: Option<Sink>,

    /// Scheduling and identity of the worker pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodOptions>,
}

impl PipelineSpec {
    /// The source's bucket and, if there is a sink, the sink's.
    pub fn buckets(&self) -> impl Iterator<Item = &Bucket> {
        std::iter::once(&self.source.bucket).chain(self.sink.as_ref().map(|sink| &sink.bucket))
    }
}

/// The files of a bucket to process.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// The bucket to list.
    pub bucket: Bucket,

    /// Globs on the key after the prefix; a file must match at least one of them. Empty means all files.
    /// `*` stays within a folder, `**` crosses folders: `**/*.jpg`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(validation = cel::globs())]
    pub include: Vec<String>,

    /// Globs on the key after the prefix; a file that matches any of them is excluded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(validation = cel::globs())]
    pub exclude: Vec<String>,
}

/// The order in which filters process a file.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, VariantNames)]
pub enum Order {
    /// One after the other: a filter starts once the one before it has succeeded.
    #[default]
    Sequential,
    /// All at once, as containers of one pod.
    Concurrent,
}

/// One container of the chain. It reads `/ws/input` and writes below `/ws/out/<name>/`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.protocol) || self.protocol != 'Lines' || (has(self.command) && size(self.command) > 0)")
        .message("protocol: Lines needs a command, because the operator does not know the image's entrypoint; write the entrypoint as command, or set protocol: Exec [lines-command]")
        .field_path(".command")
)]
pub struct Filter {
    /// Unique name, used as the container's name.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = cel::filter_name(), validation = Rule::new("!(self in ['claimer', 'publisher'])")
        .message("claimer and publisher are the names of the containers that fetch the file and upload the results; choose another name [filter-name-reserved]"))]
    pub name: String,

    /// Container image, for example `ghcr.io/acme/resize:1.4`.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,

    /// Replaces the entrypoint of the image. `mode: Warm` and `protocol: Lines` need it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub command: Vec<String>,

    /// Arguments of the entrypoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub args: Vec<String>,

    /// `Exec` (the default) runs the command once per file. `Lines` starts it once and sends it one line of
    /// JSON per file on stdin; the command answers each with one line on stdout that starts with
    /// `::openfilter::`.
    // No default in the schema: unless Argo CD compares on the server, it reports a default within a list as
    // drift.
    #[serde(default, skip_serializing_if = "Protocol::is_exec")]
    pub protocol: Protocol,

    /// Environment variables. They override those that every filter gets (SOURCE_PATH, OPENFILTER_RUN, …).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), transform = cel::environment)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,

    /// CPU, memory and other resources of the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,

    /// When to pull the image. If omitted, Kubernetes' default applies: `Always` for the tag `latest`, or
    /// with neither tag nor digest; otherwise `IfNotPresent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
}

/// When to pull an image.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, VariantNames)]
#[allow(missing_docs)]
pub enum ImagePullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// Where results go. A retry uploads under the same names, so it replaces results and never duplicates them.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Sink {
    /// The bucket to write to. A result is stored as `<prefix><key without the source prefix>/<path below
    /// /ws/out/<from>/>`.
    pub bucket: Bucket,

    /// The filter whose results are uploaded; if omitted, the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub from: Option<String>,
}

/// Settings of the worker pods.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PodOptions {
    /// Service account of the worker pods. Its token is not mounted; the account provides
    /// ambient cloud identity and pull secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub service_account_name: Option<String>,

    /// Secrets for pulling the filters' images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<LocalObjectReference>,

    /// Labels that a node must have to run the worker pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,

    /// Taints that the worker pods tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub tolerations: Vec<Toleration>,

    /// Affinity of the worker pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,

    /// Priority class of the worker pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub priority_class_name: Option<String>,

    /// Runtime class of the worker pods, for example for sandboxed containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub runtime_class_name: Option<String>,

    /// Pod security context. It is merged over the default, which satisfies Pod Security "restricted".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_context: Option<PodSecurityContext>,

    /// Extra labels for the worker pods. The prefix `filter.plainsight.ai/` is reserved for the operator.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    #[x_kube(validation = Rule::new("self.all(key, !key.startsWith('filter.plainsight.ai/'))")
        .message("labels of filter.plainsight.ai/ belong to the operator; use a prefix of your own [pod-label-reserved]"))]
    pub labels: BTreeMap<String, String>,

    /// Extra annotations for the worker pods. The prefix `filter.plainsight.ai/` is reserved for the
    /// operator.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    #[x_kube(validation = Rule::new("self.all(key, !key.startsWith('filter.plainsight.ai/'))")
        .message("annotations of filter.plainsight.ai/ belong to the operator; use a prefix of your own [pod-label-reserved]"))]
    pub annotations: BTreeMap<String, String>,
}

/// The observed state of a Pipeline, written by the operator.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PipelineStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Ready`: the Pipeline is valid and its credentials Secret is present and well-formed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// The most recent run of this Pipeline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<LastRun>,
}

/// The most recent run of a Pipeline.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LastRun {
    /// Name of the PipelineRun.
    pub name: String,
    /// Namespace of the PipelineRun.
    pub namespace: String,
    /// Phase of the run when this status was written.
    pub phase: Phase,
    /// When the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When the run finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
}
