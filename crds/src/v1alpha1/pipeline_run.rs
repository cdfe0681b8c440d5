//! `PipelineRun`: one execution of a Pipeline, with its state for people and tools.

use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use protocol::{RunId, RunIdError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, VariantNames};

use super::cel;

/// One execution of a Pipeline. Everything except `execution.parallelism`, `execution.maxFailedFiles` and
/// `suspend` is immutable.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "filter.plainsight.ai",
    version = "v1alpha1",
    kind = "PipelineRun",
    namespaced,
    status = "PipelineRunStatus",
    shortname = "plr",
    category = "openfilter",
    doc = "One execution of a Pipeline over every file of its bucket. It runs once: to run again, create another PipelineRun.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Pipeline", type_ = "string", json_path = ".spec.pipelineRef.name"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.progress"),
    printcolumn(name = "Succeeded", type_ = "integer", json_path = ".status.counts.succeeded"),
    printcolumn(name = "Failed", type_ = "integer", json_path = ".status.counts.failed"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Queued", type_ = "integer", json_path = ".status.counts.queued", priority = 1),
    printcolumn(name = "Running", type_ = "integer", json_path = ".status.counts.running", priority = 1),
    printcolumn(name = "Rate", type_ = "string", json_path = ".status.rate", priority = 1),
    printcolumn(name = "ETA", type_ = "string", json_path = ".status.estimatedCompletionTime", priority = 1),
    printcolumn(name = "Job", type_ = "string", json_path = ".status.jobName", priority = 1),
    printcolumn(name = "Duration", type_ = "string", json_path = ".status.duration", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.pipelineRef == oldSelf.pipelineRef")
        .message("pipelineRef is immutable: a run happens once; create a new PipelineRun instead [immutable]")
        .field_path(".pipelineRef"),
    validation = Rule::new("has(self.source) == has(oldSelf.source) && (!has(self.source) || self.source == oldSelf.source)")
        .message("source is immutable: a run happens once; create a new PipelineRun instead [immutable]"),
    validation = Rule::new("(has(self.env) ? self.env : []) == (has(oldSelf.env) ? oldSelf.env : [])")
        .message("env is immutable: a run happens once; create a new PipelineRun instead [immutable]"),
    validation = Rule::new("has(self.queue) == has(oldSelf.queue) && (!has(self.queue) || self.queue == oldSelf.queue)")
        .message("queue is immutable: the files of this run are already queued there; create a new PipelineRun instead [immutable]")
)]
pub struct PipelineRunSpec {
    /// The Pipeline to run.
    pub pipeline_ref: PipelineReference,

    /// Narrows down the Pipeline's files for this run, so that one Pipeline can serve a different folder
    /// every day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<RunSource>,

    /// Environment variables added to every filter of this run. They override the Pipeline's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), transform = cel::environment)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,

    /// Concurrency, retries and limits of the run.
    #[serde(default)]
    pub execution: Execution,

    /// The Valkey stream and consumer group of this run. If omitted, they are derived from the run's
    /// namespace and name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueKeys>,

    /// Pauses the run: files in progress are finished, and no new ones are started. Set it to false to
    /// resume.
    #[serde(default)]
    pub suspend: bool,
}

impl PipelineRunSpec {
    /// The id of the run with this namespace and name: from its queue keys if they are set, otherwise
    /// derived.
    pub fn run_id(&self, namespace: &str, name: &str) -> Result<RunId, RunIdError> {
        match &self.queue {
            Some(keys) => RunId::from_keys(keys.stream.as_deref(), keys.group.as_deref()),
            None => RunId::derive(namespace, name),
        }
    }
}

/// A Pipeline, in this namespace unless another is named.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PipelineReference {
    /// Name of the Pipeline.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = cel::object_name())]
    pub name: String,

    /// Namespace of the Pipeline, if it is not this one. A ReferenceGrant in that namespace must then allow
    /// the reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = cel::namespace_name())]
    pub namespace: Option<String>,
}

/// The subset of its Pipeline's files that a run processes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RunSource {
    /// Process only keys with this prefix, which must begin with the Pipeline's own prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = cel::key_prefix())]
    pub prefix: Option<String>,

    /// Replaces the Pipeline's `include`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(validation = cel::globs())]
    pub include: Option<Vec<String>>,

    /// Replaces the Pipeline's `exclude`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(validation = cel::globs())]
    pub exclude: Option<Vec<String>>,
}

/// Concurrency, retries and limits. Durations are written like `90s`, `15m` or `1h30m`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.fileTimeout) == has(oldSelf.fileTimeout) && (!has(self.fileTimeout) || self.fileTimeout == oldSelf.fileTimeout)")
        .message("fileTimeout is immutable: a run happens once; create a new PipelineRun instead [immutable]")
        .field_path(".fileTimeout"),
    validation = Rule::new("has(self.timeout) == has(oldSelf.timeout) && (!has(self.timeout) || self.timeout == oldSelf.timeout)")
        .message("timeout is immutable: a run happens once; create a new PipelineRun instead [immutable]")
        .field_path(".timeout"),
    validation = Rule::new("(has(self.nonRetryableExitCodes) ? self.nonRetryableExitCodes : []) == (has(oldSelf.nonRetryableExitCodes) ? oldSelf.nonRetryableExitCodes : [])")
        .message("nonRetryableExitCodes is immutable: a run happens once; create a new PipelineRun instead [immutable]")
        .field_path(".nonRetryableExitCodes"),
    validation = cel::not_longer("fileTimeout", "timeout")
        .message("fileTimeout must not be longer than timeout, the limit of the whole run [file-timeout]")
        .field_path(".fileTimeout")
)]
pub struct Execution {
    /// How many pods may run at once. It can be changed during the run.
    #[serde(default = "default::parallelism")]
    #[schemars(range(min = 1, max = 10_000))]
    pub parallelism: i32,

    /// How many times a file is tried before it is dead-lettered.
    #[serde(default = "default::max_attempts")]
    #[schemars(range(min = 1, max = 100))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("maxAttempts is immutable: a run happens once; create a new PipelineRun instead [immutable]"))]
    pub max_attempts: i32,

    /// How long a file may stay claimed by a pod on a lost node before it is given to another pod.
    /// A pod that is alive keeps its file, however long it takes.
    #[serde(default = "default::pending_timeout")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("pendingTimeout is immutable: a run happens once; create a new PipelineRun instead [immutable]"),
        validation = cel::duration("pendingTimeout"),
        validation = cel::duration_range("pendingTimeout", "10s"))]
    pub pending_timeout: String,

    /// How long a failed file waits before it is tried again.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("retryBackoff is immutable: a run happens once; create a new PipelineRun instead [immutable]"))]
    pub retry_backoff: RetryBackoff,

    /// Time limit for the filters' work on one file in one attempt; waiting for storage does not count. If
    /// omitted, there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = cel::duration("fileTimeout"), validation = cel::duration_range("fileTimeout", "1s"))]
    pub file_timeout: Option<String>,

    /// Time limit for the whole run, counted from `status.startTime`; time in which the run waits or is
    /// suspended counts too. Files that are not finished by then are dead-lettered. If omitted, there is no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = cel::duration("timeout"), validation = cel::duration_range("timeout", "1s"))]
    pub timeout: Option<String>,

    /// Exit codes with which a filter says "this input is bad": the file is dead-lettered without another
    /// attempt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(range(min = 1, max = 255)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub non_retryable_exit_codes: Vec<i32>,

    /// How many files may fail, as a count (`5`) or a percentage of all files (`10%`). Up to this limit, the
    /// run still counts as succeeded; one more failed file stops it early. If omitted, failed files do not
    /// stop the run early, but a single one makes it fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 16))]
    #[x_kube(validation = Rule::new("string(self).matches('^([0-9]{1,9}|(100|[0-9]{1,2})%)$')")
        .message("maxFailedFiles is a count such as 5 (at most 999999999) or a percentage from 0% to 100% [max-failed-files]"))]
    pub max_failed_files: Option<IntOrString>,
}

impl Default for Execution {
    fn default() -> Self {
        Self {
            parallelism: default::parallelism(),
            max_attempts: default::max_attempts(),
            pending_timeout: default::pending_timeout(),
            retry_backoff: RetryBackoff::default(),
            file_timeout: None,
            timeout: None,
            non_retryable_exit_codes: Vec::new(),
            max_failed_files: None,
        }
    }
}

/// Exponential back-off with jitter, per file.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = cel::not_longer("initial", "max")
    .message("retryBackoff.initial must not be longer than retryBackoff.max [backoff-order]"))]
pub struct RetryBackoff {
    /// The wait after the first failure; it doubles after each further one.
    #[serde(default = "default::backoff_initial")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = cel::duration("retryBackoff.initial"), validation = cel::duration_range("retryBackoff.initial", "0s"))]
    pub initial: String,

    /// The longest wait.
    #[serde(default = "default::backoff_max")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = cel::duration("retryBackoff.max"), validation = cel::duration_range("retryBackoff.max", "0s"))]
    pub max: String,
}

impl Default for RetryBackoff {
    fn default() -> Self {
        Self { initial: default::backoff_initial(), max: default::backoff_max() }
    }
}

mod default {
    pub(super) fn parallelism() -> i32 {
        10
    }
    pub(super) fn max_attempts() -> i32 {
        3
    }
    pub(super) fn pending_timeout() -> String {
        "15m".into()
    }
    pub(super) fn backoff_initial() -> String {
        "1s".into()
    }
    pub(super) fn backoff_max() -> String {
        "5m".into()
    }
}

/// Stream and consumer group of a run. Both contain the same runId: 1 to 128 letters, digits, dots,
/// underscores and hyphens, starting and ending with a letter or digit, in braces if Valkey is a cluster.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.stream) && has(self.group)")
        .message("set both queue.stream (pr:<runId>:work) and queue.group (cg:<runId>), or leave queue out and they are derived [queue-keys-both]"),
    validation = Rule::new("!has(self.stream) || !has(self.group) || self.stream == 'pr:' + self.group.substring(3) + ':work'")
        .message("queue.stream (pr:<runId>:work) and queue.group (cg:<runId>) must hold the same runId [queue-keys-run-id]")
)]
pub struct QueueKeys {
    /// `pr:<runId>:work`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 140))]
    #[x_kube(validation = Rule::new("self.matches('^pr:([A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?|[{][A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?[}]):work$')")
        .message("queue.stream must be pr:<runId>:work, with a runId of 1 to 128 letters, digits, dots, underscores and hyphens that starts and ends with a letter or digit [queue-key]"))]
    pub stream: Option<String>,

    /// `cg:<runId>`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 135))]
    #[x_kube(validation = Rule::new("self.matches('^cg:([A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?|[{][A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?[}])$')")
        .message("queue.group must be cg:<runId>, with a runId of 1 to 128 letters, digits, dots, underscores and hyphens that starts and ends with a letter or digit [queue-key]"))]
    pub group: Option<String>,
}

/// The observed state of a run, written by the operator.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PipelineRunStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The id of this run in Valkey and in labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,

    /// The state of the run in one word. Tools should read the conditions instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,

    /// Every listed file is in exactly one of these counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,

    /// Files found so far, while the bucket is being listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed_files: Option<i64>,

    /// Settled files out of all files, for example `42/100`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,

    /// Name of the Job that owns the worker pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,

    /// When the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,

    /// When the run ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// How long the run took, once it is finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,

    /// Files settled per second during the last minute, for example `0.72` or `148`. Like `workers` and
    /// `estimatedCompletionTime`, it is written together with `counts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,

    /// When the run will end if the rate stays the same. Absent while the bucket is still being listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimated_completion_time: Option<Time>,

    /// How many pods work on the run, or are about to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<i64>,

    /// The files that failed permanently, in groups of alike failures, largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub failures: Vec<FailureGroup>,

    /// The files that most recently failed permanently; the dead-letter queue lists all failed files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub recent_failures: Vec<FailedFile>,

    /// `Progressing`, `Succeeded` and `Degraded` for people; `Ready`, `Reconciling` and `Stalled` for tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The state of a run.
#[derive(
    JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Display, VariantNames,
)]
#[schemars(transform = described_by_its_field)]
pub enum Phase {
    /// Waiting for its Pipeline, a Secret or Valkey.
    #[default]
    Pending,
    /// The bucket is being listed.
    Listing,
    /// Files are being processed.
    Running,
    /// Paused by `spec.suspend`.
    Suspended,
    /// Finished: every file succeeded, or at most `maxFailedFiles` failed.
    Succeeded,
    /// Finished with failed files, or stopped early.
    Failed,
}

/// Removes the description of a type, which would otherwise replace that of an optional field with this type.
fn described_by_its_field(schema: &mut schemars::Schema) {
    schema.remove("description");
}

/// `totalFiles = queued + running + succeeded + failed`, always. `retried` counts attempts, not files.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// All files of the run.
    pub total_files: i64,
    /// Waiting for a pod, or for their next attempt.
    pub queued: i64,
    /// Claimed by a pod.
    pub running: i64,
    /// Processed by every filter.
    pub succeeded: i64,
    /// Dead-lettered.
    pub failed: i64,
    /// Attempts that failed and were repeated.
    #[serde(default)]
    pub retried: i64,
}

/// Files that failed permanently in the same way.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FailureGroup {
    /// Why they failed. An ellipsis stands for what differs from file to file.
    #[schemars(length(max = 256))]
    pub reason: String,
    /// Their number.
    pub count: i64,
    /// Key of the one that failed last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub example: Option<String>,
    /// When it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<Time>,
}

/// A file that failed permanently.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FailedFile {
    /// Key of the file in the bucket.
    #[schemars(length(max = 1024))]
    pub file: String,
    /// How many times the file was tried.
    pub attempts: i32,
    /// Why the last attempt failed.
    #[schemars(length(max = 512))]
    pub reason: String,
    /// Exit code of the container that failed, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The pod of the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod: Option<String>,
    /// When the file was dead-lettered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}
