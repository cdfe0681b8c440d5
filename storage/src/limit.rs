//! A limit on the size of answers. They are read whole before they are parsed, and an endpoint is whatever a tenant wrote.

use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextMut;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_smithy_types::body::SdkBody;
use http_body_util::Limited;

/// Refuses to read more than this many bytes of an answer.
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
