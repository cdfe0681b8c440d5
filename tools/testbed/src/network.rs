//! The cluster's network: a switch that connects the host and every node's network namespace.
//!
//! Nodes reach each other's pods over the switch by routes in their own namespaces, so the host forwards
//! nothing, and its firewall, DNS and default route stay unchanged. A node's namespace has no default route:
//! no packet leaves the machine. The switch is a bridge in its own namespace: on the host, a firewall that
//! also filters bridges (Docker's) would drop packets between nodes.

use std::{fs, net::Ipv4Addr, path::Path};

use serde::Deserialize;

use crate::{
    command::{run, run_line},
    error::{Doing, Error, Result},
    mounts,
};

/// The host's address: the API server listens there, and so can a test for pods.
pub const HOST_IP: Ipv4Addr = Ipv4Addr::new(10, 87, 0, 1);
/// The addresses of the host and the nodes.
const NODE_RANGE: &str = "10.87.0.0/24";
/// The addresses of all pods.
pub const POD_RANGE: &str = "10.88.0.0/16";
/// The addresses of services.
pub const SERVICE_RANGE: &str = "10.89.0.0/16";
/// The addresses that pods of fake nodes claim to have. Nothing answers there.
pub const KWOK_RANGE: &str = "10.86.0.0/16";
/// The `kubernetes` service, which has the first address of the range by definition.
pub const API_SERVICE_IP: Ipv4Addr = Ipv4Addr::new(10, 89, 0, 1);
/// The cluster DNS service.
pub const DNS_SERVICE_IP: Ipv4Addr = Ipv4Addr::new(10, 89, 0, 10);
/// The API server's port on [`HOST_IP`].
pub const API_PORT: u16 = 6443;
/// Nodes look here for images of a registry that a test runs on [`HOST_IP`], without TLS.
pub const REGISTRY: &str = "10.87.0.1:5000";
/// A node's number is one byte of its addresses.
pub const NODES_MAX: u8 = 32;

/// The host's interface to the switch.
const HOST_LINK: &str = "oftb0";
/// The namespace of the switch.
const SWITCH: &str = "oftb-switch";
const PREFIX: &str = "oftb";

/// The API server's URL.
pub fn api_server_url() -> String {
    format!("https://{HOST_IP}:{API_PORT}")
}

/// A node's name.
pub fn node_name(number: u8) -> String {
    format!("node-{number}")
}

/// A node's address on the switch.
pub fn node_ip(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 87, 0, 10 + number)
}

/// The addresses of one node's pods.
pub fn pod_range(number: u8) -> String {
    format!("10.88.{number}.0/24")
}

/// A node's network namespace.
pub fn netns(number: u8) -> String {
    format!("{PREFIX}-node-{number}")
}

/// Creates the switch, one namespace per node, and the host's routes to them.
pub fn create(nodes: u8, fake: bool) -> Result<()> {
    let kwok = fake.then_some(KWOK_RANGE);
    let ours: Vec<&str> = [NODE_RANGE, POD_RANGE, SERVICE_RANGE].into_iter().chain(kwok).collect();
    let resolver = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    if let Some(conflict) = conflict(&ours, &host_routes()?, &resolver) {
        return Err(Error::Refused(format!(
            "the testbed's addresses are in use on this machine: {conflict}"
        )));
    }
    let ip = |line: String| run_line("create the switch", &format!("ip {line}"));
    ip(format!("netns add {SWITCH}"))?;
    ip(format!("-n {SWITCH} link add switch type bridge"))?;
    ip(format!("-n {SWITCH} link set switch up"))?;
    ip(format!("link add {HOST_LINK} type veth peer name host netns {SWITCH}"))?;
    ip(format!("-n {SWITCH} link set host master switch up"))?;
    ip(format!("addr add {HOST_IP}/24 dev {HOST_LINK}"))?;
    ip(format!("link set {HOST_LINK} up"))?;
    for number in 1..=nodes {
        create_node(number, nodes)?;
    }
    if let Some(range) = kwok {
        // Route these to the switch, where nothing answers, instead of the host's default route.
        ip(format!("route add {range} dev {HOST_LINK}"))?;
    }
    route_services(1)
}

/// Routes the host's packets for services to a node, whose kube-proxy directs them to a pod. Without this
/// route they would take the host's default one.
pub(crate) fn route_services(number: u8) -> Result<()> {
    let line = format!("ip route replace {SERVICE_RANGE} via {} dev {HOST_LINK}", node_ip(number));
    run_line("route services", &line)?;
    Ok(())
}

fn create_node(number: u8, nodes: u8) -> Result<()> {
    let netns = netns(number);
    let doing = format!("create the network of {}", node_name(number));
    let host = |line: String| run_line(&doing, &format!("ip {line}"));
    let inside = |line: String| run_line(&doing, &format!("ip -n {netns} {line}"));
    host(format!("netns add {netns}"))?;
    inside(format!("link add eth0 type veth peer name n{number} netns {SWITCH}"))?;
    host(format!("-n {SWITCH} link set n{number} master switch up"))?;
    inside("link set lo up".to_owned())?;
    inside(format!("addr add {}/24 dev eth0", node_ip(number)))?;
    inside("link set eth0 up".to_owned())?;
    // A node's own packets need a route before kube-proxy can direct them to a pod.
    inside(format!("route add {SERVICE_RANGE} dev eth0"))?;
    for other in (1..=nodes).filter(|other| *other != number) {
        inside(format!("route add {} via {} dev eth0", pod_range(other), node_ip(other)))?;
    }
    let forward = ["nsenter", &format!("--net=/run/netns/{netns}"), "--", "sh", "-c"].map(str::to_owned);
    run(&doing, &[&forward[..], &["echo 1 >/proc/sys/net/ipv4/ip_forward".to_owned()]].concat())?;
    // Added once the link is up on both sides: the host reaches pods directly, for webhooks and for tests.
    host(format!("route add {} via {} dev {HOST_LINK}", pod_range(number), node_ip(number)))?;
    Ok(())
}

/// A route of the host, as `ip -json` prints it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Route {
    #[serde(rename = "type")]
    kind: String,
    dst: String,
    gateway: String,
    dev: String,
    table: String,
    nexthops: Vec<NextHop>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NextHop {
    gateway: String,
    dev: String,
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = [("", &self.kind), ("", &self.dst), ("via ", &self.gateway), ("dev ", &self.dev)];
        let words = words.into_iter().chain([("table ", &self.table)]).filter(|(_, word)| !word.is_empty());
        let words: Vec<String> = words.map(|(name, word)| format!("{name}{word}")).collect();
        f.write_str(&words.join(" "))
    }
}

fn host_routes() -> Result<Vec<Route>> {
    let doing = "list the host's routes";
    let listed = run_line(doing, "ip -json -4 route show table all")?;
    parse_routes(&listed).doing(|| doing.to_owned())
}

fn parse_routes(listed: &str) -> serde_json::Result<Vec<Route>> {
    serde_json::from_str(if listed.trim().is_empty() { "[]" } else { listed })
}

/// The first and last address of a range or of a single address; `None` for "default" and for anything but
/// IPv4.
fn bounds(range: &str) -> Option<(u32, u32)> {
    let (address, length) = range.split_once('/').unwrap_or((range, "32"));
    let (address, length) = (u32::from(address.parse::<Ipv4Addr>().ok()?), length.parse::<u32>().ok()?);
    let host_bits = u32::MAX.checked_shr(length).unwrap_or(0);
    (length <= 32).then_some((address & !host_bits, address | host_bits))
}

/// Finds something of the host that routes to our ranges would cut off, in which case the testbed must not
/// start.
fn conflict(ours: &[&str], routes: &[Route], resolver: &str) -> Option<String> {
    let taken = |range: &str| {
        let (first, last) = bounds(range)?;
        ours.iter().find(|own| bounds(own).is_some_and(|(start, end)| first <= end && start <= last))
    };
    for route in routes {
        if bounds(&route.dst) != Some((0, u32::MAX))
            && let Some(own) = taken(&route.dst)
        {
            return Some(format!("the route \"{route}\" overlaps {own}"));
        }
        for gateway in route.nexthops.iter().map(|hop| &hop.gateway).chain([&route.gateway]) {
            if let Some(own) = taken(gateway) {
                return Some(format!("the gateway {gateway} of the route \"{route}\" is in {own}"));
            }
        }
    }
    let servers =
        resolver.lines().filter_map(|line| line.trim().strip_prefix("nameserver")?.split_whitespace().next());
    let found = servers.filter_map(|server| Some((server, taken(server)?))).next();
    found.map(|(server, own)| format!("the nameserver {server} of /etc/resolv.conf is in {own}"))
}

/// Removes every interface, route and namespace of the testbed. Routes disappear with their interface.
pub fn remove() -> Result<()> {
    for netns in namespaces() {
        run_line("remove a network namespace", &format!("ip netns del {netns}"))?;
    }
    for link in links()? {
        // It may already be gone together with the other end of its pair.
        let removed = run_line("remove an interface", &format!("ip link del {link}"));
        if links()?.contains(&link) {
            removed?;
        }
    }
    // `ip` mounts this folder on itself; nothing needs that mount once the last namespace is gone.
    if fs::read_dir("/run/netns").is_ok_and(|mut entries| entries.next().is_none()) {
        mounts::unmount_below(Path::new("/run/netns"))?;
        let _ = fs::remove_dir("/run/netns");
    }
    Ok(())
}

/// The testbed's network namespaces that exist.
pub fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(PREFIX))
        .collect()
}

/// The testbed's interfaces that exist on the host.
pub fn links() -> Result<Vec<String>> {
    let listed = run_line("list interfaces", "ip -o link show")?;
    let names = listed.lines().filter_map(|line| line.split(": ").nth(1));
    Ok(names
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .filter(|name| name.starts_with(PREFIX))
        .collect())
}

/// The host's routes over the testbed's interfaces.
pub fn routes() -> Result<Vec<String>> {
    let over_ours = |route: &Route| {
        let hops = route.nexthops.iter().map(|hop| &hop.dev);
        hops.chain([&route.dev]).any(|dev| dev.starts_with(PREFIX))
    };
    Ok(host_routes()?.iter().filter(|route| over_ours(route)).map(ToString::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(routes: &str, resolver: &str) -> Option<String> {
        let ours = [NODE_RANGE, POD_RANGE, SERVICE_RANGE];
        conflict(&ours, &parse_routes(routes).unwrap(), resolver)
    }

    #[test]
    fn a_machine_whose_addresses_only_look_like_ours_is_fine() {
        let routes = r#"[{"dst":"default","gateway":"192.0.2.1","dev":"eth0","flags":[]},
            {"dst":"10.87.1.0/24","dev":"eth1"}, {"dst":"110.88.0.0/16","dev":"eth1"}, {"dst":"10.90.0.0/15","dev":"eth1"},
            {"type":"local","dst":"10.86.255.255","dev":"eth1","table":"local"},
            {"type":"unicast","dst":"0.0.0.0/0","gateway":"192.0.2.1","table":"7"}]"#;
        assert_eq!(found(routes, "# 10.88.0.1\nnameserver 10.255.255.53\nnameserver fd00::1\n"), None);
        assert_eq!(found("", ""), None);
    }

    #[test]
    fn whatever_overlaps_our_ranges_is_named() {
        for dst in ["10.0.0.0/8", "0.0.0.0/1", "10.88.3.4", "10.89.255.0/24", "10.87.0.128/25"] {
            let conflict =
                found(&format!(r#"[{{"type":"blackhole","dst":"{dst}","table":"52"}}]"#), "").unwrap();
            assert!(conflict.contains(&format!("blackhole {dst} table 52")), "{conflict}");
        }
        let gateway = r#"[{"dst":"default","gateway":"10.87.0.254","dev":"eth0"}]"#;
        assert!(found(gateway, "").unwrap().contains("the gateway 10.87.0.254"));
        let several = r#"[{"dst":"default","nexthops":[{"gateway":"192.0.2.1"},{"gateway":"10.88.0.1"}]}]"#;
        assert!(found(several, "").unwrap().contains("the gateway 10.88.0.1"));
        assert!(found("[]", "nameserver 10.89.0.53\n").unwrap().contains("the nameserver 10.89.0.53"));
    }
}
