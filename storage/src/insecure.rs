//! An HTTPS client that accepts any certificate, for `insecureSkipTLSVerify`. The SDK's own client cannot do
//! this, so this second client is used in that case only: it encrypts, but does not verify its peer.

use std::sync::{Arc, OnceLock};

use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpClient, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_types::body::SdkBody;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio::time::{Duration, timeout};

use crate::guard::{AddressGuard, Resolver, guarded};

/// Creates the client, which keeps its connections across requests.
pub(crate) fn http_client(guard: Option<&AddressGuard>) -> SharedHttpClient {
    let (connector, resolver) = (OnceLock::new(), Resolver(guard.cloned()));
    let client = http_client_fn(move |settings, _| {
        let make = || Connector::new(resolver.clone(), settings.connect_timeout(), settings.read_timeout());
        SharedHttpConnector::new(connector.get_or_init(make).clone())
    });
    match guard {
        Some(guard) => guarded(guard, client),
        None => client,
    }
}

#[derive(Clone, Debug)]
struct Connector {
    client: Result<Client<HttpsConnector<Tcp<Resolver>>, SdkBody>, String>,
    read_timeout: Duration,
}

impl Connector {
    fn new(resolver: Resolver, connect: Option<Duration>, read: Option<Duration>) -> Self {
        let mut tcp = Tcp::new_with_resolver(resolver);
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(connect);
        let client = tls_config().map_err(|error| error.to_string()).map(|tls| {
            let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .build(https.wrap_connector(tcp))
        });
        Self { client, read_timeout: read.unwrap_or(Duration::MAX) }
    }
}

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let Self { client, read_timeout } = self.clone();
        HttpConnectorFuture::new(async move {
            let client = client.map_err(|error| ConnectorError::user(error.into()))?;
            let request = request.try_into_http1x().map_err(|error| ConnectorError::user(error.into()))?;
            let response = timeout(read_timeout, client.request(request))
                .await
                .map_err(|error| ConnectorError::timeout(error.into()))?
                .map_err(|error| ConnectorError::io(error.into()))?;
            HttpResponse::try_from(response.map(SdkBody::from_body_1_x))
                .map_err(|error| ConnectorError::other(error.into(), None))
        })
    }
}

fn tls_config() -> Result<ClientConfig, Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth())
}

/// Accepts every certificate. It still verifies the handshake's signature, which costs nothing.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
