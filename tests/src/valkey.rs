//! A separate Valkey or Redis server for a test, with its own port and folder, which is deleted after the
//! test.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use queue::{Connection, Owner, Retention, Server};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tempfile::TempDir;

use crate::program::mortal;

/// The time limit of an answer. The library's own limits of a second or less are too short for a machine that
/// is also compiling.
const PATIENCE: Duration = Duration::from_secs(20);

/// How many ports to try. Two that collide are rare; if every try fails, the cause is different.
const STARTS: u32 = 5;

/// Settings of a plain connection.
pub fn patient() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(PATIENCE)).set_response_timeout(Some(PATIENCE))
}

/// Finished runs are kept for longer than any test takes.
pub const KEEP: Retention = Retention { details: Duration::from_secs(60), ledger: None };

/// A run of team-a with this UID.
pub fn owner(uid: &str) -> Owner {
    Owner { uid: uid.into(), namespace: "team-a".into(), name: "run".into() }
}

/// The user that operators log in as.
const OPERATOR: &str = "openfilter";
const OPERATOR_PASSWORD: &str = "the operator's";

/// The rights of the operator's user, from the command that docs/operations.md shows.
pub fn operators_rights() -> Vec<String> {
    let page = fs::read_to_string(crate::root().join("docs/operations.md")).unwrap();
    let (_, command) = page
        .split_once("ACL SETUSER openfilter on '><password>' ")
        .expect("docs/operations.md shows the command");
    let (rights, _) = command.split_once("\n```").unwrap();
    rights.replace("\\\n", " ").split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()
}

/// The kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    /// Valkey 8.
    Valkey,
    /// Redis 7.
    Redis,
}

impl Flavor {
    /// Users have both, so the suites run on both.
    pub const ALL: [Self; 2] = [Self::Valkey, Self::Redis];

    fn binary(self) -> &'static str {
        match self {
            Self::Valkey => "valkey-server",
            Self::Redis => "redis-server",
        }
    }
}

/// Special features of a server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Password of the default user.
    pub password: Option<&'static str>,
    /// Keep data across restarts (append-only file, synced on every write).
    pub persistent: bool,
    /// Listen with TLS, with a certificate from its own CA.
    pub tls: bool,
    /// A Valkey Cluster of one node that serves every slot.
    pub cluster: bool,
    /// A configuration file, relative to the root of the project. It decides everything but the address, the
    /// folder and the password.
    pub config: Option<&'static str>,
}

/// A running server. Dropping it ends the process.
pub struct TestServer {
    flavor: Flavor,
    options: Options,
    port: u16,
    /// The port for plain connections beside the TLS port, if there is one.
    plain_port: u16,
    folder: TempDir,
    process: Option<Child>,
    ca_certificate: Option<Vec<u8>>,
}

impl TestServer {
    /// Starts a server without special features.
    pub async fn start(flavor: Flavor) -> Self {
        Self::start_with(flavor, Options::default()).await
    }

    /// Starts a server and waits until it answers.
    pub async fn start_with(flavor: Flavor, options: Options) -> Self {
        let server = Self::start_on(flavor, options, free_port).await;
        if options.cluster {
            let mut command = redis::cmd("CLUSTER");
            command.arg("ADDSLOTSRANGE").arg(0).arg(16383);
            server.raw(&command).await;
            crate::eventually("the cluster serves its slots", || async {
                let mut ping = redis::cmd("SET");
                server.try_raw(ping.arg("probe").arg(1)).await.is_ok()
            })
            .await;
        }
        server
    }

    /// A port may be taken between the check and the listening: other ports are tried then.
    async fn start_on(flavor: Flavor, options: Options, mut port: impl FnMut() -> u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_certificate = options.tls.then(|| make_certificates(&folder));
        let mut server =
            Self { flavor, options, port: 0, plain_port: 0, folder, process: None, ca_certificate };
        for attempt in 1.. {
            server.port = port();
            server.plain_port = if options.tls { port() } else { server.port };
            match server.run().await {
                Ok(()) => break,
                Err(error) => assert!(attempt < STARTS, "{error}"),
            }
        }
        server
    }

    /// The port that it listens on, on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The settings for a connection as the default user.
    pub fn server(&self) -> Server {
        let scheme = if self.options.tls { "rediss" } else { "redis" };
        let mut server = Server::at(format!("{scheme}://127.0.0.1:{}", self.port));
        server.password = self.options.password.map(|password| password.to_owned().into());
        server.ca_certificate.clone_from(&self.ca_certificate);
        server.timeout = PATIENCE;
        server
    }

    /// A connection as the operator's user, which has the rights that docs/operations.md gives it and no
    /// others.
    pub fn connect(&self) -> Connection {
        self.server().with_user(OPERATOR, OPERATOR_PASSWORD.to_owned().into()).connect().unwrap()
    }

    /// Runs one command over its own connection.
    pub async fn raw(&self, command: &redis::Cmd) -> redis::Value {
        self.try_raw(command).await.unwrap()
    }

    async fn try_raw(&self, command: &redis::Cmd) -> redis::RedisResult<redis::Value> {
        command.query_async(&mut self.try_raw_connection().await?).await
    }

    /// A plain connection as the default user, for commands that the protocol never uses.
    pub async fn raw_connection(&self) -> MultiplexedConnection {
        self.try_raw_connection().await.unwrap()
    }

    async fn try_raw_connection(&self) -> redis::RedisResult<MultiplexedConnection> {
        let password = self.options.password.map(|password| format!(":{password}@")).unwrap_or_default();
        let client = redis::Client::open(format!("redis://{password}127.0.0.1:{}", self.plain_port))?;
        client.get_multiplexed_async_connection_with_config(&patient()).await
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Kills the process if it runs, and starts it again with the same port and folder.
    pub async fn restart(&mut self) {
        self.kill();
        self.run().await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Starts the process and waits until it answers; returns the reason if it ends instead.
    async fn run(&mut self) -> Result<(), String> {
        let mut command = mortal(self.flavor.binary());
        command.args(self.options.config.map(|config| crate::root().join(config)));
        for (name, value) in self.settings() {
            command.arg(format!("--{name}")).arg(value);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Not by ACL SETUSER: a server that restarts must know the user before clients connect again.
        command
            .args(["--user", OPERATOR, "on"])
            .arg(format!(">{OPERATOR_PASSWORD}"))
            .args(operators_rights());
        let mut process = command.spawn().unwrap_or_else(|error| panic!("start setpriv: {error}"));
        let pid = process.id();
        let exited = async {
            while process.try_wait().unwrap().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let answers = async {
            while !self.answers(pid).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let fault = tokio::select! {
            () = exited => Some("ends"),
            () = answers => None,
            () = tokio::time::sleep(PATIENCE) => Some("does not answer"),
        };
        self.process = Some(process);
        let Some(fault) = fault else { return Ok(()) };
        self.kill();
        Err(format!(
            "{} {fault} instead of starting (`make packages` installs it): {}",
            self.flavor.binary(),
            fs::read_to_string(self.log()).unwrap_or_default()
        ))
    }

    /// Whether this very process answers, and not another one that took the port.
    async fn answers(&self, pid: u32) -> bool {
        // While the server loads its data, PING says so and INFO does not.
        if self.try_raw(&redis::cmd("PING")).await.is_err() {
            return false;
        }
        let info = self.try_raw(redis::cmd("INFO").arg("server")).await.ok();
        let info = info.and_then(|info| redis::from_redis_value::<String>(info).ok()).unwrap_or_default();
        info.lines().any(|line| line == format!("process_id:{pid}"))
    }

    /// The process's peak memory in bytes, as the kernel counts it.
    pub fn peak_memory(&self) -> u64 {
        let pid = self.process.as_ref().unwrap().id();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Freezes the server: connections stay open and nothing answers.
    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    /// Resumes a frozen server.
    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let on = |setting: bool| if setting { "yes" } else { "no" }.to_owned();
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        let mut settings = vec![
            ("bind", "127.0.0.1".to_owned()),
            ("port", self.plain_port.to_string()),
            ("dir", self.folder.path().display().to_string()),
            ("logfile", self.log().display().to_string()),
        ];
        if self.options.config.is_none() {
            settings.extend([
                ("save", String::new()),
                ("appendonly", on(self.options.persistent)),
                ("appendfsync", "always".to_owned()),
                ("cluster-enabled", on(self.options.cluster)),
                // The default is within the range that the system uses for clients' ports.
                ("cluster-port", free_port().to_string()),
                // How often the server checks for clients that have waited long enough; 10 times a second by
                // default.
                ("hz", "500".to_owned()),
            ]);
        }
        if let Some(password) = self.options.password {
            settings.push(("requirepass", password.to_owned()));
        }
        if self.options.tls {
            settings.push(("tls-port", self.port.to_string()));
            settings.push(("tls-cert-file", path("server.pem")));
            settings.push(("tls-key-file", path("server.key")));
            settings.push(("tls-ca-cert-file", path("ca.pem")));
            settings.push(("tls-auth-clients", "no".to_owned()));
        }
        settings
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A free port below the range that the system uses for clients' ports, so that no client takes it meanwhile.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_mul(131).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 20_000 + (number % 12_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Writes a CA and a server certificate for 127.0.0.1 to the folder; returns the CA's certificate.
fn make_certificates(folder: &TempDir) -> Vec<u8> {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_certificate = ca.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])
        .unwrap()
        .signed_by(&key, &issuer)
        .unwrap();
    for (name, pem) in [
        ("ca.pem", ca_certificate.pem()),
        ("server.pem", certificate.pem()),
        ("server.key", key.serialize_pem()),
    ] {
        fs::write(folder.path().join(name), pem).unwrap();
    }
    ca_certificate.pem().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_that_somebody_took_meanwhile_is_given_up_for_another() {
        for options in [Options::default(), Options { tls: true, ..Options::default() }] {
            let taken = TcpListener::bind("127.0.0.1:0").unwrap();
            let taken_port = taken.local_addr().unwrap().port();
            let mut ports = vec![taken_port];
            let server =
                TestServer::start_on(Flavor::Valkey, options, || ports.pop().unwrap_or_else(free_port)).await;
            assert_ne!(server.port(), taken_port);
            server.raw(&redis::cmd("PING")).await;
        }
    }
}
