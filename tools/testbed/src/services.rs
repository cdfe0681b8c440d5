//! Valkey and S3 inside the cluster, and how to make them fail.

use std::{
    os::unix::fs::chown,
    path::{Path, PathBuf},
    time::Duration,
};

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Pod, Service},
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpStream;

use crate::{
    cluster,
    error::{Doing, Result},
    images::Set,
    paths::{self, Paths},
    s3::S3,
    state,
    suite::Testbed,
};

/// The namespace of the backing services.
pub const NAMESPACE: &str = "backing";
/// Valkey's host name, for pods.
pub const VALKEY_HOST: &str = "valkey.backing.svc.cluster.local";
/// Valkey's address, for pods and the host.
pub const VALKEY_IP: &str = "10.89.0.20";
/// S3 for pods.
pub const S3_URL: &str = "http://s3.backing.svc.cluster.local:7070";
/// S3 for pods and the host, without DNS.
pub const S3_IP_URL: &str = "http://10.89.0.30:7070";

/// The uid that every image of ours runs as.
const NONROOT: u32 = 65532;
/// A pod starts within seconds, but the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(300);
/// On one machine a connection succeeds at once or not at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The backing services of a cluster.
#[derive(Debug)]
pub struct Services {
    testbed: Testbed,
    /// The password of Valkey's default user.
    pub valkey_password: String,
    /// A client of the S3 server, with its keys.
    pub s3: S3,
}

impl Services {
    /// Starts the services, or finds them running.
    pub(crate) async fn start(testbed: &Testbed) -> Result<Self> {
        let credentials = Credentials::read(testbed.paths())?;
        // The last object of the manifest, which is applied after images are loaded.
        let last: Api<Service> = Api::namespaced(testbed.client(), NAMESPACE);
        let whole = last.get_opt("s3").await.doing(|| "look for the backing services".to_owned())?.is_some();
        apply(testbed, &credentials, whole)?;
        let services = Self {
            testbed: testbed.clone(),
            s3: S3::new(S3_IP_URL, &credentials.s3_access_key, &credentials.s3_secret_key),
            valkey_password: credentials.valkey_password,
        };
        // A failed test may have left one of them down.
        services.restart_valkey().await?;
        services.restart_s3().await?;
        Ok(services)
    }

    /// Ends Valkey as a power cut would; it stays down until [`Self::restart_valkey`].
    pub async fn kill_valkey(&self) -> Result<()> {
        self.kill("valkey").await
    }

    /// Starts Valkey again, with the contents of its append-only file.
    pub async fn restart_valkey(&self) -> Result<()> {
        self.scale("valkey", 1).await?;
        self.wait_ready("valkey").await
    }

    /// Kills Valkey, deletes its data, and starts it again.
    pub async fn wipe_valkey(&self) -> Result<()> {
        self.kill_valkey().await?;
        let data = self.testbed.paths().data("valkey");
        paths::remove(&data)?;
        make_data(&data)?;
        self.restart_valkey().await
    }

    /// Ends the S3 server as a power cut would; it stays down until [`Self::restart_s3`].
    pub async fn kill_s3(&self) -> Result<()> {
        self.kill("s3").await
    }

    /// Starts the S3 server again.
    pub async fn restart_s3(&self) -> Result<()> {
        self.scale("s3", 1).await?;
        self.wait_ready("s3").await
    }

    /// Killed before it is scaled down: if asked to end, Valkey would save first.
    async fn kill(&self, service: &str) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.testbed.client(), NAMESPACE);
        let selected = ListParams::default().labels(&format!("app={service}"));
        let doing = || format!("kill {service}");
        let kill_all = async || {
            let listed = pods.list(&selected).await.doing(doing)?;
            let statuses =
                listed.items.iter().filter_map(|pod| pod.status.as_ref()?.container_statuses.as_ref());
            for id in statuses.flatten().filter_map(|status| status.container_id.as_deref()) {
                self.testbed.kill_container(id)?;
            }
            Ok(listed.items.is_empty().then_some(()))
        };
        kill_all().await?;
        self.scale(service, 0).await?;
        self.testbed.eventually(&format!("{service} is gone"), TIMEOUT, kill_all).await
    }

    async fn scale(&self, service: &str, replicas: u32) -> Result<()> {
        let api: Api<Deployment> = Api::namespaced(self.testbed.client(), NAMESPACE);
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        api.patch_scale(service, &PatchParams::default(), &patch)
            .await
            .doing(|| format!("scale {service}"))?;
        Ok(())
    }

    /// Readiness in Kubernetes is not enough, because kube-proxy learns of it a moment later.
    async fn wait_ready(&self, service: &str) -> Result<()> {
        let api: Api<Deployment> = Api::namespaced(self.testbed.client(), NAMESPACE);
        let address =
            if service == "valkey" { format!("{VALKEY_IP}:6379") } else { S3_IP_URL.replace("http://", "") };
        let ready = async || {
            let found = api.get(service).await.doing(|| format!("read the state of {service}"))?;
            let status = found.status.unwrap_or_default();
            let current = status.observed_generation >= found.metadata.generation;
            if !current || status.available_replicas.unwrap_or_default() == 0 {
                return Ok(None);
            }
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&address)).await;
            Ok(connected.is_ok_and(|stream| stream.is_ok()).then_some(()))
        };
        self.testbed.eventually(&format!("{service} answers at {address}"), TIMEOUT, ready).await
    }
}

/// The services' credentials, created once per cluster so that they are the same for every caller.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Credentials {
    valkey_password: String,
    s3_access_key: String,
    s3_secret_key: String,
}

impl Credentials {
    /// Creates them for a cluster that is about to start.
    pub(crate) fn create(paths: &Paths) -> Result<()> {
        let random = || Result::Ok(paths::read("/proc/sys/kernel/random/uuid")?.trim().replace('-', ""));
        let (valkey_password, s3_secret_key) = (random()?, random()?);
        let made = Self { valkey_password, s3_access_key: "testbed".to_owned(), s3_secret_key };
        let text = serde_json::to_string_pretty(&made).doing(|| "write the credentials".to_owned())?;
        paths::write_private(Self::file(paths), text)
    }

    fn read(paths: &Paths) -> Result<Self> {
        let file = Self::file(paths);
        serde_json::from_str(&paths::read(&file)?).doing(|| format!("read {}", file.display()))
    }

    fn file(paths: &Paths) -> PathBuf {
        paths.pki().join("services.json")
    }
}

/// Applies the manifest, which changes nothing if it was already applied completely. Only one process at a
/// time does so, because several would create images and folders in the same place. It awaits nothing
/// meanwhile, so it cannot deadlock with itself.
fn apply(testbed: &Testbed, credentials: &Credentials, whole: bool) -> Result<()> {
    let paths = testbed.paths();
    let _lock = state::lock()?;
    if !whole {
        testbed.load_images(&[Set::Services])?;
    }
    for service in ["valkey", "s3"] {
        make_data(&paths.data(service))?;
    }
    let mut manifest = paths::read(paths.testbed("manifests/services.yaml"))?;
    for (word, value) in [
        ("$VALKEY_PASSWORD", &credentials.valkey_password),
        ("$VALKEY_DATA", &paths.data("valkey").display().to_string()),
        ("$S3_ACCESS_KEY", &credentials.s3_access_key),
        ("$S3_SECRET_KEY", &credentials.s3_secret_key),
        ("$S3_DATA", &paths.data("s3").display().to_string()),
    ] {
        manifest = manifest.replace(word, value);
    }
    cluster::apply(paths, &manifest)
}

/// Creates a folder for a service that does not run as root.
fn make_data(folder: &Path) -> Result<()> {
    paths::make_dir(folder)?;
    chown(folder, Some(NONROOT), Some(NONROOT)).doing(|| format!("change the owner of {}", folder.display()))
}
