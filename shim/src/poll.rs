//! Waits for several things at once.

use std::{os::fd::BorrowedFd, time::Instant};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Waits until one of these is ready, or until the given moment; returns which are ready.
pub(crate) fn poll_until<const N: usize>(
    sources: [Option<(BorrowedFd<'_>, PollFlags)>; N],
    until: Option<Instant>,
) -> nix::Result<[bool; N]> {
    let mut polled: Vec<PollFd<'_>> =
        sources.iter().flatten().map(|(descriptor, flags)| PollFd::new(*descriptor, *flags)).collect();
    match poll(&mut polled, timeout(until)) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok([false; N]),
        Err(error) => return Err(error),
    }
    // Errors and hang-ups count as ready too: the following read or write reports them.
    let mut answers = polled.iter().map(|source| source.revents().is_none_or(|flags| !flags.is_empty()));
    Ok(sources.map(|source| source.is_some() && answers.next().unwrap_or(false)))
}

/// Rounded up, because a poll that ends too early would only be repeated.
fn timeout(until: Option<Instant>) -> PollTimeout {
    let Some(until) = until else { return PollTimeout::NONE };
    let left = until.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
    i32::try_from(left).ok().and_then(|left| PollTimeout::try_from(left).ok()).unwrap_or(PollTimeout::MAX)
}
