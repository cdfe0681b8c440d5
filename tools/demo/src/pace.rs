//! How many files a run settles per second, measured by checking its counts regularly.

use std::time::Duration;

use crds::v1alpha1::Counts;

/// Measures from the first check that found a claimed file to the first one that found all files settled, or
/// else to the latest.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    first: Option<Look>,
    last: Look,
}

/// The result of one check.
#[derive(Debug, Clone, Copy, Default)]
struct Look {
    /// Since the run was created.
    at: Duration,
    settled: i64,
}

impl Pace {
    /// Adds another check.
    pub fn look(&mut self, at: Duration, counts: &Counts) {
        let now = Look { at, settled: counts.succeeded + counts.failed };
        let nothing_claimed = counts.running + now.settled == 0;
        // From then on the end of the run takes the time, not its files.
        let was_over = counts.running + counts.queued == 0 && now.settled == self.last.settled;
        if nothing_claimed || was_over {
            return;
        }
        self.first.get_or_insert(now);
        self.last = now;
    }

    /// Files that were already settled at the first check do not count, and neither does the time before it.
    pub fn files_per_second(&self) -> Option<f64> {
        let first = self.first?;
        let (files, time) = (self.last.settled - first.settled, self.last.at.saturating_sub(first.at));
        (files > 0 && !time.is_zero()).then(|| files as f64 / time.as_secs_f64())
    }
}

/// `0.72 files/s`, `148 files/s`
pub fn shown(files_per_second: f64) -> String {
    let decimals = if files_per_second < 10.0 { 2 } else { 0 };
    format!("{files_per_second:.decimals$} files/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rate after these checks: second, queued, running, succeeded.
    fn rate(looks: &[(u64, i64, i64, i64)]) -> Option<f64> {
        let mut pace = Pace::default();
        for &(second, queued, running, succeeded) in looks {
            let total_files = queued + running + succeeded;
            let counts = Counts { total_files, queued, running, succeeded, ..Counts::default() };
            pace.look(Duration::from_secs(second), &counts);
        }
        pace.files_per_second()
    }

    #[test]
    fn the_clock_starts_with_the_first_claimed_file() {
        assert_eq!(rate(&[(0, 0, 0, 0), (4, 40, 0, 0), (9, 34, 6, 0), (19, 9, 6, 25)]), Some(2.5));
    }

    #[test]
    fn files_settled_before_the_first_look_do_not_count() {
        assert_eq!(rate(&[(5, 1_860, 40, 100), (7, 1_560, 40, 400)]), Some(150.0));
    }

    #[test]
    fn the_clock_stops_with_the_last_settled_file() {
        assert_eq!(rate(&[(5, 94, 6, 0), (15, 0, 0, 100), (16, 0, 0, 100), (40, 0, 0, 100)]), Some(10.0));
    }

    #[test]
    fn a_run_that_stands_still_slows_down() {
        assert_eq!(rate(&[(0, 94, 6, 0), (10, 44, 6, 50), (25, 44, 6, 50)]), Some(2.0));
    }

    #[test]
    fn nothing_is_promised_before_two_looks_differ() {
        assert_eq!(rate(&[(3, 100, 0, 0)]), None);
        assert_eq!(rate(&[(3, 94, 6, 0), (4, 94, 6, 0)]), None);
        assert_eq!(rate(&[(3, 0, 0, 100), (4, 0, 0, 100)]), None);
    }

    #[test]
    fn slow_rates_have_decimals_and_fast_ones_do_not() {
        assert_eq!(shown(0.716), "0.72 files/s");
        assert_eq!(shown(147.6), "148 files/s");
    }
}
