//! SIGTERM and SIGCHLD as events to wait for.
//!
//! They are blocked and read from a descriptor, because handlers need `unsafe`. The filter's processes start
//! with nothing blocked: see [`crate::spawn`].

use std::{
    mem,
    os::fd::{AsFd, BorrowedFd},
};

use nix::{
    libc,
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

pub(crate) struct Signals {
    descriptor: SignalFd,
    was_terminated: bool,
    /// A SIGTERM that arrived and was not taken yet.
    term: bool,
    child: bool,
}

impl Signals {
    /// Blocks both signals, so that they wait to be read.
    pub(crate) fn block() -> nix::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGTERM);
        mask.add(Signal::SIGCHLD);
        mask.thread_block()?;
        let descriptor = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self { descriptor, was_terminated: false, term: false, child: false })
    }

    /// Reads the signals that have arrived.
    pub(crate) fn read(&mut self) {
        while let Ok(Some(signal)) = self.descriptor.read_signal() {
            match signal.ssi_signo.cast_signed() {
                libc::SIGTERM => (self.term, self.was_terminated) = (true, true),
                _ => self.child = true,
            }
        }
    }

    /// Whether children have ended since the last call.
    pub(crate) fn take_child(&mut self) -> bool {
        mem::take(&mut self.child)
    }

    /// Whether SIGTERM has arrived since the last call.
    pub(crate) fn take_term(&mut self) -> bool {
        mem::take(&mut self.term)
    }

    /// Whether SIGTERM has arrived so far.
    pub(crate) fn was_terminated(&mut self) -> bool {
        self.read();
        self.was_terminated
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
