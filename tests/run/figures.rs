//! Figures from other programs: metrics of the operator, commands of Valkey, writes of the API server.

use std::time::Duration;

use crate::harness::Lab;

/// A metric of the operator.
pub async fn metric(name: &str) -> f64 {
    let values = metrics(name).await;
    *values.first().unwrap_or_else(|| panic!("no {name}"))
}

/// A metric of the operator, for each of its labels.
pub async fn metrics(name: &str) -> Vec<f64> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for _ in 0..100 {
        if let Ok(mut stream) = tokio::net::TcpStream::connect("127.0.0.1:18080").await {
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
            return lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the operator does not answer")
}

/// How often Valkey executed each command: `(name, calls)`. Commands inside scripts count like any other.
async fn valkey_commands(lab: &Lab) -> Vec<(String, f64)> {
    let stats: String =
        redis::cmd("INFO").arg("commandstats").query_async(&mut lab.raw().await).await.unwrap();
    let read = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    stats.lines().filter_map(read).collect()
}

/// The operator's commands to Valkey: scripts, and commands beside them. Some of these also occur in scripts,
/// so the result is slightly too high.
pub async fn valkey_calls(lab: &Lab) -> f64 {
    let sent = ["evalsha", "eval", "acl|getuser", "acl|setuser", "xpending"];
    let commands = valkey_commands(lab).await;
    commands.iter().filter(|(name, _)| sent.contains(&name.as_str())).map(|(_, calls)| calls).sum()
}

/// All commands that Valkey executed, including those inside scripts.
pub async fn all_valkey_calls(lab: &Lab) -> f64 {
    valkey_commands(lab).await.iter().map(|(_, calls)| calls).sum()
}

/// Writes that the API server has answered.
pub struct Writes {
    pub verb: String,
    pub resource: String,
    pub count: f64,
}

/// All writes since the API server started, by verb and resource.
pub fn api_writes(lab: &Lab) -> Vec<Writes> {
    let text = lab.testbed.kubectl(&["get", "--raw", "/metrics"], "").unwrap();
    let read = |line: &str| {
        let (labels, count) = line.strip_prefix("apiserver_request_total{")?.rsplit_once("} ")?;
        let label = |name: &str| {
            let value = labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""));
            Some(value?.trim_end_matches('"').to_owned())
        };
        let verb = label("verb")?;
        let is_write =
            ["POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"].contains(&verb.as_str());
        let write = Writes { verb, resource: label("resource")?, count: count.trim().parse().ok()? };
        is_write.then_some(write)
    };
    text.lines().filter_map(read).collect()
}
