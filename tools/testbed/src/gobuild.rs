//! Builds the Go programs of the testbed, once per machine.
//!
//! The user's cache keeps a build under the hash of the module's files and of the compiler. The build appears
//! there in one rename: everything with that name is complete, even after a power cut, and an interrupted
//! build leaves only a folder that the next one removes.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::{
    command::{self, tail},
    error::{Doing, Error, Result},
    image::sha256,
    paths::{self, Paths},
};

/// Long enough not to flood a log, short enough not to look stuck.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A Go module below `tools/testbed/go/`.
#[derive(Debug)]
pub struct Module {
    /// The name of the folder and of the program.
    pub name: &'static str,
    /// The version that its `go.mod` pins.
    pub version: &'static str,
    /// The package to build: the module itself, or a program of a module that it requires.
    package: &'static str,
    /// Variables that the linker sets, so that the program knows its version.
    stamps: &'static [&'static str],
    /// Files and folders of the package's module to keep beside the program, under the same paths.
    files: &'static [&'static str],
    /// How long the first build takes on two cores.
    takes: &'static str,
}

/// Kubernetes and etcd in one program.
pub(crate) const KUBERNETES: Module = Module {
    name: "kubernetes",
    version: "v1.36.3",
    package: ".",
    stamps: &[
        "k8s.io/component-base/version.gitVersion=v1.36.3",
        "k8s.io/component-base/version.gitMajor=1",
        "k8s.io/component-base/version.gitMinor=36",
        "k8s.io/client-go/pkg/version.gitVersion=v1.36.3",
    ],
    files: &[],
    takes: "8 minutes",
};

/// The cluster's DNS server.
pub(crate) const COREDNS: Module =
    Module { name: "coredns", version: "v1.15.0", package: ".", stamps: &[], files: &[], takes: "2 minutes" };

/// Nodes that exist only in the API, for scale.
pub(crate) const KWOK: Module = Module {
    name: "kwok",
    version: "v0.8.0",
    package: "sigs.k8s.io/kwok/cmd/kwok",
    stamps: &["sigs.k8s.io/kwok/pkg/consts.Version=v0.8.0"],
    files: &[],
    takes: "3 minutes",
};

/// The S3 server.
pub(crate) const VERSITYGW: Module = Module {
    name: "versitygw",
    version: "v1.8.0",
    package: "github.com/versity/versitygw/cmd/versitygw",
    stamps: &["main.Version=v1.8.0"],
    files: &[],
    takes: "3 minutes",
};

/// The other end of a connection, for the testbed's own tests.
pub(crate) const PEER: Module =
    Module { name: "peer", version: "v1", package: ".", stamps: &[], files: &[], takes: "20 seconds" };

/// Flux: fetches Git repositories.
pub const SOURCE_CONTROLLER: Module = Module {
    name: "source-controller",
    version: "v1.9.3",
    package: "github.com/fluxcd/source-controller",
    stamps: &[],
    files: &["config/crd/bases"],
    takes: "8 minutes",
};

/// Flux: applies what was fetched.
pub const KUSTOMIZE_CONTROLLER: Module = Module {
    name: "kustomize-controller",
    version: "v1.9.4",
    package: "github.com/fluxcd/kustomize-controller",
    stamps: &[],
    files: &["config/crd/bases"],
    takes: "5 minutes",
};

/// All programs of Argo CD in one; the environment variable `ARGOCD_BINARY_NAME` selects one.
pub const ARGOCD: Module = Module {
    name: "argocd",
    version: "v3.5.3",
    package: "github.com/argoproj/argo-cd/v3/cmd",
    stamps: &["github.com/argoproj/argo-cd/v3/common.version=3.5.3"],
    files: &["manifests/crds", "hack/git-verify-wrapper.sh", "hack/gpg-wrapper.sh"],
    takes: "12 minutes",
};

/// Argo CD calls this to build manifests.
pub const KUSTOMIZE: Module = Module {
    name: "kustomize",
    version: "v5.8.2",
    package: "sigs.k8s.io/kustomize/kustomize/v5",
    stamps: &[],
    files: &[],
    takes: "20 seconds",
};

impl Module {
    /// The path of the program, which is built first if this machine does not have it yet.
    pub fn program(&self, paths: &Paths) -> Result<PathBuf> {
        let source = paths.testbed("go").join(self.name);
        let folder = paths::cache().join(format!("{}-{}-{}", self.name, self.version, self.key(&source)?));
        let program = folder.join(self.name);
        if program.is_file() {
            return Ok(program);
        }
        paths::make_dir(paths::cache())?;
        let lock = paths::cache().join(format!(".{}.lock", self.name));
        let lock = File::create(&lock).doing(|| format!("open {}", lock.display()))?;
        lock.lock().doing(|| format!("wait for another build of {}", self.name))?;
        if program.is_file() {
            return Ok(program); // another process built it while this one waited
        }
        // A unique name: the compiler of a killed build may still be writing to the old folder.
        let prefix = format!(".{}.building-", self.name);
        let half = paths::cache().join(format!("{prefix}{}", std::process::id()));
        let kept = fs::read_dir(paths::cache()).doing(|| format!("list {}", paths::cache().display()))?;
        for old in kept.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
            paths::remove(old.path())?;
        }
        paths::make_dir(&half)?;
        self.build(&source, &half.join(self.name))?;
        self.keep_files(&source, &half)?;
        sync(&half.join(self.name))?;
        sync(&half)?;
        fs::rename(&half, &folder).doing(|| format!("keep the build {}", folder.display()))?;
        sync(&paths::cache())?;
        Ok(program)
    }

    fn build(&self, source: &PathBuf, output: &PathBuf) -> Result<()> {
        let Self { name, version, takes, .. } = self;
        println!("building {name} {version}, about {takes} the first time on a machine ...");
        let log = paths::cache().join(format!("{name}.log"));
        let doing = || format!("open {}", log.display());
        let written = File::create(&log).doing(doing)?;
        let stamps: String = self.stamps.iter().map(|stamp| format!(" -X {stamp}")).collect();
        let mut child = Command::new("go")
            .args([
                "build",
                "-mod=readonly",
                "-buildvcs=false",
                "-trimpath",
                "-ldflags",
                &format!("-s -w{stamps}"),
                "-o",
            ])
            .arg(output)
            .arg(self.package)
            .current_dir(source)
            .env("CGO_ENABLED", "0")
            .env("GOWORK", "off")
            .stdout(written.try_clone().doing(doing)?)
            .stderr(written)
            .spawn()
            .doing(|| format!("build {name} (is Go installed?)"))?;
        let (started, mut said) = (Instant::now(), Instant::now());
        let status = loop {
            if let Some(status) = child.try_wait().doing(|| format!("wait for the build of {name}"))? {
                break status;
            }
            if said.elapsed() >= HEARTBEAT {
                println!("  still building {name} {version} ({} s)", started.elapsed().as_secs());
                said = Instant::now();
            }
            thread::sleep(Duration::from_millis(200));
        };
        if status.success() {
            println!("  built {name} {version} in {} s", started.elapsed().as_secs());
            return Ok(());
        }
        let output = tail(&fs::read_to_string(&log).unwrap_or_default(), 2_000);
        let doing = format!("build {name} {version} (log: {})", log.display());
        Err(Error::Command { doing, command: "go build".to_owned(), status, output })
    }

    /// Copies the files that are used beside the program, so that a machine with the build no longer needs
    /// the module.
    fn keep_files(&self, source: &PathBuf, folder: &PathBuf) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let doing = format!("find the module of {}", self.name);
        let mut list = Command::new("go");
        list.args(["list", "-mod=readonly", "-f", "{{.Module.Dir}}", self.package]).current_dir(source);
        let module = command::finish(&doing, list.env("GOWORK", "off"))?;
        let mut copy = Command::new("cp");
        // Modules are read-only, but the copies must be removable.
        copy.args(["--recursive", "--parents", "--no-preserve=mode"]).args(self.files).arg(folder);
        let doing = format!("keep files of {}", self.name);
        command::finish(&doing, copy.current_dir(module.trim())).map(|_| ())
    }

    /// A hash of everything the build depends on, short enough for a folder name.
    fn key(&self, source: &PathBuf) -> Result<String> {
        let listed = fs::read_dir(source).doing(|| format!("list {}", source.display()))?;
        let mut files: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
        files.sort();
        // Ask in the module's folder, where go.mod may choose a compiler other than the machine's.
        let mut go = Command::new("go");
        go.args(["env", "GOVERSION", "GOARCH"]).current_dir(source);
        let go = command::finish("read the version of Go (is Go installed?)", &mut go)?;
        let go: Vec<&str> = go.split_whitespace().collect();
        let mut all = format!("{} {:?} {}{}", self.package, self.stamps, go.join(" "), self.files.concat())
            .into_bytes();
        for file in files {
            all.extend(fs::read(&file).doing(|| format!("read {}", file.display()))?);
        }
        Ok(sha256(&all)[..12].to_owned())
    }
}

/// Waits until a file or folder is written to the disk.
fn sync(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .doing(|| format!("write {} to the disk", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_module_requires_the_version_it_is_named_by() {
        let paths = Paths::find().unwrap();
        let flux = [SOURCE_CONTROLLER, KUSTOMIZE_CONTROLLER];
        for module in [KUBERNETES, COREDNS, KWOK, VERSITYGW, ARGOCD, KUSTOMIZE].into_iter().chain(flux) {
            let text = paths::read(paths.testbed("go").join(module.name).join("go.mod")).unwrap();
            // The program's own module, by its path; for our own programs, the module they are named after.
            let is_wanted = |path: &str| match module.package {
                "." => path.ends_with(&format!("/{}", module.name)),
                package => format!("{package}/").starts_with(&format!("{path}/")),
            };
            let required = text.lines().any(|line| {
                let mut words = line.trim().trim_start_matches("require ").split(' ');
                words.next().is_some_and(is_wanted) && words.next() == Some(module.version)
            });
            assert!(required, "{} requires a version other than {}", module.name, module.version);
        }
    }
}
