//! Errors of a pass, and obstacles of a run.

use std::time::Duration;

use crds::rules::SecretProblem;
use strum::{AsRefStr, IntoStaticStr, VariantArray};

pub use storage::chain;

/// A failed pass. The variant serves as metric label and as reason of the log line; the data never does.
#[derive(Debug, thiserror::Error, AsRefStr)]
pub enum Error {
    /// Kubernetes refused a request or did not answer.
    #[error("cannot {doing}")]
    Kubernetes {
        /// The action that failed.
        doing: String,
        /// The client's error.
        #[source]
        source: Box<kube::Error>,
    },
    /// A queue operation failed.
    #[error("cannot use the queue of the run")]
    Queue(#[from] queue::Error),
    /// Another object owns something with the name of a part of this run. Usually that object is being
    /// garbage-collected.
    #[error("cannot use {what}: it belongs to another owner; the run waits until it is deleted")]
    NotOurs {
        /// Kind and name.
        what: String,
    },
    /// A stored snapshot cannot be read, or an outcome cannot be written.
    #[error("cannot read or write stored JSON")]
    Json(#[source] serde_json::Error),
    /// The machine provides no random numbers.
    #[error("cannot generate a random name: {0}")]
    Random(getrandom::Error),
    /// A pass exceeded its time limit.
    #[error("cannot finish a pass within {0:?}")]
    TooLong(Duration),
}

impl Error {
    /// Wraps an error of the client.
    pub fn kubernetes(doing: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Kubernetes { doing: doing.into(), source: Box::new(source) }
    }

    /// Whether the API server will give the same answer until something changes.
    pub fn is_refusal(&self) -> bool {
        let Self::Kubernetes { source, .. } = self else { return false };
        matches!(&**source, kube::Error::Api(status) if is_refusal(status))
    }
}

/// Whether the API server will give the same answer until something changes, rather than only at this moment.
pub fn is_refusal(status: &kube::core::Status) -> bool {
    matches!(status.code, 400 | 403 | 405 | 413 | 422)
}

/// The obstacle for a refusal: an exceeded quota has its own reason, whatever object it is about.
pub fn refused(reason: Reason, what: &str, message: &str) -> Obstacle {
    let reason = if message.contains("exceeded quota") { Reason::QuotaExceeded } else { reason };
    reason.because(format!("the API server refuses {what}: {message}"))
}

/// An obstacle that blocks a run. It is shown as `Degraded`; most obstacles resolve themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The kind of obstacle.
    pub reason: Reason,
    /// The explanation for users.
    pub message: String,
}

/// The kind of obstacle: the reason of the condition, and of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, AsRefStr, IntoStaticStr, VariantArray)]
pub enum Reason {
    /// The run's own spec breaks a rule.
    InvalidSpec,
    /// The Pipeline does not exist.
    PipelineNotFound,
    /// The Pipeline breaks a rule.
    PipelineInvalid,
    /// No grant allows a reference to another namespace.
    ReferenceNotGranted,
    /// The credentials Secret does not exist.
    CredentialsMissing,
    /// The credentials Secret lacks a key, or the storage refuses them.
    CredentialsInvalid,
    /// Another PipelineRun now holds this runId.
    RunIdTaken,
    /// A run with another spec used this runId.
    RunIdUsed,
    /// The bucket cannot be listed.
    ListingFailed,
    /// Valkey does not answer, or refuses the operator.
    QueueUnavailable,
    /// Valkey lost the queue, and the bucket is listed again.
    QueueLost,
    /// Valkey has no memory left for more files.
    QueueFull,
    /// The storage of source or sink does not answer.
    StorageUnavailable,
    /// Files do not fit into the workspaces of pods.
    WorkspaceFull,
    /// An image cannot be pulled.
    ImagePullFailed,
    /// A container cannot be started, for a reason other than its image.
    ContainerStartFailed,
    /// A node accepts pods but does not start them.
    NodeNotStarting,
    /// No node accepts the pods.
    PodsUnschedulable,
    /// A quota is exhausted.
    QuotaExceeded,
    /// The API server refuses the Job.
    JobRefused,
    /// The API server refuses the pods.
    PodsRefused,
    /// Pods die before they get a file.
    WorkersFailing,
    /// The cluster drops `managedBy` from Jobs.
    JobNotManaged,
    /// The Job's name is taken by something else.
    NameTaken,
    /// Kubernetes refuses the operator's requests, or keeps answering with an error.
    OperatorRefused,
}

/// How to fix a full queue.
pub const MORE_MEMORY: &str = "give Valkey more memory, or let other runs end first";

impl Reason {
    /// Whether only a person can help, so that tools need not wait. The operator still checks again
    /// occasionally.
    pub fn is_stalled(self) -> bool {
        match self {
            Self::InvalidSpec | Self::RunIdTaken | Self::RunIdUsed | Self::JobNotManaged => true,
            Self::PipelineNotFound
            | Self::PipelineInvalid
            | Self::ReferenceNotGranted
            | Self::CredentialsMissing
            | Self::CredentialsInvalid
            | Self::ListingFailed
            | Self::QueueUnavailable
            | Self::QueueLost
            | Self::QueueFull
            | Self::StorageUnavailable
            | Self::WorkspaceFull
            | Self::ImagePullFailed
            | Self::ContainerStartFailed
            | Self::NodeNotStarting
            | Self::PodsUnschedulable
            | Self::QuotaExceeded
            | Self::JobRefused
            | Self::PodsRefused
            | Self::WorkersFailing
            | Self::NameTaken
            | Self::OperatorRefused => false,
        }
    }

    /// The obstacle for a run that needs the keys in a Secret.
    pub fn of_secret(problem: &SecretProblem) -> Self {
        match problem {
            SecretProblem::Missing => Self::CredentialsMissing,
            SecretProblem::Lacks(_) => Self::CredentialsInvalid,
        }
    }

    /// An obstacle of this kind.
    pub fn because(self, message: impl Into<String>) -> Obstacle {
        Obstacle { reason: self, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_documented() {
        let docs = include_str!("../../docs/runs.md");
        for reason in Reason::VARIANTS {
            let row = format!("| `{}` |", reason.as_ref());
            assert!(docs.contains(&row), "docs/runs.md has no row {row}");
        }
    }

    #[test]
    fn causes_are_told_once() {
        let error = Error::Random(getrandom::Error::UNSUPPORTED);
        assert!(chain(&error).starts_with("cannot generate a random name: "));
    }
}
