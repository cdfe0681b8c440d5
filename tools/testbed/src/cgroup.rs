//! The cgroups of the testbed, which distinguish its processes from all others.
//!
//! Every process starts inside `openfilter-testbed/<part>`, and so do its children; the kubelet puts
//! containers below `openfilter-testbed/<node>`. Every process in there is ours. So `down` ends even
//! processes that were never recorded, or whose record a crash lost, and never ends anyone else's.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    command,
    error::{Doing, Error, Result},
    paths,
};

/// The root of the testbed's cgroups, in every hierarchy.
pub(crate) const ROOT: &str = "openfilter-testbed";

/// The controllers that a kubelet uses if the machine has them.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "pids", "hugetlb"];
/// The controllers without which a kubelet does not start.
const NEEDED: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// The kernel ends a killed process within milliseconds, unless it is stuck in disk I/O.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// Every mounted hierarchy: one on a machine with cgroup v2, one per controller with v1.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mounts = paths::read("/proc/self/mounts")?;
    let mut found: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (path, kind) = (words.nth(1)?, words.next()?);
            kind.starts_with("cgroup").then(|| PathBuf::from(path))
        })
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// The hierarchy in which to look for processes.
fn tracking() -> Result<PathBuf> {
    let all = hierarchies()?;
    let pids = all.iter().find(|path| path.ends_with("pids"));
    pids.or_else(|| all.first())
        .cloned()
        .ok_or_else(|| Error::Refused("no cgroup hierarchy is mounted under /sys/fs/cgroup".to_owned()))
}

/// Creates the cgroup `part` (a node or the control plane) in every hierarchy, because the kubelet does not
/// create its root.
pub(crate) fn make(part: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let mut folder = hierarchy.clone();
        for name in [ROOT, part] {
            if is_v2(&folder) {
                delegate(&folder)?;
            }
            let parent = folder.clone();
            folder.push(name);
            paths::make_dir(&folder)?;
            // v1: a new cpuset has no CPUs, and refuses every process until it has some.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if parent.join(file).is_file() && !is_v2(&folder) {
                    paths::write(folder.join(file), paths::read(parent.join(file))?)?;
                }
            }
        }
    }
    let tracking = tracking()?;
    let folder = tracking.join(ROOT).join(part);
    if is_v2(&tracking) {
        let lacking = lacking(&controllers(&tracking)?, &controllers(&folder)?);
        if !lacking.is_empty() {
            return Err(Error::Refused(format!(
                "the cgroup {} lacks the controllers {}, which a kubelet needs: the machine does not have them, or \
                 something else uses them in another hierarchy or in {}",
                folder.display(),
                lacking.join(", "),
                tracking.display()
            )));
        }
    }
    // v2 allows processes only in leaves, and the kubelet creates children in a node's folder.
    paths::make_dir(folder.join("system"))
}

fn is_v2(folder: &Path) -> bool {
    folder.join("cgroup.controllers").is_file()
}

fn controllers(folder: &Path) -> Result<Vec<String>> {
    Ok(paths::read(folder.join("cgroup.controllers"))?.split_whitespace().map(str::to_owned).collect())
}

/// The controllers that a kubelet would miss in a cgroup, on a machine whose root has these.
fn lacking(root: &[String], part: &[String]) -> Vec<&'static str> {
    let has = |all: &[String], name: &str| all.iter().any(|one| one == name);
    let wanted = CONTROLLERS.into_iter().filter(|name| NEEDED.contains(name) || has(root, name));
    wanted.filter(|name| !has(part, name)).collect()
}

/// v2: delegates the controllers of a cgroup to its children. [`make`] notices those that are refused here.
fn delegate(folder: &Path) -> Result<()> {
    let there = controllers(folder)?;
    for controller in CONTROLLERS.iter().filter(|name| there.iter().any(|one| one == *name)) {
        let _ = fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Ok(())
}

/// v2: the controllers that the machine's root delegates to its children.
pub(crate) fn handed_down() -> Result<Vec<String>> {
    let root = tracking()?;
    if !is_v2(&root) {
        return Ok(Vec::new());
    }
    let listed = paths::read(root.join("cgroup.subtree_control"))?;
    Ok(listed.split_whitespace().map(str::to_owned).collect())
}

/// v2: takes back the controllers that the root delegated only for the testbed. One that something else uses
/// by now stays.
pub(crate) fn restore(before: &[String]) {
    let (Ok(root), Ok(now)) = (tracking(), handed_down()) else { return };
    for controller in now.iter().filter(|name| !before.contains(name)) {
        let _ = fs::write(root.join("cgroup.subtree_control"), format!("-{controller}"));
    }
}

/// The file to which a process of `part` writes its pid before it execs its program.
pub(crate) fn entry(part: &str) -> Result<PathBuf> {
    Ok(tracking()?.join(ROOT).join(part).join("system/cgroup.procs"))
}

/// The processes of one part including its containers, or with "" those of the whole testbed.
pub(crate) fn processes(part: &str) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for folder in folders(&tracking()?.join(ROOT).join(part)) {
        let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        pids.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// The processes of one container on any node, by the id in its pod's status.
pub(crate) fn container_processes(container: &str) -> Result<Vec<u32>> {
    let all = folders(&tracking()?.join(ROOT));
    let own = all.iter().filter(|folder| folder.file_name().is_some_and(|name| name == container));
    Ok(own
        .filter_map(|folder| fs::read_to_string(folder.join("cgroup.procs")).ok())
        .flat_map(|listed| listed.lines().filter_map(|line| line.parse().ok()).collect::<Vec<u32>>())
        .collect())
}

/// Ends every process of a part at once, as a power cut would, and waits until none is left.
pub(crate) fn kill(part: &str) -> Result<()> {
    let deadline = Instant::now() + KILL_TIMEOUT;
    loop {
        let pids = processes(part)?;
        if pids.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::Refused(format!(
                "processes {pids:?} of {ROOT}/{part} still run after SIGKILL"
            )));
        }
        signal("KILL", &pids);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal, and ignores a process that has just ended.
pub(crate) fn signal(name: &str, pids: &[u32]) {
    let words: Vec<String> = ["kill", "-s", name]
        .iter()
        .map(|word| (*word).to_owned())
        .chain(pids.iter().map(u32::to_string))
        .collect();
    let _ = command::run("signal a process", &words);
}

/// Removes a part's cgroups, or with "" all of them. Their processes must be gone.
pub(crate) fn remove(part: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let mut all = folders(&hierarchy.join(ROOT).join(part));
        all.reverse(); // children first
        for folder in all {
            // The kernel releases a dead process's cgroup a moment after the process.
            let deadline = Instant::now() + KILL_TIMEOUT;
            while let Err(error) = fs::remove_dir(&folder) {
                if error.kind() == std::io::ErrorKind::NotFound {
                    break;
                }
                if Instant::now() > deadline {
                    return Err(error).doing(|| format!("remove the cgroup {}", folder.display()));
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
    Ok(())
}

/// Every cgroup folder of the testbed that exists.
pub(crate) fn leftovers() -> Result<Vec<PathBuf>> {
    Ok(hierarchies()?.iter().flat_map(|hierarchy| folders(&hierarchy.join(ROOT))).collect())
}

/// A folder and all folders below it, parents first; empty if it does not exist.
fn folders(top: &Path) -> Vec<PathBuf> {
    if !top.is_dir() {
        return Vec::new();
    }
    let mut found = vec![top.to_owned()];
    let mut next = 0;
    while let Some(folder) = found.get(next).cloned() {
        next += 1;
        let children = fs::read_dir(folder).into_iter().flatten().flatten();
        found.extend(
            children.filter(|child| child.file_type().is_ok_and(|kind| kind.is_dir())).map(|c| c.path()),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_a_kubelet_would_miss_is_named() {
        let root = words("cpuset cpu io memory hugetlb pids rdma misc");
        assert!(lacking(&root, &words("cpuset cpu memory hugetlb pids")).is_empty());
        assert_eq!(lacking(&root, &words("memory pids")), ["cpu", "cpuset", "hugetlb"]);
        assert_eq!(lacking(&words("cpu memory pids"), &words("cpu memory pids")), ["cpuset"]);
    }
}
