//! `ReferenceGrant`: lets objects of other namespaces refer to objects of this one.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, VariantNames};

use super::cel;

/// Which objects of other namespaces may refer to which objects of this one.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "filter.plainsight.ai",
    version = "v1alpha1",
    kind = "ReferenceGrant",
    namespaced,
    category = "openfilter",
    doc = "Lets PipelineRuns or Pipelines of other namespaces refer to Pipelines or Secrets of this one. It lives in the namespace that owns the target; deleting it withdraws the permission.",
    derive = "PartialEq",
    printcolumn(name = "From", type_ = "string", json_path = ".spec.from[*].namespace"),
    printcolumn(name = "To", type_ = "string", json_path = ".spec.to[*].kind"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ReferenceGrantSpec {
    /// The objects that may refer to this namespace: each entry is one kind in one namespace.
    #[schemars(length(min = 1, max = 64))]
    pub from: Vec<GrantFrom>,

    /// The objects of this namespace that they may refer to.
    #[schemars(length(min = 1, max = 64))]
    pub to: Vec<GrantTo>,
}

/// Objects of one kind in one other namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct GrantFrom {
    /// Kind of the objects that refer.
    pub kind: GrantFromKind,
    /// Namespace of the objects that refer.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = cel::namespace_name())]
    pub namespace: String,
}

/// Kinds that refer to other objects.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Display, VariantNames)]
#[allow(missing_docs)]
pub enum GrantFromKind {
    PipelineRun,
    Pipeline,
}

/// Objects of one kind in this namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct GrantTo {
    /// Kind of the objects that are referred to.
    pub kind: GrantToKind,
    /// Name of a single object; if omitted, all objects of the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub name: Option<String>,
}

/// Kinds that can be referred to.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Display, VariantNames)]
#[allow(missing_docs)]
pub enum GrantToKind {
    Pipeline,
    Secret,
}
