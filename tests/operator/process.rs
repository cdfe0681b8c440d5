//! The operator as a process, where no cluster answers.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use tests::program::{mortal, program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An address at which nobody listens.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// The operator, with a Kubernetes that does not answer.
fn operator(folder: &tempfile::TempDir) -> Command {
    let kubeconfig = folder.path().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: ''}}}}]\n",
        free_address()
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let mut command = mortal(program("operator"));
    command.env("KUBECONFIG", kubeconfig).args(["--claimer-image", "c:1", "--valkey-url"]);
    command.stderr(Stdio::piped());
    command
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn an_operator_without_kubernetes_is_alive_and_not_ready() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    let mut command = operator(&folder);
    let mut child = Ended(command.args(["redis://127.0.0.1:1", "--listen", &address]).spawn().unwrap());
    let mut log = BufReader::new(child.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    // It has asked, and had no answer.
    assert!(log.any(|line| line.contains("Kubernetes does not answer")), "it ended");
    assert!(get(&address, "/livez").await.contains(" 200 "));
    let ready = get(&address, "/readyz").await;
    assert!(ready.contains(" 503 ") && ready.contains("not connected to Kubernetes yet"), "{ready}");
}

/// Trap 24: it would be in every pod.
#[tokio::test]
async fn a_password_in_the_workers_url_is_refused_and_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = operator(&folder);
    command.args(["redis://127.0.0.1:1", "--listen", &free_address()]);
    let mut child =
        Ended(command.args(["--worker-valkey-url", "redis://:hunter2@valkey:6379"]).spawn().unwrap());
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!child.0.wait().unwrap().success(), "{said}");
    assert!(said.contains("--worker-valkey-url") && !said.contains("hunter2"), "{said}");
}
