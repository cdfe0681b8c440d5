//! Which answers are worth another try: one list, for the client that repeats a request and for what its failure is
//! called in the end.

use aws_sdk_s3::config::retry::{ClassifyRetry, RetryAction};
use aws_smithy_runtime_api::client::interceptors::context::InterceptorContext;

/// Whether the same request may have another answer later: the service was slow, busy, or failed itself.
pub(crate) fn may_pass(status: u16) -> bool {
    matches!(status, 408 | 429 | 500..=599)
}

/// Repeats by status. The client's own list has only 500, 502, 503 and 504, and the codes in a body: a HEAD has none, and
/// gateways have statuses of their own.
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
