//! What a file costs: CPU time and memory, and whether it exceeded its memory.

use std::{fs::File, os::unix::fs::FileExt, time::Duration};

use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::TimeVal,
    },
    time::clock_getcpuclockid,
    unistd::Pid,
};

use crate::files::read_small;

/// Counters of the container's memory cgroup, version 2 and version 1.
const OOM_COUNTERS: [&str; 2] = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"];

/// More than the counters of a memory cgroup take.
const OOM_COUNTERS_BYTES_MAX: usize = 1024;

/// Reads the counters.
pub(crate) struct Meter {
    /// Kept open: reading from its start returns the current values.
    oom_counter: Option<File>,
}

/// The counters at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    /// CPU time of all processes that were reaped.
    reaped: Duration,
    /// CPU time of the process that is kept, if there is one.
    kept: Duration,
    /// The largest process of all that were reaped.
    reaped_peak_kib: u64,
    oom_kills: u64,
}

impl Meter {
    pub(crate) fn new() -> Self {
        let mut files = OOM_COUNTERS.iter().filter_map(|path| File::open(path).ok());
        Self { oom_counter: files.find(|file| oom_kills_in(file).is_some()) }
    }

    /// The current counters, including those of the process that is kept, if there is one.
    pub(crate) fn read(&self, kept: Option<Pid>) -> Usage {
        let (reaped, reaped_peak_kib) = of_children();
        Usage {
            reaped,
            kept: kept.and_then(cpu_of).unwrap_or_default(),
            reaped_peak_kib,
            oom_kills: self.oom_counter.as_ref().and_then(oom_kills_in).unwrap_or(0),
        }
    }
}

impl Usage {
    /// The CPU time since then. A kept process that has been reaped meanwhile adds its whole life, part of
    /// which was already counted.
    pub(crate) fn cpu_since(&self, before: &Self) -> Duration {
        (self.reaped + self.kept).saturating_sub(before.reaped + before.kept)
    }

    /// The largest process so far, including the one that is kept.
    pub(crate) fn peak_memory_kib(&self, kept: Option<Pid>) -> u64 {
        kept.and_then(peak_of).unwrap_or_default().max(self.reaped_peak_kib)
    }

    pub(crate) fn oom_killed_since(&self, before: &Self) -> bool {
        self.oom_kills > before.oom_kills
    }
}

fn of_children() -> (Duration, u64) {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_CHILDREN) else { return Default::default() };
    (duration(usage.user_time()) + duration(usage.system_time()), usage.max_rss().try_into().unwrap_or(0))
}

fn duration(time: TimeVal) -> Duration {
    let micros = i128::from(time.tv_sec()) * 1_000_000 + i128::from(time.tv_usec());
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn cpu_of(pid: Pid) -> Option<Duration> {
    Some(clock_getcpuclockid(pid).ok()?.now().ok()?.into())
}

fn peak_of(pid: Pid) -> Option<u64> {
    let status = read_small(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn oom_kills_in(file: &File) -> Option<u64> {
    let mut bytes = [0; OOM_COUNTERS_BYTES_MAX];
    let length = file.read_at(&mut bytes, 0).ok()?;
    oom_kills(str::from_utf8(&bytes[..length]).ok()?)
}

fn oom_kills(counters: &str) -> Option<u64> {
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_count_kills() {
        assert_eq!(oom_kills("low 0\nhigh 0\nmax 4\noom 2\noom_kill 3\noom_group_kill 0\n"), Some(3));
        assert_eq!(oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"), Some(1));
        assert_eq!(oom_kills("oom_kill_disable 0\nunder_oom 0\n"), None);
    }

    #[test]
    fn a_running_process_has_time_and_memory() {
        let own = nix::unistd::getpid();
        assert!(peak_of(own).unwrap() > 100);
        assert!(cpu_of(own).unwrap() > Duration::ZERO);
    }
}
