//! The HTTP port: its answers, and its shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use operator::metrics::Metrics;
use operator::server::serve;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

struct Running {
    address: String,
    ready: Arc<AtomicBool>,
    stop: watch::Sender<bool>,
    task: JoinHandle<std::io::Result<()>>,
}

impl Running {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (ready, (stop, stopped)) = (Arc::new(AtomicBool::new(false)), watch::channel(false));
        let metrics = Arc::new(Metrics::new());
        metrics.set_leader(true);
        let asked = Arc::clone(&ready);
        let is_ready = move || match asked.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err("the caches are not filled yet".to_owned()),
        };
        let task = tokio::spawn(serve(listener, metrics, is_ready, stopped));
        Self { address, ready, stop, task }
    }

    async fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn ends(self, within: Duration) {
        timeout(within, self.task).await.expect("the server ends").unwrap().unwrap();
        assert!(TcpStream::connect(&self.address).await.is_err(), "it still listens");
    }
}

#[tokio::test]
async fn probes_and_figures_are_served() {
    let server = Running::start().await;
    assert!(server.get("/livez").await.starts_with("HTTP/1.1 200"));
    let answer = server.get("/readyz").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("caches"), "{answer}");
    server.ready.store(true, Ordering::SeqCst);
    assert!(server.get("/readyz").await.starts_with("HTTP/1.1 200"));
    let answer = server.get("/metrics").await;
    assert!(answer.contains("application/openmetrics-text"), "{answer}");
    assert!(answer.contains("openfilter_leader 1\n") && answer.contains("# EOF"), "{answer}");
    assert!(server.get("/else").await.starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn it_ends_when_told_to_whatever_its_clients_do() {
    let server = Running::start().await;
    // One client keeps its connection open, and one never finishes its request.
    let mut idle = TcpStream::connect(&server.address).await.unwrap();
    idle.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut stuck = TcpStream::connect(&server.address).await.unwrap();
    stuck.write_all(b"GET /livez HTTP/1.1\r\nhost").await.unwrap();
    assert!(idle.read(&mut [0; 16]).await.unwrap() > 0);
    server.stop.send(true).unwrap();
    server.ends(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn it_ends_with_whoever_could_tell_it_to() {
    let Running { address, ready, stop, task } = Running::start().await;
    drop(stop);
    let (stop, _) = watch::channel(false);
    Running { address, ready, stop, task }.ends(Duration::from_secs(10)).await;
}
