//! Reports on the files of this pod. Only the latest report on each file counts. It is written at once, and a
//! final one is repeated until the file is no longer in the inbox, because the queue may lose its last
//! second.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use protocol::{FileState, State};
use queue::{EntryId, Reporter};
use storage::chain;
use tokio::sync::Notify;

/// The wait before a final report is repeated; it doubles each time.
const REPEAT_FIRST: Duration = Duration::from_secs(2);
/// The longest wait between two repetitions.
const REPEAT_LONGEST: Duration = Duration::from_secs(60);
/// The wait after a failed write.
const AGAIN: Duration = Duration::from_millis(500);

/// Reports on files.
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

    /// Reports a file's progress.
    pub(crate) fn say(&self, entry: &EntryId, state: State) {
        let is_final = state.is_final();
        let text = FileState { pod: self.pod.clone(), state }.to_string();
        let word = Word { text, is_final, due: Instant::now(), wait: REPEAT_FIRST };
        self.lock().insert(entry.clone(), word);
        self.news.notify_one();
    }

    /// Forgets reports about files that are settled or were taken back.
    pub(crate) fn keep(&self, held: &HashSet<EntryId>) {
        self.lock().retain(|entry, _| held.contains(entry));
        self.settled.notify_waiters();
    }

    /// Waits until there is nothing left to report.
    pub(crate) async fn all_settled(&self) {
        loop {
            let settled = self.settled.notified();
            if self.lock().is_empty() {
                return;
            }
            settled.await;
        }
    }

    /// Waits until all current reports are written.
    pub(crate) async fn all_said(&self) {
        while !self.due(Instant::now()).0.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Writes reports until the task is dropped.
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
                    eprintln!("trying again in {AGAIN:.1?}: {}", chain(&error).escape_debug());
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
            // A newer report may have come in meanwhile.
            let Some(word) = words.get_mut(entry).filter(|word| word.text == *text) else { continue };
            // The operator judges a pod that is gone by the files it had begun, so this is repeated once,
            // much later.
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
        assert!(reports.due(soon).0.is_empty(), "already written");
        assert_eq!(reports.due(soon + REPEAT_FIRST).0.len(), 1, "once more");
        reports.keep(&HashSet::from([entry("1-0")]));
        assert_eq!(reports.due(soon + REPEAT_FIRST).0.len(), 1, "it is not settled yet");
        reports.keep(&HashSet::new());
        assert!(reports.due(soon + REPEAT_FIRST).0.is_empty());
    }

    /// Covers the whole upload, and needs no second write for the file that begins at the same moment.
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
