//! Every process that descends from the filter's command, even if its parent is gone.

use std::{collections::HashMap, fs};

use nix::{
    errno::Errno,
    sys::{
        prctl,
        signal::{Signal, kill, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getpid},
};

use crate::wire::Ending;

/// Proof that orphans become our children: because we are pid 1, or because we asked for it.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    is_init: bool,
}

/// The filter's own process: the one that the shim started, not its descendants.
pub(crate) struct Main {
    pid: Pid,
    /// How it ended, once it has.
    pub(crate) ending: Option<Ending>,
}

impl Family {
    pub(crate) fn adopt() -> nix::Result<Self> {
        let is_init = getpid() == Pid::from_raw(1);
        if !is_init {
            prctl::set_child_subreaper(true)?;
        }
        Ok(Self { is_init })
    }

    /// Whether all visible processes, and `/tmp`, belong to this container's filter.
    pub(crate) fn has_own_container(self) -> bool {
        self.is_init
    }

    /// Reaps processes that have ended; returns whether any are left.
    pub(crate) fn reap(self, main: &mut Main) -> bool {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => return true,
                Ok(WaitStatus::Exited(pid, code)) => main.ended(pid, Ending::Exited(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => main.ended(pid, Ending::Signaled(signal as i32)),
                // A real-time signal, for which `nix` has no name, ended a process: ours, if ours is gone
                // now.
                Err(Errno::EINVAL) if kill(main.pid, None).is_err() => {
                    main.ended(main.pid, Ending::Signaled(0))
                }
                Ok(_) | Err(Errno::EINTR | Errno::EINVAL) => {}
                Err(_) => return false,
            }
        }
    }

    /// Kills everything that is left. Processes that fork meanwhile leave new ones: reap and repeat.
    pub(crate) fn kill(self) {
        if self.is_init {
            let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
            return;
        }
        for pid in descendants(getpid()) {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

impl Main {
    pub(crate) fn of(pid: Pid) -> Self {
        Self { pid, ending: None }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Asks the process and its process group to end.
    pub(crate) fn terminate(&self) {
        let _ = killpg(self.pid, Signal::SIGTERM);
    }

    fn ended(&mut self, pid: Pid, ending: Ending) {
        // After reaping, the number may belong to another process.
        if pid == self.pid && self.ending.is_none() {
            self.ending = Some(ending);
        }
    }
}

fn descendants(of: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut next = vec![of.as_raw()];
    while let Some(pid) = next.pop() {
        let of_this = children.remove(&pid).unwrap_or_default();
        found.extend(of_this.iter().copied().map(Pid::from_raw));
        next.extend(of_this);
    }
    found
}

fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any character; state and parent follow it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}
