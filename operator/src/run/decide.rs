//! Decides what to do with the pods of a run, and whether it has ended. Pure: no I/O and no clock, so that a
//! plain test answers "do we start another pod?".

use std::time::Duration;

use queue::{State, Stats};
use strum::{AsRefStr, VariantArray};

use super::breaker::Probe;
use super::limits::Limits;

/// The state of a run that a decision is based on.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The counts of its queue.
    pub stats: &'a Stats,
    /// The run's limits.
    pub limits: &'a Limits,
    /// Pods that work or will work.
    pub alive: u64,
    /// Pods that were created and that the watch has not shown yet.
    pub in_flight: u64,
    /// Whether no file may be started.
    pub suspended: bool,
    /// Whether pods were refused or died so recently that no more should be created yet.
    pub backing_off: bool,
    /// Whether the run's workers misbehave repeatedly.
    pub misbehaving: bool,
    /// Whether only a probe may be created, because a dependency of the run fails.
    pub probe: Probe,
}

/// The decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The run continues.
    GoOn {
        /// Pods to create.
        create: u64,
        /// How many pods without a file to remove, because no file may be started, or fewer at once than
        /// before.
        dismiss: u64,
        /// When to decide again, if nothing happens before.
        wake: Option<Duration>,
    },
    /// The run ends.
    End(End),
}

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr, VariantArray)]
pub enum End {
    /// All files are settled, and no more of them failed than are allowed.
    Completed,
    /// All files are settled, and too many failed.
    FilesFailed,
    /// There were no files.
    NoFilesFound,
    /// The run took too long.
    TimedOut,
    /// So many files failed that the run stops early.
    TooManyFailures,
    /// The bucket has more files than a run may have.
    TooManyFiles,
    /// Workers repeatedly wrote more into Valkey than reports can take up.
    WorkersMisbehaving,
    /// The operator crashed while ending the run; Valkey holds the reason for the end.
    Aborted,
}

impl End {
    /// Whether files that are not settled are abandoned.
    pub fn is_abort(self) -> bool {
        match self {
            Self::TimedOut
            | Self::TooManyFailures
            | Self::TooManyFiles
            | Self::WorkersMisbehaving
            | Self::Aborted => true,
            Self::Completed | Self::FilesFailed | Self::NoFilesFound => false,
        }
    }
}

/// Decides what to do with a run now.
pub fn decide(seen: &Seen<'_>) -> Plan {
    let Seen { stats, limits, alive, in_flight, suspended, backing_off, misbehaving, probe } = *seen;
    if let Some(end) = end(stats, limits) {
        return Plan::End(end);
    }
    if misbehaving {
        return Plan::End(End::WorkersMisbehaving);
    }
    let left = limits.time_left(stats);
    let wake = [left, stats.next_retry, probe.wake()].into_iter().flatten().min();
    if suspended {
        return Plan::GoOn { create: 0, dismiss: alive, wake };
    }
    // A file that waits for its back-off needs no pod until it is due.
    let demand = limits.parallelism.min(stats.queued - stats.delayed + stats.running);
    let create = if backing_off { 0 } else { demand.saturating_sub(alive + in_flight) };
    let create = probe.cap(create);
    Plan::GoOn { create, dismiss: alive.saturating_sub(limits.parallelism), wake }
}

/// How the run ends, if it does.
pub fn end(stats: &Stats, limits: &Limits) -> Option<End> {
    if stats.state == State::Closing {
        return Some(End::Aborted);
    }
    if stats.is_finished() {
        return Some(match (stats.total, limits.is_success(stats.failed, stats.total)) {
            (0, _) => End::NoFilesFound,
            (_, true) => End::Completed,
            (_, false) if limits.too_many_failed(stats.failed, stats.total) => End::TooManyFailures,
            (_, false) => End::FilesFailed,
        });
    }
    if limits.time_left(stats).is_some_and(|left| left.is_zero()) {
        return Some(End::TimedOut);
    }
    if limits.max_files.is_some_and(|max| stats.total > max) {
        return Some(End::TooManyFiles);
    }
    let too_many = limits.too_many_dead_letters(stats.failed)
        // A share of the files means nothing until some of them are listed and the first may be processed.
        || stats.started && limits.too_many_failed(stats.failed, stats.total);
    too_many.then_some(End::TooManyFailures)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::run::limits::RunSettings;
    use queue::Listing;
    use serde_json::json;

    fn limits(execution: serde_json::Value) -> Limits {
        Limits::parse(&serde_json::from_value(execution).unwrap(), RunSettings::for_tests()).unwrap()
    }

    fn stats(queued: u64, running: u64, succeeded: u64, failed: u64) -> Stats {
        Stats {
            state: State::Open,
            listing: Listing::Complete,
            total: queued + running + succeeded + failed,
            skipped: 0,
            queued,
            running,
            succeeded,
            failed,
            retried: 0,
            reclaimed: 0,
            disrupted: 0,
            delayed: 0,
            next_retry: None,
            started: true,
            paused: None,
            age: Some(Duration::ZERO),
            canary: None,
        }
    }

    fn seen<'a>(stats: &'a Stats, limits: &'a Limits) -> Seen<'a> {
        Seen {
            stats,
            limits,
            alive: 0,
            in_flight: 0,
            suspended: false,
            backing_off: false,
            misbehaving: false,
            probe: Probe::Full,
        }
    }

    fn plan(stats: &Stats, limits: &Limits, alive: u64) -> Plan {
        decide(&Seen { alive, ..seen(stats, limits) })
    }

    fn creates(plan: Plan) -> u64 {
        match plan {
            Plan::GoOn { create, .. } => create,
            Plan::End(end) => panic!("{end:?}"),
        }
    }

    #[test]
    fn as_many_pods_as_files_and_never_more_than_allowed() {
        let ten = limits(json!({"parallelism": 10}));
        assert_eq!(creates(plan(&stats(100, 0, 0, 0), &ten, 0)), 10);
        assert_eq!(creates(plan(&stats(100, 6, 0, 0), &ten, 8)), 2);
        assert_eq!(creates(plan(&stats(3, 0, 97, 0), &ten, 0)), 3, "no pod without a file");
        assert_eq!(creates(plan(&stats(0, 3, 97, 0), &ten, 3)), 0, "those that run are enough");
        let lowered = plan(&stats(100, 0, 0, 0), &ten, 15);
        assert_eq!(lowered, Plan::GoOn { create: 0, dismiss: 5, wake: None }, "those without a file may go");
        let stats = stats(100, 0, 0, 0);
        let unseen = Seen { in_flight: 5, alive: 8, ..seen(&stats, &ten) };
        assert_eq!(
            decide(&unseen),
            Plan::GoOn { create: 0, dismiss: 0, wake: None },
            "some may never have been made"
        );
    }

    #[test]
    fn a_file_that_waits_for_its_back_off_needs_no_pod_yet() {
        let waiting = Stats { delayed: 4, next_retry: Some(Duration::from_secs(7)), ..stats(4, 0, 6, 0) };
        let plan = plan(&waiting, &limits(json!({})), 0);
        assert_eq!(plan, Plan::GoOn { create: 0, dismiss: 0, wake: Some(Duration::from_secs(7)) });
    }

    #[test]
    fn a_suspended_run_starts_nothing_and_lets_go_of_idle_pods() {
        let (stats, limits) = (stats(9, 1, 0, 0), limits(json!({})));
        let seen = Seen { alive: 1, suspended: true, ..seen(&stats, &limits) };
        assert_eq!(decide(&seen), Plan::GoOn { create: 0, dismiss: 1, wake: None });
    }

    #[test]
    fn a_run_ends_when_every_file_is_settled() {
        let none = limits(json!({}));
        assert_eq!(plan(&stats(0, 0, 5, 0), &none, 2), Plan::End(End::Completed));
        assert_eq!(plan(&stats(0, 0, 4, 1), &none, 0), Plan::End(End::FilesFailed));
        assert_eq!(plan(&stats(0, 0, 0, 0), &none, 0), Plan::End(End::NoFilesFound));
        assert_eq!(
            plan(&stats(0, 0, 4, 1), &limits(json!({"maxFailedFiles": 1})), 0),
            Plan::End(End::Completed)
        );
        let listing = Stats { listing: Listing::UpTo(String::new()), ..stats(0, 0, 5, 0) };
        assert!(matches!(plan(&listing, &none, 0), Plan::GoOn { .. }), "not all files are known");
    }

    #[test]
    fn a_run_stops_early_when_too_many_files_failed_or_its_time_is_over() {
        let two = limits(json!({"maxFailedFiles": 2}));
        assert!(matches!(plan(&stats(5, 1, 0, 2), &two, 1), Plan::GoOn { .. }));
        assert_eq!(plan(&stats(5, 1, 0, 3), &two, 1), Plan::End(End::TooManyFailures));
        let minute = limits(json!({"timeout": "1m"}));
        let at = |seconds| {
            let stats = Stats { age: Some(Duration::from_secs(seconds)), ..stats(5, 1, 0, 0) };
            plan(&stats, &minute, 6)
        };
        assert_eq!(at(59), Plan::GoOn { create: 0, dismiss: 0, wake: Some(Duration::from_secs(1)) });
        assert_eq!(at(60), Plan::End(End::TimedOut));
    }

    #[test]
    fn a_dependency_that_fails_lets_only_a_probe_be_created() {
        let (stats, ten) = (stats(100, 0, 0, 0), limits(json!({"parallelism": 10})));
        let with = |probe| decide(&Seen { probe, ..seen(&stats, &ten) });
        assert_eq!(creates(with(Probe::One)), 1);
        assert_eq!(creates(with(Probe::UnderWay)), 0);
        let wait = Duration::from_secs(3);
        assert_eq!(with(Probe::Wait(wait)), Plan::GoOn { create: 0, dismiss: 0, wake: Some(wait) });
    }

    #[test]
    fn dead_letters_are_bounded_and_a_count_applies_before_all_files_are_known() {
        let none = Limits { max_dead_letters: 2, ..limits(json!({})) };
        let listing =
            |failed, started| Stats { listing: Listing::UpTo("k".into()), started, ..stats(5, 1, 0, failed) };
        assert!(matches!(plan(&listing(2, true), &none, 1), Plan::GoOn { .. }));
        assert_eq!(plan(&listing(3, true), &none, 1), Plan::End(End::TooManyFailures));
        let one = limits(json!({"maxFailedFiles": 1}));
        assert_eq!(plan(&listing(2, true), &one, 1), Plan::End(End::TooManyFailures));
        let share = limits(json!({"maxFailedFiles": "10%"}));
        assert_eq!(
            plan(&listing(2, true), &share, 1),
            Plan::End(End::TooManyFailures),
            "of those listed so far"
        );
    }

    #[test]
    fn a_run_with_more_files_than_it_may_have_is_stopped_while_listing_or_after() {
        let limits = Limits { max_files: Some(10), ..limits(json!({})) };
        assert!(matches!(plan(&stats(10, 0, 0, 0), &limits, 0), Plan::GoOn { .. }));
        assert_eq!(plan(&stats(11, 0, 0, 0), &limits, 0), Plan::End(End::TooManyFiles));
        let listing = Stats { listing: Listing::UpTo("k".to_owned()), ..stats(11, 0, 0, 0) };
        assert_eq!(plan(&listing, &limits, 0), Plan::End(End::TooManyFiles));
        assert!(End::TooManyFiles.is_abort(), "what is queued is given up");
        assert_eq!(
            plan(&stats(0, 0, 11, 0), &limits, 0),
            Plan::End(End::Completed),
            "nothing is left to stop"
        );
    }

    #[test]
    fn workers_that_misbehave_again_and_again_stop_a_run_that_has_not_ended() {
        let limits = limits(json!({}));
        let with = |stats: &Stats| decide(&Seen { misbehaving: true, ..seen(stats, &limits) });
        assert_eq!(with(&stats(5, 1, 0, 0)), Plan::End(End::WorkersMisbehaving));
        assert!(End::WorkersMisbehaving.is_abort(), "what is queued is given up");
        assert_eq!(with(&stats(0, 0, 5, 0)), Plan::End(End::Completed), "nothing is left to stop");
    }

    #[test]
    fn every_end_is_documented() {
        let docs = include_str!("../../../docs/runs.md");
        // `Aborted` only lets a restarted operator continue: the run shows the recorded reason.
        for end in End::VARIANTS.iter().filter(|end| **end != End::Aborted) {
            let row = format!("| `{}` |", end.as_ref());
            assert!(docs.contains(&row), "docs/runs.md has no row {row}");
        }
    }

    #[test]
    fn an_abort_that_was_begun_is_carried_on() {
        let closing = Stats { state: State::Closing, ..stats(5, 1, 0, 0) };
        assert_eq!(plan(&closing, &limits(json!({})), 1), Plan::End(End::Aborted));
    }
}
