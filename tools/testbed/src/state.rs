//! The machine-wide record of the one cluster: whose it is, how far it got, what the machine was like before.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    cgroup,
    error::{Doing, Result},
    paths::{self, Paths, RUN},
    process::{self, Running},
};

/// Settings of the kernel that a kubelet changes for the whole machine.
const KERNEL_SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// What is known about the cluster of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The checkout it belongs to.
    pub root: PathBuf,
    /// The boot it was started in; after another one nothing of it runs.
    boot: String,
    /// Real nodes.
    pub nodes: u8,
    /// Fake nodes.
    pub kwok: u32,
    /// Whether its start was finished.
    pub ready: bool,
    /// Settings of the kernel before it was started.
    kernel: BTreeMap<String, String>,
    /// cgroup v2: the controllers that the machine handed to its own cgroups before it was started.
    #[serde(default)]
    controllers: Vec<String>,
}

/// What a look at the machine finds.
#[derive(Debug)]
pub enum Found {
    /// No cluster was started, or it was taken down.
    Nothing,
    /// A cluster that was started to the end and whose control plane runs.
    Up(Record),
    /// A start that was interrupted, a crash, or a reboot; `None` when even the record is unreadable.
    Stale(Option<Record>),
}

impl Record {
    /// The record of a cluster that is about to start.
    pub fn begin(root: &Path, nodes: u8, kwok: u32) -> Result<Self> {
        let kernel = KERNEL_SETTINGS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), fs::read_to_string(kernel_file(name)).ok()?)))
            .collect();
        let (root, controllers) = (root.to_owned(), cgroup::handed_down()?);
        let record = Self { root, boot: boot()?, nodes, kwok, ready: false, kernel, controllers };
        record.write()?;
        Ok(record)
    }

    /// A record of nothing but whose cluster it is.
    #[cfg(test)]
    pub(crate) fn of(root: &Path) -> Self {
        let (root, boot, kernel) = (root.to_owned(), String::new(), BTreeMap::new());
        Self { root, boot, nodes: 1, kwok: 0, ready: true, kernel, controllers: Vec::new() }
    }

    /// Says that the start was finished.
    pub fn finish(mut self) -> Result<Self> {
        self.ready = true;
        self.write()?;
        Ok(self)
    }

    /// The copy in the checkout, for when /run is lost: a reboot empties it, and what was changed below /var stays.
    pub(crate) fn copy(paths: &Paths) -> Option<Self> {
        let text = fs::read_to_string(copy_file(&paths.root)).ok()?;
        let record: Self = serde_json::from_str(&text).ok()?;
        Some(Self { root: paths.root.clone(), ..record })
    }

    /// Puts the kernel's settings back. The testbed's cgroups must be gone.
    pub fn restore_kernel(&self) {
        if self.boot != boot().unwrap_or_default() {
            return;
        }
        for (name, value) in &self.kernel {
            // A machine that refuses the old value refused the kubelet's too.
            let _ = fs::write(kernel_file(name), value);
        }
        cgroup::restore(&self.controllers);
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self).doing(|| "write the cluster's record".to_owned())?;
        // A record is whole or not there: it decides what `down` may touch.
        for file in [copy_file(&self.root), file()] {
            let half = file.with_extension("half");
            paths::write(&half, &text)?;
            fs::rename(&half, &file).doing(|| format!("write {}", file.display()))?;
        }
        Ok(())
    }

    fn runs(&self) -> bool {
        let control_plane = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];
        self.ready
            && boot().is_ok_and(|now| now == self.boot)
            && control_plane.iter().all(|name| Running::find(name).is_some())
    }
}

/// Looks at what is there.
pub fn find() -> Found {
    let Ok(text) = fs::read_to_string(file()) else {
        return if Path::new(RUN).exists() { Found::Stale(None) } else { Found::Nothing };
    };
    match serde_json::from_str::<Record>(&text) {
        Ok(record) if record.runs() => Found::Up(record),
        Ok(record) => Found::Stale(Some(record)),
        Err(_) => Found::Stale(None),
    }
}

/// One `up` or `down` at a time on a machine; released when the file is dropped.
pub(crate) fn lock() -> Result<File> {
    let path = Path::new("/run/lock/openfilter-testbed.lock");
    paths::make_dir("/run/lock")?;
    let file = File::create(path).doing(|| format!("open {} (are you root?)", path.display()))?;
    if file.try_lock().is_err() {
        eprintln!("waiting for another process that starts, stops or mends the cluster ...");
        file.lock().doing(|| "wait for another `up` or `down`".to_owned())?;
    }
    Ok(file)
}

/// The names of recorded processes that do not run any more.
pub fn dead() -> Vec<String> {
    process::recorded().into_iter().filter(|name| Running::find(name).is_none()).collect()
}

fn file() -> PathBuf {
    Path::new(RUN).join("cluster.json")
}

fn copy_file(root: &Path) -> PathBuf {
    Paths { root: root.to_owned() }.state().join("cluster.json")
}

fn kernel_file(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

/// The kernel's name for this boot.
pub(crate) fn boot() -> Result<String> {
    Ok(paths::read("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
