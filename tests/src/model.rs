//! The queue protocol as plain data: what each script does, without a server. The property test compares the real
//! server with it after every step; the model checker explores every interleaving of it.
//!
//! Time is left out: back-off is over when somebody promotes, and every pending entry has been idle long enough.

use std::collections::{BTreeMap, BTreeSet};

/// A file, by number.
pub type FileNo = u32;
/// A stream entry: entries are numbered as they are added.
pub type EntryNo = u32;
/// A consumer: a pod, by number.
pub type Pod = u32;

/// A file in the stream or in the retry set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The file.
    pub file: FileNo,
    /// Attempts that failed.
    pub attempts: u32,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Every filter succeeded.
    Succeeded,
    /// It failed and may be tried again.
    Failed,
    /// It failed for good.
    Rejected,
    /// Nobody tried it.
    Released,
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Counted as succeeded.
    Succeeded,
    /// It will be tried again.
    Retrying(Message),
    /// Queued again, as it was.
    Released,
    /// Dead-lettered.
    DeadLettered(Message),
    /// Nothing was done.
    Ignored,
}

/// The queue of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ModelQueue {
    /// Entries of the stream.
    pub work: BTreeMap<EntryNo, Message>,
    /// Entries that are claimed, and by whom.
    pub pending: BTreeMap<EntryNo, Pod>,
    /// Entries that were handed out and are held by nobody.
    pub adrift: BTreeSet<EntryNo>,
    /// Entries that wait for their back-off, by the entry they were.
    pub retry: BTreeSet<(EntryNo, Message)>,
    /// Dead letters.
    pub dlq: Vec<Message>,
    /// Pages that were added.
    pub cursor: u32,
    /// Whether the last page was added.
    pub listed: bool,
    /// Whether an abort has begun.
    pub closing: bool,
    /// Whether the run is closed.
    pub closed: bool,
    /// Files that were added.
    pub total: u32,
    /// Files that succeeded.
    pub succeeded: u32,
    /// Files that failed for good.
    pub failed: u32,
    /// Attempts that were repeated.
    pub retried: u32,
    /// Entries that were reclaimed.
    pub reclaimed: u32,
    added: EntryNo,
}

impl ModelQueue {
    /// Files that wait.
    pub fn queued(&self) -> u32 {
        (self.work.len() - self.pending.len() + self.retry.len()) as u32
    }

    /// Files that are claimed.
    pub fn running(&self) -> u32 {
        self.pending.len() as u32
    }

    /// Whether the counts add up.
    pub fn adds_up(&self) -> bool {
        self.total == self.queued() + self.running() + self.succeeded + self.failed
    }

    /// Adds a page if the listing is where the caller thinks it is; otherwise nothing happens.
    pub fn enqueue(&mut self, expected: u32, last: bool, files: &[FileNo]) -> bool {
        if self.closing || self.closed || self.listed || self.cursor != expected {
            return false;
        }
        for file in files {
            self.add(Message { file: *file, attempts: 0 });
        }
        self.cursor += u32::from(!last);
        self.listed = last;
        self.total += files.len() as u32;
        true
    }

    fn add(&mut self, message: Message) {
        self.added += 1;
        self.work.insert(self.added, message);
    }

    /// The entry that a pod works on: the first that it holds.
    pub fn own(&self, pod: Pod) -> Option<(EntryNo, Message)> {
        let entry = self.pending.iter().find(|(_, holder)| **holder == pod).map(|(entry, _)| *entry)?;
        Some((entry, self.work[&entry]))
    }

    /// Files that can be handed out.
    pub fn available(&self) -> impl Iterator<Item = (EntryNo, Message)> + '_ {
        let free = |entry: &EntryNo| !self.pending.contains_key(entry) && !self.adrift.contains(entry);
        self.work.iter().filter(move |(entry, _)| free(entry)).map(|(entry, message)| (*entry, *message))
    }

    /// Hands a file to a pod, whatever it holds already. Which file comes first is not the protocol's concern.
    pub fn deliver(&mut self, pod: Pod, fits: impl Fn(&Message) -> bool) -> Option<EntryNo> {
        let (entry, _) = self.available().find(|(_, message)| fits(message))?;
        self.pending.insert(entry, pod);
        Some(entry)
    }

    /// Hands a file to somebody who does not want it to be remembered.
    pub fn deliver_unremembered(&mut self, fits: impl Fn(&Message) -> bool) -> Option<EntryNo> {
        let (entry, _) = self.available().find(|(_, message)| fits(message))?;
        self.adrift.insert(entry);
        Some(entry)
    }

    /// What a worker does: its own entry if it holds one, otherwise another, and then the first that it holds.
    pub fn claim(&mut self, pod: Pod, fits: impl Fn(&Message) -> bool) -> Option<(EntryNo, Message)> {
        if self.own(pod).is_none() {
            self.deliver(pod, fits)?;
        }
        self.own(pod)
    }

    /// Of what was handed out after an entry, looks at the next ones, at most `limit`, and queues again what nobody holds.
    /// Returns how many these were, and where to go on.
    pub fn recover(&mut self, after: EntryNo, limit: usize) -> (u32, Option<EntryNo>) {
        let handed_out = self.pending.keys().chain(&self.adrift).copied();
        let mut looked_at: Vec<EntryNo> = handed_out.filter(|entry| *entry > after).collect();
        looked_at.sort_unstable();
        looked_at.truncate(limit);
        let mut recovered = 0;
        for entry in &looked_at {
            if self.adrift.remove(entry)
                && let Some(message) = self.work.remove(entry)
            {
                self.add(message);
                recovered += 1;
            }
        }
        self.reclaimed += recovered;
        (recovered, looked_at.last().copied().filter(|_| looked_at.len() == limit))
    }

    /// Settles an entry, if it is pending.
    pub fn settle(&mut self, entry: EntryNo, verdict: Verdict, max_attempts: u32, backoff: bool) -> Fate {
        if self.pending.remove(&entry).is_none() {
            return Fate::Ignored;
        }
        let Some(message) = self.work.remove(&entry) else { return Fate::Ignored };
        if verdict == Verdict::Released {
            self.add(message);
            return Fate::Released;
        }
        let message = Message { attempts: message.attempts + 1, ..message };
        match verdict {
            Verdict::Succeeded => {
                self.succeeded += 1;
                Fate::Succeeded
            }
            Verdict::Failed if message.attempts < max_attempts => {
                self.retried += 1;
                if backoff {
                    self.retry.insert((entry, message));
                } else {
                    self.add(message);
                }
                Fate::Retrying(message)
            }
            Verdict::Failed | Verdict::Rejected | Verdict::Released => {
                self.failed += 1;
                self.dlq.push(message);
                Fate::DeadLettered(message)
            }
        }
    }

    /// Settles an entry of a dead pod as failed, if that pod still holds it.
    pub fn reclaim(&mut self, entry: EntryNo, pod: Pod, max_attempts: u32, backoff: bool) -> Fate {
        if self.pending.get(&entry) != Some(&pod) {
            return Fate::Ignored;
        }
        self.reclaimed += 1;
        self.settle(entry, Verdict::Failed, max_attempts, backoff)
    }

    /// Moves everything that waits for its back-off to the stream.
    pub fn promote(&mut self) -> u32 {
        let due = std::mem::take(&mut self.retry);
        for (_, message) in &due {
            self.add(*message);
        }
        due.len() as u32
    }

    /// Finishes the run, if every file is listed and settled.
    pub fn finish(&mut self) -> bool {
        if self.listed && self.work.is_empty() && self.retry.is_empty() {
            self.closed = true;
        }
        self.closed
    }

    /// Dead-letters what remains, at most `limit` files, and closes the run when nothing is left.
    pub fn abort(&mut self, limit: usize) -> bool {
        if self.closed {
            return true;
        }
        self.closing = true;
        let mut moved = Vec::new();
        while moved.len() < limit
            && let Some((entry, message)) = self.work.pop_first()
        {
            self.pending.remove(&entry);
            self.adrift.remove(&entry);
            moved.push(message);
        }
        while moved.len() < limit
            && let Some((_, message)) = self.retry.pop_first()
        {
            moved.push(message);
        }
        self.failed += moved.len() as u32;
        self.dlq.extend(moved);
        self.closed = self.work.is_empty() && self.retry.is_empty();
        self.closed
    }
}
