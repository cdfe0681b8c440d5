//! Creates a certificate authority and serving certificates, and decides when. Apart from the randomness of
//! keys it is pure: it takes the present material and returns the desired one.
//!
//! An authority is replaced long before it expires, and in two steps, so that no client ever receives a
//! certificate that it does not trust yet: first the new authority is added to the bundle that the API server
//! trusts, and only after [`OVERLAP`] is a certificate from it served. The old authority stays in the bundle
//! until it expires.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use super::{PemError, certificates, validity};

/// A year; renewed after eight months.
const AUTHORITY_LIFE: Duration = Duration::days(365);
/// Ninety days; renewed after sixty.
const SERVING_LIFE: Duration = Duration::days(90);
/// Clocks differ: a certificate that was just signed must be valid for a client whose clock is slow.
const SKEW: Duration = Duration::minutes(5);
/// How long an authority is trusted before a certificate from it is served. The API server reads its
/// configuration within a second, and every replica writes the bundle once a minute.
pub const OVERLAP: Duration = Duration::minutes(10);

/// Authorities that stay trusted although they are not in the Secret: more than an occasionally deleted
/// Secret leaves behind, and few enough for the configuration that carries them.
const STRANGERS_MAX: usize = 4;

const AUTHORITY_NAME: &str = "openfilter-webhook-ca";

/// The content of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// The authorities to trust, newest first.
    pub bundle: String,
    /// The key of the newest authority.
    pub authority_key: String,
    /// The certificate that is served.
    pub certificate: String,
    /// The key of the served certificate.
    pub key: String,
}

/// Why no certificate could be created.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The library refused to create it.
    #[error("cannot create a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The new certificate could not be read back.
    #[error(transparent)]
    Read(#[from] PemError),
}

impl Material {
    /// Creates an authority and a certificate for these names. No client trusts anything yet, so both are
    /// used at once.
    pub fn create(names: &[String], now: OffsetDateTime) -> Result<Self, IssueError> {
        let (bundle, authority_key) = authority(now)?;
        let (certificate, key) = serving(&authority_key, names, now)?;
        Ok(Self { bundle, authority_key: authority_key.serialize_pem(), certificate, key })
    }

    /// Also trusts the unexpired authorities of `trusted`. Unreadable ones are omitted.
    pub fn trusting(self, trusted: &str, now: OffsetDateTime) -> Self {
        let at = now.unix_timestamp();
        let mut bundle = self.bundle.clone();
        let strangers = certificate_texts(trusted).filter_map(|part| unexpired(part, at).ok());
        let mut room = STRANGERS_MAX;
        for stranger in strangers.filter(|stranger| !stranger.is_empty()) {
            if room > 0 && !bundle.contains(&stranger) {
                bundle.push_str(&stranger);
                room -= 1;
            }
        }
        Self { bundle, ..self }
    }

    /// Whether a client that trusts these authorities accepts this certificate at this moment.
    pub fn accepts(&self, chain: &[u8], at: i64) -> bool {
        let (Ok(served), Ok(authorities)) = (certificates(chain), certificates(self.bundle.as_bytes()))
        else {
            return false;
        };
        let signer = served.first().filter(|leaf| validity(leaf).is_ok_and(|(_, until)| until > at));
        let signer = signer.and_then(|leaf| key_id_of(leaf, true));
        signer.is_some() && authorities.iter().any(|authority| key_id_of(authority, false) == signer)
    }

    /// The material that should replace this; `None` if nothing needs to change.
    pub fn renewed(&self, names: &[String], now: OffsetDateTime) -> Result<Option<Self>, IssueError> {
        let Ok(state) = State::read(self, names) else {
            return Self::create(names, now).map(Some);
        };
        let at = now.unix_timestamp();
        // No client accepts this material any more, so the two steps would only take longer.
        if state.serving.1 <= at || state.authority.1 <= at {
            return Self::create(names, now).map(Some);
        }
        let trusted_for = at - state.authority.0;
        let replaced = !state.signed_by_newest && trusted_for >= (OVERLAP + SKEW).whole_seconds();
        if is_old(state.authority, at) && state.signed_by_newest {
            let (newest, authority_key) = authority(now)?;
            let bundle = format!("{newest}{}", unexpired(&self.bundle, at)?);
            return Ok(Some(Self { bundle, authority_key: authority_key.serialize_pem(), ..self.clone() }));
        }
        if replaced || state.signed_by_newest && (is_old(state.serving, at) || !state.names_fit) {
            let authority_key = KeyPair::from_pem(&self.authority_key)?;
            let (certificate, key) = serving(&authority_key, names, now)?;
            return Ok(Some(Self { certificate, key, ..self.clone() }));
        }
        let bundle = unexpired(&self.bundle, at)?;
        Ok((bundle != self.bundle).then(|| Self { bundle, ..self.clone() }))
    }
}

/// The facts about usable material.
struct State {
    authority: (i64, i64),
    serving: (i64, i64),
    signed_by_newest: bool,
    names_fit: bool,
}

impl State {
    fn read(material: &Material, names: &[String]) -> Result<Self, IssueError> {
        let Material { bundle, authority_key, certificate, key } = material;
        let (authorities, served) = (certificates(bundle.as_bytes())?, certificates(certificate.as_bytes())?);
        super::certified(certificate.as_bytes(), key.as_bytes())?;
        KeyPair::from_pem(authority_key)?;
        let (newest, leaf) = match (authorities.first(), served.first()) {
            (Some(newest), Some(leaf)) => (newest, leaf),
            _ => return Err(PemError::Certificate("no certificate found".to_owned()).into()),
        };
        let unreadable = |error: x509_parser::nom::Err<_>| PemError::Certificate(error.to_string());
        let (_, parsed_leaf) = x509_parser::parse_x509_certificate(leaf).map_err(unreadable)?;
        let (_, parsed_newest) = x509_parser::parse_x509_certificate(newest).map_err(unreadable)?;
        let subject_key = key_id(&parsed_newest, false);
        Ok(Self {
            authority: validity(newest)?,
            serving: validity(leaf)?,
            signed_by_newest: subject_key.is_some() && subject_key == key_id(&parsed_leaf, true),
            names_fit: names.iter().all(|name| has_name(&parsed_leaf, name)),
        })
    }
}

fn key_id_of(certificate: &[u8], issuer: bool) -> Option<Vec<u8>> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    key_id(&parsed, issuer)
}

/// The id of a certificate's own key, or of the key that signed it.
fn key_id(certificate: &x509_parser::certificate::X509Certificate<'_>, issuer: bool) -> Option<Vec<u8>> {
    use x509_parser::extensions::ParsedExtension;
    certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) if !issuer => Some(id.0.to_vec()),
        ParsedExtension::AuthorityKeyIdentifier(id) if issuer => {
            id.key_identifier.as_ref().map(|id| id.0.to_vec())
        }
        _ => None,
    })
}

fn has_name(certificate: &x509_parser::certificate::X509Certificate<'_>, name: &str) -> bool {
    use x509_parser::extensions::GeneralName;
    let names = certificate.subject_alternative_name().ok().flatten();
    let address: Option<std::net::IpAddr> = name.parse().ok();
    names.is_some_and(|names| {
        names.value.general_names.iter().any(|found| match (found, address) {
            (GeneralName::DNSName(found), None) => *found == name,
            (GeneralName::IPAddress(octets), Some(std::net::IpAddr::V4(address))) => {
                *octets == address.octets()
            }
            (GeneralName::IPAddress(octets), Some(std::net::IpAddr::V6(address))) => {
                *octets == address.octets()
            }
            _ => false,
        })
    })
}

/// Whether two thirds of its life have passed.
fn is_old((from, until): (i64, i64), at: i64) -> bool {
    at - from > (until - from) / 3 * 2
}

fn unexpired(bundle: &str, at: i64) -> Result<String, IssueError> {
    let mut kept = String::new();
    for part in certificate_texts(bundle) {
        let expires = certificates(part.as_bytes())?.first().map(super::expiry).transpose()?;
        if expires.is_some_and(|expires| expires > at) {
            kept.push_str(part.trim());
            kept.push('\n');
        }
    }
    Ok(kept)
}

/// Each certificate of a bundle, unchanged.
fn certificate_texts(bundle: &str) -> impl Iterator<Item = &str> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let parts = bundle.split_inclusive(END).filter(|part| part.ends_with(END));
    parts.filter_map(|part| part.find(BEGIN).map(|start| &part[start..]))
}

fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, AUTHORITY_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

fn authority(now: OffsetDateTime) -> Result<(String, KeyPair), IssueError> {
    let key = KeyPair::generate()?;
    let mut params = authority_params();
    (params.not_before, params.not_after) = (now - SKEW, now + AUTHORITY_LIFE);
    let pem = params.self_signed(&key)?.pem();
    Ok((format!("{}\n", pem.replace("\r\n", "\n").trim()), key))
}

fn serving(
    authority: &KeyPair,
    names: &[String],
    now: OffsetDateTime,
) -> Result<(String, String), IssueError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, "openfilter-webhook");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (params.not_before, params.not_after) = (now - SKEW, now + SERVING_LIFE);
    let certificate = params.signed_by(&key, &Issuer::new(authority_params(), authority))?;
    Ok((certificate.pem().replace("\r\n", "\n"), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    const NAME: &str = "webhook.openfilter.svc";

    fn names() -> Vec<String> {
        vec![NAME.to_owned(), "127.0.0.1".to_owned()]
    }

    fn start() -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap()
    }

    /// Whether a client that trusts `bundle` accepts the served certificate.
    fn accepted(material: &Material, bundle: &str, now: OffsetDateTime) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates(bundle.as_bytes()).unwrap());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let served = certificates(material.certificate.as_bytes()).unwrap();
        let at = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now.unix_timestamp() as u64));
        let name = ServerName::try_from(NAME).unwrap();
        verifier.verify_server_cert(&served[0], &[], &name, &[], at).is_ok()
    }

    #[test]
    fn what_was_made_is_accepted_and_left_alone() {
        let material = Material::create(&names(), start()).unwrap();
        assert!(accepted(&material, &material.bundle, start()));
        assert_eq!(material.renewed(&names(), start()).unwrap(), None);
        assert_eq!(material.renewed(&names(), start() + Duration::days(50)).unwrap(), None);
    }

    #[test]
    fn over_three_years_every_certificate_is_accepted_by_who_trusts_the_bundle_of_a_step_before() {
        let mut material = Material::create(&names(), start()).unwrap();
        let (mut served, mut authorities) = (1, 1);
        let mut now = start();
        let end = start() + Duration::days(3 * 365);
        while now < end {
            // Replicas check once a minute; a check every six hours is equivalent, and quicker to test.
            let trusted = material.bundle.clone();
            now += Duration::hours(6);
            if let Some(next) = material.renewed(&names(), now).unwrap() {
                served += usize::from(next.certificate != material.certificate);
                authorities += usize::from(next.authority_key != material.authority_key);
                assert!(
                    next.certificate == material.certificate || next.authority_key == material.authority_key,
                    "one step at a time"
                );
                material = next;
            }
            assert!(accepted(&material, &trusted, now), "at {now}");
            assert!(
                certificates(material.bundle.as_bytes()).unwrap().len() <= 2,
                "old authorities are dropped"
            );
        }
        assert!((15..25).contains(&served), "{served} certificates");
        assert!((4..6).contains(&authorities), "{authorities} authorities");
    }

    #[test]
    fn a_certificate_is_accepted_while_it_is_valid_and_its_authority_is_trusted() {
        let [old, other] = [(); 2].map(|()| Material::create(&names(), start()).unwrap());
        let (at, served) = (start().unix_timestamp(), old.certificate.as_bytes());
        assert!(old.accepts(served, at) && !other.accepts(served, at));
        assert!(other.trusting(&old.bundle, start()).accepts(served, at));
        assert!(!old.accepts(served, (start() + SERVING_LIFE).unix_timestamp()));
        assert!(!old.accepts(b"nonsense", at));
    }

    #[test]
    fn a_new_authority_is_not_used_before_the_overlap() {
        let material = Material::create(&names(), start()).unwrap();
        let old = start() + Duration::days(250);
        // With a serving certificate that is still valid, because an expired one skips the two steps.
        let (certificate, key) =
            serving(&KeyPair::from_pem(&material.authority_key).unwrap(), &names(), old).unwrap();
        let material = Material { certificate, key, ..material };
        let first = material.renewed(&names(), old).unwrap().unwrap();
        assert_eq!(first.certificate, material.certificate);
        assert_eq!(first.renewed(&names(), old + Duration::minutes(1)).unwrap(), None);
        let second = first.renewed(&names(), old + OVERLAP + Duration::minutes(1)).unwrap().unwrap();
        assert_ne!(second.certificate, first.certificate);
        assert!(accepted(&second, &first.bundle, old + OVERLAP + Duration::minutes(1)));
    }

    #[test]
    fn after_the_secret_is_lost_a_replica_that_serves_the_old_certificate_is_still_trusted() {
        let old = Material::create(&names(), start()).unwrap();
        let later = start() + Duration::days(30);
        let new = Material::create(&names(), later).unwrap();
        assert!(!accepted(&old, &new.bundle, later));
        let new = new.trusting(&format!("nonsense\n{}{}", old.bundle, old.bundle), later);
        assert!(accepted(&old, &new.bundle, later) && accepted(&new, &new.bundle, later));
        assert_eq!(certificates(new.bundle.as_bytes()).unwrap().len(), 2, "each is there once");
        assert!(!new.bundle.contains("nonsense"));
        // Nothing needs to be done until the old authority expires.
        assert_eq!(new.renewed(&names(), later).unwrap(), None);
        assert_eq!(new.clone().trusting(&new.bundle, later), new);
        let expired = start() + Duration::days(400);
        let newest = Material::create(&names(), expired).unwrap();
        assert_eq!(newest.clone().trusting(&old.bundle, expired), newest);
    }

    #[test]
    fn what_is_expired_broken_or_for_other_names_is_replaced() {
        let material = Material::create(&names(), start()).unwrap();
        let late = start() + Duration::days(100);
        let next = material.renewed(&names(), late).unwrap().unwrap();
        assert!(accepted(&next, &next.bundle, late));
        let broken = Material { key: "nonsense".to_owned(), ..material.clone() };
        assert!(broken.renewed(&names(), start()).unwrap().is_some());
        let other = Material::create(&names(), start()).unwrap();
        let mixed = Material { key: other.key, ..material.clone() };
        assert!(mixed.renewed(&names(), start()).unwrap().is_some());
        let more = [names(), vec!["another.svc".to_owned()]].concat();
        let renamed = material.renewed(&more, start()).unwrap().unwrap();
        assert_eq!(renamed.bundle, material.bundle);
        assert_eq!(renamed.renewed(&more, start()).unwrap(), None);
    }
}
