//! Wait times between tries: doubling, bounded, and with jitter so that a thousand pods do not return at
//! once.

use std::time::Duration;

/// Wait times that double from a first value up to a longest one.
pub(crate) struct Backoff {
    next: Duration,
    first: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { next: first, first, max }
    }

    /// The next wait: between half of the current value and all of it.
    pub(crate) fn wait(&mut self) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(self.max);
        // Without randomness, the waits merely lose their jitter.
        let part = getrandom::u32().map_or(1.0, |random| f64::from(random) / f64::from(u32::MAX));
        whole.mul_f64(0.5 + part / 2.0)
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_start_again_after_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
        for whole in [1, 2, 4, 8, 16, 30, 30] {
            let (wait, whole) = (backoff.wait(), Duration::from_secs(whole));
            assert!(wait >= whole / 2 && wait <= whole, "{wait:?} of {whole:?}");
        }
        backoff.reset();
        assert!(backoff.wait() <= Duration::from_secs(1));
    }
}
