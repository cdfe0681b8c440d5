//! The demo's conclusion: how fast each mode was, and how that was measured.

use crds::v1alpha1::Mode;

use crate::{pace, run::Finished};

/// A run as the comparison shows it.
#[derive(Debug, Clone)]
pub struct Measured {
    mode: Mode,
    files: i64,
    /// Average size of a file.
    bytes: usize,
    /// Its concurrent pods.
    pods: i32,
    files_per_second: Option<f64>,
    /// From the creation of the run to its end, according to its status.
    duration: String,
}

impl Measured {
    /// A finished run of files of this average size.
    pub fn of(mode: Mode, bytes: usize, finished: &Finished) -> Self {
        let status = finished.run.status.clone().unwrap_or_default();
        Self {
            mode,
            files: status.counts.unwrap_or_default().total_files,
            bytes,
            pods: finished.run.spec.execution.parallelism,
            files_per_second: finished.pace.files_per_second(),
            duration: status.duration.unwrap_or_default(),
        }
    }

    fn line(&self) -> String {
        let Self { mode, files, pods, duration, .. } = self;
        let size = self.bytes as f64 / 1e3;
        let rate = self.files_per_second.map_or_else(|| "not measured".to_owned(), pace::shown);
        format!(
            "{:<10}  {files:>4} files of {size:>4.1} KB, {pods} pods at once: {rate}; the whole run took {duration}",
            format!("{mode:?}"),
        )
    }
}

/// Both runs, the comparison, and how it was measured.
pub fn text(slow: &Measured, warm: &Measured) -> String {
    [slow.line(), warm.line(), String::new(), sentence(slow, warm), HOW.to_owned()].join("\n")
}

const HOW: &str = "This demo measured both rates by polling the runs once a second, from the first claimed file to the last settled one.\n\
    The rates exclude the time that the first pods took to start; the time of the whole run includes it.";

fn sentence(slow: &Measured, warm: &Measured) -> String {
    let (Some(before), Some(now)) = (slow.files_per_second, warm.files_per_second) else {
        return "A run was over before its rate could be measured, so the modes are not compared.".to_owned();
    };
    let times = now / before;
    let decimals = if times < 10.0 { 1 } else { 0 };
    format!(
        "Warm was {times:.decimals$} times as fast as a pod per file, with the same filters: {} instead of {}.",
        pace::shown(now),
        pace::shown(before)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(mode: Mode, files_per_second: Option<f64>) -> Measured {
        let (files, bytes, pods, duration) = match mode {
            Mode::PodPerFile => (37, 78_400, 6, "49s"),
            Mode::Warm => (2_000, 1_640, 4, "19s"),
        };
        Measured { mode, files, bytes, pods, files_per_second, duration: duration.to_owned() }
    }

    fn compared(slow: Option<f64>, warm: Option<f64>) -> String {
        text(&measured(Mode::PodPerFile, slow), &measured(Mode::Warm, warm))
    }

    #[test]
    fn the_sentence_says_how_many_times_as_fast_and_the_lines_say_what_differed() {
        let text = compared(Some(0.72), Some(148.3));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[..4],
            [
                "PodPerFile    37 files of 78.4 KB, 6 pods at once: 0.72 files/s; the whole run took 49s",
                "Warm        2000 files of  1.6 KB, 4 pods at once: 148 files/s; the whole run took 19s",
                "",
                "Warm was 206 times as fast as a pod per file, with the same filters: 148 files/s instead of 0.72 files/s.",
            ]
        );
        assert!(text.ends_with(HOW), "{text}");
    }

    #[test]
    fn a_small_factor_has_a_decimal() {
        assert!(compared(Some(2.0), Some(9.0)).contains("Warm was 4.5 times as fast"));
    }

    #[test]
    fn nothing_is_claimed_without_both_rates() {
        for text in [compared(None, Some(148.0)), compared(Some(0.7), None)] {
            assert!(text.contains("not measured") && text.contains("are not compared"), "{text}");
            assert!(!text.contains("times as fast"), "{text}");
        }
    }
}
