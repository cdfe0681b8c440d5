//! The rules by name. An id is stable: it is printed with every violation, and docs/rules.md lists them all.

use serde::Serialize;
use strum::{Display, EnumIter, EnumMessage};

/// A rule. The doc comment of each is its entry in docs/rules.md.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Display, EnumIter, EnumMessage,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Rule {
    /// Every field is one of the API's; a near miss of a name is pointed out.
    UnknownField,
    /// Required fields are present.
    MissingField,
    /// A value has the type of its field.
    WrongType,
    /// A value is one of the words that its field allows; a near miss is pointed out.
    UnknownValue,
    /// A number lies within the bounds of its field.
    NumberRange,
    /// A text is as long as its field allows.
    TextLength,
    /// A list has as many entries as its field allows.
    ListLength,

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
    /// A prefix is at most 1,024 bytes long and not a URL.
    Prefix,
    /// Entries of include and exclude are globs, relative to the prefix.
    Glob,

    /// A filter's name is a DNS label, because it is a container's name.
    FilterName,
    /// A filter is not called `claimer` or `publisher`, nor `install` or `worker` with `mode: Warm`: the operator adds containers of these names.
    FilterNameReserved,
    /// No two filters of a Pipeline have the same name.
    FilterNameUnique,
    /// An image reference is well-formed: `[registry/]repository[:tag][@digest]`.
    Image,
    /// The name of an environment variable is one that every container runtime accepts.
    EnvName,
    /// No environment variable is set twice.
    EnvUnique,
    /// An environment variable has a value or exactly one source.
    EnvSource,
    /// A resource is `cpu`, `memory`, `ephemeral-storage`, `hugepages-…`, or has a domain such as `nvidia.com/gpu`.
    ResourceName,
    /// Resource requests and limits are quantities such as `500m` or `2Gi`, and not negative; `prefetchBytes` is at least `1Mi`.
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
    /// Names of Secrets, Pipelines, namespaces, service accounts and classes are names that Kubernetes accepts.
    ObjectName,
    /// Labels, annotations and node selectors of worker pods are well-formed.
    PodLabel,
    /// Labels and annotations of `filter.plainsight.ai/` are left to the operator.
    PodLabelReserved,

    /// A reference to another namespace is allowed by a ReferenceGrant there.
    ReferenceGrant,
    /// The prefix of a run lies within the prefix of its Pipeline.
    RunPrefix,
    /// A duration is written like `90s`, `15m` or `1h30m`, and within the bounds of its field.
    Duration,
    /// `retryBackoff.initial` is at most `retryBackoff.max`.
    BackoffOrder,
    /// `fileTimeout` is at most `timeout`.
    FileTimeout,
    /// `maxFailedFiles` is a count, or a percentage from 0% to 100%.
    MaxFailedFiles,
    /// `queue.stream` and `queue.group` are set together or not at all.
    QueueKeysBoth,
    /// `queue.stream` is `pr:<runId>:work` and `queue.group` is `cg:<runId>`.
    QueueKey,
    /// `queue.stream` and `queue.group` hold the same runId.
    QueueKeysRunId,
    /// A runId is 1 to 128 letters, digits, dots, underscores and hyphens, starting and ending with a letter or digit.
    RunId,
    /// A runId belongs to a single run.
    RunIdUnique,
    /// Of a run's spec only `execution.parallelism`, `execution.maxFailedFiles` and `suspend` change.
    Immutable,

    /// A policy has at least one rule or default.
    PolicyEmpty,
    /// A namespace selector is well-formed.
    PolicySelector,
    /// Names of a policy's rules are DNS labels, each used once.
    PolicyRuleName,
    /// A rule has either `cel`, or `field` with exactly one of `regex`, `range`, `required`, `forbidden` and `schema`.
    PolicyRuleForm,
    /// A CEL expression compiles, and knows every variable and function it names.
    PolicyCel,
    /// A regular expression compiles, in linear-time syntax and bounded memory.
    PolicyRegex,
    /// A JSON Schema compiles, is bounded in size, and refers to nothing outside itself.
    PolicySchema,
    /// A field path is well-formed, and has at most one default; defaults go into spec, labels and annotations.
    PolicyField,
    /// A range has bounds of one kind, the lower one first.
    PolicyRange,

    /// A grant's entries go together: runs refer to Pipelines and Secrets, Pipelines to Secrets only.
    GrantUseless,
}
