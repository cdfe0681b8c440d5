//! Plays the part of the kubelet for pods, so that the machine's processors are left to the measurement.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use protocol::container::{CLAIMER, INSTALL};
use protocol::{FileState, FilterEnding, FilterFailure, RunId, State};
use queue::{Claim, EntryId, Inbox, Reporter, Server, Worker};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// More than there ever are pods.
const AT_ONCE: usize = 2_000;
/// The label of every pod that names its run.
const RUN_LABEL: &str = "filter.plainsight.ai/run";

/// As in `claimer serve`: how long a read of the inbox blocks, and how often the whole inbox is read.
const BLOCK: Duration = Duration::from_secs(1);
/// The same in a pod that was told to stop.
const BLOCK_AT_THE_END: Duration = Duration::from_millis(50);
/// More files than a pod is ever given.
const HELD_MAX: usize = 100;
/// The wait before a final report is repeated; it doubles from the first to the longest.
const REPEAT_FIRST: Duration = Duration::from_secs(2);
const REPEAT_LONGEST: Duration = Duration::from_secs(60);
/// The wait after a failed read.
const AGAIN: Duration = Duration::from_millis(500);

/// Plays worker, filter and kubelet for every pod, in both modes.
pub struct Player {
    pods: Api<Pod>,
    server: Server,
    work: Duration,
    exit_code: i32,
    seen: Mutex<PodsSeen>,
}

/// The player of a namespace; it stops when dropped.
pub struct Playing {
    pub player: Arc<Player>,
    task: JoinHandle<()>,
}

impl Drop for Playing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Default)]
struct PodsSeen {
    played: HashSet<String>,
    deleted: HashSet<String>,
    /// How often each file was claimed; in Warm mode, begun.
    claimed: BTreeMap<String, usize>,
    /// When the API server accepted the pod's end.
    ended: HashMap<String, Timestamp>,
}

impl Player {
    /// Plays for all pods of a namespace. The work takes about this long for each file, and its filter ends
    /// with this code.
    pub fn start(pods: Api<Pod>, server: Server, work: Duration, exit_code: i32) -> Playing {
        let player = Arc::new(Self { pods, server, work, exit_code, seen: Mutex::default() });
        Playing { task: tokio::spawn(Arc::clone(&player).play()), player }
    }

    async fn play(self: Arc<Self>) {
        let events = watcher(self.pods.clone(), watcher::Config::default()).default_backoff();
        // After an error the watch restarts by itself. Pods that are being played continue.
        let events = events.filter_map(|event| std::future::ready(event.ok()));
        let each = |event: watcher::Event<Pod>| {
            let player = Arc::clone(&self);
            async move {
                match event {
                    watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                        player.play_pod(&pod).await
                    }
                    watcher::Event::Delete(pod) => player.note_deleted(&pod),
                    watcher::Event::Init | watcher::Event::InitDone => {}
                }
            }
        };
        events.for_each_concurrent(AT_ONCE, each).await;
    }

    fn note_deleted(&self, pod: &Pod) {
        self.seen.lock().unwrap().deleted.insert(pod.name_any());
    }

    fn is_deleted(&self, pod: &str) -> bool {
        self.seen.lock().unwrap().deleted.contains(pod)
    }

    /// Plays a pod from its start to its end, unless it is or was already played.
    async fn play_pod(&self, pod: &Pod) {
        let Some(run) = pod.labels().get(RUN_LABEL).and_then(|run| run.parse::<RunId>().ok()) else { return };
        let number = {
            let mut seen = self.seen.lock().unwrap();
            if !seen.played.insert(pod.name_any()) {
                return;
            }
            seen.played.len()
        };
        if is_warm(pod) {
            WarmPod::new(self, pod, &run, number).serve().await;
        } else {
            self.process_one(&pod.name_any(), &run, number).await;
        }
    }

    /// A pod that processes one file.
    async fn process_one(&self, name: &str, run: &RunId, number: usize) {
        let claiming = json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, &runs())]});
        if !self.show(name, claiming).await {
            return;
        }
        let mut worker = Worker::new(self.server.clone(), &run.key("work"), name);
        let claim = loop {
            match worker.claim(Duration::from_secs(30)).await {
                Ok(Some(claim)) => break claim,
                // The operator hands out files as long as there are any.
                Ok(None) => {}
                Err(_) => return,
            }
        };
        self.note_claimed(&claim);
        tokio::time::sleep(self.work_time(number)).await;
        let phase = if self.exit_code == 0 { "Succeeded" } else { "Failed" };
        let status = json!({"phase": phase, "initContainerStatuses": [container(CLAIMER, &ended(0))],
            "containerStatuses": [container("main", &ended(self.exit_code))]});
        self.show(name, status).await;
        self.seen.lock().unwrap().ended.insert(name.to_owned(), Timestamp::now());
    }

    /// Writes the status of a pod, as its kubelet would; returns whether the API server accepted it.
    async fn show(&self, pod: &str, status: Value) -> bool {
        let patch = Patch::Merge(json!({ "status": status }));
        self.pods.patch_status(pod, &PatchParams::default(), &patch).await.is_ok()
    }

    fn note_claimed(&self, claim: &Claim) {
        *self.seen.lock().unwrap().claimed.entry(claim.file.key.clone()).or_default() += 1;
    }

    /// Half to one and a half times as long, so that pods do not end all at once.
    fn work_time(&self, number: usize) -> Duration {
        self.work / 2 + self.work / 100 * (number * 37 % 100) as u32
    }

    /// How often each file was claimed; in Warm mode, begun.
    pub fn claimed(&self) -> BTreeMap<String, usize> {
        self.seen.lock().unwrap().claimed.clone()
    }

    /// How long after its end each pod was settled, according to the operator's log, in order. The operator
    /// may have learned of an end before this process received the answer.
    #[allow(dead_code, reason = "only the bench asks")]
    pub fn latencies(&self, log: &str) -> Vec<Duration> {
        let ended = &self.seen.lock().unwrap().ended;
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let settled = lines.filter(|line| line["message"] == "settled").filter_map(|line| {
            let at: Timestamp = line["timestamp"].as_str()?.parse().ok()?;
            let ended = ended.get(line["pod"].as_str()?)?;
            Some(Duration::try_from(at.duration_since(*ended)).unwrap_or_default())
        });
        let mut latencies: Vec<Duration> = settled.collect();
        latencies.sort();
        latencies
    }
}

/// Plays the worker of a Warm pod. Like `claimer serve`, it works on the files of its inbox one after the
/// other, repeats its reports until they are settled, and never acknowledges.
struct WarmPod<'a> {
    player: &'a Player,
    name: String,
    /// The containers that stay up: worker and filters.
    containers: Vec<String>,
    number: usize,
    worker: Worker,
    reporter: Reporter,
    /// The position of the last read of the inbox.
    last: Option<EntryId>,
    /// When the whole inbox was last read.
    looked: Instant,
    /// The contents of the inbox, as far as it was read.
    known: HashSet<EntryId>,
    /// Files that wait for their turn, oldest first.
    waiting: VecDeque<Claim>,
    /// The last report on each unsettled file.
    words: HashMap<EntryId, Word>,
    begun: usize,
    is_stopping: bool,
}

struct Word {
    text: String,
    is_final: bool,
    due: Instant,
    wait: Duration,
}

impl<'a> WarmPod<'a> {
    fn new(player: &'a Player, pod: &Pod, run: &RunId, number: usize) -> Self {
        let (name, work) = (pod.name_any(), run.key("work"));
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        Self {
            player,
            containers: containers.map(|container| container.name.clone()).collect(),
            number,
            worker: Worker::new(player.server.clone(), &work, &name),
            reporter: Reporter::new(player.server.clone(), &work),
            name,
            last: None,
            looked: Instant::now(),
            known: HashSet::new(),
            waiting: VecDeque::new(),
            words: HashMap::new(),
            begun: 0,
            is_stopping: false,
        }
    }

    /// Runs until the pod was told to stop and all of its reports are settled, or until it is deleted.
    async fn serve(mut self) {
        let status = self.status("Running", &runs());
        if !self.player.show(&self.name, status).await {
            return;
        }
        while !self.player.is_deleted(&self.name) {
            if self.read_inbox().await.is_err() {
                tokio::time::sleep(AGAIN).await;
            }
            self.process_next().await;
            if self.is_stopping && self.words.is_empty() {
                let status = self.status("Succeeded", &ended(0));
                self.player.show(&self.name, status).await;
                return;
            }
        }
    }

    /// The pod's status with all main containers in this state.
    fn status(&self, phase: &str, state: &Value) -> Value {
        let main: Vec<Value> = self.containers.iter().map(|name| container(name, state)).collect();
        json!({"phase": phase, "initContainerStatuses": [container(INSTALL, &ended(0))],
            "containerStatuses": main})
    }

    async fn read_inbox(&mut self) -> Result<(), queue::Error> {
        let look_every = if self.is_stopping { BLOCK_AT_THE_END } else { BLOCK };
        // A waiting file must not wait for new ones to arrive.
        let wait = if self.waiting.is_empty() { look_every } else { Duration::ZERO };
        let new = self.worker.claim_after(self.last.as_ref(), HELD_MAX, wait).await?;
        if new.last.is_some() {
            self.last.clone_from(&new.last);
        }
        self.take_in(new);
        if self.looked.elapsed() >= look_every {
            let all = self.worker.held(HELD_MAX).await?;
            self.looked = Instant::now();
            // A file that is gone from the inbox was settled, or taken back.
            let held: HashSet<EntryId> = all.claims.iter().map(|claim| claim.entry.clone()).collect();
            self.known.retain(|entry| held.contains(entry));
            self.words.retain(|entry, _| held.contains(entry));
            self.take_in(all);
        }
        Ok(())
    }

    /// Queues new files, or gives them back in a pod that was told to stop.
    fn take_in(&mut self, inbox: Inbox) {
        self.is_stopping |= inbox.is_told_to_stop;
        for claim in inbox.claims {
            if self.known.insert(claim.entry.clone()) {
                self.waiting.push_back(claim);
            }
        }
        if self.is_stopping {
            for claim in std::mem::take(&mut self.waiting) {
                self.say(&claim.entry, State::Released);
            }
        }
    }

    /// Works on the next file, if there is one. Its start is reported together with the end of the previous
    /// file.
    async fn process_next(&mut self) {
        let next = self.waiting.pop_front();
        if let Some(claim) = &next {
            self.player.note_claimed(claim);
            self.say(&claim.entry, State::Started);
        }
        self.report().await;
        if let Some(claim) = next {
            self.begun += 1;
            tokio::time::sleep(self.player.work_time(self.number + self.begun)).await;
            let state = self.outcome();
            self.say(&claim.entry, state);
            // Without a next file, there is no start to report the end with.
            if self.waiting.is_empty() {
                self.report().await;
            }
        }
    }

    fn say(&mut self, entry: &EntryId, state: State) {
        let is_final = state != State::Started;
        let text = FileState { pod: self.name.clone(), state }.to_string();
        let word = Word { text, is_final, due: Instant::now(), wait: REPEAT_FIRST };
        self.words.insert(entry.clone(), word);
    }

    /// Writes due reports. Those that cannot be written stay due.
    async fn report(&mut self) {
        let now = Instant::now();
        let due = self.words.iter().filter(|(_, word)| word.due <= now);
        let due: Vec<_> = due.map(|(entry, word)| (entry.clone(), word.text.clone())).collect();
        if self.reporter.report(&due).await.is_err() {
            return;
        }
        for (entry, _) in &due {
            let Some(word) = self.words.get_mut(entry) else { continue };
            let wait = if word.is_final { word.wait } else { REPEAT_LONGEST };
            word.due = Instant::now() + wait;
            word.wait = (wait * 2).min(REPEAT_LONGEST);
        }
    }

    /// How the filters end.
    fn outcome(&self) -> State {
        if self.player.exit_code == 0 {
            return State::Succeeded;
        }
        State::FilterFailed(FilterFailure {
            filter: self.containers.last().cloned().unwrap_or_default(),
            ending: FilterEnding::Exited(self.player.exit_code),
            oom_killed: false,
            after_term: false,
            text: String::new(),
        })
    }
}

fn is_warm(pod: &Pod) -> bool {
    let first = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref()?.first());
    first.is_some_and(|first| first.name == INSTALL)
}

fn container(name: &str, state: &Value) -> Value {
    json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state})
}

fn runs() -> Value {
    json!({"running": {}})
}

fn ended(exit_code: i32) -> Value {
    json!({"terminated": {"exitCode": exit_code}})
}
