//! How often a run reports its counts. All runs share a budget of writes, so that many runs do not overload
//! the API server.

use std::time::Duration;

/// The most writes per second that all runs together may spend on counts. The API server of a small cluster
/// can handle several times as many, but the cluster's other programs need them too. Changes of phase and
/// conditions are written immediately and are not included: 500 active runs stay under 150 writes per second.
const WRITES_PER_SECOND: usize = 120;

/// How many times a run reports its counts for each report of its Job. People watch the run; the Job's counts
/// serve only generic tools.
const JOB_EVERY: usize = 5;

/// Shorter than anyone can read.
const SHORTEST: Duration = Duration::from_secs(1);

/// The interval between two reports of a run's counts, given the number of active runs.
pub fn publish_every(active_runs: usize) -> Duration {
    let millis_each = 1_000 + 1_000 / JOB_EVERY;
    let millis = active_runs.saturating_mul(millis_each) / WRITES_PER_SECOND;
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)).max(SHORTEST)
}

/// The same for the run's Job.
pub fn publish_job_every(active_runs: usize) -> Duration {
    publish_every(active_runs).saturating_mul(JOB_EVERY as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_runs_report_every_second() {
        for active in [0, 1, 100] {
            assert_eq!(publish_every(active), SHORTEST);
        }
        assert!(publish_every(101) > SHORTEST);
    }

    #[test]
    fn any_number_of_runs_stays_within_the_budget() {
        for active in [61, 101, 500, 10_000] {
            let each =
                publish_every(active).as_secs_f64().recip() + publish_job_every(active).as_secs_f64().recip();
            let writes = active as f64 * each;
            assert!(writes < 150.0, "{active} runs: {writes} writes per second");
        }
        assert!(publish_every(500) < Duration::from_secs(10), "progress is still seen");
    }
}
