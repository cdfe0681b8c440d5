//! Decides which decisions about files are logged at info: a million failures must not become a million
//! lines. Pure: the caller supplies the clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::metrics::FileOutcome;

/// How many lines of one outcome a run may log at once: enough to see a pattern.
const BURST: u32 = 10;
/// How soon another line may follow: a run in which every file fails logs six lines a minute of each outcome.
const EVERY: Duration = Duration::from_secs(10);

/// The decisions that a run has logged. Each outcome has its own allowance, so that a dead letter stays
/// visible among thousands of retries.
#[derive(Debug, Default)]
pub struct Decisions(HashMap<FileOutcome, Allowance>);

#[derive(Debug)]
struct Allowance {
    lines: u32,
    since: Instant,
    suppressed: u64,
}

impl Decisions {
    /// Whether a decision may be logged now. If so, returns how many of its outcome were suppressed since the
    /// last logged one.
    pub fn admit(&mut self, outcome: FileOutcome, now: Instant) -> Option<u64> {
        let full = Allowance { lines: BURST, since: now, suppressed: 0 };
        let allowance = self.0.entry(outcome).or_insert(full);
        allowance.refill(now);
        if allowance.lines == 0 {
            allowance.suppressed += 1;
            return None;
        }
        allowance.lines -= 1;
        Some(std::mem::take(&mut allowance.suppressed))
    }
}

impl Allowance {
    fn refill(&mut self, now: Instant) {
        let earned = now.saturating_duration_since(self.since).as_secs() / EVERY.as_secs();
        let earned = u32::try_from(earned).unwrap_or(BURST).min(BURST);
        if self.lines + earned >= BURST {
            (self.lines, self.since) = (BURST, now);
        } else {
            self.lines += earned;
            self.since += EVERY * earned;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_failures_are_a_few_lines_that_say_how_many_there_were() {
        let (mut decisions, start) = (Decisions::default(), Instant::now());
        let (mut lines, mut counted) = (0, 0);
        for number in 0..1_000_000 {
            // Spread the failures over an hour.
            let now = start + Duration::from_micros(3_600 * number);
            if let Some(suppressed) = decisions.admit(FileOutcome::Failed, now) {
                lines += 1;
                counted += 1 + suppressed;
            }
        }
        assert!((360..=370).contains(&lines), "{lines} lines");
        assert!(counted > 990_000, "{counted} of a million are accounted for");
    }

    #[test]
    fn a_run_logs_its_first_decisions_and_those_that_are_rare() {
        let (mut decisions, start) = (Decisions::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(decisions.admit(FileOutcome::Retried, start), Some(0));
        }
        assert_eq!(decisions.admit(FileOutcome::Retried, start), None);
        assert_eq!(decisions.admit(FileOutcome::Failed, start), Some(0), "each outcome has its own lines");
        assert_eq!(decisions.admit(FileOutcome::Retried, start + EVERY), Some(1), "one was suppressed");
        let later = start + EVERY * (2 * BURST);
        for _ in 0..BURST {
            assert_eq!(decisions.admit(FileOutcome::Retried, later), Some(0), "a quiet run may log again");
        }
        assert_eq!(decisions.admit(FileOutcome::Retried, later), None, "and no more than at first");
    }

    #[test]
    fn a_clock_that_stands_still_earns_nothing() {
        let (mut decisions, now) = (Decisions::default(), Instant::now());
        let admitted = (0..100).filter(|_| decisions.admit(FileOutcome::Disrupted, now).is_some()).count();
        assert_eq!(admitted, BURST as usize);
    }
}
