//! How often a run reports its counts. All runs share one budget of writes, so that many runs together do not overload the API
//! server.

use std::time::Duration;

/// Writes per second that all runs together may spend on counts: an API server of a small cluster takes several times as many,
/// and the other programs of the cluster need it too. Changes of phase and of conditions do not wait and come on top of it:
/// 500 active runs stay under 150 writes per second.
const WRITES_PER_SECOND: usize = 120;

/// A run writes two statuses when its counts change: its own and that of its Job.
const WRITES_EACH: usize = 2;

/// Faster than people read.
const SHORTEST: Duration = Duration::from_secs(1);

/// How long a run waits between two reports of its counts when so many runs are active.
pub fn publish_every(active_runs: usize) -> Duration {
    let millis = active_runs.saturating_mul(WRITES_EACH * 1_000) / WRITES_PER_SECOND;
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)).max(SHORTEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_runs_report_every_second() {
        for active in [0, 1, 60] {
            assert_eq!(publish_every(active), SHORTEST);
        }
        assert!(publish_every(61) > SHORTEST);
    }

    #[test]
    fn any_number_of_runs_stays_within_the_budget() {
        for active in [61, 100, 500, 10_000] {
            let writes = (active * WRITES_EACH) as f64 / publish_every(active).as_secs_f64();
            assert!(writes < 150.0, "{active} runs: {writes} writes per second");
        }
        assert!(publish_every(500) < Duration::from_secs(10), "progress is still seen");
    }
}
