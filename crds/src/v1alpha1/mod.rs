//! The `filter.plainsight.ai/v1alpha1` kinds. `kubectl explain` prints the doc comments of these types.

mod bucket;
mod cel;
mod grant;
mod pipeline;
mod pipeline_run;
mod policy;
mod warm;

pub use bucket::{Bucket, SecretReference};
pub use grant::{GrantFrom, GrantFromKind, GrantTo, GrantToKind, ReferenceGrant, ReferenceGrantSpec};
pub use pipeline::{
    Filter, ImagePullPolicy, LastRun, Order, Pipeline, PipelineSpec, PipelineStatus, PodOptions, Sink, Source,
};
pub use pipeline_run::{
    Counts, Execution, FailedFile, FailureGroup, Phase, PipelineReference, PipelineRun, PipelineRunSpec,
    PipelineRunStatus, QueueKeys, RetryBackoff, RunSource,
};
pub use policy::{
    PipelinePolicy, PipelinePolicySpec, PipelinePolicyStatus, PolicyAction, PolicyDefault, PolicyRange,
    PolicyRule, PolicyTarget,
};
pub use warm::{Mode, Protocol, WarmOptions};
