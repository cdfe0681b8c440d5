//! Files that failed permanently, for status and events. The dead letters themselves are authoritative: a
//! lost reply or a crash of the operator hides no failure.

use std::collections::VecDeque;

use crds::v1alpha1::{FailedFile, FailureGroup};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use queue::{DeadLetter, EntryId};

use crate::run::failure_groups::FailureGroups;

/// How many failed files a status shows: enough to see a pattern, few enough to keep the status small.
const RECENT_MAX: usize = 10;
/// How many events a run may send about failed files: the dead-letter queue has all of them.
const EVENTS_MAX: usize = 10;
/// How many bytes of a key a status shows: the longest key that S3 allows.
const KEY_BYTES_MAX: usize = 1_024;

/// The failed files that the operator remembers.
#[derive(Default)]
pub struct Failures {
    /// What the dead letters said, as far as they were read.
    read: Read,
    /// How many files had failed when all dead letters were read.
    known: Option<u64>,
    events: usize,
}

#[derive(Default)]
struct Read {
    last: Option<EntryId>,
    /// Newest first.
    newest: VecDeque<FailedFile>,
    groups: FailureGroups,
}

impl Failures {
    /// Whether an event about another failed file may be sent.
    pub fn may_send_event(&mut self) -> bool {
        self.events += 1;
        self.events <= EVENTS_MAX
    }

    /// Whether the dead letters must be read to show the newest failures.
    pub fn are_outdated(&self, failed: u64) -> bool {
        self.known != Some(failed)
    }

    /// The dead letter after which to read on, when this many files have failed.
    pub fn last_read(&mut self, failed: u64) -> Option<EntryId> {
        // Valkey went back to an earlier state.
        if self.known.is_some_and(|known| failed < known) {
            self.lost();
        }
        self.read.last.clone()
    }

    /// Notes the next dead letters, in the order in which the files failed.
    pub fn read(&mut self, letters: Vec<DeadLetter>) {
        let Read { last, newest, groups } = &mut self.read;
        for letter in letters {
            *last = Some(letter.entry.clone());
            let file = shown(letter);
            groups.add(&file.file, &file.reason, file.exit_code, file.time.as_ref());
            newest.push_front(file);
            newest.truncate(RECENT_MAX);
        }
    }

    /// Notes that there were no more dead letters when this many files had failed.
    pub fn all_read(&mut self, failed: u64) {
        self.known = Some(failed);
    }

    /// Notes that Valkey has lost the outcomes of files.
    pub fn lost(&mut self) {
        (self.read, self.known) = (Read::default(), Some(0));
    }

    /// The newest failures, newest first; `None` until they have been read.
    pub fn newest(&self) -> Option<Vec<FailedFile>> {
        self.known.map(|_| self.read.newest.iter().cloned().collect())
    }

    /// The largest groups of alike failures, largest first; `None` until they have been read.
    pub fn groups(&self) -> Option<Vec<FailureGroup>> {
        self.known.map(|_| self.read.groups.largest())
    }
}

fn shown(letter: DeadLetter) -> FailedFile {
    let DeadLetter { file, attempts, reason, exit_code, pod, time_ms, .. } = letter;
    let time = i64::try_from(time_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    FailedFile {
        file: file[..file.floor_char_boundary(KEY_BYTES_MAX)].to_owned(),
        attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
        reason,
        exit_code,
        pod,
        time: time.map(Time),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn letter(file: &str) -> DeadLetter {
        DeadLetter {
            entry: "1763405000000-0".to_owned().into(),
            run: "r".to_owned(),
            file: file.to_owned(),
            attempts: 3,
            reason: "a exited with code 1".to_owned(),
            exit_code: Some(1),
            pod: Some("p".to_owned()),
            time_ms: 1_763_405_000_000,
        }
    }

    #[test]
    fn a_status_shows_the_newest_dead_letters_and_reads_them_only_when_more_failed() {
        let mut failures = Failures::default();
        assert!(failures.newest().is_none() && failures.are_outdated(0), "a new operator reads them once");
        for page in [0..15, 15..20] {
            failures.read(page.map(|number| letter(&number.to_string())).collect());
        }
        assert!(failures.newest().is_none(), "there may be more");
        failures.all_read(20);
        let shown = failures.newest().unwrap();
        assert_eq!((shown.len(), shown[0].file.as_str(), shown[9].file.as_str()), (10, "19", "10"));
        assert_eq!(shown[0].time.as_ref().unwrap().0.to_string(), "2025-11-17T18:43:20Z");
        let groups = failures.groups().unwrap();
        assert_eq!((groups.len(), groups[0].count, groups[0].example.as_deref()), (1, 20, Some("19")));
        assert_eq!(groups[0].last_time, shown[0].time);
        assert!(!failures.are_outdated(20) && failures.are_outdated(21));
        assert_eq!(failures.last_read(21), Some("1763405000000-0".to_owned().into()));
        assert_eq!(failures.last_read(3), None, "Valkey went back: read all of them again");
        assert_eq!(failures.newest(), Some(Vec::new()));
        failures.lost();
        assert_eq!(failures.groups(), Some(Vec::new()), "Valkey knows nothing of them");
    }

    #[test]
    fn a_key_that_is_too_long_for_a_status_is_cut_between_characters() {
        let mut failures = Failures::default();
        failures.read(vec![letter(&format!("a{}", "ü".repeat(600)))]);
        failures.all_read(1);
        assert_eq!(failures.newest().unwrap()[0].file.len(), 1_023);
    }
}
