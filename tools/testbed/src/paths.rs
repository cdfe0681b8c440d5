//! The paths of everything that belongs to a checkout, to the machine, and to the user's cache.

use std::{
    env,
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{
    error::{Doing, Result},
    image::sha256,
};

/// A machine has one cluster: sockets, records and namespaces have fixed names below this folder. It is
/// short, because the path of a Unix socket may have at most 108 bytes.
pub const RUN: &str = "/run/openfilter-testbed";

/// The files of a cluster that belongs to one checkout.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The checkout.
    pub root: PathBuf,
}

impl Paths {
    /// The checkout that contains the current folder, or the one in which this library was built.
    pub fn find() -> Result<Self> {
        let here = env::current_dir().doing(|| "find the current folder".to_owned())?;
        let is_root = |folder: &&Path| folder.join("tools/testbed/go/kubernetes/go.mod").is_file();
        let built = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root =
            here.ancestors().find(is_root).or_else(|| built.ancestors().find(is_root)).unwrap_or(&here);
        Ok(Self { root: root.to_owned() })
    }

    /// The state of a running cluster, except what has a fixed place on the machine.
    pub fn state(&self) -> PathBuf {
        self.root.join(".testbed")
    }

    /// The kubeconfig of the cluster's administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.state().join("kubeconfig")
    }

    /// Every component's log file, and the logs of pods by node.
    pub fn logs(&self) -> PathBuf {
        self.state().join("logs")
    }

    /// The log of one component.
    pub fn log(&self, name: &str) -> PathBuf {
        self.logs().join(format!("{name}.log"))
    }

    /// Keys, certificates and kubeconfigs.
    pub fn pki(&self) -> PathBuf {
        self.state().join("pki")
    }

    /// The path of a Kubernetes component, by name.
    pub fn bin(&self, name: &str) -> PathBuf {
        self.state().join("bin").join(name)
    }

    /// The folder of one node: images, pods, configuration.
    pub fn node(&self, node: &str) -> PathBuf {
        self.state().join("nodes").join(node)
    }

    /// The data of a backing service.
    pub fn data(&self, service: &str) -> PathBuf {
        self.state().join("data").join(service)
    }

    /// The image archives that `testbed images` built.
    pub fn images(&self) -> PathBuf {
        self.state().join("images")
    }

    /// The folder into which the README test clones this checkout: always the same, so that the next test
    /// finds what a killed one left.
    pub fn readme_clone(&self) -> PathBuf {
        let key = &sha256(self.root.as_os_str().as_encoded_bytes())[..12];
        cache().join(format!("readme-{key}/openfilter-pipelines"))
    }

    /// A file of this crate.
    pub fn testbed(&self, file: &str) -> PathBuf {
        self.root.join("tools/testbed").join(file)
    }
}

/// The folder of the builds: one per machine and user, not one per checkout.
pub fn cache() -> PathBuf {
    let base = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .unwrap_or_else(|| PathBuf::from("/var/cache"));
    base.join("openfilter-pipelines")
}

/// Creates a folder and its parents.
pub(crate) fn make_dir(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    fs::create_dir_all(path).doing(|| format!("create the folder {}", path.display()))
}

/// Writes a whole file, and creates its folder.
pub(crate) fn write(path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
    let path = path.as_ref();
    if let Some(parent) = path.parent() {
        make_dir(parent)?;
    }
    fs::write(path, content).doing(|| format!("write {}", path.display()))
}

/// Does the same for a secret: at no time can anyone else read it.
pub(crate) fn write_private(path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
    let path = path.as_ref();
    if let Some(parent) = path.parent() {
        make_dir(parent)?;
    }
    // The mode applies only to a new file.
    remove(path)?;
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.and_then(|mut file| file.write_all(content.as_ref())).doing(|| format!("write {}", path.display()))
}

/// A unique name, for a file that is not complete yet.
pub(crate) fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Reads a whole text file.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    fs::read_to_string(path).doing(|| format!("read {}", path.display()))
}

/// Removes a file, or a folder with all its contents, if it exists.
pub(crate) fn remove(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => return Ok(()),
    };
    match removed {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.doing(|| format!("remove {}", path.display())),
    }
}
