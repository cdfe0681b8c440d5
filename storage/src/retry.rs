//! Which answers are worth another try: a single list, both for the client that repeats a request and for the
//! error that it finally returns.

use aws_sdk_s3::config::retry::{ClassifyRetry, RetryAction};
use aws_smithy_runtime_api::client::interceptors::context::InterceptorContext;

/// Whether the same request may get another answer later: the service was slow, busy, or failed internally.
pub(crate) fn may_pass(status: u16) -> bool {
    matches!(status, 408 | 429 | 500..=599)
}

/// Retries by status. The client's own list contains only 500, 502, 503 and 504, and codes in the body. But a
/// HEAD response has no body, and gateways have their own statuses.
#[derive(Debug)]
pub(crate) struct RetryByStatus;

impl ClassifyRetry for RetryByStatus {
    fn classify_retry(&self, context: &InterceptorContext) -> RetryAction {
        match context.response() {
            Some(response) if may_pass(response.status().as_u16()) => RetryAction::transient_error(),
            _ => RetryAction::NoActionIndicated,
        }
    }

    fn name(&self) -> &'static str {
        "RetryByStatus"
    }
}
