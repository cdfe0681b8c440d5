//! Which processes use the processors while a run is processed: that shows the bottleneck.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Linux counts processor time in hundredths of a second, whatever its internal clock.
const TICKS_PER_SECOND: f64 = 100.0;
const FILTERS: &str = "filters (children of the shims)";

/// What the processors did in an interval.
pub struct Usage {
    took: Duration,
    machine: Machine,
    /// Seconds of each kind of process.
    seconds: BTreeMap<&'static str, f64>,
}

impl Usage {
    /// Prints a table, largest first.
    pub fn print(&self, files: usize) {
        let whole = self.machine.total();
        let of_whole = |seconds: f64| 100.0 * seconds / whole;
        println!(
            "| {:.0?} of {files} files | CPU | per file | of the machine |\n|---|---|---|---|",
            self.took
        );
        let known: f64 = self.seconds.values().sum();
        let mut rows: Vec<(&str, f64)> =
            self.seconds.iter().map(|(kind, seconds)| (*kind, *seconds)).collect();
        rows.push(("everything else, and the kernel for itself", (self.machine.busy - known).max(0.0)));
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        rows.push(("all", self.machine.busy));
        for (kind, seconds) in rows {
            let each = 1_000.0 * seconds / files as f64;
            println!("| {kind} | {seconds:.1} s | {each:.2} ms | {:.0} % |", of_whole(seconds));
        }
        let Machine { idle, waiting, stolen, .. } = self.machine;
        for (what, seconds) in
            [("idle", idle), ("idle, waiting for a disk", waiting), ("taken by other machines", stolen)]
        {
            println!("| {what} | {seconds:.1} s | | {:.0} % |", of_whole(seconds));
        }
        println!();
    }
}

/// Seconds of all processors.
#[derive(Clone, Copy)]
struct Machine {
    busy: f64,
    idle: f64,
    waiting: f64,
    stolen: f64,
}

impl Machine {
    fn read() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let line = stat.lines().next().unwrap();
        let seconds: Vec<f64> = line.split_whitespace().skip(1).map(seconds_of).collect();
        let [user, nice, system, idle, waiting, irq, softirq, stolen, ..] = seconds[..] else {
            panic!("/proc/stat: {line}")
        };
        Self { busy: user + nice + system + irq + softirq, idle, waiting, stolen }
    }

    fn since(self, before: Self) -> Self {
        Self {
            busy: self.busy - before.busy,
            idle: self.idle - before.idle,
            waiting: self.waiting - before.waiting,
            stolen: self.stolen - before.stolen,
        }
    }

    fn total(self) -> f64 {
        self.busy + self.idle + self.waiting + self.stolen
    }
}

/// Samples all processes now and then, because those of a pod disappear with it.
pub struct Sampler {
    stop: oneshot::Sender<()>,
    sampling: JoinHandle<Usage>,
}

impl Sampler {
    pub fn start(every: Duration) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let (began, before, mut processes) = (Instant::now(), Machine::read(), Processes::new());
        let sampling = tokio::spawn(async move {
            while tokio::time::timeout(every, &mut stopped).await.is_err() {
                processes.look();
            }
            processes.look();
            Usage {
                took: began.elapsed(),
                machine: Machine::read().since(before),
                seconds: processes.seconds(),
            }
        });
        Self { stop, sampling }
    }

    pub async fn finish(self) -> Usage {
        let _ = self.stop.send(());
        self.sampling.await.unwrap()
    }
}

/// A process; its start time distinguishes it from a later one with the same pid.
type Id = (u32, u64);

struct Processes {
    known: HashMap<Id, Process>,
}

#[derive(Default)]
struct Process {
    kind: Option<&'static str>,
    first: Time,
    last: Time,
}

/// Processor seconds of a process, and of its children that have ended.
#[derive(Clone, Copy, Default)]
struct Time {
    own: f64,
    children: f64,
}

impl Processes {
    fn new() -> Self {
        let mut found = Self { known: HashMap::new() };
        found.look();
        for process in found.known.values_mut() {
            process.first = process.last;
        }
        found
    }

    fn look(&mut self) {
        let pids =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for pid in pids {
            // It may already be gone.
            let Some((start, time)) = time_of(pid) else { continue };
            let process = self.known.entry((pid, start)).or_default();
            // Read each time: the first process of a container is runc before it becomes the container's
            // program.
            process.kind = kind_of(pid).or(process.kind);
            process.last = time;
        }
    }

    fn seconds(&self) -> BTreeMap<&'static str, f64> {
        let mut seconds = BTreeMap::new();
        for Process { kind, first, last } in self.known.values() {
            let Some(kind) = *kind else { continue };
            *seconds.entry(kind).or_default() += last.own - first.own;
            // Filters are too short-lived to be sampled themselves.
            if kind == "shims" {
                *seconds.entry(FILTERS).or_default() += last.children - first.children;
            }
        }
        seconds
    }
}

/// The kind of a process, if it deserves a row. Filters do not, because they are children of shims.
fn kind_of(pid: u32) -> Option<&'static str> {
    if pid == std::process::id() {
        return Some("this bench");
    }
    let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    // Valkey appends its port to its name, after a space.
    let path = command.split(|byte| matches!(byte, 0 | b' ')).next()?;
    let name = path.rsplit(|byte| *byte == b'/').next()?;
    match std::str::from_utf8(name).ok()? {
        "operator" => Some("operator"),
        "valkey-server" => Some("Valkey"),
        "versitygw" => Some("S3 server"),
        "claimer" => Some("workers"),
        "shim" => Some("shims"),
        "kubelet" => Some("kubelets"),
        "containerd" | "containerd-shim-runc-v2" | "runc" => Some("containerd"),
        "kube-apiserver" | "etcd" => Some("API server and etcd"),
        "kube-proxy" | "kube-controller-manager" | "kube-scheduler" | "coredns" | "kwok" => {
            Some("other Kubernetes")
        }
        _ => None,
    }
}

/// Processor seconds that a process has used so far.
pub fn seconds_used(pid: u32) -> f64 {
    time_of(pid).unwrap().1.own
}

/// The start of a process, and its processor time so far.
fn time_of(pid: u32) -> Option<(u64, Time)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields after the name, which may contain spaces and parentheses: the state is field 3 of proc(5), user
    // time is 14.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
    let seconds = |field: usize| fields.get(field - 3).map(|text| seconds_of(text));
    let time = Time { own: seconds(14)? + seconds(15)?, children: seconds(16)? + seconds(17)? };
    Some((fields.get(22 - 3)?.parse().ok()?, time))
}

fn seconds_of(ticks: &str) -> f64 {
    ticks.parse::<f64>().unwrap() / TICKS_PER_SECOND
}
