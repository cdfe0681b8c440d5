//! Keeps requests away from addresses that only this process can reach, due to its network position: instance
//! metadata, loopback, link-local. A name can resolve to any address, and to another one a second later, so
//! the check happens where the connection is made: the address that is checked is the address that is used.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::dns::{DnsFuture, ResolveDns, ResolveDnsError};
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpClient,
    SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use hyper_util::client::legacy::connect::dns::Name;
use tower_service::Service;
use url::{Host, Url};

use crate::error::has;

/// Decides to which addresses connections are allowed.
#[derive(Clone)]
pub struct AddressGuard(Arc<dyn Fn(IpAddr) -> bool + Send + Sync>);

impl AddressGuard {
    /// A guard that permits connections to the addresses for which `allows` is true.
    pub fn new(allows: impl Fn(IpAddr) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(allows))
    }

    /// Whether connections to this address are allowed.
    pub fn allows(&self, address: IpAddr) -> bool {
        (self.0)(address)
    }
}

impl fmt::Debug for AddressGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AddressGuard")
    }
}

/// A connection that was refused.
#[derive(Debug, thiserror::Error)]
#[error(
    "{host} is at {address}, which is not allowed for endpoints; name another one, or ask an administrator to add this \
     address to the networks that the operator allows for endpoints"
)]
pub(crate) struct AddressRefused {
    host: String,
    address: IpAddr,
}

/// Resolves a name to its addresses, without refused ones.
#[derive(Clone, Debug)]
pub(crate) struct Resolver(pub(crate) Option<AddressGuard>);

impl Resolver {
    async fn resolve(&self, host: &str) -> Result<Vec<IpAddr>, Box<dyn std::error::Error + Send + Sync>> {
        let found = tokio::net::lookup_host((host, 0)).await?;
        let found: Vec<IpAddr> = found.map(|address| address.ip()).collect();
        let Some(guard) = &self.0 else { return Ok(found) };
        let (allowed, refused): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|address| guard.allows(*address));
        match refused.first() {
            Some(address) if allowed.is_empty() => {
                Err(AddressRefused { host: host.to_owned(), address: *address }.into())
            }
            _ => Ok(allowed),
        }
    }
}

impl ResolveDns for Resolver {
    fn resolve_dns<'a>(&'a self, name: &'a str) -> DnsFuture<'a> {
        DnsFuture::new(async { self.resolve(name).await.map_err(ResolveDnsError::new) })
    }
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.clone();
        Box::pin(async move {
            let found = resolver.resolve(name.as_str()).await?;
            let found: Vec<_> = found.into_iter().map(|address| SocketAddr::new(address, 0)).collect();
            Ok(found.into_iter())
        })
    }
}

/// A client for http and verified https whose connections the guard checks.
pub(crate) fn http_client(guard: &AddressGuard) -> SharedHttpClient {
    let tls = Builder::new().tls_provider(Provider::Rustls(CryptoMode::AwsLc));
    guarded(guard, tls.build_with_resolver(Resolver(Some(guard.clone()))))
}

/// Adds two checks that a resolver cannot do: a literal address is never resolved, and a refusal is final.
pub(crate) fn guarded(guard: &AddressGuard, client: SharedHttpClient) -> SharedHttpClient {
    SharedHttpClient::new(Guarded { guard: guard.clone(), inner: client })
}

#[derive(Clone, Debug)]
struct Guarded<T> {
    guard: AddressGuard,
    inner: T,
}

impl HttpClient for Guarded<SharedHttpClient> {
    fn http_connector(
        &self,
        settings: &HttpConnectorSettings,
        components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        let inner = self.inner.http_connector(settings, components);
        SharedHttpConnector::new(Guarded { guard: self.guard.clone(), inner })
    }
}

impl HttpConnector for Guarded<SharedHttpConnector> {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        if let Some(refused) = refused(&self.guard, request.uri()) {
            return HttpConnectorFuture::ready(Err(ConnectorError::user(refused.into())));
        }
        let answer = self.inner.call(request);
        HttpConnectorFuture::new(async move {
            // A failed lookup may succeed on another try; a refused address stays refused.
            answer.await.map_err(|error| match has::<AddressRefused>(&error) {
                true => ConnectorError::user(error.into()),
                false => error,
            })
        })
    }
}

/// The literal address of a URL, if it is refused. A URL that cannot be parsed is left to the connector to
/// refuse.
fn refused(guard: &AddressGuard, uri: &str) -> Option<AddressRefused> {
    let url = Url::parse(uri).ok()?;
    let address: IpAddr = match url.host()? {
        Host::Domain(_) => return None,
        Host::Ipv4(address) => address.into(),
        Host::Ipv6(address) => address.into(),
    };
    (!guard.allows(address)).then(|| AddressRefused { host: "the endpoint".to_owned(), address })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_written_out_is_judged() {
        let guard = AddressGuard::new(|address| !address.is_loopback());
        for (uri, is_refused) in [
            ("http://127.0.0.1:9000/b?x=y", true),
            ("https://[::1]/b", true),
            ("http://10.0.0.7/b", false),
            ("http://[2001:db8::1]:9000/b", false),
            ("http://localhost/b", false),
        ] {
            assert_eq!(refused(&guard, uri).is_some(), is_refused, "{uri}");
        }
    }

    #[test]
    fn a_refusal_says_how_to_go_on() {
        let said = AddressRefused { host: "db".to_owned(), address: [127, 0, 0, 1].into() }.to_string();
        assert!(said.contains("127.0.0.1") && said.contains("not allowed for endpoints"), "{said}");
        assert!(said.contains("administrator"), "{said}");
    }
}
