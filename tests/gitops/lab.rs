//! The environment of the engines: a cluster with images and a bucket, this project's repository, and that of
//! a team that uses it.

use std::fs::File;
use std::process::Stdio;
use std::sync::Once;
use std::time::Duration;

use crds::v1alpha1::{Pipeline, PipelineRun};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource};
use testbed::images::{Set, reference};
use testbed::services::{S3_IP_URL, Services};
use testbed::{Doing, Testbed};
use tests::root;
use tokio::process::{Child, Command};

use crate::git::{GitServer, Repository};

/// The longest that anything may take on a busy machine.
pub const LONG: Duration = Duration::from_secs(600);
/// Where the manifests of kustomize/gitops expect their repositories, and the tag they install.
const PLACE: &str = "https://git.example.com";
const RELEASE: &str = "v0.1.0";
/// The namespace of examples/gitops-repo, and the bucket that its dev environment reads.
pub const NAMESPACE: &str = "cameras";
const BUCKET: &str = "camera-images-dev";

static LOADED: Once = Once::new();

pub struct Lab {
    pub testbed: Testbed,
    pub services: Services,
    git: GitServer,
    pub team: Repository,
}

impl Lab {
    /// A new lab. Removes whatever an earlier test left of engines, operator and team.
    pub async fn new() -> Self {
        let testbed = Testbed::with_nodes(2).await.unwrap();
        let services = testbed.services().await.unwrap();
        LOADED.call_once(|| testbed.load_images(&[Set::Worker, Set::Product, Set::Tests]).unwrap());
        services.s3.make_bucket(BUCKET).await.unwrap();
        let git = GitServer::start().await;
        let project = git.repository("openfilter/pipelines.git");
        for folder in ["crds", "kustomize", "policies"] {
            project.copy(&root().join(folder), folder);
        }
        // A single policy: those of the other environments require things that the testbed does not have.
        let overlay = "kustomize/overlays/dev/kustomization.yaml";
        project.edit(overlay, "- ../../base\n", "- ../../base\n- ../../../policies/no-default-namespace\n");
        project.commit("A release");
        project.tag(RELEASE);
        let team = git.repository("teams/cameras.git");
        let lab = Self { testbed, services, git, team };
        lab.remove_traces();
        lab
    }

    fn remove_traces(&self) {
        // The engines are gone, so nothing else would remove their finalizers.
        let flux = "gitrepositories.source.toolkit.fluxcd.io,kustomizations.kustomize.toolkit.fluxcd.io";
        let argocd = "applications.argoproj.io,applicationsets.argoproj.io";
        for (namespace, kinds) in [("flux-system", flux), ("argocd", argocd)] {
            let left = self.kubectl(&["get", kinds, "-n", namespace, "-o", "name"]);
            for object in left.unwrap_or_default().lines() {
                let patch = r#"{"metadata":{"finalizers":null}}"#;
                self.kubectl(&["patch", object, "-n", namespace, "--type=merge", "-p", patch]).unwrap();
            }
        }
        let gone = |words: &[&str]| {
            self.kubectl(&[&["delete", "--ignore-not-found", "--timeout=180s"], words].concat())
        };
        // The operator still runs, and cleans up after the team's runs.
        gone(&["namespace", NAMESPACE, "argocd", "flux-system"]).unwrap();
        gone(&["--kustomize", root().join("kustomize/overlays/dev").to_str().unwrap()]).unwrap();
    }

    /// The repository of examples/gitops-repo as the team uses it here: with the testbed's bucket and an
    /// image that exists.
    pub fn fill_team_repository(&self) {
        self.team.copy(&root().join("examples/gitops-repo"), "");
        let pipeline = "pipelines/thumbnails.yaml";
        self.team.edit(pipeline, "https://minio.storage.svc:9000", S3_IP_URL);
        let image = format!("{}\n    args: [obey]", reference("probe"));
        self.team.edit(pipeline, "ghcr.io/acme/resize:1.4", &image);
        let (id, secret) = self.services.s3.keys();
        let keys = format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{ name: camera-keys }}\nstringData: {{ accessKeyId: {id}, secretAccessKey: {secret} }}\n"
        );
        self.team.write("environments/dev/camera-keys.yaml", &keys);
        self.team.edit("environments/dev/kustomization.yaml", "# - camera-keys.yaml", "- camera-keys.yaml");
    }

    /// Stores images for a day: `probe obey` does with each what its content says.
    pub async fn put_images(&self, day: &str, count: usize, content: &str) {
        for number in 0..count {
            let key = format!("inbox/{day}/{number}.jpg");
            self.services.s3.put(BUCKET, &key, content.to_owned()).await.unwrap();
        }
    }

    /// Applies a folder of kustomize/gitops as a user does, with this test's repositories.
    pub fn apply_glue(&self, folder: &str) {
        let folder = root().join("kustomize/gitops").join(folder);
        let manifests = self.kubectl(&["kustomize", folder.to_str().unwrap()]).unwrap();
        self.testbed.apply(&manifests.replace(PLACE, &self.git.url)).unwrap();
    }

    /// Applies the kinds of an engine and waits until they are served: its programs exit otherwise.
    pub async fn apply_kinds(&self, words: &[&str]) {
        self.kubectl(&[&["apply", "--server-side"], words].concat()).unwrap();
        // kubectl fails instead of waiting while a kind has no conditions at all.
        let established = ["wait", "--for=condition=Established", "--timeout=10s", "crd", "--all"];
        let served = async || Ok(self.kubectl(&established).ok());
        self.testbed.eventually("the kinds of the engine are served", LONG, served).await.unwrap();
    }

    /// Starts a program of an engine; its log is beside those of the cluster.
    pub fn start(&self, name: &str, command: &mut Command) -> Child {
        let log = File::create(self.testbed.paths().log(name)).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        command.spawn().unwrap_or_else(|error| panic!("start {name}: {error}"))
    }

    pub fn kubectl(&self, words: &[&str]) -> Result<String, String> {
        self.testbed.kubectl(words, "")
    }

    /// The team's objects.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.testbed.client(), NAMESPACE)
    }

    pub async fn pipeline(&self, name: &str) -> Pipeline {
        self.api::<Pipeline>().get(name).await.unwrap()
    }

    pub async fn run(&self, name: &str) -> Option<PipelineRun> {
        self.api::<PipelineRun>().get_opt(name).await.unwrap()
    }

    pub async fn jobs(&self) -> Vec<Job> {
        self.api::<Job>().list(&ListParams::default()).await.unwrap().items
    }

    pub async fn pods(&self) -> Vec<Pod> {
        self.api::<Pod>().list(&ListParams::default()).await.unwrap().items
    }

    /// Waits until a run satisfies the condition.
    pub async fn until_run(
        &self,
        name: &str,
        what: &str,
        is_so: impl Fn(&PipelineRun) -> bool,
    ) -> PipelineRun {
        let api = self.api::<PipelineRun>();
        let probe = async || {
            let found = api.get_opt(name).await.doing(|| format!("look at the run {name}"))?;
            Ok(found.filter(|run| is_so(run)))
        };
        self.testbed.eventually(&format!("{name}: {what}"), LONG, probe).await.unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.testbed.paths().logs();
            eprintln!(
                "--- what was there when the test failed; logs of engines and cluster: {} ---",
                logs.display()
            );
            for words in [
                &["get", "pods", "-A", "-o", "wide"][..],
                &["get", "pl,plr,jobs", "-n", NAMESPACE, "-o", "wide"],
                &["get", "applications", "-n", "argocd", "-o", "yaml"],
                &["get", "gitrepositories,kustomizations", "-n", "flux-system", "-o", "yaml"],
            ] {
                eprintln!("{}", self.kubectl(words).unwrap_or_else(|error| error));
            }
        }
    }
}
