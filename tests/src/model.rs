//! The queue protocol as plain data: the effect of each script, without a server. The property test compares
//! the real server with it after every step; the model checker explores every interleaving of it.
//!
//! Time is left out: back-off is over when an operator promotes, and every pending entry has been idle long
//! enough. So is memory: a listing pauses only at high water.

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
    /// Failed attempts so far.
    pub attempts: u32,
    /// Disruptions in a row that count against it.
    pub disruptions: u32,
}

/// The limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The number of attempts per file.
    pub max_attempts: u32,
    /// The number of disruptions in a row that cost a file nothing.
    pub max_disruptions: u32,
    /// Whether a failed file waits before it is tried again.
    pub backoff: bool,
}

/// The result of adding a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// It was added.
    Added,
    /// The listing has moved on.
    Superseded,
    /// Enough files are waiting already.
    Paused,
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
    /// Something other than the file ended it.
    Disrupted {
        /// Whether it counts against the file.
        counts: bool,
    },
    /// It was never tried.
    Released,
}

/// What a worker that processes many files reports about one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// The filters work on it.
    Started,
    /// The filters succeeded, and its results are being published.
    Publishing,
    /// It succeeded.
    Succeeded,
    /// It ended in any other way.
    Other,
}

/// The result of settling an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Counted as succeeded.
    Succeeded,
    /// It will be tried again.
    Retrying(Message),
    /// Queued again, without an attempt.
    Disrupted {
        /// The file.
        file: FileNo,
        /// Disruptions in a row that count against it.
        disruptions: u32,
    },
    /// Queued again, unchanged.
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
    /// Claimed entries, and their holders.
    pub pending: BTreeMap<EntryNo, Pod>,
    /// The contents of each pod's inbox.
    pub inboxes: BTreeMap<Pod, BTreeSet<EntryNo>>,
    /// What workers reported about entries, and which pod did.
    pub states: BTreeMap<EntryNo, (Pod, State)>,
    /// Whether a worker wrote more beside them than all reports can be.
    pub flooded: bool,
    /// Entries that were handed out but have no holder.
    pub adrift: BTreeSet<EntryNo>,
    /// Entries that wait for their back-off, by the number of their last entry.
    pub retry: BTreeSet<(EntryNo, Message)>,
    /// Dead letters.
    pub dlq: Vec<Message>,
    /// Pages that were added.
    pub cursor: u32,
    /// Whether the last page was added.
    pub listed: bool,
    /// Whether the listing is paused.
    pub paused: bool,
    /// Whether files may be processed.
    pub started: bool,
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
    /// Attempts that led to a retry.
    pub retried: u32,
    /// Entries that were reclaimed.
    pub reclaimed: u32,
    /// How often a file was queued again without an attempt.
    pub disrupted: u32,
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

    /// Files that wait or are claimed, which count against high water.
    pub fn unsettled(&self) -> usize {
        self.work.len() + self.retry.len()
    }

    /// Adds a page if the listing is where the caller thinks it is, and few enough files are waiting. A
    /// paused listing continues below half of the mark.
    pub fn enqueue(&mut self, expected: u32, last: bool, files: &[FileNo], high_water: usize) -> Enqueued {
        if self.closing || self.closed || self.listed || self.cursor != expected {
            return Enqueued::Superseded;
        }
        let halves = if self.paused { 2 } else { 1 };
        if !files.is_empty() && self.unsettled() * halves >= high_water {
            (self.paused, self.started) = (true, true);
            return Enqueued::Paused;
        }
        for file in files {
            self.add(Message { file: *file, attempts: 0, disruptions: 0 });
        }
        self.cursor += u32::from(!last);
        self.listed = last;
        self.started |= last;
        self.paused &= files.is_empty() && !last;
        self.total += files.len() as u32;
        Enqueued::Added
    }

    fn add(&mut self, message: Message) {
        self.added += 1;
        self.work.insert(self.added, message);
    }

    /// The entry that a pod works on: the first one it holds.
    pub fn own(&self, pod: Pod) -> Option<(EntryNo, Message)> {
        let entry = self.held_by(pod).next()?;
        Some((entry, self.work[&entry]))
    }

    /// The entries that a pod holds.
    pub fn held_by(&self, pod: Pod) -> impl Iterator<Item = EntryNo> + '_ {
        self.pending.iter().filter(move |(_, holder)| **holder == pod).map(|(entry, _)| *entry)
    }

    /// Files that can be handed out.
    pub fn available(&self) -> impl Iterator<Item = (EntryNo, Message)> + '_ {
        let free = |entry: &EntryNo| !self.pending.contains_key(entry) && !self.adrift.contains(entry);
        self.work.iter().filter(move |(entry, _)| free(entry)).map(|(entry, message)| (*entry, *message))
    }

    /// Gives a pod a file past its inbox. The protocol does not define which file comes first.
    pub fn deliver(&mut self, pod: Pod, fits: impl Fn(&Message) -> bool) -> Option<EntryNo> {
        let (entry, _) = self.available().find(|(_, message)| fits(message))?;
        self.pending.insert(entry, pod);
        Some(entry)
    }

    /// Hands a file to a reader that leaves no trace.
    pub fn deliver_unremembered(&mut self, fits: impl Fn(&Message) -> bool) -> Option<EntryNo> {
        let (entry, _) = self.available().find(|(_, message)| fits(message))?;
        self.adrift.insert(entry);
        Some(entry)
    }

    /// Gives a pod files until it holds `most`; returns whether it has any. An abort hands out nothing more.
    pub fn fill(&mut self, pod: Pod, most: usize, fits: impl Fn(&Message) -> bool) -> bool {
        if self.closing {
            return false;
        }
        while self.held_by(pod).count() < most && self.deliver(pod, &fits).is_some() {}
        let held: BTreeSet<EntryNo> = self.held_by(pod).collect();
        let has_any = !held.is_empty();
        self.inboxes.insert(pod, held);
        has_any
    }

    /// The inbox as a worker reads it.
    pub fn inbox(&self, pod: Pod) -> impl Iterator<Item = (EntryNo, Message)> + '_ {
        let entries = self.inboxes.get(&pod).into_iter().flatten();
        entries.map(|entry| (*entry, self.work[entry]))
    }

    /// The inbox as a worker that processes one file reads it.
    pub fn claim(&self, pod: Pod) -> Option<(EntryNo, Message)> {
        self.inbox(pod).next()
    }

    /// A worker reports the outcome of an entry, truthfully or not.
    pub fn report(&mut self, entry: EntryNo, pod: Pod, state: State) {
        if !self.closed {
            self.states.insert(entry, (pod, state));
        }
    }

    /// A worker writes more than all reports can be.
    pub fn flood(&mut self) {
        self.flooded |= !self.closed;
    }

    /// Drops all reports if there is more than they can be; returns whether there was.
    pub fn drop_flood(&mut self) -> bool {
        let flooded = self.flooded;
        if flooded {
            self.forget_reports();
        }
        flooded
    }

    fn forget_reports(&mut self) {
        self.states.clear();
        self.flooded = false;
    }

    /// Settles files that their holder reports as succeeded, and forgets reports of others. Returns the files
    /// that succeeded.
    pub fn take_reports(&mut self, policy: Policy) -> Vec<FileNo> {
        let pending = self.pending.clone();
        self.states.retain(|entry, (pod, _)| pending.get(entry) == Some(pod));
        let reported = self.states.clone().into_iter();
        let succeeded = reported.filter(|(_, (_, state))| *state == State::Succeeded);
        let mut files = Vec::new();
        for (entry, (pod, _)) in succeeded {
            files.push(self.work[&entry].file);
            self.settle(entry, pod, Verdict::Succeeded, policy);
        }
        files
    }

    /// Takes an entry from its holder, and out of its inbox.
    fn take(&mut self, entry: EntryNo) -> Option<Message> {
        if let Some(pod) = self.pending.remove(&entry)
            && let Some(inbox) = self.inboxes.get_mut(&pod)
        {
            inbox.remove(&entry);
        }
        self.states.remove(&entry);
        self.work.remove(&entry)
    }

    /// Of the entries that were handed out after `after`, checks at most `limit`, and queues again those
    /// without a holder. Returns their number, and where to continue.
    pub fn recover(&mut self, after: EntryNo, limit: usize) -> (u32, Option<EntryNo>) {
        let handed_out = self.pending.keys().chain(&self.adrift).copied();
        let mut checked: Vec<EntryNo> = handed_out.filter(|entry| *entry > after).collect();
        checked.sort_unstable();
        checked.truncate(limit);
        let mut recovered = 0;
        for entry in &checked {
            if self.adrift.remove(entry)
                && let Some(message) = self.work.remove(entry)
            {
                self.add(message);
                recovered += 1;
            }
        }
        self.reclaimed += recovered;
        (recovered, checked.last().copied().filter(|_| checked.len() == limit))
    }

    /// Settles an entry, if this pod holds it.
    pub fn settle(&mut self, entry: EntryNo, pod: Pod, verdict: Verdict, policy: Policy) -> Fate {
        if self.pending.get(&entry) != Some(&pod) {
            return Fate::Ignored;
        }
        let Some(message) = self.take(entry) else { return Fate::Ignored };
        match verdict {
            Verdict::Succeeded => {
                self.succeeded += 1;
                Fate::Succeeded
            }
            Verdict::Failed => self.charge(entry, message, true, policy),
            Verdict::Rejected => self.charge(entry, message, false, policy),
            Verdict::Disrupted { counts } => {
                let message = Message { disruptions: message.disruptions + u32::from(counts), ..message };
                if counts && message.disruptions > policy.max_disruptions {
                    return self.charge(entry, message, true, policy);
                }
                self.disrupted += 1;
                self.add(message);
                Fate::Disrupted { file: message.file, disruptions: message.disruptions }
            }
            Verdict::Released => {
                self.add(message);
                Fate::Released
            }
        }
    }

    fn charge(&mut self, entry: EntryNo, message: Message, retryable: bool, policy: Policy) -> Fate {
        let message = Message { attempts: message.attempts + 1, disruptions: 0, ..message };
        if retryable && message.attempts < policy.max_attempts {
            self.retried += 1;
            if policy.backoff {
                self.retry.insert((entry, message));
            } else {
                self.add(message);
            }
            return Fate::Retrying(message);
        }
        self.failed += 1;
        self.dlq.push(message);
        Fate::DeadLettered(message)
    }

    /// Settles an entry of a dead pod as a disruption that counts, if that pod still holds the entry.
    pub fn reclaim(&mut self, entry: EntryNo, pod: Pod, policy: Policy) -> Fate {
        let fate = self.settle(entry, pod, Verdict::Disrupted { counts: true }, policy);
        self.reclaimed += u32::from(fate != Fate::Ignored);
        fate
    }

    /// Queues again, unchanged, whatever a consumer holds that cannot be a pod.
    pub fn remove_consumer(&mut self, consumer: Pod) {
        let held: Vec<EntryNo> =
            self.pending.iter().filter(|(_, holder)| **holder == consumer).map(|(entry, _)| *entry).collect();
        for entry in held {
            if let Some(message) = self.take(entry) {
                self.add(message);
            }
        }
    }

    /// Moves everything whose back-off is over to the stream.
    pub fn promote(&mut self) -> u32 {
        let due = std::mem::take(&mut self.retry);
        for (_, message) in &due {
            self.add(*message);
        }
        due.len() as u32
    }

    /// Finishes the run if every file is listed and settled.
    pub fn finish(&mut self) -> bool {
        if self.listed && self.work.is_empty() && self.retry.is_empty() {
            self.closed = true;
            self.forget_reports();
        }
        self.closed
    }

    /// Dead-letters at most `limit` of the remaining files, and closes the run when none is left.
    pub fn abort(&mut self, limit: usize) -> bool {
        if self.closed {
            return true;
        }
        if !self.closing {
            self.forget_reports();
        }
        self.closing = true;
        self.inboxes.clear();
        self.paused = false;
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
        if self.closed {
            self.forget_reports();
        }
        self.closed
    }
}
