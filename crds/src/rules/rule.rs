//! The rules by name. Ids are stable: every violation prints the id of its rule, and docs/rules.md lists them
//! all.

use serde::Serialize;
use strum::{Display, EnumIter, EnumMessage};

/// A rule. Its doc comment is its entry in docs/rules.md.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Display, EnumIter, EnumMessage,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Rule {
    /// Every field exists in the API; for a likely typo, the message suggests the right name.
    UnknownField,
    /// Required fields are present.
    MissingField,
    /// A value has the type of its field.
    WrongType,
    /// A value is one of those that its field allows; for a likely typo, the message suggests the right
    /// value.
    UnknownValue,
    /// A number lies within the bounds of its field.
    NumberRange,
    /// The length of a text lies within the bounds of its field.
    TextLength,
    /// The number of entries in a list or mapping lies within the bounds of its field.
    ListLength,
    /// A list that is a set has each entry once.
    ListUnique,
    /// Kubernetes accepts the labels of the object itself.
    ObjectLabel,

    /// A bucket name is 3 to 63 lowercase letters, digits, dots and hyphens, and not an IP address.
    BucketName,
    /// A bucket on AWS (no endpoint) has a region, and a region is well-formed.
    BucketRegion,
    /// An endpoint is `[http://|https://]host[:port]`, without path, query or fragment.
    Endpoint,
    /// An endpoint holds no credentials: they belong in a Secret.
    EndpointCredentials,
    /// An endpoint is not a loopback, link-local or metadata address, unless an administrator allows it.
    EndpointAddress,
    /// The Secret of a bucket exists and has both keys.
    CredentialsSecret,
    /// A prefix is at most 1,024 bytes long and is not a URL.
    Prefix,
    /// Entries of `include` and `exclude` are well-formed globs, relative to the prefix.
    Glob,

    /// A filter's name is a DNS label, because it is a container's name.
    FilterName,
    /// No filter is called `claimer`, `publisher` or, with `mode: Warm`, `install` or `worker`: the
    /// operator's containers have these names.
    FilterNameReserved,
    /// No two filters of a Pipeline have the same name.
    FilterNameUnique,
    /// An image reference is well-formed: `[registry/]repository[:tag][@digest]`.
    Image,
    /// Every container runtime accepts the name of an environment variable.
    EnvName,
    /// No environment variable is set twice.
    EnvUnique,
    /// An environment variable has a value or exactly one source.
    EnvSource,
    /// A resource is `cpu`, `memory`, `ephemeral-storage`, `hugepages-…`, or has a domain such as
    /// `nvidia.com/gpu`.
    ResourceName,
    /// Resource requests and limits are quantities such as `500m` or `2Gi`, and not negative; `prefetchBytes`
    /// is at least `1Mi`.
    Quantity,
    /// No resource request is above its limit; for devices and huge pages the two are equal.
    RequestsWithinLimits,
    /// With `mode: Warm` every filter has a `command`.
    WarmCommand,
    /// `warm` needs `mode: Warm`.
    WarmMode,
    /// A filter with `protocol: Lines` has a `command`.
    LinesCommand,
    /// A sink needs `order: Sequential`.
    SinkOrder,
    /// `sink.from` names one of the filters.
    SinkFrom,
    /// Kubernetes accepts the name of the object itself, and those of the Secrets, Pipelines, namespaces,
    /// service accounts and classes that it names.
    ObjectName,
    /// Labels, annotations and node selectors of worker pods are well-formed.
    PodLabel,
    /// Labels and annotations with the prefix `filter.plainsight.ai/` are reserved for the operator.
    PodLabelReserved,

    /// A ReferenceGrant in the other namespace allows a reference to it.
    ReferenceGrant,
    /// The prefix of a run lies within the prefix of its Pipeline.
    RunPrefix,
    /// A duration is written like `90s`, `15m` or `1h30m`, and lies within the bounds of its field.
    Duration,
    /// `retryBackoff.initial` is at most `retryBackoff.max`.
    BackoffOrder,
    /// `fileTimeout` is at most `timeout`.
    FileTimeout,
    /// `maxFailedFiles` is a count of at most 999999999, or a percentage from 0% to 100%.
    MaxFailedFiles,
    /// `queue.stream` and `queue.group` are set together or not at all.
    QueueKeysBoth,
    /// `queue.stream` is `pr:<runId>:work` and `queue.group` is `cg:<runId>`.
    QueueKey,
    /// `queue.stream` and `queue.group` contain the same runId.
    QueueKeysRunId,
    /// A runId is 1 to 128 letters, digits, dots, underscores and hyphens, starting and ending with a letter
    /// or digit.
    RunId,
    /// A runId belongs to a single run.
    RunIdUnique,
    /// In the spec of a run, only `execution.parallelism`, `execution.maxFailedFiles` and `suspend` may
    /// change.
    Immutable,

    /// A policy has at least one rule or default.
    PolicyEmpty,
    /// A namespace selector is well-formed.
    PolicySelector,
    /// The names of a policy's rules are DNS labels and unique within the policy.
    PolicyRuleName,
    /// A rule has either `cel`, or `field` with exactly one of `regex`, `range`, `required`, `forbidden` and
    /// `schema`.
    PolicyRuleForm,
    /// A CEL expression compiles, and every variable and function in it exists.
    PolicyCel,
    /// A regular expression compiles, in linear-time syntax and bounded memory.
    PolicyRegex,
    /// A JSON Schema compiles, is bounded in size, and refers to nothing outside itself.
    PolicySchema,
    /// A field path is well-formed and has at most one default; only fields of spec, labels and annotations
    /// have defaults.
    PolicyField,
    /// The bounds of a range are of the same kind, and `min` is at most `max`.
    PolicyRange,

    /// The entries of a grant fit together: runs refer to Pipelines and Secrets, Pipelines only to Secrets.
    GrantUseless,
}
