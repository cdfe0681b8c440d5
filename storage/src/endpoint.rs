//! Endpoints as written by users.

use url::Url;

/// The text is not an endpoint. The error does not repeat it, because it may contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}: write [http://|https://]host[:port]")]
pub struct EndpointError(&'static str);

/// Parses an endpoint like the API's validation: https if it has no scheme, and nothing after the host.
pub fn parse_endpoint(text: &str) -> Result<Url, EndpointError> {
    let parsed = if text.contains("://") { Url::parse(text) } else { Url::parse(&format!("https://{text}")) };
    let url = parsed.map_err(|_| EndpointError("is not an endpoint"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err(EndpointError("is not an http or https address"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(EndpointError("contains credentials"));
    }
    if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
        return Err(EndpointError("contains more than a host and port"));
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_scheme_is_https() {
        let parsed = |text| parse_endpoint(text).map(|url| url.to_string()).ok();
        assert_eq!(parsed("minio:9000").as_deref(), Some("https://minio:9000/"));
        assert_eq!(parsed("10.0.0.7:9000").as_deref(), Some("https://10.0.0.7:9000/"));
        assert_eq!(parsed("http://minio:9000/").as_deref(), Some("http://minio:9000/"));
        for wrong in ["ftp://x", "https://h/path", "https://h?x=y", "https://", "a b"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn credentials_in_an_endpoint_are_refused_and_not_repeated() {
        let error = parse_endpoint("https://me:hunter2@s3").unwrap_err();
        assert!(error.to_string().contains("credentials") && !error.to_string().contains("hunter2"));
    }
}
