//! Errors of the storage, by their meaning. They repeat only the service's code and message, never its whole
//! answer, which can contain parts of a signature.

use std::error::Error;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use http_body_util::LengthLimitError;
use strum::AsRefStr;

use crate::guard::AddressRefused;
use crate::retry::may_pass;

/// A request failed permanently, after all its tries. The variant is suitable as a metric label or an event
/// reason; the text is not.
#[derive(Debug, thiserror::Error, AsRefStr)]
pub enum StorageError {
    /// The service refuses us, or there are no credentials.
    #[error("access refused: {0}")]
    NoAccess(String),
    /// The object does not exist.
    #[error("not found: {0}")]
    Gone(String),
    /// The answer is 404, but not in the words of S3: a HEAD response has none, and a gateway that does not
    /// reach the service answers in the same way for every object.
    #[error("nothing found: {0}")]
    NotFound(String),
    /// According to the service, the bucket does not exist. A gateway whose volume is not mounted also says
    /// so.
    #[error("no such bucket: {0}")]
    NoBucket(String),
    /// The object is not the requested one.
    #[error("changed since it was listed: {0}")]
    Changed(String),
    /// The service does not answer, or only with internal errors.
    #[error("no usable answer: {0}")]
    Unreachable(String),
    /// The service refuses the request itself.
    #[error("request refused: {0}")]
    Refused(String),
    /// The service's answer must not be trusted.
    #[error("invalid answer: {0}")]
    Unusable(String),
    /// The guard of the bucket refuses the service's address.
    #[error("address refused: {0}")]
    AddressRefused(String),
}

impl StorageError {
    /// Whether retrying later can help without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::NoAccess(_)
            | Self::Gone(_)
            | Self::NotFound(_)
            | Self::NoBucket(_)
            | Self::Changed(_)
            | Self::Refused(_)
            | Self::Unusable(_)
            | Self::AddressRefused(_) => false,
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
            if let Some(refused) = cause::<AddressRefused>(&error) {
                return Self::AddressRefused(refused.to_string());
            }
            if has::<LengthLimitError>(&error) {
                return Self::Unusable("it is too long".to_owned());
            }
            return Self::Unreachable(chain(&error));
        };
        let said = match (service.code(), service.message()) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            // A HEAD response has no body with more details.
            (None, _) => "no reason given".to_owned(),
        };
        let said = status.map_or_else(|| said.clone(), |status| format!("{status} {said}"));
        let is_code = |codes: &[&str]| service.code().is_some_and(|code| codes.contains(&code));
        match status {
            // versitygw did not find the user, and reports it as if the bucket were missing.
            _ if service.code() == Some("XAdminUserNotFound") => Self::NoAccess(said),
            // S3 reports some internal errors, and some problems with keys, as errors of the request.
            _ if is_code(&["RequestTimeout", "OperationAborted", "ConditionalRequestConflict"]) => {
                Self::Unreachable(said)
            }
            _ if is_code(&["ExpiredToken", "InvalidToken"]) => Self::NoAccess(said),
            _ if is_code(&["NoSuchBucket"]) => Self::NoBucket(said),
            Some(401 | 403) => Self::NoAccess(said),
            Some(404) if is_code(&["NoSuchKey", "NoSuchVersion", "NoSuchUpload"]) => Self::Gone(said),
            Some(404) => Self::NotFound(said),
            // If-Match failed, or the object is shorter than the requested range.
            Some(412 | 416) => Self::Changed(said),
            Some(status @ 400..=499) if !may_pass(status) => Self::Refused(said),
            _ => Self::Unreachable(said),
        }
    }
}

/// An error and its causes, outermost first.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Many errors of the libraries repeat their cause.
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

/// Whether an error of this type is among the causes.
pub fn has<T: Error + 'static>(error: &(dyn Error + 'static)) -> bool {
    cause::<T>(error).is_some()
}

fn cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}
