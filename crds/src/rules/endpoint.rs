//! Endpoints of S3-compatible services: well-formed, without credentials, and not usable to reach addresses
//! that only the operator's network position reaches (instance metadata, link-local and loopback addresses).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use url::{Host, Url};

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};

/// The internal addresses that an administrator allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct EndpointPolicy<'a> {
    /// Networks that endpoints may use although they are refused by default.
    pub allowed_networks: &'a [IpNet],
    /// Hosts that endpoints may name although they are refused by default.
    pub allowed_hosts: &'a [String],
}

impl EndpointPolicy<'_> {
    /// Whether requests may be sent to this address. Called for literal addresses here, and again for the
    /// addresses of a name when the connection is made, because a name can resolve to anything.
    pub fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        !is_internal(address) || self.allowed_networks.iter().any(|network| network.contains(&address))
    }

    fn allows_host(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.');
        let internal = INTERNAL_HOSTS.contains(&host) || host.ends_with(".localhost");
        !internal || self.allowed_hosts.iter().any(|allowed| allowed == host)
    }
}

/// Names of metadata services and of the machine itself.
const INTERNAL_HOSTS: [&str; 5] =
    ["localhost", "metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"];

/// Metadata services of clouds. The network policies of the deployment have the same list.
pub const METADATA: [IpNet; 8] = [
    // Most clouds; AWS containers and pods.
    v4(Ipv4Addr::new(169, 254, 169, 254)),
    v4(Ipv4Addr::new(169, 254, 170, 2)),
    v4(Ipv4Addr::new(169, 254, 170, 23)),
    // Alibaba, Azure's host agent, Oracle.
    v4(Ipv4Addr::new(100, 100, 100, 200)),
    v4(Ipv4Addr::new(168, 63, 129, 16)),
    v4(Ipv4Addr::new(192, 0, 0, 192)),
    // AWS uses this whole network, Google one address.
    v6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0), 32),
    v6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254), 128),
];

const fn v4(address: Ipv4Addr) -> IpNet {
    IpNet::new_assert(IpAddr::V4(address), 32)
}

const fn v6(address: Ipv6Addr, prefix: u8) -> IpNet {
    IpNet::new_assert(IpAddr::V6(address), prefix)
}

fn is_metadata(address: IpAddr) -> bool {
    METADATA.iter().any(|network| network.contains(&address))
}

/// The IPv4 address that a NAT64 translator (64:ff9b::/96) would send to.
fn translated(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let octets = address.octets();
    (octets[..12] == [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0])
        .then(|| Ipv4Addr::new(octets[12], octets[13], octets[14], octets[15]))
}

fn is_internal(address: IpAddr) -> bool {
    match address {
        // Some systems treat all of 0.0.0.0/8 as "this host".
        IpAddr::V4(v4) => {
            let local = v4.is_link_local() || v4.is_loopback() || v4.octets()[0] == 0;
            local || v4.is_multicast() || is_metadata(address)
        }
        IpAddr::V6(v6) => {
            let local = v6.is_unicast_link_local() || v6.is_loopback() || v6.is_unspecified();
            let inner = translated(v6).is_some_and(|v4| is_internal(v4.into()));
            local || inner || v6.is_multicast() || is_metadata(address)
        }
    }
}

/// Parses an endpoint; without a scheme, https is assumed.
pub(super) fn parse(endpoint: &str) -> Result<Url, url::ParseError> {
    if endpoint.contains("://") { Url::parse(endpoint) } else { Url::parse(&format!("https://{endpoint}")) }
}

pub(super) fn check(field: &Path, endpoint: &str, policy: &EndpointPolicy<'_>, out: &mut Findings) {
    const FORM: &str = "write [http://|https://]host[:port], for example https://minio.storage.svc:9000";
    // Checked before anything is parsed or quoted: a key that contains a slash would make the rest look like
    // a path.
    if endpoint.contains('@') {
        let fix = "put the keys into a Secret and name it in credentialsSecret";
        out.add(
            field,
            Rule::EndpointCredentials,
            "the URL contains credentials, which anyone who reads this object would see",
            fix,
        );
        return;
    }
    let url = match parse(endpoint) {
        Ok(url) => url,
        Err(error) => {
            out.add(field, Rule::Endpoint, format!("{} is not an endpoint ({error})", quote(endpoint)), FORM);
            return;
        }
    };
    // Also as written, because the parser ignores surplus slashes before the host.
    let host = endpoint.split_once("://").map_or(endpoint, |(_scheme, rest)| rest);
    let host = host.strip_suffix('/').unwrap_or(host);
    let bare = !host.contains(['/', '\\', '?', '#'])
        && matches!(url.path(), "" | "/")
        && url.query().is_none()
        && url.fragment().is_none();
    if !matches!(url.scheme(), "http" | "https") {
        out.add(field, Rule::Endpoint, format!("{} is not an http or https address", quote(endpoint)), FORM);
        return;
    }
    if !bare || endpoint.contains(char::is_whitespace) {
        out.add(
            field,
            Rule::Endpoint,
            format!("{} contains more than a host and port", quote(endpoint)),
            FORM,
        );
        return;
    }
    let allowed = match url.host() {
        Some(Host::Domain(host)) => policy.allows_host(host),
        Some(Host::Ipv4(address)) => policy.allows(address.into()),
        Some(Host::Ipv6(address)) => policy.allows(address.into()),
        None => false,
    };
    if !allowed {
        let message = format!("{} is a loopback, link-local or metadata address", quote(endpoint));
        let fix = "name the service by its address in the cluster or on the internet, or ask an administrator to allow this one";
        out.add(field, Rule::EndpointAddress, message, fix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(endpoint: &str, policy: &EndpointPolicy<'_>) -> Option<Rule> {
        let mut out = Findings::default();
        check(&Path::root(), endpoint, policy, &mut out);
        out.into_vec().first().map(|violation| violation.rule)
    }

    #[test]
    fn services_are_reached_with_and_without_a_scheme() {
        for endpoint in [
            "https://s3.example.com",
            "minio:9000",
            "http://minio.storage.svc:9000/",
            "10.0.0.7:9000",
            "[2001:db8::1]:9000",
        ] {
            assert_eq!(refused(endpoint, &EndpointPolicy::default()), None, "{endpoint}");
        }
    }

    #[test]
    fn only_a_host_and_a_port_are_an_endpoint() {
        for endpoint in [
            "https://s3.example.com/bucket",
            "https:///minio",
            "/minio",
            "minio//",
            "minio\\",
            "minio?",
            "a b",
        ] {
            assert_eq!(refused(endpoint, &EndpointPolicy::default()), Some(Rule::Endpoint), "{endpoint}");
        }
    }

    #[test]
    fn metadata_is_refused_however_it_is_spelled() {
        for endpoint in [
            "http://169.254.169.254",
            "169.254.169.254:80",
            "http://2852039166",
            "http://0xa9fea9fe",
            "http://0251.0376.0251.0376",
            "http://[::ffff:169.254.169.254]",
            "http://[fe80::1]",
            "http://[fd00:ec2::254]",
            "http://[fd00:ec2::23]",
            "http://[fd20:ce::254]",
            "http://[64:ff9b::a9fe:a9fe]",
            "http://db.localhost",
            "http://METADATA.google.internal",
            "http://metadata.google.internal.",
            "http://100.100.100.200",
            "http://localhost:9000",
            "http://127.0.0.1:6379",
            "http://[::1]",
            "http://0.0.0.0",
        ] {
            assert_eq!(
                refused(endpoint, &EndpointPolicy::default()),
                Some(Rule::EndpointAddress),
                "{endpoint}"
            );
        }
    }

    #[test]
    fn an_administrator_can_allow_an_internal_address() {
        let networks = ["127.0.0.0/8".parse().unwrap()];
        let hosts = ["localhost".to_owned()];
        let policy = EndpointPolicy { allowed_networks: &networks, allowed_hosts: &hosts };
        assert_eq!(refused("http://127.0.0.1:9000", &policy), None);
        assert_eq!(refused("localhost:9000", &policy), None);
        assert_eq!(refused("http://169.254.169.254", &policy), Some(Rule::EndpointAddress));
    }

    #[test]
    fn credentials_are_refused_and_never_repeated() {
        for endpoint in [
            "https://key:hunter2@s3.example.com",
            "https://key:hunter2/x@host",
            "key:hun/ter2@host",
            "https://k:12/hunter2@h",
        ] {
            let mut out = Findings::default();
            check(&Path::root(), endpoint, &EndpointPolicy::default(), &mut out);
            let violations = out.into_vec();
            assert_eq!(violations[0].rule, Rule::EndpointCredentials, "{endpoint}");
            assert!(!violations[0].to_string().contains("ter2"), "{endpoint}");
        }
    }
}
