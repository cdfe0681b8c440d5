//! What an error of the storage means for the attempt. Only the service's code and message are repeated, never its whole
//! answer: that can hold parts of a signature.

use std::error::Error;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use crate::exit::{Exit, chain};

/// A request failed for good, after all its tries.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StorageError {
    #[error("access refused: {0}")]
    NoAccess(String),
    #[error("not found: {0}")]
    Gone(String),
    #[error("changed since it was listed: {0}")]
    Changed(String),
    #[error("no usable answer: {0}")]
    Unreachable(String),
    #[error("request refused: {0}")]
    Refused(String),
}

impl StorageError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::NoAccess(_) => Exit::NoAccess,
            Self::Gone(_) => Exit::ObjectGone,
            Self::Changed(_) => Exit::ObjectChanged,
            Self::Unreachable(_) => Exit::StorageUnreachable,
            Self::Refused(_) => Exit::StorageRefused,
        }
    }
}

impl<E> From<SdkError<E, HttpResponse>> for StorageError
where
    E: ProvideErrorMetadata + Error + Send + Sync + 'static,
{
    fn from(error: SdkError<E, HttpResponse>) -> Self {
        let status = error.raw_response().map(|response| response.status().as_u16());
        let Some(service) = error.as_service_error() else {
            if has::<CredentialsError>(&error) {
                return Self::NoAccess(format!("no credentials: {}", chain(&error)));
            }
            return Self::Unreachable(chain(&error));
        };
        let said = match (service.code(), service.message()) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            // A HEAD has no body to say more in.
            (None, _) => "no reason given".to_owned(),
        };
        let said = status.map_or_else(|| said.clone(), |status| format!("{status} {said}"));
        match status {
            Some(401 | 403) => Self::NoAccess(said),
            Some(404) => Self::Gone(said),
            // If-Match failed, or the object is shorter than the range that was asked for.
            Some(412 | 416) => Self::Changed(said),
            Some(400..=407 | 409..=428 | 430..=499) => Self::Refused(said),
            _ => Self::Unreachable(said),
        }
    }
}

/// Whether an error of this type is among the causes.
pub(crate) fn has<T: Error + 'static>(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<T>() {
            return true;
        }
        cause = error.source();
    }
    false
}
