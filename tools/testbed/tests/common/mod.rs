//! Shared by the testbed's tests: the cluster, pods that run to their end, and a minimal Valkey client.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::{Doing, Testbed, services::VALKEY_IP};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::{RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// Tests that break something run alone, all others concurrently.
static CLUSTER: RwLock<()> = RwLock::const_new(());

/// The cluster, for a test that does not disturb others.
pub(crate) async fn shared() -> (Testbed, RwLockReadGuard<'static, ()>) {
    let guard = CLUSTER.read().await;
    (Testbed::with_nodes(2).await.unwrap(), guard)
}

/// The cluster, for a test that breaks it.
pub(crate) async fn alone() -> (Testbed, RwLockWriteGuard<'static, ()>) {
    let guard = CLUSTER.write().await;
    (Testbed::with_nodes(2).await.unwrap(), guard)
}

/// A typed object from JSON.
pub(crate) fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// What Pod Security "restricted" requires of a container, and a read-only root filesystem.
pub(crate) fn restricted() -> Value {
    json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "runAsNonRoot": true, "runAsUser": 65532,
           "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}})
}

/// How a pod ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) reason: String,
    pub(crate) log: String,
}

/// Runs a pod with a container called `main` to its end.
pub(crate) async fn run_pod(testbed: &Testbed, namespace: &str, name: &str, mut spec: Value) -> Ended {
    spec["restartPolicy"] = json!("Never");
    let pods: Api<Pod> = Api::namespaced(testbed.client(), namespace);
    let pod = object(json!({"metadata": {"name": name}, "spec": spec}));
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let ended = async || {
        let pod = pods.get(name).await.doing(|| format!("read the state of the pod {name}"))?;
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        Ok(statuses.into_iter().find_map(|status| status.state?.terminated))
    };
    let ended =
        testbed.eventually(&format!("the pod {name} ends"), Duration::from_secs(300), ended).await.unwrap();
    let log = testbed.logs(namespace, name, "main").await.unwrap_or_default();
    Ended { code: ended.exit_code, reason: ended.reason.unwrap_or_default(), log }
}

/// An authenticated connection to Valkey.
#[derive(Debug)]
pub(crate) struct Valkey(BufReader<TcpStream>);

impl Valkey {
    /// Logs in with a password, or with a user and a password.
    pub(crate) async fn connect(login: &str) -> Result<Self, String> {
        let stream = TcpStream::connect((VALKEY_IP, 6379)).await.map_err(|error| error.to_string())?;
        let mut valkey = Self(BufReader::new(stream));
        match valkey.ask(&format!("AUTH {login}")).await? {
            answer if answer == "+OK" => Ok(valkey),
            refusal => Err(refusal),
        }
    }

    /// Sends one command and returns its answer; a value follows its length.
    pub(crate) async fn ask(&mut self, command: &str) -> Result<String, String> {
        let answer = async {
            self.0.get_mut().write_all(format!("{command}\r\n").as_bytes()).await?;
            let mut answer = String::new();
            if self.0.read_line(&mut answer).await? == 0 {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
            if answer.starts_with('$') && !answer.starts_with("$-1") {
                answer = answer.trim_end().to_owned() + " ";
                self.0.read_line(&mut answer).await?;
            }
            Ok::<_, std::io::Error>(answer.trim_end().to_owned())
        };
        let answer = tokio::time::timeout(Duration::from_secs(60), answer).await;
        answer.map_err(|_| "no answer".to_owned())?.map_err(|error| error.to_string())
    }
}
