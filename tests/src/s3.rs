//! A separate S3 server for a test: a real versitygw on loopback, with its own folder, which is deleted after
//! the test.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use storage::{AccessKeys, Bucket};
use tempfile::TempDir;
use testbed::images::{RECIPES, Source};
use testbed::{Paths, S3};

use crate::program::mortal;
use crate::valkey::free_port;

/// The keys of every test server.
pub const ACCESS_KEY: &str = "test-access-key";
/// Their secret key, which must not appear anywhere.
pub const SECRET_KEY: &str = "test-secret-key-hunter2";

/// A running server. Dropping it ends the process.
pub struct TestS3 {
    /// The URL that it listens on.
    pub url: String,
    /// A client of it.
    pub client: S3,
    folder: TempDir,
    processes: Vec<Child>,
}

impl TestS3 {
    /// Starts a server and creates a bucket in it.
    pub async fn start(bucket: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        let (process, port) = serve(folder.path(), &[]).await;
        let url = format!("http://127.0.0.1:{port}");
        let client = S3::new(&url, ACCESS_KEY, SECRET_KEY);
        client.make_bucket(bucket).await.unwrap();
        Self { url, client, folder, processes: vec![process] }
    }

    /// Starts another server for the same buckets, with TLS. Returns its port and the CA that signed its
    /// certificate, in PEM.
    pub async fn with_tls(&mut self, name: &str) -> (u16, String) {
        let (certificate, key, ca) = certificate(name);
        let path = |file: &str| self.folder.path().join(file).display().to_string();
        fs::write(path("server.pem"), certificate).unwrap();
        fs::write(path("server.key"), key).unwrap();
        let arguments = ["--cert", &path("server.pem"), "--key", &path("server.key")];
        let (process, port) = serve(self.folder.path(), &arguments).await;
        self.processes.push(process);
        (port, ca)
    }

    /// Starts another server for the same buckets, which reads the bucket from the host name. Returns its
    /// port.
    pub async fn with_virtual_hosts(&mut self, domain: &str) -> u16 {
        let (process, port) = serve(self.folder.path(), &["--virtual-domain", domain]).await;
        self.processes.push(process);
        port
    }
}

impl Drop for TestS3 {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A certificate for a name or address, its key, and the CA that signed it: all in PEM.
pub fn certificate(name: &str) -> (String, String, String) {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_certificate = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    (params.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem(), ca_certificate)
}

/// A key as it appears in the path of a request: every byte except letters, digits and `-._~/` is escaped.
pub fn escape(key: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escaped = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    key.bytes().map(escaped).collect()
}

/// A bucket of a test server for operator and claimer, with one try and a short timeout.
pub fn bucket(url: &str, name: &str) -> Bucket {
    Bucket {
        name: name.to_owned(),
        endpoint: Some(storage::parse_endpoint(url).unwrap()),
        region: None,
        path_style: true,
        skip_tls_verify: false,
        keys: Some(AccessKeys { id: ACCESS_KEY.to_owned().into(), secret: SECRET_KEY.to_owned().into() }),
        timeout: Duration::from_secs(20),
        max_attempts: 1,
        etag_is_md5: true,
        addresses: None,
    }
}

async fn serve(folder: &Path, arguments: &[&str]) -> (Child, u16) {
    let recipe = RECIPES.iter().find(|recipe| recipe.name == "s3").unwrap();
    let Source::Go(module) = recipe.source else { panic!("the S3 server is a Go program") };
    let program = module.program(&Paths::find().unwrap()).unwrap();
    let port = free_port();
    let mut command = mortal(program);
    command.args(["--port", &format!("127.0.0.1:{port}"), "--quiet", "--keep-alive"]).args(arguments);
    command.arg("posix").arg(folder.join("data"));
    command.env("ROOT_ACCESS_KEY", ACCESS_KEY).env("ROOT_SECRET_KEY", SECRET_KEY);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = command.spawn().unwrap();
    let start = Instant::now();
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        let exited = process.try_wait().unwrap();
        assert!(
            exited.is_none() && start.elapsed() < Duration::from_secs(20),
            "versitygw does not start: {exited:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (process, port)
}
