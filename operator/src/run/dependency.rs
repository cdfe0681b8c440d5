//! The dependencies of a run besides its files.

use strum::{IntoStaticStr, VariantArray};

use crate::error::Reason;

/// A dependency of a run, which can fail without any file being at fault. They are ordered as they are to be
/// reported: the first needs a person most urgently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray, IntoStaticStr)]
pub enum Dependency {
    /// The source accepts our keys.
    SourceCredentials,
    /// The sink accepts our keys.
    SinkCredentials,
    /// Images can be pulled.
    Image,
    /// Containers can be created and started from them.
    Container,
    /// The source answers.
    Source,
    /// The sink answers.
    Sink,
    /// The workspace has room for the file.
    Workspace,
}

/// A pod's use of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The claimer fetches the file.
    Fetch,
    /// The publisher uploads the results.
    Publish,
}

impl Dependency {
    /// The storage of an operation.
    pub fn storage(operation: Operation) -> Self {
        match operation {
            Operation::Fetch => Self::Source,
            Operation::Publish => Self::Sink,
        }
    }

    /// The keys of an operation.
    pub fn credentials(operation: Operation) -> Self {
        match operation {
            Operation::Fetch => Self::SourceCredentials,
            Operation::Publish => Self::SinkCredentials,
        }
    }

    /// The operation that fails without this dependency, if it belongs to storage.
    pub fn operation(self) -> Option<Operation> {
        match self {
            Self::SourceCredentials | Self::Source => Some(Operation::Fetch),
            Self::SinkCredentials | Self::Sink => Some(Operation::Publish),
            Self::Image | Self::Container | Self::Workspace => None,
        }
    }

    /// The dependency's name in metrics; `None` if it never slows a run down. A full workspace is as full for
    /// one pod as for many, and other nodes may have room.
    pub fn label(self) -> Option<&'static str> {
        match self {
            Self::SourceCredentials | Self::SinkCredentials => Some("credentials"),
            Self::Image | Self::Container => Some("image"),
            Self::Source => Some("source"),
            Self::Sink => Some("sink"),
            Self::Workspace => None,
        }
    }

    /// The reason of `Degraded` while the dependency fails.
    pub fn reason(self) -> Reason {
        match self {
            Self::SourceCredentials | Self::SinkCredentials => Reason::CredentialsInvalid,
            Self::Image => Reason::ImagePullFailed,
            Self::Container => Reason::ContainerStartFailed,
            Self::Source | Self::Sink => Reason::StorageUnavailable,
            Self::Workspace => Reason::WorkspaceFull,
        }
    }

    /// The failure in words.
    pub fn problem(self) -> &'static str {
        match self {
            Self::SourceCredentials => "the source's storage refuses the credentials",
            Self::SinkCredentials => "the sink's storage refuses the credentials",
            Self::Image => "an image cannot be pulled",
            Self::Container => "a container cannot be started",
            Self::Source => "the source's storage is unavailable",
            Self::Sink => "the sink's storage is unavailable",
            Self::Workspace => "files do not fit into the workspace",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn every_breaker_has_a_metric_from_the_start() {
        let text = Metrics::new().encode().unwrap_or_default();
        for label in Dependency::VARIANTS.iter().filter_map(|dependency| dependency.label()) {
            let line = format!("openfilter_breaker_open{{dependency=\"{label}\"}} 0");
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }
}
