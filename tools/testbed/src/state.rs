//! The machine-wide record of the one cluster: whose it is, how far it got, and the machine's original
//! settings.

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

/// Kernel settings that a kubelet changes for the whole machine.
const KERNEL_SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// The record of this machine's cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The checkout that it belongs to.
    pub root: PathBuf,
    /// The boot in which it started; after another boot none of it runs.
    boot: String,
    /// Number of real nodes.
    pub nodes: u8,
    /// Number of fake nodes.
    pub kwok: u32,
    /// Whether it finished starting.
    pub ready: bool,
    /// Kernel settings before it started.
    kernel: BTreeMap<String, String>,
    /// cgroup v2: the controllers that the machine's root had delegated before it started.
    #[serde(default)]
    controllers: Vec<String>,
}

/// The state of the machine.
#[derive(Debug)]
pub enum Found {
    /// No cluster was started, or it was taken down.
    Nothing,
    /// A cluster that finished starting, and whose control plane runs.
    Up(Record),
    /// An interrupted start, a crash, or a reboot; `None` if even the record is unreadable.
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

    /// A record that contains only whose cluster it is.
    #[cfg(test)]
    pub(crate) fn of(root: &Path) -> Self {
        let (root, boot, kernel) = (root.to_owned(), String::new(), BTreeMap::new());
        Self { root, boot, nodes: 1, kwok: 0, ready: true, kernel, controllers: Vec::new() }
    }

    /// Records that the start is finished.
    pub fn finish(mut self) -> Result<Self> {
        self.ready = true;
        self.write()?;
        Ok(self)
    }

    /// Reads the copy in the checkout, in case /run is lost: a reboot empties it, but changes below /var
    /// stay.
    pub(crate) fn copy(paths: &Paths) -> Option<Self> {
        let text = fs::read_to_string(copy_file(&paths.root)).ok()?;
        let record: Self = serde_json::from_str(&text).ok()?;
        Some(Self { root: paths.root.clone(), ..record })
    }

    /// Restores the kernel's settings. The testbed's cgroups must be gone.
    pub fn restore_kernel(&self) {
        if self.boot != boot().unwrap_or_default() {
            return;
        }
        for (name, value) in &self.kernel {
            // A machine that refuses the old value also refused the kubelet's.
            let _ = fs::write(kernel_file(name), value);
        }
        cgroup::restore(&self.controllers);
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self).doing(|| "write the cluster's record".to_owned())?;
        // A record is complete or absent, because it decides what `down` may touch.
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

/// Inspects the machine.
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

/// Allows one `up` or `down` at a time on a machine, until the file is dropped.
pub(crate) fn lock() -> Result<File> {
    let path = Path::new("/run/lock/openfilter-testbed.lock");
    paths::make_dir("/run/lock")?;
    let file = File::create(path).doing(|| format!("open {} (are you root?)", path.display()))?;
    if file.try_lock().is_err() {
        eprintln!("waiting for another process that starts, stops or repairs the cluster ...");
        file.lock().doing(|| "wait for another `up` or `down`".to_owned())?;
    }
    Ok(file)
}

/// The names of recorded processes that no longer run.
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

/// The kernel's id of this boot.
pub(crate) fn boot() -> Result<String> {
    Ok(paths::read("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
