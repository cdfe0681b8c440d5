//! The cluster of the demo: the testbed on this machine, built and started if need be, or an existing cluster
//! of the user.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use testbed::{
    Paths, Testbed, Whose,
    images::Set,
    services::{S3_IP_URL, S3_URL},
};

use crate::{
    Result,
    kubectl::Kubectl,
    settings::{self, Args, DEFAULT_BUCKET, Foreign, Where},
    step,
    store::Store,
};

/// The prefix of our images in the repository's YAML.
const OUR_IMAGES: &str = "localhost/openfilter/";
const OUR_TAG: &str = ":testbed";
/// The images that come from this repository; the testbed has more.
const IMAGES: [&str; 5] = ["operator", "webhook", "claimer", "thumbnail", "annotate"];
/// How often a long operation prints a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A cluster with a bucket, and access to both.
pub struct Cluster {
    /// kubectl for this cluster.
    pub kubectl: Kubectl,
    /// The bucket.
    pub store: Store,
    /// Keys of the bucket, for the Secret.
    pub keys: storage::AccessKeys,
    /// The checkout.
    pub paths: Paths,
    foreign: Option<Foreign>,
}

impl Cluster {
    /// Starts the cluster, or finds it.
    pub async fn start(args: &Args) -> Result<Self> {
        let paths = Paths::find()?;
        match args.cluster {
            Where::Testbed => Self::testbed(paths).await,
            Where::Current => Self::current(paths, args.foreign()?).await,
        }
    }

    async fn testbed(paths: Paths) -> Result<Self> {
        step("A Kubernetes cluster on this machine");
        let cold = cold(&listed(&testbed::cache()), &listed(&target().join("debug")));
        if !cold.is_empty() {
            println!("This is the first run, so the following is built from source and kept for later runs:");
            cold.iter().for_each(|line| println!("  {line}"));
        }
        let testbed = Testbed::start_or_reuse().await?;
        let kubectl = Kubectl::of_testbed(&paths);
        kubectl.show(&["get", "nodes"])?;
        println!(
            "\nThe images of the operator, the webhook, the claimer and two sample filters, and an S3 server:"
        );
        let sets = [Set::Worker, Set::Product, Set::Filters];
        with_heartbeat("building and loading the images", || testbed.load_images(&sets))?;
        let services = testbed.services().await?;
        println!("loaded into the cluster; the S3 server answers at {S3_IP_URL}");
        let (access, secret) = services.s3.keys();
        let bucket = settings::bucket(DEFAULT_BUCKET, S3_IP_URL, access, secret)?;
        Self::with(paths, kubectl, bucket, None).await
    }

    async fn current(paths: Paths, foreign: Foreign) -> Result<Self> {
        step("The cluster of KUBECONFIG");
        let kubectl = Kubectl::of_user(&paths.root)?;
        kubectl.show(&["get", "nodes"])?;
        let bucket = foreign.bucket.clone();
        Self::with(paths, kubectl, bucket, Some(foreign)).await
    }

    async fn with(
        paths: Paths,
        kubectl: Kubectl,
        bucket: storage::Bucket,
        foreign: Option<Foreign>,
    ) -> Result<Self> {
        let keys = bucket.keys.clone().ok_or("the bucket has no keys")?;
        fs::create_dir_all(folder(&paths))?;
        Ok(Self { kubectl, store: Store::open(bucket).await?, keys, paths, foreign })
    }

    /// Whether the cluster belongs to the user and not to the testbed.
    pub fn is_foreign(&self) -> bool {
        self.foreign.is_some()
    }

    /// The path of a manifest of `examples/demo` for kubectl. For the user's cluster, it is the path of a
    /// copy with that cluster's images, endpoint and bucket.
    pub fn manifest(&self, name: &str) -> Result<String> {
        let original = format!("examples/demo/{name}");
        let Some(foreign) = &self.foreign else { return Ok(original) };
        let text = fs::read_to_string(self.paths.root.join(&original))?;
        self.write_copy(name, &adapted(&text, foreign))
    }

    /// Writes a text into the demo's folder; returns its path for kubectl.
    pub fn write_copy(&self, name: &str, text: &str) -> Result<String> {
        let file = folder(&self.paths).join(name);
        fs::write(&file, text)?;
        Ok(file.strip_prefix(&self.paths.root).unwrap_or(&file).display().to_string())
    }

    /// A manifest with the images and the bucket of this cluster.
    pub fn adapt(&self, text: &str) -> String {
        self.foreign.as_ref().map_or_else(|| text.to_owned(), |foreign| adapted(text, foreign))
    }
}

/// The folder of the demo's files; `cluster-down` removes it.
pub fn folder(paths: &Paths) -> PathBuf {
    paths.state().join("demo")
}

/// Takes down the cluster of this checkout.
pub fn down_testbed() -> Result<()> {
    match testbed::down(&Paths::find()?, Whose::Ours)? {
        Some(_) => println!("the cluster is down, and everything in it is gone"),
        None => println!("no cluster was running, and nothing is left of an earlier one"),
    }
    Ok(())
}

/// Replaces the repository's names with those of the other cluster.
fn adapted(text: &str, foreign: &Foreign) -> String {
    let Foreign { registry, tag, valkey_image, endpoint, bucket } = foreign;
    let mut text = text.replace(S3_URL, endpoint);
    text = text.replace(&format!("{OUR_IMAGES}valkey{OUR_TAG}"), valkey_image);
    text = text.replace(
        &format!("name: {DEFAULT_BUCKET}\n      prefix"),
        &format!("name: {}\n      prefix", bucket.name),
    );
    for name in IMAGES {
        text = text.replace(&format!("{OUR_IMAGES}{name}{OUR_TAG}"), &format!("{registry}/{name}:{tag}"));
    }
    text
}

/// What must still be built, and how long that takes on two cores.
fn cold(cache: &[String], programs: &[String]) -> Vec<&'static str> {
    let mut cold = Vec::new();
    let modules = [
        ("kubernetes-", "Kubernetes             8 to 13 minutes, once per machine"),
        ("coredns-", "cluster DNS            3 minutes, once per machine"),
        ("versitygw-", "an S3 server           3 minutes, once per machine"),
    ];
    for (module, line) in modules {
        if !cache.iter().any(|name| name.starts_with(module)) {
            cold.push(line);
        }
    }
    if !IMAGES.iter().all(|image| programs.iter().any(|name| name == image)) {
        cold.push("operator, webhook, claimer and filters   3 minutes, once per checkout");
    }
    cold
}

fn listed(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

/// Does something that may take minutes, and reports regularly that it is still working.
fn with_heartbeat<T: Send>(what: &str, work: impl FnOnce() -> T + Send) -> T {
    let started = Instant::now();
    let (done, heard) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while heard.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                println!("  still {what} ({} s)", started.elapsed().as_secs());
            }
        });
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn what_is_not_there_is_announced_and_nothing_else() {
        let cache = names(&["kubernetes-v1.36.3-abc", "coredns-v1-abc", "versitygw-v1-abc"]);
        assert!(cold(&cache, &names(&IMAGES)).is_empty());
        assert_eq!(cold(&[], &names(&IMAGES)).len(), 3);
        assert!(cold(&cache, &names(&IMAGES[1..]))[0].starts_with("operator"));
    }

    #[test]
    fn manifests_get_the_images_and_the_bucket_of_another_cluster_and_nothing_of_ours_is_left() {
        let words = [
            "demo",
            "--registry=reg/team",
            "--tag=7",
            "--s3-endpoint=http://s3.acme:9000",
            "--s3-bucket=mine",
        ];
        let foreign = Args::parse_from([&words[..], &["--s3-access-key=a", "--s3-secret-key=b"]].concat())
            .foreign()
            .unwrap();
        let root = Paths::find().unwrap().root;
        for name in ["pipeline.yaml", "warm-pipeline.yaml"] {
            let pipeline = fs::read_to_string(root.join("examples/demo").join(name)).unwrap();
            let adapted = adapted(&pipeline, &foreign);
            assert_eq!(adapted.matches("endpoint: http://s3.acme:9000").count(), 2);
            assert_eq!(adapted.matches("name: mine").count(), 2);
            for filter in ["image: reg/team/thumbnail:7", "image: reg/team/annotate:7"] {
                assert!(adapted.contains(filter), "{adapted}");
            }
            assert!(adapted.contains("namespace: openfilter-demo"), "the namespace is not the bucket");
            assert!(!adapted.contains(OUR_IMAGES) && !adapted.contains(S3_URL), "{adapted}");
        }
    }

    #[test]
    fn work_gives_its_result_and_the_heartbeat_ends_with_it() {
        assert_eq!(with_heartbeat("adding", || 1 + 1), 2);
    }
}
