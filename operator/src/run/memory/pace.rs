//! How fast a run settles its files.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time over which the rate is measured: long enough to be steady, short enough to show a change.
const WINDOW: Duration = Duration::from_secs(60);
/// A shorter time shows chance, not a rate.
const SHORTEST: Duration = Duration::from_secs(5);
/// The distance of two samples.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// The numbers of settled files during the last minute.
#[derive(Debug, Default)]
pub struct Pace {
    /// Oldest first.
    samples: VecDeque<(Instant, u64)>,
    last: Option<(Instant, u64)>,
}

impl Pace {
    /// Notes how many files are settled now.
    pub fn note(&mut self, now: Instant, settled: u64) {
        // Valkey went back to an earlier state.
        if self.last.is_some_and(|(_, before)| settled < before) {
            self.samples.clear();
        }
        self.last = Some((now, settled));
        if self.samples.back().is_none_or(|(last, _)| now.duration_since(*last) >= SAMPLE_EVERY) {
            self.samples.push_back((now, settled));
        }
        while self.samples.get(1).is_some_and(|(second, _)| now.duration_since(*second) >= WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Files per second; `None` until it has been watched for long enough.
    pub fn per_second(&self) -> Option<f64> {
        let (first, before) = *self.samples.front()?;
        let (last, now) = self.last?;
        let time = last.duration_since(first);
        (time >= SHORTEST).then(|| now.saturating_sub(before) as f64 / time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_last_minute() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        pace.note(at(0), 0);
        assert_eq!(pace.per_second(), None);
        pace.note(at(4), 40);
        assert_eq!(pace.per_second(), None, "that may be chance");
        for second in 5..=100 {
            pace.note(at(second), second * 10);
        }
        assert_eq!(pace.per_second(), Some(10.0));
        for second in 101..=160 {
            pace.note(at(second), 1_000);
        }
        assert_eq!(pace.per_second(), Some(0.0), "nothing was settled for a minute");
        assert!(pace.samples.len() <= 62);
        pace.note(at(170), 5);
        assert_eq!(pace.per_second(), None, "Valkey went back");
    }
}
