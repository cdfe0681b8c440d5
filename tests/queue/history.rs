//! Random histories: operators that crash, lost replies, pods that die, results that come late or twice.
//! After every step the real server is compared with the model, and every file is looked up where it really
//! is.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use protocol::RunId;
use queue::{
    Closed, Disruption, Ending, Enqueued, EntryId, Failure, Fate, Listing, Opened, Page, Pause, Pending,
    Reporter, ReportsLimit, RetryPolicy, RunQueue, Settlement, Verdict, Worker,
};
use redis::streams::{StreamId, StreamRangeReply, StreamReadReply};
use tests::model::{self, EntryNo, FileNo, ModelQueue, Pod};
use tests::valkey::{Flavor, KEEP, TestServer};

use super::{file, open, open_as, run_id, worker};

/// Histories per server, unless the environment variable of this name overrides it. With their steps they
/// make some hundred thousand calls.
const HISTORIES: u32 = 400;
const PAGES: u32 = 3;
const FILES_PER_PAGE: u32 = 3;
const FILES: usize = (PAGES * FILES_PER_PAGE) as usize;
const PODS: Pod = 4;
const MAX_ATTEMPTS: u32 = 2;
const MAX_DISRUPTIONS: u32 = 1;
/// A consumer whose name no pod can have, beside those that can, and beside a thief whose name is not kept.
const IMPOSSIBLE: Pod = PODS + 1;
/// Long enough to count as a back-off, short enough to wait for: the delay is at least half of it, so at
/// least 1 ms.
const BACKOFF: Duration = Duration::from_millis(2);
/// Small, so that histories cross batches.
const BATCH: usize = 2;
/// More reports, and more bytes of them, than a history has claims.
const REPORTS_MAX: ReportsLimit = ReportsLimit { reports: 100, bytes: 64 << 10 };

#[derive(Clone, Debug)]
enum Step {
    /// An operator sends the page after the last one it knows. If the reply is lost, it knows no more than
    /// before.
    Enqueue {
        operator: usize,
        reply_lost: bool,
    },
    /// An operator gives pods files until each holds this many.
    HandOut {
        operator: usize,
        pods: BTreeSet<Pod>,
        most: usize,
    },
    /// A worker reports the outcome of a file that was given to it, or to another one, at any time.
    Report {
        claim: prop::sample::Index,
        state: model::State,
        by_another: bool,
    },
    /// A worker writes more than all reports can be: too many of them, or too many bytes.
    Flood {
        too_many: bool,
    },
    /// An operator takes the reports.
    Take {
        operator: usize,
    },
    /// An operator tells pods to end, again and again, also those that hold nothing.
    Stop {
        operator: usize,
        pods: BTreeSet<Pod>,
    },
    /// A worker reads its inbox. If the reply is lost, it does not know that it holds a file.
    Claim {
        pod: Pod,
        reply_lost: bool,
    },
    /// A claimer of an older version fetches a file itself, and its reply is lost.
    Ghost {
        pod: Pod,
    },
    /// A file is read with NOACK.
    Steal,
    /// A file is read under a name that no pod can have.
    ClaimAsImpossible,
    /// An operator reports claims: now, after another operator did, the same one twice in one call, or as a
    /// claim of a pod that never held it.
    Settle {
        operator: usize,
        claims: Vec<(prop::sample::Index, model::Verdict, bool)>,
    },
    /// An operator reclaims the files of these pods.
    Reclaim {
        operator: usize,
        dead: BTreeSet<Pod>,
    },
    /// The same, call by call, so that anything may happen in between: it reads the claims, and judges.
    Judge {
        operator: usize,
        dead: BTreeSet<Pod>,
    },
    /// It settles what it judged, however long ago that was.
    ReclaimJudged {
        operator: usize,
    },
    /// It queues again what has no holder.
    Recover {
        operator: usize,
    },
    Promote {
        operator: usize,
    },
    /// An operator dies, and another one starts, which knows only what the server says.
    Crash {
        operator: usize,
    },
    /// An operator tries to finish the run, whatever its state.
    Finish {
        operator: usize,
    },
    /// An operator aborts the run, which takes several calls.
    Abort {
        operator: usize,
    },
}

fn verdict() -> impl Strategy<Value = model::Verdict> {
    prop_oneof![
        Just(model::Verdict::Succeeded),
        Just(model::Verdict::Failed),
        Just(model::Verdict::Rejected),
        any::<bool>().prop_map(|counts| model::Verdict::Disrupted { counts }),
        Just(model::Verdict::Released)
    ]
}

fn state() -> impl Strategy<Value = model::State> {
    prop_oneof![
        Just(model::State::Started),
        Just(model::State::Publishing),
        Just(model::State::Succeeded),
        Just(model::State::Other)
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let operator = 0..2usize;
    let pod = 0..PODS;
    let dead = prop::collection::btree_set(pod.clone(), 0..3);
    let claim = any::<prop::sample::Index>();
    prop_oneof![
        4 => (operator.clone(), any::<bool>()).prop_map(|(operator, reply_lost)| Step::Enqueue { operator, reply_lost }),
        6 => (operator.clone(), prop::collection::btree_set(pod.clone(), 1..4), 1..4usize).prop_map(|(operator, pods, most)| Step::HandOut { operator, pods, most }),
        6 => (claim.clone(), state(), prop::bool::weighted(0.1)).prop_map(|(claim, state, by_another)| Step::Report { claim, state, by_another }),
        1 => any::<bool>().prop_map(|too_many| Step::Flood { too_many }),
        3 => operator.clone().prop_map(|operator| Step::Take { operator }),
        2 => (operator.clone(), prop::collection::btree_set(pod.clone(), 1..3)).prop_map(|(operator, pods)| Step::Stop { operator, pods }),
        8 => (pod, any::<bool>()).prop_map(|(pod, reply_lost)| Step::Claim { pod, reply_lost }),
        8 => (operator.clone(), prop::collection::vec((claim, verdict(), prop::bool::weighted(0.1)), 1..4)).prop_map(|(operator, claims)| Step::Settle { operator, claims }),
        1 => (0..PODS).prop_map(|pod| Step::Ghost { pod }),
        1 => Just(Step::Steal),
        1 => Just(Step::ClaimAsImpossible),
        2 => (operator.clone(), dead.clone()).prop_map(|(operator, dead)| Step::Reclaim { operator, dead }),
        2 => (operator.clone(), dead).prop_map(|(operator, dead)| Step::Judge { operator, dead }),
        2 => operator.clone().prop_map(|operator| Step::ReclaimJudged { operator }),
        1 => operator.clone().prop_map(|operator| Step::Recover { operator }),
        2 => operator.clone().prop_map(|operator| Step::Promote { operator }),
        1 => operator.clone().prop_map(|operator| Step::Crash { operator }),
        1 => operator.clone().prop_map(|operator| Step::Finish { operator }),
        1 => operator.prop_map(|operator| Step::Abort { operator }),
    ]
}

#[derive(Clone, Debug)]
struct History {
    steps: Vec<Step>,
    backoff: bool,
    /// How many files may be listed but not settled.
    high_water: u64,
    /// How the run ends after the steps: by processing the rest, or by an abort.
    abort: bool,
}

fn history() -> impl Strategy<Value = History> {
    (prop::collection::vec(step(), 0..50), any::<bool>(), 1..12u64, any::<bool>())
        .prop_map(|(steps, backoff, high_water, abort)| History { steps, backoff, high_water, abort })
}

/// An operator's knowledge.
struct Operator {
    queue: RunQueue,
    cursor: u32,
    /// The files of dead pods when it last read the claims.
    judged: Vec<Pending>,
}

struct World {
    run: RunId,
    connections: [queue::Connection; 2],
    operators: Vec<Operator>,
    workers: BTreeMap<Pod, Worker>,
    reporter: Reporter,
    model: ModelQueue,
    entries: BTreeMap<EntryId, EntryNo>,
    /// Every claim that a worker learned of, oldest first: operators may report these, however late.
    claims: Vec<(EntryId, Pod)>,
    succeeded: BTreeSet<FileNo>,
    /// The file that succeeded last. It is not in the model, because the checker would have to tell the
    /// model's states apart by it.
    canary: Option<FileNo>,
    high_water: u64,
    policy: RetryPolicy,
    raw: redis::aio::MultiplexedConnection,
}

/// Connections that all histories share, because connecting takes longer than running a history.
struct Connections {
    operators: [queue::Connection; 2],
    raw: redis::aio::MultiplexedConnection,
}

impl Connections {
    async fn new(server: &TestServer) -> Self {
        let raw = server.raw_connection().await;
        Self { operators: [server.connect(), server.connect()], raw }
    }
}

fn name_of(file_no: FileNo) -> String {
    format!("file-{file_no}")
}

fn number_of(name: &str) -> FileNo {
    name.strip_prefix("file-").unwrap().parse().unwrap()
}

fn pod_name(pod: Pod) -> String {
    if pod == IMPOSSIBLE { "Pod".repeat(100) } else { format!("pod-{pod}") }
}

fn page(number: u32) -> (Page, Vec<FileNo>) {
    let files: Vec<FileNo> = (0..FILES_PER_PAGE).map(|offset| number * FILES_PER_PAGE + offset).collect();
    let cursor = |number: u32| if number == 0 { String::new() } else { number.to_string() };
    let next = (number + 1 < PAGES).then(|| cursor(number + 1));
    (
        Page {
            after: cursor(number),
            next,
            files: files.iter().map(|no| file(name_of(*no))).collect(),
            skipped: 0,
        },
        files,
    )
}

impl World {
    async fn new(server: &TestServer, connections: &Connections, name: &str, history: &History) -> Self {
        let run = run_id(name);
        let mut operators = Vec::new();
        for connection in &connections.operators {
            let queue = open(connection, &run).await.with_batch(BATCH);
            operators.push(Operator { queue, cursor: 0, judged: Vec::new() });
        }
        let workers = (0..PODS)
            .map(|pod| (pod, worker(server.server(), &operators[0].queue, &pod_name(pod))))
            .collect();
        let reporter = Reporter::new(server.server(), &operators[0].queue.keys().work);
        let delay = if history.backoff { BACKOFF } else { Duration::ZERO };
        Self {
            run,
            connections: connections.operators.clone(),
            operators,
            workers,
            reporter,
            model: ModelQueue::default(),
            entries: BTreeMap::new(),
            claims: Vec::new(),
            succeeded: BTreeSet::new(),
            canary: None,
            high_water: history.high_water,
            policy: RetryPolicy {
                max_attempts: MAX_ATTEMPTS,
                max_disruptions: MAX_DISRUPTIONS,
                backoff_initial: delay,
                backoff_max: delay,
                keep_results: 0,
            },
            raw: connections.raw.clone(),
        }
    }

    fn backoff(&self) -> bool {
        !self.policy.backoff_max.is_zero()
    }

    fn model_policy(&self) -> model::Policy {
        let RetryPolicy { max_attempts, max_disruptions, .. } = self.policy;
        model::Policy { max_attempts, max_disruptions, backoff: self.backoff() }
    }

    async fn take(&mut self, step: &Step) {
        match step {
            Step::Enqueue { operator, reply_lost } => self.enqueue(*operator, *reply_lost).await,
            Step::HandOut { operator, pods, most } => self.hand_out(*operator, pods, *most).await,
            Step::Report { claim, state, by_another } => {
                if !self.claims.is_empty() {
                    self.report(claim.index(self.claims.len()), *state, *by_another).await;
                }
            }
            Step::Flood { too_many } => self.flood(*too_many).await,
            Step::Take { operator } => self.take_reports(*operator).await,
            // The model knows nothing of it: it must change no count and no inbox.
            Step::Stop { operator, pods } => {
                let pods: Vec<String> = pods.iter().map(|pod| pod_name(*pod)).collect();
                self.operators[*operator].queue.stop(&pods).await.unwrap();
            }
            Step::Claim { pod, reply_lost } => self.claim(*pod, *reply_lost).await,
            Step::Settle { operator, claims } => {
                let known = self.claims.len();
                let claims: Vec<_> = claims
                    .iter()
                    .map(|(claim, verdict, by_another)| (claim.index(known.max(1)), *verdict, *by_another))
                    .collect();
                if known > 0 {
                    self.settle(*operator, &claims).await;
                }
            }
            Step::Reclaim { operator, dead } => self.reclaim(*operator, dead).await,
            Step::Judge { operator, dead } => self.judge(*operator, dead).await,
            Step::ReclaimJudged { operator } => self.reclaim_judged(*operator).await,
            Step::Recover { operator } => {
                let recovered = self.operators[*operator].queue.recover().await;
                if let Some(recovered) = self.unless_closed(recovered) {
                    assert_eq!(recovered, u64::from(recover_all(&mut self.model)));
                }
            }
            Step::Promote { operator } => {
                tokio::time::sleep(if self.backoff() { BACKOFF * 2 } else { Duration::ZERO }).await;
                let mut moved = 0;
                for _ in 0..PAGES * FILES_PER_PAGE {
                    let promoted = self.operators[*operator].queue.promote().await.unwrap();
                    moved += promoted.moved;
                    if promoted.moved < BATCH as u64 {
                        break;
                    }
                }
                assert_eq!(moved, u64::from(self.model.promote()));
            }
            Step::Ghost { pod } => self.ghost(*pod).await,
            Step::Steal => self.steal().await,
            Step::ClaimAsImpossible => self.ghost(IMPOSSIBLE).await,
            Step::Crash { operator } => {
                self.reopen(*operator).await;
                let listing = self.operators[*operator].queue.stats().await.unwrap().listing;
                self.operators[*operator].cursor = self.cursor_of(&listing);
                self.operators[*operator].judged.clear();
            }
            Step::Finish { operator } => {
                let closed = self.operators[*operator].queue.close(Ending::Finish, "", &KEEP).await.unwrap();
                assert_eq!(matches!(closed, Closed::Closed(_)), self.model.finish(), "{closed:?}");
            }
            Step::Abort { operator } => self.abort(*operator).await,
        }
        self.check().await;
    }

    /// A new process knows only what `open` tells it.
    async fn reopen(&mut self, operator: usize) {
        let connection = self.connections[operator].clone();
        match open_as(&connection, &self.run, "uid-1", "spec-1").await {
            Opened::Resumed(queue) => self.operators[operator].queue = queue.with_batch(BATCH),
            Opened::Finished(_) => assert!(self.model.closed),
            Opened::Created(_) | Opened::Taken { .. } | Opened::Used => panic!("the queue is another one"),
        }
    }

    async fn abort(&mut self, operator: usize) {
        loop {
            let ending = Ending::Abort { reason: "Aborted" };
            let closed = self.operators[operator].queue.close(ending, "", &KEEP).await.unwrap();
            let ended = self.model.abort(BATCH);
            assert_eq!(matches!(closed, Closed::Closed(_)), ended, "{closed:?}");
            // With a back-off, the server's clock decides the order of files, and the model does not know it:
            // the rest in the middle of an abort cannot be compared.
            if ended || !self.backoff() {
                return;
            }
        }
    }

    /// Calls `XREADGROUP … >`, and returns the file.
    async fn read_new(&mut self, pod: Pod, no_ack: bool) -> Option<(EntryId, FileNo)> {
        let keys = self.operators[0].queue.keys().clone();
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(&keys.group).arg(pod_name(pod)).arg("COUNT").arg(1);
        if no_ack {
            command.arg("NOACK");
        }
        command.arg("STREAMS").arg(&keys.work).arg(">");
        let reply: Option<StreamReadReply> = command.query_async(&mut self.raw).await.unwrap();
        let entry = reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids).next()?;
        Some((entry.id.clone().into(), number_of(&entry.get::<String>("file").unwrap())))
    }

    async fn ghost(&mut self, pod: Pod) {
        if self.model.closed {
            return;
        }
        let read = self.read_new(pod, false).await;
        let delivered =
            self.model.deliver(pod, |message| read.as_ref().is_some_and(|(_, file)| message.file == *file));
        assert_eq!(read.is_some(), delivered.is_some());
        if let (Some((entry, _)), Some(number)) = (read, delivered) {
            self.entries.insert(entry, number);
        }
    }

    async fn steal(&mut self) {
        if self.model.closed {
            return;
        }
        let read = self.read_new(PODS, true).await;
        let stolen = self
            .model
            .deliver_unremembered(|message| read.as_ref().is_some_and(|(_, file)| message.file == *file));
        assert_eq!(read.is_some(), stolen.is_some());
    }

    fn cursor_of(&self, listing: &Listing) -> u32 {
        match listing {
            Listing::UpTo(cursor) => cursor.parse().unwrap_or(0),
            Listing::Complete => PAGES - 1,
        }
    }

    async fn enqueue(&mut self, operator: usize, reply_lost: bool) {
        let cursor = self.operators[operator].cursor;
        let (page, files) = page(cursor);
        let enqueued = self.operators[operator].queue.enqueue(&page, self.high_water).await.unwrap();
        let expected = self.model.enqueue(
            cursor,
            page.next.is_none(),
            &files,
            usize::try_from(self.high_water).unwrap(),
        );
        match &enqueued {
            Enqueued::Added { total } => {
                assert_eq!(expected, model::Enqueued::Added);
                assert_eq!(*total, u64::from(self.model.total));
            }
            Enqueued::Superseded(_) => assert_eq!(expected, model::Enqueued::Superseded),
            Enqueued::Paused(reason) => {
                assert_eq!((*reason, expected), (Pause::HighWater, model::Enqueued::Paused));
            }
        }
        if !reply_lost {
            self.operators[operator].cursor = match enqueued {
                Enqueued::Added { .. } => (cursor + 1).min(PAGES - 1),
                Enqueued::Superseded(listing) => self.cursor_of(&listing),
                Enqueued::Paused(_) => cursor,
            };
        }
    }

    async fn hand_out(&mut self, operator: usize, pods: &BTreeSet<Pod>, most: usize) {
        let names: Vec<String> = pods.iter().map(|pod| pod_name(*pod)).collect();
        let served = self.operators[operator].queue.fill(&names, most).await;
        let Some(served) = self.unless_closed(served) else { return };
        for pod in pods {
            let files = self.in_inbox(*pod).await;
            let fits = |message: &model::Message| files.iter().any(|(_, file)| message.file == *file);
            assert_eq!(self.model.fill(*pod, most, fits), served.contains(&pod_name(*pod)), "pod {pod}");
            let expected: Vec<_> = self.model.inbox(*pod).collect();
            for (entry, file) in files {
                let (number, _) = expected.iter().find(|(_, message)| message.file == file).unwrap();
                assert_eq!(*self.entries.entry(entry).or_insert(*number), *number);
            }
        }
    }

    /// The files in a pod's inbox, in order; it may also hold messages to end.
    async fn in_inbox(&mut self, pod: Pod) -> Vec<(EntryId, FileNo)> {
        let inbox = self.operators[0].queue.keys().inbox(&pod_name(pod));
        let found: StreamRangeReply =
            redis::cmd("XRANGE").arg(inbox).arg("-").arg("+").query_async(&mut self.raw).await.unwrap();
        let file = |entry: &StreamId| number_of(&entry.get::<String>("file").unwrap());
        let files = found.ids.into_iter().filter(|entry| !entry.map.contains_key("stop"));
        files.map(|entry| (entry.id.clone().into(), file(&entry))).collect()
    }

    async fn report(&mut self, claim: usize, state: model::State, by_another: bool) {
        let (entry, holder) = self.claims[claim].clone();
        let pod = if by_another { (holder + 1) % PODS } else { holder };
        let word = match state {
            model::State::Started => "started",
            model::State::Publishing => "started publishing",
            model::State::Succeeded => "succeeded",
            model::State::Other => "ended exit:1",
        };
        // The user of a closed run is gone, and cannot write.
        if !self.model.closed {
            let report = format!("{} {word}", pod_name(pod));
            self.reporter.report(&[(entry.clone(), report)]).await.unwrap();
            self.model.report(self.entries[&entry], pod, state);
        }
    }

    async fn flood(&mut self, too_many: bool) {
        // The user of a closed run is gone, and cannot write.
        if self.model.closed {
            return;
        }
        let number = if too_many { REPORTS_MAX.reports + 1 } else { 1 };
        let text = if too_many { String::new() } else { "x".repeat(REPORTS_MAX.bytes as usize) };
        let words: Vec<_> = (1..=number).map(|entry| (format!("{entry}-1").into(), text.clone())).collect();
        self.reporter.report(&words).await.unwrap();
        self.model.flood();
    }

    async fn take_reports(&mut self, operator: usize) {
        let taken = self.operators[operator].queue.take(REPORTS_MAX, &self.policy).await;
        let Some(taken) = self.unless_closed(taken) else { return };
        let flooded = self.model.drop_flood();
        assert_eq!(taken.is_flooded, flooded);
        if flooded {
            assert_eq!((taken.succeeded, taken.reports.len()), (0, 0), "none of it is read");
            return;
        }
        let files = self.model.take_reports(self.model_policy());
        assert_eq!(taken.succeeded, files.len() as u64);
        if !files.is_empty() {
            // Which of them is last depends on the order of a hash.
            self.canary = taken.newest.as_deref().map(number_of);
            assert!(self.canary.is_some_and(|file| files.contains(&file)), "{:?}", taken.newest);
        }
        for file in files {
            assert!(self.succeeded.insert(file), "a file succeeded twice");
        }
        let others = self.model.states.iter().filter(|(_, (_, state))| *state == model::State::Other);
        let expected: BTreeSet<EntryNo> = others.map(|(entry, _)| *entry).collect();
        let found: BTreeSet<EntryNo> =
            taken.reports.iter().map(|reported| self.entries[&reported.entry]).collect();
        assert_eq!(found, expected);
    }

    async fn claim(&mut self, pod: Pod, reply_lost: bool) {
        if self.model.closed {
            return;
        }
        let expected: Vec<_> = self.model.inbox(pod).collect();
        let held = self.workers.get_mut(&pod).unwrap().held(FILES).await.unwrap().claims;
        assert_eq!(held.len(), expected.len(), "the inbox of {pod}: {held:?}");
        for claimed in held {
            let file = number_of(&claimed.file.key);
            let (entry, message) = expected.iter().find(|(_, message)| message.file == file).unwrap();
            assert_eq!((message.attempts, message.disruptions), (claimed.attempts, claimed.disruptions));
            assert_eq!(*self.entries.entry(claimed.entry.clone()).or_insert(*entry), *entry);
            if !reply_lost {
                self.claims.push((claimed.entry, pod));
            }
        }
    }

    async fn settle(&mut self, operator: usize, claims: &[(usize, model::Verdict, bool)]) {
        let mut settlements = Vec::new();
        let mut expected = Vec::new();
        for (claim, verdict, by_another) in claims {
            let (entry, holder) = self.claims[*claim].clone();
            let pod = if *by_another { (holder + 1) % PODS } else { holder };
            let file_no = self.model.work.get(&self.entries[&entry]).map(|message| message.file);
            let fate = self.model.settle(self.entries[&entry], pod, *verdict, self.model_policy());
            if fate == model::Fate::Succeeded {
                self.canary = file_no;
                assert!(self.succeeded.insert(file_no.unwrap()), "a file succeeded twice");
            }
            expected.push(fate);
            let failure = Failure::new("boom", Some(1));
            let verdict = match verdict {
                model::Verdict::Succeeded => Verdict::Succeeded,
                model::Verdict::Failed => Verdict::Failed(failure),
                model::Verdict::Rejected => Verdict::Rejected(failure),
                model::Verdict::Disrupted { counts } => {
                    Verdict::Disrupted(Disruption { failure, counts: *counts })
                }
                model::Verdict::Released => Verdict::Released,
            };
            settlements.push(Settlement { entry, consumer: pod_name(pod), verdict });
        }
        let fates = self.operators[operator].queue.settle(&settlements, &self.policy).await.unwrap();
        assert_eq!(fates.iter().map(simplified).collect::<Vec<_>>(), expected);
    }

    async fn reclaim(&mut self, operator: usize, dead: &BTreeSet<Pod>) {
        let names: BTreeSet<String> = dead.iter().map(|pod| pod_name(*pod)).collect();
        self.model.remove_consumer(IMPOSSIBLE);
        let held: Vec<(EntryNo, Pod)> = self
            .model
            .pending
            .iter()
            .filter(|(_, pod)| dead.contains(pod))
            .map(|(entry, pod)| (*entry, *pod))
            .collect();
        let expected: Vec<model::Fate> = held
            .into_iter()
            .map(|(entry, pod)| self.model.reclaim(entry, pod, self.model_policy()))
            .collect();
        let queue = &self.operators[operator].queue;
        let reclaimed = queue
            .reclaim(Duration::ZERO, &self.policy, |pending| {
                names.contains(&pending.consumer).then(|| "PodLost".into())
            })
            .await;
        let Some(reclaimed) = self.unless_closed(reclaimed) else { return };
        assert_eq!(reclaimed.held_by_nobody, u64::from(recover_all(&mut self.model)));
        let mut fates: Vec<String> =
            reclaimed.fates.iter().map(|fate| format!("{:?}", simplified(fate))).collect();
        let mut expected: Vec<String> = expected.iter().map(|fate| format!("{fate:?}")).collect();
        fates.sort();
        expected.sort();
        assert_eq!(fates, expected);
    }

    async fn judge(&mut self, operator: usize, dead: &BTreeSet<Pod>) {
        let names: BTreeSet<String> = dead.iter().map(|pod| pod_name(*pod)).collect();
        let mut held = Vec::new();
        let queue = &self.operators[operator].queue;
        let visited = queue.for_each_pending(Duration::ZERO, |pending| held.push(pending.clone())).await;
        if self.unless_closed(visited).is_none() {
            return;
        }
        self.model.remove_consumer(IMPOSSIBLE);
        assert_eq!(held.len(), self.model.pending.len());
        held.retain(|pending| names.contains(&pending.consumer));
        self.operators[operator].judged = held;
    }

    async fn reclaim_judged(&mut self, operator: usize) {
        let judged = std::mem::take(&mut self.operators[operator].judged);
        let mut expected = Vec::new();
        for pending in &judged {
            let pod = (0..PODS).find(|pod| pod_name(*pod) == pending.consumer).unwrap();
            let entry = self.entries[&pending.entry];
            expected.push(self.model.reclaim(entry, pod, self.model_policy()));
        }
        let dead: Vec<(Pending, String)> =
            judged.into_iter().map(|pending| (pending, "PodLost".to_owned())).collect();
        let fates = self.operators[operator].queue.reclaim_from(&dead, Duration::ZERO, &self.policy).await;
        if dead.is_empty() {
            return;
        }
        if let Some(fates) = self.unless_closed(fates) {
            assert_eq!(fates.iter().map(simplified).collect::<Vec<_>>(), expected);
        }
    }

    /// The result of a step; `None` if the run is closed, as the server must then report.
    fn unless_closed<T: Debug>(&self, done: Result<T, queue::Error>) -> Option<T> {
        if self.model.closed {
            assert!(matches!(done, Err(queue::Error::Closed { .. })), "a closed run holds nothing: {done:?}");
            return None;
        }
        Some(done.unwrap())
    }

    /// Checks that the server's counts are the model's, and that every file is in exactly one place.
    async fn check(&mut self) {
        let stats = self.operators[0].queue.stats().await.unwrap();
        let model = self.model.clone();
        assert!(model.adds_up());
        let counts = [
            stats.total,
            stats.queued,
            stats.running,
            stats.succeeded,
            stats.failed,
            stats.retried,
            stats.reclaimed,
            stats.disrupted,
        ];
        let expected = [
            model.total,
            model.queued(),
            model.running(),
            model.succeeded,
            model.failed,
            model.retried,
            model.reclaimed,
            model.disrupted,
        ];
        assert_eq!(counts, expected.map(u64::from));
        assert_eq!(stats.listing == Listing::Complete, model.listed);
        assert_eq!((stats.started, stats.paused.is_some()), (model.started, model.paused));
        assert_eq!(stats.canary.as_deref().map(number_of), self.canary);

        for pod in 0..PODS {
            let found: BTreeSet<FileNo> =
                self.in_inbox(pod).await.into_iter().map(|(_, file)| file).collect();
            let expected: BTreeSet<FileNo> = self.model.inbox(pod).map(|(_, message)| message.file).collect();
            assert_eq!(found, expected, "inbox of pod {pod}");
        }
        let keys = self.operators[0].queue.keys().clone();
        let mut everywhere = redis::pipe();
        everywhere.cmd("XRANGE").arg(&keys.work).arg("-").arg("+");
        everywhere.cmd("ZRANGE").arg(&keys.retry).arg(0).arg(-1);
        everywhere.cmd("XRANGE").arg(&keys.dlq).arg("-").arg("+");
        let (work, retry, dlq): (StreamRangeReply, Vec<String>, StreamRangeReply) =
            everywhere.query_async(&mut self.raw).await.unwrap();
        let mut found: Vec<FileNo> = self.succeeded.iter().copied().collect();
        for entry in work.ids.iter().chain(&dlq.ids) {
            found.push(number_of(&entry.get::<String>("file").unwrap()));
        }
        for member in &retry {
            let start = member.find("file-").unwrap();
            found.push(number_of(member[start..].split('"').next().unwrap()));
        }
        found.sort();
        assert_eq!(
            found,
            (0..self.model.total).collect::<Vec<_>>(),
            "every file that was queued is in one place"
        );
    }

    /// Processes the rest with one honest operator and one honest worker.
    async fn work_off(&mut self) {
        let listing = self.operators[0].queue.stats().await.unwrap().listing;
        self.operators[0].cursor = self.cursor_of(&listing);
        // Each round adds a page, settles a file or moves one on, and a file is tried at most twice.
        for _ in 0..PAGES * FILES_PER_PAGE * (MAX_ATTEMPTS + 1) + 2 {
            if !self.model.listed {
                self.enqueue(0, false).await;
            }
            if self.model.finish() {
                break;
            }
            if self.model.pending.values().any(|pod| *pod != 0) || !self.model.adrift.is_empty() {
                self.take(&Step::Reclaim { operator: 0, dead: (1..PODS).collect() }).await;
            }
            if !self.model.retry.is_empty() {
                self.take(&Step::Promote { operator: 0 }).await;
            }
            self.take(&Step::HandOut { operator: 0, pods: [0].into(), most: 1 }).await;
            self.take(&Step::Claim { pod: 0, reply_lost: false }).await;
            if let Some((entry, _)) = self.claims.last().cloned()
                && self.model.pending.contains_key(&self.entries[&entry])
            {
                self.settle(0, &[(self.claims.len() - 1, model::Verdict::Succeeded, false)]).await;
                self.check().await;
            }
        }
        let closed = self.operators[0].queue.close(Ending::Finish, "done", &KEEP).await.unwrap();
        assert!(
            matches!(&closed, Closed::Closed(finished) if finished.counts.total == u64::from(PAGES * FILES_PER_PAGE)),
            "{closed:?}"
        );
    }
}

/// The effect of `recover` over all its calls.
fn recover_all(model: &mut ModelQueue) -> u32 {
    let (mut recovered, mut after) = (0, Some(0));
    while let Some(entry) = after {
        let (more, next) = model.recover(entry, BATCH);
        recovered += more;
        after = next;
    }
    recovered
}

fn simplified(fate: &Fate) -> model::Fate {
    // A charged attempt ends a row of disruptions.
    let message =
        |file: &str, attempts: u32| model::Message { file: number_of(file), attempts, disruptions: 0 };
    match fate {
        Fate::Succeeded => model::Fate::Succeeded,
        Fate::Retrying { file, attempts, .. } => model::Fate::Retrying(message(file, *attempts)),
        Fate::DeadLettered { file, attempts } => model::Fate::DeadLettered(message(file, *attempts)),
        Fate::Disrupted { file, disruptions } => {
            model::Fate::Disrupted { file: number_of(file), disruptions: *disruptions }
        }
        Fate::Released => model::Fate::Released,
        Fate::Ignored => model::Fate::Ignored,
    }
}

async fn live_through(server: &TestServer, connections: &Connections, name: &str, history: &History) {
    let mut world = World::new(server, connections, name, history).await;
    for step in &history.steps {
        world.take(step).await;
    }
    if history.abort || world.model.closing {
        for _ in 0..PAGES * FILES_PER_PAGE {
            if !world.model.closed {
                world.take(&Step::Abort { operator: 1 }).await;
            }
        }
        assert!(world.model.closed);
        world.check().await;
    } else {
        world.work_off().await;
        assert_eq!(world.model.total, PAGES * FILES_PER_PAGE);
    }
}

fn random_histories(flavor: Flavor) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = runtime.block_on(TestServer::start(flavor));
    let connections = runtime.block_on(Connections::new(&server));
    let cases =
        std::env::var("HISTORIES").map_or(HISTORIES, |number| number.parse().expect("HISTORIES is a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let started = std::time::Instant::now();
    let number = std::cell::Cell::new(0u32);
    let outcome = TestRunner::new(config).run(&history(), |history| {
        number.set(number.get() + 1);
        let name = format!("history-{}", number.get());
        let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(live_through(&server, &connections, &name, &history));
        }));
        lived.map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a check failed".into());
            TestCaseError::fail(text)
        })
    });
    println!("{} histories in {:?}", number.get(), started.elapsed());
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn random_histories_lose_nothing_and_count_nothing_twice_on_valkey() {
    random_histories(Flavor::Valkey);
}

#[test]
fn random_histories_lose_nothing_and_count_nothing_twice_on_redis() {
    random_histories(Flavor::Redis);
}
