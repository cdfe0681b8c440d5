//! Processes that a test kills, and the attempts that must be charged for them. A process is frozen before it
//! is killed, so that the file it works on is known and cannot change meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use crate::harness::Lab;
use crate::warm::{Process, kill, processes};

/// How long a signalled process may take to freeze, and a worker to report that a file was begun.
const SHOWN_WITHIN: Duration = Duration::from_secs(3);

/// A file, and the number of its attempt, counted from 1.
pub type Attempt = (String, u64);

/// The victims of one run.
pub struct Victims<'a> {
    run: &'a str,
    killed: Vec<Killed>,
    /// Pods that have lost their worker or a shim: they end, and nothing else in them is killed.
    ending: BTreeSet<String>,
}

/// A filter that was killed, alone or with its shim.
struct Killed {
    /// The process that was struck.
    process: Process,
    pod: String,
    attempt: Attempt,
    /// Whether the queue has shown that the attempt is over.
    is_settled: bool,
    /// Whether the operator must learn that the filter was killed.
    is_certain: bool,
}

impl<'a> Victims<'a> {
    pub fn of(run: &'a str) -> Self {
        Self { run, killed: Vec::new(), ending: BTreeSet::new() }
    }

    /// Kills a filter that works on a file; returns whether there was one. Its worker reports that until the
    /// operator has settled it, whatever else dies.
    pub fn strike_filter(&mut self, lab: &Lab, pick: usize) -> bool {
        let Some((pid, pod)) = self.choose(lab, Process::Filter, pick) else { return false };
        let Some(filter) = Frozen::new(pid) else { return false };
        let Some(attempt) = attempt_in(pid) else { return false };
        if !filter.kill() {
            return false;
        }
        let process = Process::Filter;
        self.killed.push(Killed { process, pod, attempt, is_settled: false, is_certain: true });
        true
    }

    /// Kills the shim of a filter that works on a file; returns whether there was one. The operator judges
    /// the pod by the file that it reported as begun.
    pub async fn strike_shim(&mut self, lab: &Lab, pick: usize) -> bool {
        let Some((filter, pod)) = self.choose(lab, Process::Filter, pick) else { return false };
        let Some(pid) = parent(filter) else { return false };
        let Some(shim) = Frozen::new(pid) else { return false };
        // A shim reports the end of a file after it has reaped the filter: this file has not ended.
        if parent(filter) != Some(pid) {
            return false;
        }
        let Some(attempt) = attempt_in(pid) else { return false };
        let is_certain = is_reported_as_begun(lab, self.run, &pod, &attempt).await;
        if !shim.kill() {
            return false;
        }
        self.ending.insert(pod.clone());
        self.killed.push(Killed { process: Process::Shim, pod, attempt, is_settled: false, is_certain });
        true
    }

    /// Kills a worker; returns whether there was one. If a filter of its pod was killed before, and that is
    /// not settled, the worker may not have reported it, and its own death decides.
    pub async fn strike_worker(&mut self, lab: &Lab, pick: usize, is_valkey_up: bool) -> bool {
        let Some((pid, pod)) = self.choose(lab, Process::Worker, pick) else { return false };
        if is_valkey_up {
            self.note_settled(lab).await;
        }
        if !kill(pid) {
            return false;
        }
        for killed in self.killed.iter_mut().filter(|killed| killed.pod == pod && !killed.is_settled) {
            killed.is_certain = false;
        }
        self.ending.insert(pod);
        true
    }

    /// Asks the queue which attempts are over.
    pub async fn note_settled(&mut self, lab: &Lab) {
        let held: BTreeSet<Attempt> = attempts_in_work(lab, self.run).await.into_values().collect();
        for killed in &mut self.killed {
            killed.is_settled |= !held.contains(&killed.attempt);
        }
    }

    /// Checks the attempts that the run has charged: each was killed, and each that was killed is charged,
    /// unless its worker died before it had to be known. Returns how many are of that kind.
    #[track_caller]
    pub fn check_charged(&self, charged: &BTreeSet<Attempt>) -> usize {
        let killed: BTreeSet<&Attempt> = self.killed.iter().map(|killed| &killed.attempt).collect();
        let certain = self.killed.iter().filter(|killed| killed.is_certain);
        let certain: BTreeSet<&Attempt> = certain.map(|killed| &killed.attempt).collect();
        let charged: BTreeSet<&Attempt> = charged.iter().collect();
        let wrong: Vec<_> = charged.difference(&killed).collect();
        assert!(wrong.is_empty(), "attempts are charged of which nothing was killed: {wrong:?}");
        let free: Vec<_> = certain.difference(&charged).collect();
        assert!(free.is_empty(), "attempts are not charged whose filter was killed: {free:?}");
        killed.len() - certain.len()
    }

    /// How many of this kind were killed and must be charged.
    pub fn certain(&self, process: Process) -> usize {
        self.killed.iter().filter(|killed| killed.process == process && killed.is_certain).count()
    }

    /// A process of the run, and its pod.
    fn choose(&self, lab: &Lab, process: Process, pick: usize) -> Option<(u32, String)> {
        let found = processes(lab, self.run, process).into_iter().filter_map(|pid| Some((pid, pod_of(pid)?)));
        let mut found: Vec<_> = found.filter(|(_, pod)| !self.ending.contains(pod)).collect();
        (!found.is_empty()).then(|| found.swap_remove(pick % found.len()))
    }
}

/// The attempts that a run has charged, according to the outcomes that its queue keeps. All of its files must
/// have succeeded.
pub async fn charged(lab: &Lab, run: &str) -> BTreeSet<Attempt> {
    let outcomes: Vec<(String, HashMap<String, String>)> = stream(lab, run, "results").await;
    let mut charged = BTreeSet::new();
    for (_, outcome) in outcomes {
        assert_eq!(outcome["outcome"], "succeeded", "{outcome:?}");
        let last: u64 = outcome["attempts"].parse().unwrap();
        charged.extend((1..last).map(|attempt| (outcome["file"].clone(), attempt)));
    }
    charged
}

/// The next attempt of each file that waits or is processed, by entry.
async fn attempts_in_work(lab: &Lab, run: &str) -> BTreeMap<String, Attempt> {
    let entries = stream(lab, run, "work").await.into_iter();
    let attempt = |message: &HashMap<String, String>| {
        (message["file"].clone(), message["attempts"].parse::<u64>().unwrap() + 1)
    };
    entries.map(|(entry, message)| (entry, attempt(&message))).collect()
}

async fn stream(lab: &Lab, run: &str, part: &str) -> Vec<(String, HashMap<String, String>)> {
    let key = lab.run_id(run).key(part);
    redis::cmd("XRANGE").arg(key).arg("-").arg("+").query_async(&mut lab.raw().await).await.unwrap()
}

/// Waits until Valkey shows that this pod has begun this attempt; returns whether it did in time.
async fn is_reported_as_begun(lab: &Lab, run: &str, pod: &str, attempt: &Attempt) -> bool {
    let (states, since) = (lab.run_id(run).key("states"), Instant::now());
    let begun = format!("{pod} started");
    while since.elapsed() < SHOWN_WITHIN {
        let in_work = attempts_in_work(lab, run).await;
        let reports: HashMap<String, String> =
            redis::cmd("HGETALL").arg(&states).query_async(&mut lab.raw().await).await.unwrap();
        let is_begun = |(entry, report): (&String, &String)| {
            *report == begun && in_work.get(entry).is_some_and(|held| held == attempt)
        };
        if reports.iter().any(is_begun) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    false
}

/// A process that does nothing until this value is dropped.
struct Frozen(u32);

impl Frozen {
    /// Freezes a process that has not ended.
    fn new(pid: u32) -> Option<Self> {
        if !signal(pid, "STOP") {
            return None;
        }
        let (frozen, since) = (Self(pid), Instant::now());
        // It may be in the middle of a system call.
        while since.elapsed() < SHOWN_WITHIN {
            match status(pid)?.0 {
                'T' => return Some(frozen),
                'Z' | 'X' => return None,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        None
    }

    /// Returns whether it was this that killed it: the kubelet may end a pod at any moment.
    fn kill(self) -> bool {
        kill(self.0)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // Of no effect if it was killed.
        signal(self.0, "CONT");
    }
}

fn signal(pid: u32, name: &str) -> bool {
    let mut command = std::process::Command::new("kill");
    let command = command.args([&format!("-{name}"), &pid.to_string()]).stderr(std::process::Stdio::null());
    command.status().unwrap().success()
}

/// State and parent of a process.
fn status(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may contain anything.
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// The parent of a process; `None` if the process is just going, and has none any more.
fn parent(pid: u32) -> Option<u32> {
    let (_, parent) = status(pid)?;
    (parent > 1).then_some(parent)
}

/// The pod of a process: its container's host name.
fn pod_of(pid: u32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    let name = variables.find_map(|variable| variable.strip_prefix(b"HOSTNAME="))?;
    String::from_utf8(name.to_vec()).ok()
}

/// The attempt that the filter's container of this process sees.
fn attempt_in(pid: u32) -> Option<Attempt> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/root/ws/{name}")).ok();
    let (uri, attempt) = (read("input.source_uri")?, read("input.attempt")?);
    let (_, key) = uri.strip_prefix("s3://")?.split_once('/')?;
    Some((key.to_owned(), attempt.trim().parse().ok()?))
}
