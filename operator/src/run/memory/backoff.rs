//! Exponential back-off.

use std::time::{Duration, Instant};

/// Waits that double after each failure, and start over after a success.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// The first wait.
    const FIRST: Duration = Duration::from_secs(1);
    /// The longest wait: long enough to spare the services, short enough that a fix shows quickly.
    const LONGEST: Duration = Duration::from_secs(60);

    /// Notes a failure.
    pub fn failed(&mut self, now: Instant) {
        let wait = Self::FIRST.saturating_mul(1 << self.failures.min(16)).min(Self::LONGEST);
        self.failures += 1;
        self.until = Some(now + wait);
    }

    /// Notes a success.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// How much of the wait is left; `None` if the wait is over.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.until.and_then(|until| until.checked_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_start_over_after_a_success() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        assert_eq!(backoff.left(now), None);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            backoff.failed(now);
            assert_eq!(backoff.left(now), Some(Duration::from_secs(seconds)));
        }
        assert_eq!(backoff.left(now + Duration::from_secs(60)), None);
        backoff.reset();
        backoff.failed(now);
        assert_eq!(backoff.left(now), Some(Duration::from_secs(1)));
    }
}
