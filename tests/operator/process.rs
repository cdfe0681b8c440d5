//! The operator as a process, without a cluster that answers.

use std::process::Stdio;
use std::time::Duration;

use tests::program::{mortal, program};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

/// A short time, but long enough for a machine that does other things too.
const SOON: Duration = Duration::from_secs(30);

/// The operator, with a Kubernetes API that closes every connection.
async fn operator(folder: &tempfile::TempDir) -> Command {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let kubeconfig = folder.path().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: 'http://{server}'}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: ''}}}}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let mut command = Command::from(mortal(program("operator")));
    command.env("KUBECONFIG", kubeconfig).args([
        "--claimer-image",
        "c:1",
        "--valkey-url",
        "redis://127.0.0.1:1",
    ]);
    command.stderr(Stdio::piped()).kill_on_drop(true);
    command
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
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let mut child = operator(&folder).await.args(["--listen", &address]).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let has_asked = async {
        while let Some(line) = log.next_line().await.unwrap() {
            if line.contains("Kubernetes does not answer") {
                return;
            }
        }
        panic!("it ended");
    };
    timeout(SOON, has_asked).await.expect("it says that it had no answer");
    assert!(get(&address, "/livez").await.contains(" 200 "));
    let ready = get(&address, "/readyz").await;
    assert!(ready.contains(" 503 ") && ready.contains("not connected to Kubernetes yet"), "{ready}");
}

/// It would appear in the specification of every pod.
#[tokio::test]
async fn a_password_in_the_workers_url_is_refused_and_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let url = "redis://:hunter2@valkey:6379";
    let mut command = operator(&folder).await;
    command.args(["--listen", "127.0.0.1:0", "--worker-valkey-url", url]);
    let ended = timeout(SOON, command.output()).await.expect("it ends").unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success(), "{said}");
    assert!(said.contains("--worker-valkey-url") && !said.contains("hunter2"), "{said}");
}
