//! Starts the filter's command as the container runtime would: with the same environment, folder, user and
//! signals.
//!
//! It uses `posix_spawn` and not std, which would pass our blocked signals to the child. Nothing runs between
//! fork and exec, so the kernel copies no memory.

use std::{
    env,
    ffi::{CStr, CString, OsString},
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::Path,
};

use nix::{
    errno::Errno,
    libc::{STDERR_FILENO, STDIN_FILENO, STDOUT_FILENO},
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::signal::SigSet,
    unistd::{Pid, dup2_stdin},
};

use crate::program::Program;

const TMPDIR: &[u8] = b"TMPDIR=";

/// Everything that is the same for every file.
pub(crate) struct Spawner {
    program: Program,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

/// The process's stdin.
#[derive(Clone, Copy)]
pub(crate) enum Stdin {
    Empty,
    Pipe,
}

/// A process that was started, and its pipes.
pub(crate) struct Spawned {
    pub(crate) pid: Pid,
    /// Both ends.
    pub(crate) stdin: Option<(OwnedFd, OwnedFd)>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

impl Spawner {
    pub(crate) fn new(program: Program) -> Result<Self, String> {
        // This becomes our own stdin, which the command inherits unless it gets a pipe: less to set up for
        // each file.
        let nothing = File::open("/dev/null").map_err(|error| format!("cannot open /dev/null: {error}"))?;
        dup2_stdin(&nothing).map_err(|error| format!("cannot read from /dev/null: {error}"))?;
        let arguments =
            program.arguments.iter().cloned().map(OsString::into_vec).filter_map(c_string).collect();
        let pair = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            c_string(name.into_vec())
        };
        Ok(Self { program, arguments, environment: env::vars_os().filter_map(pair).collect() })
    }

    /// Starts a process in its own process group. An error says why the command cannot be executed.
    pub(crate) fn spawn(&self, stdin: Stdin, temporary: Option<&Path>) -> Result<Spawned, String> {
        let spawned = self.try_spawn(stdin, temporary).map_err(|error| self.refusal(error))?;
        // Written from outside, because a hook between fork and exec would cost more. If memory runs short,
        // the kernel should choose the filter and not the shim. A process that has already ended needs
        // nothing.
        let _ = fs::write(format!("/proc/{}/oom_score_adj", spawned.pid), "1000");
        Ok(spawned)
    }

    fn try_spawn(&self, stdin: Stdin, temporary: Option<&Path>) -> nix::Result<Spawned> {
        let (stdout, its_stdout) = io::pipe().map_err(errno)?;
        let (stderr, its_stderr) = io::pipe().map_err(errno)?;
        let feed = match stdin {
            Stdin::Empty => None,
            Stdin::Pipe => Some(io::pipe().map_err(errno)?),
        };
        let mut files = PosixSpawnFileActions::init()?;
        if let Some((its_stdin, _)) = &feed {
            files.add_dup2(its_stdin.as_raw_fd(), STDIN_FILENO)?;
        }
        files.add_dup2(its_stdout.as_raw_fd(), STDOUT_FILENO)?;
        files.add_dup2(its_stderr.as_raw_fd(), STDERR_FILENO)?;
        let fresh = temporary.and_then(|folder| c_string([TMPDIR, folder.as_os_str().as_bytes()].concat()));
        let inherited = self.environment.iter().map(CString::as_c_str);
        let inherited = inherited.filter(|pair| fresh.is_none() || !pair.to_bytes().starts_with(TMPDIR));
        let environment: Vec<&CStr> = inherited.chain(fresh.as_deref()).collect();
        let pid = posix_spawn(&self.program.path, &files, &attributes()?, &self.arguments, &environment)?;
        let stdin = feed.map(|(its_stdin, feed)| (its_stdin.into(), feed.into()));
        Ok(Spawned { pid, stdin, stdout: stdout.into(), stderr: stderr.into() })
    }

    fn refusal(&self, error: Errno) -> String {
        let hint = match error {
            Errno::ENOEXEC => ": it was built for another architecture, or is a script without `#!`",
            Errno::ENOENT => ": it is gone, or its interpreter or loader is missing",
            _ => "",
        };
        format!("cannot execute `{}`: {}{hint}", self.program.path.display(), error.desc())
    }
}

fn attributes() -> nix::Result<PosixSpawnAttr> {
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
    )?;
    attributes.set_pgroup(Pid::from_raw(0))?;
    attributes.set_sigmask(&SigSet::empty())?;
    // Rust programs ignore SIGPIPE, and this one may have inherited more ignored signals.
    attributes.set_sigdefault(&SigSet::all())?;
    Ok(attributes)
}

/// Arguments and variables that came from the kernel contain no zero byte.
fn c_string(bytes: Vec<u8>) -> Option<CString> {
    CString::new(bytes).ok()
}

fn errno(error: io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or_default())
}
