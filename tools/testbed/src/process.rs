//! The long-running programs of the testbed: started apart from the terminal, recorded, and stopped by their own pid.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    cgroup,
    command::tail,
    error::{Doing, Error, Result},
    paths::{self, Paths, RUN},
    state,
};

/// How much of the end of a component's log goes into an error, in bytes.
const LOG_TAIL: usize = 2_000;

/// A program to start.
#[derive(Debug)]
pub(crate) struct Program {
    /// What it is called in records, logs and errors.
    pub name: String,
    /// The cgroup it lives in: a node or the control plane.
    pub part: String,
    /// The network namespace it lives in; none is the host's.
    pub netns: Option<String>,
    /// The program and its arguments.
    pub words: Vec<String>,
}

impl Program {
    /// Starts it and returns its pid; its output goes to its log.
    pub(crate) fn start(self, paths: &Paths) -> Result<u32> {
        let log = paths.log(&self.name);
        paths::make_dir(paths.logs())?;
        let doing = || format!("open {}", log.display());
        let output = File::options().create(true).append(true).open(&log).doing(doing)?;
        let mut words: Vec<String> = Vec::new();
        if let Some(netns) = &self.netns {
            // `ip netns exec` would also hide the cgroup mounts.
            words.extend(["nsenter".to_owned(), format!("--net=/run/netns/{netns}"), "--".to_owned()]);
        }
        words.extend(self.words);
        // Everything between here and the program is an exec, so the pid stays the one that is recorded.
        let child = Command::new("setsid")
            .args(["sh", "-c", r#"echo $$ >"$1" && shift && exec "$@""#, "sh"])
            .arg(cgroup::entry(&self.part)?)
            .args(&words)
            .stdin(Stdio::null())
            .stdout(output.try_clone().doing(doing)?)
            .stderr(output)
            .spawn()
            .doing(|| format!("start {}", self.name))?;
        let pid = child.id();
        // A child that nobody waits for stays a zombie for as long as its parent lives.
        thread::spawn(move || {
            let mut child = child;
            child.wait()
        });
        Running { pid, started: start_time(pid).unwrap_or_default(), boot: state::boot()? }
            .record(&self.name)?;
        Ok(pid)
    }
}

/// A process that was started, told from a later one with the same pid by its start time, and after a reboot, when
/// pids and times begin anew, by the boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since the machine did.
    started: u64,
    /// The boot it started in.
    boot: String,
}

impl Running {
    /// The recorded process of this name, if it still runs.
    pub(crate) fn find(name: &str) -> Option<Self> {
        let text = fs::read_to_string(record_file(name)).ok()?;
        let [pid, started, boot] = text.split_whitespace().collect::<Vec<_>>().try_into().ok()?;
        let found = Self { pid: pid.parse().ok()?, started: started.parse().ok()?, boot: boot.to_owned() };
        found.lives().then_some(found)
    }

    /// Whether this very process still runs.
    pub(crate) fn lives(&self) -> bool {
        start_time(self.pid) == Some(self.started) && state::boot().is_ok_and(|boot| boot == self.boot)
    }

    /// Asks it to end and, after `patience`, ends it. Fails when not even that ends it.
    pub(crate) fn stop(&self, patience: Duration) -> Result<()> {
        let began = Instant::now();
        // A paused process would not see the request.
        cgroup::signal("CONT", &[self.pid]);
        cgroup::signal("TERM", &[self.pid]);
        while self.lives() {
            if began.elapsed() > patience + cgroup::KILL_TIMEOUT {
                return Err(Error::Refused(format!(
                    "process {} does not end when killed; `cat /proc/{}/stack` may say what holds it",
                    self.pid, self.pid
                )));
            }
            if began.elapsed() > patience {
                cgroup::signal("KILL", &[self.pid]);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn record(&self, name: &str) -> Result<()> {
        paths::write(record_file(name), format!("{} {} {}", self.pid, self.started, self.boot))
    }
}

/// Every recorded process, living or not.
pub(crate) fn recorded() -> Vec<String> {
    let entries = fs::read_dir(Path::new(RUN).join("pids")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Fails, with the end of its log, when a component that should run does not.
pub(crate) fn check(paths: &Paths, name: &str) -> Result<()> {
    if Running::find(name).is_some() {
        return Ok(());
    }
    let log = paths.log(name);
    let text = fs::read(&log).unwrap_or_default();
    Err(Error::Died { name: name.to_owned(), tail: tail(&String::from_utf8_lossy(&text), LOG_TAIL), log })
}

/// Forgets a process that was stopped.
pub(crate) fn forget(name: &str) -> Result<()> {
    paths::remove(record_file(name))
}

fn record_file(name: &str) -> PathBuf {
    Path::new(RUN).join("pids").join(name)
}

/// Field 22 of `/proc/<pid>/stat`; none for a process that is gone or only waits to be collected.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and parentheses; the fields after its last ')' do not.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    (*fields.first()? != "Z").then(|| fields.get(19)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recycled_pid_is_not_the_recorded_process() {
        let pid = std::process::id();
        let own = Running { pid, started: start_time(pid).unwrap(), boot: state::boot().unwrap() };
        assert!(own.lives());
        assert!(!Running { started: own.started + 1, ..own.clone() }.lives());
        assert!(!Running { boot: "an earlier one".to_owned(), ..own }.lives());
    }
}
