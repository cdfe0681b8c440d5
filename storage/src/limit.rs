//! A limit on the size of answers. The client reads an answer completely before parsing it, and the endpoint
//! is whatever a tenant configured.

use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextMut;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_smithy_types::body::SdkBody;
use http_body_util::Limited;

/// Stops reading an answer after this many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit(pub(crate) usize);

impl Intercept for Limit {
    fn name(&self) -> &'static str {
        "Limit"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let body = context.response_mut().body_mut();
        let whole = std::mem::replace(body, SdkBody::empty());
        *body = SdkBody::from_body_1_x(Limited::new(whole, self.0));
        Ok(())
    }
}
