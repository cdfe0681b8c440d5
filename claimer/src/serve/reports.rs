//! What is to be said about the files of this pod. The last word on each counts: it is written at once, and a final one again
//! and again until the file is no longer in the inbox, because the queue may lose its last second.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use protocol::{FileState, State};
use queue::{EntryId, Reporter};
use storage::chain;
use tokio::sync::Notify;

/// The wait before a final word is repeated; it doubles each time.
const REPEAT_FIRST: Duration = Duration::from_secs(2);
/// No wait between two repetitions is longer.
const REPEAT_LONGEST: Duration = Duration::from_secs(60);
/// Wait after words that could not be written.
const AGAIN: Duration = Duration::from_millis(500);

/// Words about files.
pub(crate) struct Reports {
    pod: String,
    words: Mutex<HashMap<EntryId, Word>>,
    news: Notify,
    settled: Notify,
}

struct Word {
    text: String,
    is_final: bool,
    due: Instant,
    wait: Duration,
}

impl Reports {
    pub(crate) fn new(pod: &str) -> Self {
        Self { pod: pod.to_owned(), words: Mutex::default(), news: Notify::new(), settled: Notify::new() }
    }

    /// Says how far a file is.
    pub(crate) fn say(&self, entry: &EntryId, state: State) {
        let is_final = state.is_final();
        let text = FileState { pod: self.pod.clone(), state }.to_string();
        let word = Word { text, is_final, due: Instant::now(), wait: REPEAT_FIRST };
        self.lock().insert(entry.clone(), word);
        self.news.notify_one();
    }

    /// Forgets the words about files that are settled, or were taken back.
    pub(crate) fn keep(&self, held: &HashSet<EntryId>) {
        self.lock().retain(|entry, _| held.contains(entry));
        self.settled.notify_waiters();
    }

    /// Waits until nothing is left to say.
    pub(crate) async fn all_settled(&self) {
        loop {
            let settled = self.settled.notified();
            if self.lock().is_empty() {
                return;
            }
            settled.await;
        }
    }

    /// Waits until all that is to be said now is written.
    pub(crate) async fn all_said(&self) {
        while !self.due(Instant::now()).0.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Writes what is to be said, without end.
    pub(crate) async fn write(&self, mut reporter: Reporter) {
        loop {
            let (due, next) = self.due(Instant::now());
            if due.is_empty() {
                tokio::select! {
                    () = self.news.notified() => {}
                    () = tokio::time::sleep(next) => {}
                }
                continue;
            }
            match reporter.report(&due).await {
                Ok(()) => self.written(&due, Instant::now()),
                Err(error) => {
                    eprintln!("try again in {AGAIN:.1?}: {}", chain(&error).escape_debug());
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }

    fn due(&self, now: Instant) -> (Vec<(EntryId, String)>, Duration) {
        let words = self.lock();
        let due = words.iter().filter(|(_, word)| word.due <= now);
        let due = due.map(|(entry, word)| (entry.clone(), word.text.clone())).collect();
        let next = words.values().map(|word| word.due.saturating_duration_since(now)).min();
        (due, next.unwrap_or(REPEAT_LONGEST))
    }

    fn written(&self, said: &[(EntryId, String)], now: Instant) {
        let mut words = self.lock();
        for (entry, text) in said {
            // Something newer may have been said meanwhile.
            let Some(word) = words.get_mut(entry).filter(|word| word.text == *text) else { continue };
            // The operator judges a pod that is gone by what it had begun: that is said once more, much later.
            let wait = if word.is_final { word.wait } else { REPEAT_LONGEST };
            word.due = now + wait;
            word.wait = (wait * 2).min(REPEAT_LONGEST);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<EntryId, Word>> {
        self.words.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str) -> EntryId {
        EntryId::from(id.to_owned())
    }

    #[test]
    fn the_last_word_counts_and_a_final_one_is_repeated_until_the_file_is_settled() {
        let (reports, now) = (Reports::new("pod"), Instant::now());
        reports.say(&entry("1-0"), State::Started);
        reports.say(&entry("1-0"), State::Succeeded);
        let soon = now + Duration::from_millis(50);
        let (due, _) = reports.due(soon);
        assert_eq!(due, [(entry("1-0"), "pod succeeded".to_owned())]);
        reports.written(&due, soon);
        assert!(reports.due(soon).0.is_empty(), "it was said");
        assert_eq!(reports.due(soon + REPEAT_FIRST).0.len(), 1, "once more");
        reports.keep(&HashSet::from([entry("1-0")]));
        assert_eq!(reports.due(soon + REPEAT_FIRST).0.len(), 1, "it is not settled yet");
        reports.keep(&HashSet::new());
        assert!(reports.due(soon + REPEAT_FIRST).0.is_empty());
    }

    /// As long as an upload takes, and without a second write for the file that begins in the same moment.
    #[test]
    fn a_file_that_is_being_published_is_reported_with_the_next_and_repeated_seldom() {
        let reports = Reports::new("pod");
        reports.say(&entry("1-0"), State::Publishing);
        reports.say(&entry("2-0"), State::Started);
        let soon = Instant::now() + Duration::from_millis(50);
        let (mut due, _) = reports.due(soon);
        due.sort();
        let said =
            [(entry("1-0"), "pod started publishing".to_owned()), (entry("2-0"), "pod started".to_owned())];
        assert_eq!(due, said);
        reports.written(&due, soon);
        assert!(reports.due(soon + REPEAT_FIRST).0.is_empty(), "neither is final");
        assert_eq!(reports.due(soon + REPEAT_LONGEST).0.len(), 2);
    }

    #[test]
    fn a_word_that_was_overtaken_while_it_was_written_is_written_too() {
        let reports = Reports::new("pod");
        reports.say(&entry("1-0"), State::Started);
        let later = Instant::now() + Duration::from_millis(50);
        let (due, _) = reports.due(later);
        reports.say(&entry("1-0"), State::Released);
        reports.written(&due, later);
        assert_eq!(reports.due(later).0, [(entry("1-0"), "pod released".to_owned())]);
    }
}
