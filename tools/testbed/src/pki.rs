//! The cluster's certificates and kubeconfigs: one authority, created anew for every cluster.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

use crate::{
    error::{Doing, Result},
    network,
    paths::{self, Paths},
};

/// Signs every certificate of the cluster.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    paths: Paths,
}

impl Authority {
    /// Creates the authority and writes its certificate to `pki/ca.crt`.
    pub fn create(paths: &Paths) -> Result<Self> {
        let key = new_key()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "openfilter-testbed");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key).doing(|| "sign the authority".to_owned())?;
        paths::write(paths.pki().join("ca.crt"), certificate.pem())?;
        let authority = Self { issuer: Issuer::new(params, key), paths: paths.clone() };
        // The key is kept too, so that nodes that join later and suites that serve webhooks get certificates.
        authority.write_key("ca", authority.issuer.key())?;
        Ok(authority)
    }

    /// The authority of a running cluster.
    pub fn load(paths: &Paths) -> Result<Self> {
        let read = |name: &str| paths::read(paths.pki().join(name));
        let key = KeyPair::from_pem(&read("ca.key")?).doing(|| "read the authority's key".to_owned())?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "openfilter-testbed");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        Ok(Self { issuer: Issuer::new(params, key), paths: paths.clone() })
    }

    /// A certificate and key in PEM, for a server with these names and addresses or a client.
    pub fn issue(
        &self,
        user: &str,
        group: Option<&str>,
        names: &[&str],
        ips: &[Ipv4Addr],
    ) -> Result<(String, KeyPair)> {
        let doing = || format!("sign the certificate of {user}");
        let key = new_key()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        for name in names {
            params
                .subject_alt_names
                .push(SanType::DnsName(rcgen::string::Ia5String::try_from(*name).doing(doing)?));
        }
        params.subject_alt_names.extend(ips.iter().map(|ip| SanType::IpAddress(IpAddr::V4(*ip))));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).doing(doing)?;
        Ok((certificate.pem(), key))
    }

    /// Does the same as [`Self::issue`], and writes `pki/<file>.crt` and `.key`.
    pub fn issue_file(
        &self,
        file: &str,
        user: &str,
        group: Option<&str>,
        names: &[&str],
        ips: &[Ipv4Addr],
    ) -> Result<()> {
        let (certificate, key) = self.issue(user, group, names, ips)?;
        paths::write(self.paths.pki().join(format!("{file}.crt")), certificate)?;
        self.write_key(file, &key)
    }

    /// A client's certificate and a kubeconfig that uses it; returns the kubeconfig's path.
    pub fn kubeconfig(&self, file: &str, user: &str, group: Option<&str>) -> Result<PathBuf> {
        self.issue_file(file, user, group, &[], &[])?;
        let pki = self.paths.pki();
        // JSON is YAML; files instead of inline data keep it readable.
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "testbed",
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user}}],
            "clusters": [{"name": "testbed", "cluster": {
                "server": network::api_server_url(), "certificate-authority": pki.join("ca.crt")}}],
            "users": [{"name": user, "user": {
                "client-certificate": pki.join(format!("{file}.crt")), "client-key": pki.join(format!("{file}.key"))}}],
        });
        let path = pki.join(format!("{file}.kubeconfig"));
        paths::write_private(&path, format!("{config:#}\n"))?;
        Ok(path)
    }

    /// The key pair that signs service accounts' tokens: `pki/service-accounts.key` and `.pub`.
    pub fn service_accounts(&self) -> Result<()> {
        let key = new_key()?;
        paths::write(self.paths.pki().join("service-accounts.pub"), key.public_key_pem())?;
        self.write_key("service-accounts", &key)
    }

    fn write_key(&self, file: &str, key: &KeyPair) -> Result<()> {
        paths::write_private(self.paths.pki().join(format!("{file}.key")), key.serialize_pem())
    }
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate().doing(|| "create a key".to_owned())
}
