//! The time that a file's processes have: until they are asked to end, and then until they are killed.

use std::time::{Duration, Instant};

use crate::wire::{Ending, TIMEOUT_GRACE};

/// After a stop, the file has already failed, and the next one waits.
const STOP_GRACE: Duration = Duration::from_secs(1);

pub(crate) struct Limit {
    ask_at: Option<Instant>,
    asked: Option<(Ending, Instant)>,
}

/// The action that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Terminate,
    Kill,
}

impl Limit {
    pub(crate) fn new(deadline: Option<Instant>) -> Self {
        Self { ask_at: deadline, asked: None }
    }

    /// The next moment at which something may be due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.asked.map(|(_, kill_at)| kill_at).or(self.ask_at)
    }

    /// The worker asks for the end of the file.
    pub(crate) fn stop(&mut self, now: Instant) -> Due {
        self.ask(Ending::Stopped, now + STOP_GRACE)
    }

    pub(crate) fn due(&mut self, now: Instant) -> Due {
        match (self.asked, self.ask_at) {
            (Some((_, kill_at)), _) if now >= kill_at => Due::Kill,
            (None, Some(ask_at)) if now >= ask_at => self.ask(Ending::TimedOut, now + TIMEOUT_GRACE),
            _ => Due::Nothing,
        }
    }

    /// How the file ends, if its process was asked to end.
    pub(crate) fn ending(&self) -> Option<Ending> {
        self.asked.map(|(ending, _)| ending)
    }

    fn ask(&mut self, ending: Ending, kill_at: Instant) -> Due {
        match &mut self.asked {
            None => {
                self.asked = Some((ending, kill_at));
                Due::Terminate
            }
            // The first reason stands, with the earlier of the two ends.
            Some((_, earlier)) => {
                *earlier = kill_at.min(*earlier);
                Due::Nothing
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_timeout_asks_once_and_kills_later() {
        let start = Instant::now();
        let mut limit = Limit::new(Some(start + SECOND));
        assert_eq!(limit.due(start), Due::Nothing);
        assert_eq!(limit.due(start + SECOND), Due::Terminate);
        assert_eq!(limit.due(start + SECOND), Due::Nothing);
        assert_eq!(limit.next(), Some(start + SECOND + TIMEOUT_GRACE));
        assert_eq!(limit.due(start + SECOND + TIMEOUT_GRACE), Due::Kill);
        assert_eq!(limit.ending(), Some(Ending::TimedOut));
    }

    #[test]
    fn a_stop_hastens_a_timeout_and_keeps_its_reason() {
        let start = Instant::now();
        let mut limit = Limit::new(Some(start + SECOND));
        assert_eq!(limit.due(start + SECOND), Due::Terminate);
        assert_eq!(limit.stop(start + SECOND), Due::Nothing);
        assert_eq!(limit.next(), Some(start + SECOND + STOP_GRACE));
        assert_eq!(limit.ending(), Some(Ending::TimedOut));
    }

    #[test]
    fn without_a_timeout_only_a_stop_ends_it() {
        let start = Instant::now();
        let mut limit = Limit::new(None);
        assert_eq!(limit.next(), None);
        assert_eq!(limit.due(start + 1_000_000 * SECOND), Due::Nothing);
        assert_eq!(limit.stop(start), Due::Terminate);
        assert_eq!(limit.ending(), Some(Ending::Stopped));
    }
}
