//! The protocol, exhaustively: every interleaving of two operators and a handful of pods over a small bucket,
//! with crashes, lost replies, dying pods and decisions that are carried out long after they were made.
//! Random histories sample this space; here it is explored completely.

use std::collections::{BTreeMap, BTreeSet};

use stateright::{Checker, CheckerBuilder, Expectation, Model, Property};
use tests::model::{Enqueued, EntryNo, Fate, FileNo, ModelQueue, Pod, Policy, State, Verdict};

const OPERATORS: usize = 2;

/// The bucket, and the limits of what may happen.
struct Protocol {
    pages: &'static [&'static [FileNo]],
    pods: Pod,
    policy: Policy,
    /// How many files may be listed but not settled.
    high_water: usize,
    /// Whether pods are also disrupted, and not only killed.
    disruptions: bool,
    /// How many files pods get past their inbox, because pods of older versions fetch files themselves.
    ghosts: u8,
    /// How many files are read with NOACK by a worker that then forgets them.
    thefts: u8,
    /// Whether operators may abort the run.
    abort: bool,
    /// How many files a pod holds. With more than one, it processes many and reports the outcome of each.
    slots: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    ghosts: u8,
    thefts: u8,
    queue: ModelQueue,
    operators: [Operator; OPERATORS],
    pods: Vec<PodState>,
    /// What really happened, including what the queue does not know.
    processed: BTreeSet<FileNo>,
    succeeded: Vec<FileNo>,
    /// What serving pods have read, and whether it was reported.
    read: BTreeMap<(Pod, EntryNo), (FileNo, bool)>,
}

/// What an operator knows and is about to do. Anything may happen between deciding and acting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Operator {
    cursor: u32,
    plan: Option<Plan>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Plan {
    Settle(EntryNo, Pod, Verdict),
    Reclaim(EntryNo, Pod),
    Release(EntryNo, Pod),
    Finish,
    /// One file per call, so that anything may also happen between two of them.
    Abort,
    /// The same: it continues after this entry.
    Recover(EntryNo),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PodState {
    /// Waits for a file.
    Waiting,
    /// Has read its file and works on it.
    Working(EntryNo, FileNo),
    /// Ended, with a result.
    Ended(EntryNo, Verdict),
    /// Processes the files in its inbox one after the other, and reports.
    Serving,
    /// Killed: its node is gone, or it was evicted.
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Enqueue {
        operator: usize,
        reply_lost: bool,
    },
    /// An operator restarts: it forgets its plan and reads its cursor again.
    Crash(usize),
    /// An operator gives a pod a file, whatever it believes about the pod.
    HandOut(Pod),
    /// A pod reads its inbox. A lost reply changes nothing.
    Claim(Pod),
    /// A pod gets a file past its inbox, without knowing it.
    Ghost(Pod),
    /// A file is handed out without a recorded holder.
    Steal,
    End(Pod, Verdict),
    /// A serving pod reports a file that it once read and may no longer hold.
    Report(Pod, EntryNo, FileNo, State),
    /// An operator takes all reports.
    Take,
    /// An operator settles a file whose end was reported, with its own verdict.
    PlanReported(usize, EntryNo),
    Kill(Pod),
    PlanSettle(usize, Pod),
    PlanReclaim(usize, EntryNo),
    PlanRelease(usize, EntryNo),
    PlanFinish(usize),
    PlanAbort(usize),
    PlanRecover(usize),
    /// The plan is carried out; if the reply is lost, the operator keeps the plan and will repeat it.
    CarryOut {
        operator: usize,
        reply_lost: bool,
    },
    Promote,
}

impl Protocol {
    fn files(&self) -> BTreeSet<FileNo> {
        self.pages.iter().flat_map(|page| page.iter().copied()).collect()
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            ghosts: self.ghosts,
            thefts: self.thefts,
            queue: ModelQueue::default(),
            operators: Default::default(),
            pods: vec![
                if self.slots > 1 { PodState::Serving } else { PodState::Waiting };
                self.pods as usize
            ],
            processed: BTreeSet::new(),
            succeeded: Vec::new(),
            read: BTreeMap::new(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for operator in 0..OPERATORS {
            let state = &world.operators[operator];
            if !world.queue.closed {
                for reply_lost in [false, true] {
                    actions.push(Action::Enqueue { operator, reply_lost });
                }
            }
            if *state != (Operator { cursor: world.queue.cursor, plan: None }) {
                actions.push(Action::Crash(operator));
            }
            if state.plan.is_some() {
                for reply_lost in [false, true] {
                    actions.push(Action::CarryOut { operator, reply_lost });
                }
                continue;
            }
            for (pod, state) in world.pods.iter().enumerate() {
                if matches!(state, PodState::Ended(..)) {
                    actions.push(Action::PlanSettle(operator, pod as Pod));
                }
            }
            for (entry, (_, state)) in &world.queue.states {
                if *state == State::Other && world.queue.pending.contains_key(entry) {
                    actions.push(Action::PlanReported(operator, *entry));
                }
            }
            for (entry, pod) in &world.queue.pending {
                // Whether a pod is alive is a guess: a partitioned node may still be working.
                actions.push(Action::PlanReclaim(operator, *entry));
                if world.queue.own(*pod).is_some_and(|(own, _)| own != *entry) {
                    actions.push(Action::PlanRelease(operator, *entry));
                }
            }
            if !world.queue.closed {
                actions.push(Action::PlanFinish(operator));
                if self.abort {
                    actions.push(Action::PlanAbort(operator));
                }
                if self.thefts > 0 {
                    actions.push(Action::PlanRecover(operator));
                }
            }
        }
        for (pod, state) in world.pods.iter().enumerate() {
            let pod = pod as Pod;
            match state {
                PodState::Waiting if !world.queue.closed => {
                    actions.push(Action::Claim(pod));
                    actions.push(Action::Kill(pod));
                }
                PodState::Working(..) => {
                    actions.push(Action::End(pod, Verdict::Succeeded));
                    actions.push(Action::End(pod, Verdict::Failed));
                    if self.disruptions {
                        for counts in [false, true] {
                            actions.push(Action::End(pod, Verdict::Disrupted { counts }));
                        }
                    }
                    actions.push(Action::Kill(pod));
                }
                PodState::Serving => {
                    if !world.queue.closed {
                        actions.push(Action::Claim(pod));
                    }
                    let unreported =
                        world.read.iter().filter(|((reader, _), (_, done))| *reader == pod && !done);
                    for ((_, entry), (file, _)) in unreported {
                        for state in [State::Succeeded, State::Other] {
                            actions.push(Action::Report(pod, *entry, *file, state));
                        }
                    }
                    actions.push(Action::Kill(pod));
                }
                PodState::Waiting | PodState::Ended(..) | PodState::Dead => {}
            }
            if !world.queue.closed {
                actions.push(Action::HandOut(pod));
            }
            if world.ghosts > 0 && *state != PodState::Dead && !world.queue.closed {
                actions.push(Action::Ghost(pod));
            }
        }
        if !world.queue.states.is_empty() {
            actions.push(Action::Take);
        }
        if world.thefts > 0 && !world.queue.closed {
            actions.push(Action::Steal);
        }
        if !world.queue.retry.is_empty() {
            actions.push(Action::Promote);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        match action {
            Action::Enqueue { operator, reply_lost } => {
                let cursor = next.operators[operator].cursor;
                let last = cursor as usize + 1 == self.pages.len();
                let page = self.pages[cursor as usize];
                let enqueued = next.queue.enqueue(cursor, last, page, self.high_water);
                if !reply_lost && enqueued != Enqueued::Paused {
                    next.operators[operator].cursor = next.queue.cursor;
                }
            }
            Action::Crash(operator) => {
                next.operators[operator] = Operator { cursor: next.queue.cursor, plan: None };
            }
            Action::HandOut(pod) => {
                next.queue.fill(pod, self.slots, |_| true);
            }
            Action::Claim(pod) => {
                if next.pods[pod as usize] == PodState::Serving {
                    for (entry, message) in next.queue.inbox(pod) {
                        next.read.entry((pod, entry)).or_insert((message.file, false));
                    }
                    return (next != *world).then_some(next);
                }
                let (entry, message) = next.queue.claim(pod)?;
                next.pods[pod as usize] = PodState::Working(entry, message.file);
            }
            Action::Ghost(pod) => {
                next.queue.deliver(pod, |_| true)?;
                next.ghosts -= 1;
            }
            Action::Steal => {
                next.queue.deliver_unremembered(|_| true)?;
                next.thefts -= 1;
            }
            Action::End(pod, verdict) => {
                let PodState::Working(entry, file) = next.pods[pod as usize] else { return None };
                next.pods[pod as usize] = PodState::Ended(entry, verdict);
                if verdict == Verdict::Succeeded {
                    next.processed.insert(file);
                }
            }
            Action::Report(pod, entry, file, state) => {
                next.read.insert((pod, entry), (file, true));
                if state == State::Succeeded {
                    next.processed.insert(file);
                }
                next.queue.report(entry, pod, state);
            }
            Action::Take => next.succeeded.extend(next.queue.take_reports(self.policy)),
            Action::PlanReported(operator, entry) => {
                let (pod, _) = next.queue.states[&entry];
                next.operators[operator].plan = Some(Plan::Settle(entry, pod, Verdict::Failed));
            }
            Action::Kill(pod) => next.pods[pod as usize] = PodState::Dead,
            Action::PlanSettle(operator, pod) => {
                let PodState::Ended(entry, verdict) = next.pods[pod as usize] else { return None };
                next.operators[operator].plan = Some(Plan::Settle(entry, pod, verdict));
            }
            Action::PlanReclaim(operator, entry) => {
                next.operators[operator].plan = Some(Plan::Reclaim(entry, next.queue.pending[&entry]));
            }
            Action::PlanRelease(operator, entry) => {
                next.operators[operator].plan = Some(Plan::Release(entry, next.queue.pending[&entry]));
            }
            Action::PlanAbort(operator) => next.operators[operator].plan = Some(Plan::Abort),
            Action::PlanRecover(operator) => next.operators[operator].plan = Some(Plan::Recover(0)),
            Action::PlanFinish(operator) => next.operators[operator].plan = Some(Plan::Finish),
            Action::CarryOut { operator, reply_lost } => {
                let plan = next.operators[operator].plan?;
                let rest = self.carry_out(&mut next, plan);
                if !reply_lost {
                    next.operators[operator].plan = rest;
                }
            }
            Action::Promote => {
                next.queue.promote();
            }
        }
        // Reports about an entry that is gone no longer count.
        next.read.retain(|(_, entry), (_, reported)| !*reported || next.queue.work.contains_key(entry));
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the counts add up", |_, world: &World| world.queue.adds_up()),
            Property::always("every queued file is in exactly one place", |_, world: &World| {
                let queue = &world.queue;
                let mut places: Vec<FileNo> = world.succeeded.clone();
                places.extend(queue.work.values().map(|message| message.file));
                places.extend(queue.retry.iter().map(|(_, message)| message.file));
                places.extend(queue.dlq.iter().map(|message| message.file));
                let distinct: BTreeSet<FileNo> = places.iter().copied().collect();
                distinct.len() == places.len() && places.len() == queue.total as usize
            }),
            Property::always("what is in an inbox is held by its pod", |_, world: &World| {
                let queue = &world.queue;
                let held = |pod: &Pod, entry: &EntryNo| queue.pending.get(entry) == Some(pod);
                queue.inboxes.iter().all(|(pod, inbox)| inbox.iter().all(|entry| held(pod, entry)))
            }),
            Property::always("no file counts as succeeded that was not processed", |_, world: &World| {
                world.succeeded.iter().all(|file| world.processed.contains(file))
            }),
            Property::always(
                "a finished run has settled every file of the bucket",
                |protocol: &Self, world: &World| {
                    let queue = &world.queue;
                    let settled: BTreeSet<FileNo> = world
                        .succeeded
                        .iter()
                        .copied()
                        .chain(queue.dlq.iter().map(|message| message.file))
                        .collect();
                    // An aborted run has settled everything it had listed.
                    let all = if queue.closing {
                        settled.len() == queue.total as usize
                    } else {
                        settled == protocol.files()
                    };
                    !queue.closed || (all && queue.queued() == 0 && queue.running() == 0)
                },
            ),
            Property::always("no file is tried more often than allowed", |protocol: &Self, world: &World| {
                world.queue.dlq.iter().all(|message| message.attempts <= protocol.policy.max_attempts)
            }),
            Property::always(
                "a file that waits survives another disruption",
                |protocol: &Self, world: &World| {
                    let queue = &world.queue;
                    let mut waiting =
                        queue.work.values().chain(queue.retry.iter().map(|(_, message)| message));
                    waiting.all(|message| message.disruptions <= protocol.policy.max_disruptions)
                },
            ),
            Property::always(
                "no more than a page is listed beyond high water",
                |protocol: &Self, world: &World| {
                    let page = protocol.pages.iter().map(|page| page.len()).max().unwrap_or(0);
                    world.queue.unsettled() < protocol.high_water + page
                },
            ),
            Property::sometimes(
                "a run finishes with every file succeeded",
                |protocol: &Self, world: &World| {
                    world.queue.closed && world.succeeded.len() == protocol.files().len()
                },
            ),
            Property::sometimes(
                "a run finishes with every file succeeded, also those that were stolen",
                |protocol: &Self, world: &World| {
                    let all = world.queue.closed && world.succeeded.len() == protocol.files().len();
                    all && (world.thefts == 0 || protocol.thefts == 0)
                },
            ),
            Property::sometimes("a run finishes with a dead letter", |_, world: &World| {
                world.queue.closed && !world.queue.dlq.is_empty()
            }),
            Property::sometimes("a listing pauses, if it can", |protocol: &Self, world: &World| {
                world.queue.paused || protocol.files().len() <= protocol.high_water
            }),
            Property::sometimes("a file is reclaimed and succeeds", |_, world: &World| {
                world.queue.reclaimed > 0 && world.queue.succeeded == world.queue.total && world.queue.closed
            }),
        ]
    }
}

impl Protocol {
    /// Makes the next call of a plan; returns the rest of the plan.
    fn carry_out(&self, world: &mut World, plan: Plan) -> Option<Plan> {
        match plan {
            Plan::Settle(entry, pod, verdict) => {
                let file = world.queue.work.get(&entry).map(|message| message.file);
                let fate = world.queue.settle(entry, pod, verdict, self.policy);
                if let (Fate::Succeeded, Some(file)) = (fate, file) {
                    world.succeeded.push(file);
                }
            }
            Plan::Reclaim(entry, pod) => {
                world.queue.reclaim(entry, pod, self.policy);
            }
            Plan::Release(entry, pod) => {
                world.queue.settle(entry, pod, Verdict::Released, self.policy);
            }
            Plan::Abort => {
                world.queue.abort(1);
            }
            Plan::Finish => {
                world.queue.finish();
            }
            Plan::Recover(after) => return world.queue.recover(after, 1).1.map(Plan::Recover),
        }
        None
    }
}

fn explore(protocol: Protocol) {
    run(protocol.checker()).assert_properties();
}

/// What can happen within so many steps, where all that can ever happen does not fit into memory. Too few for
/// everything that should sometimes happen, which is left to the other tests.
fn explore_steps(protocol: Protocol, steps: usize) {
    let checker = run(protocol.checker().target_max_depth(steps));
    for property in checker.model().properties() {
        if property.expectation == Expectation::Always {
            checker.assert_no_discovery(property.name);
        }
    }
}

fn run(checker: CheckerBuilder<Protocol>) -> impl Checker<Protocol> {
    let started = std::time::Instant::now();
    let checker = checker.threads(2).spawn_bfs().join();
    println!("explored {} states in {:?}", checker.unique_state_count(), started.elapsed());
    assert!(checker.unique_state_count() > 10_000, "the space is smaller than it should be");
    checker
}

/// Two attempts and no uncharged disruption: the smallest space in which everything happens.
const POLICY: Policy = Policy { max_attempts: 2, max_disruptions: 0, backoff: false };

/// Two pods, one page, and no special features.
const PLAIN: Protocol = Protocol {
    pages: &[&[1, 2]],
    pods: 2,
    policy: POLICY,
    high_water: usize::MAX / 2,
    disruptions: false,
    ghosts: 0,
    thefts: 0,
    abort: false,
    slots: 1,
};

#[test]
fn every_interleaving_of_two_pages_and_two_pods_is_safe() {
    explore(Protocol { pages: &[&[1], &[2]], ..PLAIN });
}

#[test]
fn every_interleaving_with_back_off_is_safe() {
    explore(Protocol { pages: &[&[1]], pods: 3, policy: Policy { backoff: true, ..POLICY }, ..PLAIN });
}

#[test]
fn every_interleaving_with_disruptions_is_safe() {
    let policy = Policy { max_attempts: 1, max_disruptions: 1, backoff: false };
    explore(Protocol { pages: &[&[1]], pods: 3, policy, disruptions: true, ..PLAIN });
}

#[test]
fn every_interleaving_of_a_listing_that_pauses_is_safe() {
    explore(Protocol { pages: &[&[1], &[2]], high_water: 1, abort: true, ..PLAIN });
}

#[test]
fn every_interleaving_with_files_that_bypass_an_inbox_is_safe() {
    explore(Protocol { ghosts: 1, ..PLAIN });
}

#[test]
fn every_interleaving_with_an_abort_is_safe() {
    explore(Protocol { abort: true, ..PLAIN });
}

#[test]
fn every_interleaving_with_files_that_have_no_holder_is_safe() {
    explore(Protocol { policy: Policy { max_attempts: 1, ..POLICY }, thefts: 1, ..PLAIN });
}

#[test]
fn every_interleaving_of_pods_that_process_many_files_is_safe() {
    explore(Protocol { pages: &[&[1]], slots: 2, ..PLAIN });
}

/// With one file no pod holds two.
#[test]
fn interleavings_of_a_pod_that_holds_two_files_are_safe() {
    explore_steps(Protocol { pods: 1, slots: 2, ..PLAIN }, 14);
}

#[test]
fn every_interleaving_of_reports_with_an_abort_is_safe() {
    explore(Protocol { pages: &[&[1]], slots: 2, abort: true, ..PLAIN });
}
