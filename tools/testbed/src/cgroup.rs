//! The cgroups of the testbed: how its processes are told from everybody else's.
//!
//! Every process is started inside `openfilter-testbed/<part>` and its children are born there; containers are put
//! below `openfilter-testbed/<node>` by the kubelet. Whoever is in there is ours, so that a crash that lost every
//! record, or a process that was never recorded, still ends with `down`, and nobody else's process ever does.

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

/// The folder of all cgroups of the testbed, in every hierarchy.
pub(crate) const ROOT: &str = "openfilter-testbed";

/// The controllers that a kubelet wants, of those that the machine has.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "pids", "hugetlb"];
/// Those without which it does not start.
const NEEDED: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// The kernel ends a killed process within milliseconds, unless it is stuck in the disk.
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

/// The hierarchy that is used to find processes.
fn tracking() -> Result<PathBuf> {
    let all = hierarchies()?;
    let pids = all.iter().find(|path| path.ends_with("pids"));
    pids.or_else(|| all.first())
        .cloned()
        .ok_or_else(|| Error::Refused("no cgroup hierarchy is mounted under /sys/fs/cgroup".to_owned()))
}

/// Makes the cgroup `part` (a node or the control plane) in every hierarchy; the kubelet does not make its root.
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
            // v1: a fresh cpuset has no CPUs, and refuses every process until it has some.
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
    // v2 allows processes only in leaves, and the kubelet makes children of a node's folder.
    paths::make_dir(folder.join("system"))
}

fn is_v2(folder: &Path) -> bool {
    folder.join("cgroup.controllers").is_file()
}

fn controllers(folder: &Path) -> Result<Vec<String>> {
    Ok(paths::read(folder.join("cgroup.controllers"))?.split_whitespace().map(str::to_owned).collect())
}

/// What a kubelet would miss in a cgroup, on a machine whose root has these controllers.
fn lacking(root: &[String], part: &[String]) -> Vec<&'static str> {
    let has = |all: &[String], name: &str| all.iter().any(|one| one == name);
    let wanted = CONTROLLERS.into_iter().filter(|name| NEEDED.contains(name) || has(root, name));
    wanted.filter(|name| !has(part, name)).collect()
}

/// v2: children get the controllers that their parent hands down. What is refused here is missed in [`make`].
fn delegate(folder: &Path) -> Result<()> {
    let there = controllers(folder)?;
    for controller in CONTROLLERS.iter().filter(|name| there.iter().any(|one| one == *name)) {
        let _ = fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Ok(())
}

/// v2: the controllers that the machine's root hands to its children.
pub(crate) fn handed_down() -> Result<Vec<String>> {
    let root = tracking()?;
    if !is_v2(&root) {
        return Ok(Vec::new());
    }
    let listed = paths::read(root.join("cgroup.subtree_control"))?;
    Ok(listed.split_whitespace().map(str::to_owned).collect())
}

/// v2: takes back what the root handed down only for the testbed. One that somebody else uses by now stays.
pub(crate) fn restore(before: &[String]) {
    let (Ok(root), Ok(now)) = (tracking(), handed_down()) else { return };
    for controller in now.iter().filter(|name| !before.contains(name)) {
        let _ = fs::write(root.join("cgroup.subtree_control"), format!("-{controller}"));
    }
}

/// The file that a process of `part` writes its pid to before it becomes what it is.
pub(crate) fn entry(part: &str) -> Result<PathBuf> {
    Ok(tracking()?.join(ROOT).join(part).join("system/cgroup.procs"))
}

/// The processes of one part, or with "" of the whole testbed, its containers included.
pub(crate) fn processes(part: &str) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for folder in folders(&tracking()?.join(ROOT).join(part)) {
        let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        pids.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// The processes of one container, by the id in its pod's status, on whatever node it is.
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
                "processes {pids:?} of {ROOT}/{part} do not end when killed"
            )));
        }
        signal("KILL", &pids);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal; a process that has just ended is not an error.
pub(crate) fn signal(name: &str, pids: &[u32]) {
    let words: Vec<String> = ["kill", "-s", name]
        .iter()
        .map(|word| (*word).to_owned())
        .chain(pids.iter().map(u32::to_string))
        .collect();
    let _ = command::run("signal a process", &words);
}

/// Removes a part's cgroups, or with "" all of them. Its processes must be gone.
pub(crate) fn remove(part: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let mut all = folders(&hierarchy.join(ROOT).join(part));
        all.reverse(); // children first
        for folder in all {
            // The kernel lets go of a dead process's cgroup a moment after the process.
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

/// A folder and all below it, parents first; nothing when it does not exist.
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
