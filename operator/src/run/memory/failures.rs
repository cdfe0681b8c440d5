//! Files that failed for good, as status and events show them.

use std::collections::VecDeque;

use crds::v1alpha1::FailedFile;

/// Failed files that a status shows: enough to see a pattern, and a status stays small.
const RECENT_MAX: usize = 10;
/// Events about failed files of one run: all of them are in the dead-letter queue.
const EVENTS_MAX: usize = 10;

/// What is remembered of failed files.
#[derive(Default)]
pub struct Failures {
    /// The newest failures, newest last.
    recent: VecDeque<FailedFile>,
    events: usize,
    /// Valkey has forgotten those that the status still shows.
    older_are_lost: bool,
}

impl Failures {
    /// A file failed for good.
    pub fn add(&mut self, failure: FailedFile) {
        self.recent.retain(|known| known.file != failure.file);
        self.recent.push_back(failure);
        while self.recent.len() > RECENT_MAX {
            self.recent.pop_front();
        }
    }

    /// Whether another event about a failed file may be sent.
    pub fn may_send_event(&mut self) -> bool {
        self.events += 1;
        self.events <= EVENTS_MAX
    }

    /// Valkey has lost what became of files.
    pub fn lost(&mut self) {
        self.recent.clear();
        self.older_are_lost = true;
    }

    /// The newest failures, newest first; those that the status knew come after our own.
    pub fn newest(&self, in_status: &[FailedFile]) -> Vec<FailedFile> {
        let own = self.recent.iter().rev();
        let in_status = if self.older_are_lost { &[] } else { in_status };
        let older = in_status.iter().filter(|known| !self.recent.iter().any(|own| own.file == known.file));
        own.chain(older).take(RECENT_MAX).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_shows_the_ten_newest_failures() {
        let mut failures = Failures::default();
        for number in (0..20).chain([19]) {
            failures.add(FailedFile { file: number.to_string(), ..FailedFile::default() });
        }
        let known = [FailedFile { file: "19".into(), ..FailedFile::default() }];
        let shown = failures.newest(&known);
        assert_eq!(shown.len(), 10);
        assert_eq!((shown[0].file.as_str(), shown[9].file.as_str()), ("19", "10"));
        failures.lost();
        assert_eq!(failures.newest(&known), [], "Valkey knows nothing of them");
    }
}
