//! The long-running programs of the testbed: started detached from the terminal, recorded, and stopped by
//! their own pid.

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

/// How many bytes of the end of a component's log an error shows.
const LOG_TAIL: usize = 2_000;

/// A program to start.
#[derive(Debug)]
pub(crate) struct Program {
    /// Its name in records, logs and errors.
    pub name: String,
    /// Its cgroup: that of a node or of the control plane.
    pub part: String,
    /// Its network namespace; `None` for the host's.
    pub netns: Option<String>,
    /// The program and its arguments.
    pub words: Vec<String>,
}

impl Program {
    /// Starts the program and returns its pid; its output goes to its log.
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
        // Every step from here to the program is an exec, so the recorded pid stays valid.
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
        // A child stays a zombie until its parent waits for it or ends.
        thread::spawn(move || {
            let mut child = child;
            child.wait()
        });
        Running { pid, started: start_time(pid).unwrap_or_default(), boot: state::boot()? }
            .record(&self.name)?;
        Ok(pid)
    }
}

/// A process that was started. The start time distinguishes it from a later one with the same pid, and the
/// boot does so after a reboot, when pids and times start over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    /// Its pid.
    pub pid: u32,
    /// Its start, in clock ticks since the machine booted.
    started: u64,
    /// The boot it started in.
    boot: String,
}

impl Running {
    /// The recorded process of this name, if it is still running.
    pub(crate) fn find(name: &str) -> Option<Self> {
        let text = fs::read_to_string(record_file(name)).ok()?;
        let [pid, started, boot] = text.split_whitespace().collect::<Vec<_>>().try_into().ok()?;
        let found = Self { pid: pid.parse().ok()?, started: started.parse().ok()?, boot: boot.to_owned() };
        found.lives().then_some(found)
    }

    /// Whether exactly this process is still running.
    pub(crate) fn lives(&self) -> bool {
        start_time(self.pid) == Some(self.started) && state::boot().is_ok_and(|boot| boot == self.boot)
    }

    /// Asks the process to end, and kills it after `patience`. Fails if it survives even that.
    pub(crate) fn stop(&self, patience: Duration) -> Result<()> {
        let began = Instant::now();
        // A paused process would not see the request.
        cgroup::signal("CONT", &[self.pid]);
        cgroup::signal("TERM", &[self.pid]);
        while self.lives() {
            if began.elapsed() > patience + cgroup::KILL_TIMEOUT {
                return Err(Error::Refused(format!(
                    "process {} still runs after SIGKILL; `cat /proc/{}/stack` may say what holds it",
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

/// Every recorded process, whether alive or not.
pub(crate) fn recorded() -> Vec<String> {
    let entries = fs::read_dir(Path::new(RUN).join("pids")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Fails, with the end of its log, if a component that should run does not.
pub(crate) fn check(paths: &Paths, name: &str) -> Result<()> {
    if Running::find(name).is_some() {
        return Ok(());
    }
    let log = paths.log(name);
    let text = fs::read(&log).unwrap_or_default();
    Err(Error::Died { name: name.to_owned(), tail: tail(&String::from_utf8_lossy(&text), LOG_TAIL), log })
}

/// Removes the record of a process that was stopped.
pub(crate) fn forget(name: &str) -> Result<()> {
    paths::remove(record_file(name))
}

fn record_file(name: &str) -> PathBuf {
    Path::new(RUN).join("pids").join(name)
}

/// Field 22 of `/proc/<pid>/stat`; `None` for a process that is gone or a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and parentheses; the fields after its last ')' do not.
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
