//! The progress of a run in one line. Pure: it decides what to show; when and where is decided elsewhere.

use std::time::Duration;

use crds::v1alpha1::{Counts, Phase, PipelineRun};

use crate::pace;

/// A shorter bar shows nothing useful.
const BAR_MIN: usize = 10;
/// A longer bar shows nothing more.
const BAR_MAX: usize = 40;

/// The state of a run at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct View {
    /// The run's phase.
    pub phase: Phase,
    /// Files found so far, while the bucket is being listed.
    pub listed: i64,
    /// Its files.
    pub counts: Counts,
    /// Since the run was created.
    pub elapsed: Duration,
    /// The rate that the demo has measured so far.
    pub files_per_second: Option<f64>,
}

impl View {
    /// Takes the state from the run's status.
    pub fn of(run: &PipelineRun, elapsed: Duration, files_per_second: Option<f64>) -> Self {
        let status = run.status.clone().unwrap_or_default();
        Self {
            phase: status.phase.unwrap_or_default(),
            listed: status.listed_files.unwrap_or_default(),
            counts: status.counts.unwrap_or_default(),
            elapsed,
            files_per_second,
        }
    }

    /// Whether the run is over.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    fn settled(&self) -> i64 {
        self.counts.succeeded + self.counts.failed
    }

    fn left(&self) -> Option<Duration> {
        let unsettled = (self.counts.total_files - self.settled()).max(0);
        (!self.is_finished()).then_some(())?;
        Some(Duration::from_secs_f64(unsettled as f64 / self.files_per_second?))
    }
}

/// The line, at most `width` characters long: the least important parts are dropped first.
pub fn render(view: &View, width: usize) -> String {
    let Counts { total_files, queued, running, succeeded, failed, .. } = view.counts;
    if total_files == 0 {
        let found = if view.listed > 0 { format!(", {} files found", view.listed) } else { String::new() };
        return clip(&format!("{}{found}  {}", view.phase, clock(view.elapsed)), width);
    }
    let counts = format!("{succeeded} done, {failed} failed, {running} running, {queued} queued");
    let total = format!("{}/{total_files}", view.settled());
    let rate = view.files_per_second.map(pace::shown);
    let left = view.left().map(|left| format!("ETA {}", clock(left)));
    // The available room decides which parts are shown.
    let all = [Some(total), Some(counts), rate, left, Some(clock(view.elapsed))];
    let parts: Vec<String> = all.into_iter().flatten().collect();
    for shown in (1..=parts.len()).rev() {
        let text = parts[..shown].join("  ");
        let room = width.saturating_sub(text.chars().count() + 1);
        if room >= BAR_MIN {
            return format!("{} {text}", bar(view.settled(), total_files, room.min(BAR_MAX)));
        }
    }
    clip(&parts.join("  "), width)
}

/// `█████░░░░░`: full only when everything is settled.
fn bar(settled: i64, total: i64, width: usize) -> String {
    let share = settled as f64 / total.max(1) as f64;
    let full = ((share * width as f64) as usize).min(width);
    "█".repeat(full) + &"░".repeat(width - full)
}

/// `0:07`, `12:30`, `1:02:03`
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds / 3_600 {
        0 => format!("{}:{:02}", seconds / 60, seconds % 60),
        hours => format!("{hours}:{:02}:{:02}", seconds / 60 % 60, seconds % 60),
    }
}

fn clip(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(queued: i64, running: i64, succeeded: i64, failed: i64) -> View {
        let total_files = queued + running + succeeded + failed;
        View {
            phase: Phase::Running,
            counts: Counts { total_files, queued, running, succeeded, failed, ..Counts::default() },
            elapsed: Duration::from_secs(14),
            files_per_second: Some(2.0),
            ..View::default()
        }
    }

    #[test]
    fn a_wide_line_has_bar_counts_rate_and_time_left() {
        assert_eq!(
            render(&view(7, 6, 23, 1), 120),
            "█████████████████████████░░░░░░░░░░░░░░░ 24/37  23 done, 1 failed, 6 running, 7 queued  2.00 files/s  ETA 0:06  0:14"
        );
    }

    #[test]
    fn many_files_a_second_are_shown_without_decimals() {
        let view = View { files_per_second: Some(151.7), ..view(1_100, 64, 836, 0) };
        assert_eq!(
            render(&view, 100),
            "███████░░░░░░░░░░ 836/2000  836 done, 0 failed, 64 running, 1100 queued  152 files/s  ETA 0:07  0:14"
        );
    }

    #[test]
    fn a_narrow_line_loses_what_matters_least() {
        assert_eq!(
            render(&view(7, 6, 23, 1), 80),
            "██████░░░░ 24/37  23 done, 1 failed, 6 running, 7 queued  2.00 files/s  ETA 0:06"
        );
        assert_eq!(
            render(&view(7, 6, 23, 1), 75),
            "█████████░░░░░░ 24/37  23 done, 1 failed, 6 running, 7 queued  2.00 files/s"
        );
        assert_eq!(render(&view(7, 6, 23, 1), 20), "█████████░░░░░ 24/37");
        assert_eq!(render(&view(7, 6, 23, 1), 8), "24/37  2");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let views = [View::default(), view(37, 0, 0, 0), view(1_000_000, 10_000, 12, 3), view(0, 0, 36, 1)];
        for width in 0..200 {
            for view in &views {
                let line = render(view, width);
                assert!(line.chars().count() <= width, "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn before_anything_is_settled_nothing_is_promised() {
        let line = render(&View { files_per_second: None, ..view(30, 7, 0, 0) }, 120);
        assert!(!line.contains("ETA") && !line.contains("/s"), "{line}");
        assert!(line.ends_with("0/37  0 done, 0 failed, 7 running, 30 queued  0:14"), "{line}");
    }

    #[test]
    fn the_bar_is_full_when_all_is_settled_and_not_before() {
        assert!(!render(&view(0, 1, 999_999, 0), 120).contains("█ "));
        let done = View { phase: Phase::Succeeded, ..view(0, 0, 36, 1) };
        let line = render(&done, 120);
        assert!(
            line.starts_with(&"█".repeat(BAR_MAX)) && !line.contains('░') && !line.contains("ETA"),
            "{line}"
        );
    }

    #[test]
    fn while_the_bucket_is_listed_the_files_found_are_told() {
        let mut view = View { elapsed: Duration::from_secs(3_723), ..View::default() };
        assert_eq!(render(&view, 80), "Pending  1:02:03");
        (view.phase, view.listed) = (Phase::Listing, 4_000);
        assert_eq!(render(&view, 80), "Listing, 4000 files found  1:02:03");
    }
}
