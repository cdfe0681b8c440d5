//! Pods that process many files: takes what their workers report, keeps them supplied, and tells those to end that are not
//! wanted any more.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use protocol::{FileState, State};
use queue::{EntryId, Pending, ReportsLimit, Settlement, Stats, Verdict};

use super::decide::End;
use super::pass::{Pass, Prepared};
use super::verdict::{self, Begun, Rules};
use super::{GATHER, PUBLISH_EVERY};
use crate::error::Error;
use crate::metrics::FileOutcome;
use crate::pods::WorkerPod;

/// Files that a pod holds at most: what it fetches while it processes one, and what waits to be settled.
const HELD_MAX: u64 = 16;
/// A report has at most a kilobyte of text; the server adds some.
const REPORT_BYTES_MAX: u64 = 2_048;
/// Small runs need not be measured closely.
const REPORTS_SPARE: u64 = 200;
/// The longest wait before reports are looked for again, while files are processed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How often another pod is a probe while files are processed that were fetched before.
const PROBE_EVERY: Duration = Duration::from_secs(5);

/// A flood counts once in this time, so that a run may have one that ends soon.
const FLOOD_LASTS: Duration = Duration::from_secs(5);
/// How many floods end a run, if they come within [`FLOODS_WITHIN`]: one can be a mistake of ours in counting pods.
const FLOODS_MAX: usize = 3;
const FLOODS_WITHIN: Duration = Duration::from_secs(600);

/// What taking reports has shown.
#[derive(Default)]
pub struct TakenReports {
    /// Files that were settled.
    pub files: usize,
    /// Pods that have room for others.
    pub served: Vec<String>,
}

/// What a run remembers of pods that process many files.
#[derive(Default)]
pub struct WarmMemory {
    /// Pods that were told to end.
    pub stopping: HashMap<String, Instant>,
    /// When workers wrote more than reports can be.
    pub floods: Floods,
    /// Passes in a row without a report.
    idle_passes: u32,
    /// When all pods, or one as a probe, were last supplied.
    supplied: Option<Instant>,
    /// How often one was a probe.
    probes: usize,
}

/// When workers wrote more than reports can be, the newest last.
#[derive(Default)]
pub struct Floods(VecDeque<Instant>);

impl Floods {
    fn noticed(&mut self, now: Instant) {
        if self.0.back().is_none_or(|last| now.duration_since(*last) >= FLOOD_LASTS) {
            self.0.push_back(now);
        }
        self.0.retain(|flood| now.duration_since(*flood) < FLOODS_WITHIN);
    }

    /// Whether there were so many that the run is better stopped.
    pub fn are_too_many(&self) -> bool {
        self.0.len() >= FLOODS_MAX
    }
}

impl Pass<'_> {
    /// Settles what workers report.
    pub async fn take_reports(&mut self, prepared: &Prepared) -> Result<TakenReports, Error> {
        let pods = self.view.pods.len() as u64 + self.memory.pods.gone.len() as u64;
        let reports = 2 * HELD_MAX * pods + REPORTS_SPARE;
        let limit = ReportsLimit { reports, bytes: reports * REPORT_BYTES_MAX };
        let taken = prepared.queue.take(limit, &prepared.limits.retry).await?;
        if taken.is_flooded {
            let note = format!(
                "the run's workers wrote more than {reports} reports or {} bytes of them into Valkey: all of it was dropped, and the true outcomes are reported again",
                limit.bytes
            );
            self.ctx.warn(self.run, End::WorkersMisbehaving.as_ref(), note);
            self.memory.warm.floods.noticed(self.now);
        }
        // Files may have been fetched long before they ended, and the storage may have failed since.
        if let Some(handed_out) = taken.fetched_within.and_then(|ago| self.now.checked_sub(ago)) {
            self.memory.breakers.file_fetched(handed_out);
        }
        if taken.succeeded > 0 {
            self.ctx.metrics.settled(FileOutcome::Succeeded, taken.succeeded);
            if prepared.snapshot.spec.sink.is_some() {
                self.memory.breakers.results_published(self.now);
            }
        }
        if let Some(key) = &taken.newest {
            self.memory.canaries.fetched(key, self.now);
        }
        let mut settlements = Vec::new();
        for reported in &taken.reports {
            let Some(judgement) = verdict::of_report(reported, &self.rules(prepared)) else { continue };
            self.memory.breakers.judged(&judgement);
            let consumer = reported.report.split(' ').next().unwrap_or_default().to_owned();
            let verdict = judgement.verdict;
            // It is ending, for whatever reason: what it is given now comes back at once.
            if verdict == Verdict::Released {
                self.memory.warm.stopping.entry(consumer.clone()).or_insert(self.now);
            }
            settlements.push(Settlement { entry: reported.entry.clone(), consumer, verdict });
        }
        self.settle_entries(prepared, &settlements).await?;
        let files = usize::try_from(taken.succeeded).unwrap_or(usize::MAX).saturating_add(settlements.len());
        let mut served = taken.served;
        served.extend(settlements.into_iter().map(|settlement| settlement.consumer));
        let warm = &mut self.memory.warm;
        warm.idle_passes = if files > 0 { 0 } else { warm.idle_passes.saturating_add(1) };
        Ok(TakenReports { files, served })
    }

    fn rules<'b>(&self, prepared: &'b Prepared) -> Rules<'b> {
        Rules {
            limits: &prepared.limits,
            snapshot: &prepared.snapshot,
            known: self.memory.breakers.known(),
            now: self.now,
        }
    }

    /// Gives files to pods that have room: those that have just had some settled, and now and then all.
    pub async fn supply(
        &mut self,
        prepared: &Prepared,
        stats: &Stats,
        served: &[String],
    ) -> Result<(), Error> {
        let waiting = stats.queued - stats.delayed;
        let stopping = &self.memory.warm.stopping;
        let can_take = |pod: &WorkerPod| {
            pod.can_serve() && !self.memory.pods.is_done(&pod.name) && !stopping.contains_key(&pod.name)
        };
        let mut pods: Vec<&str> =
            self.view.pods.iter().filter(|pod| can_take(pod)).map(|pod| pod.name.as_str()).collect();
        if waiting == 0 || pods.is_empty() {
            return Ok(());
        }
        // The end of a run is spread over all pods, also those that are still starting, instead of waiting in the slots of a few.
        let mut most = (waiting / (2 * prepared.limits.parallelism.max(1))).clamp(1, HELD_MAX);
        let since_supplied = self.memory.warm.supplied.map(|last| self.now.duration_since(last));
        let next_try = self.memory.breakers.next_try(self.now);
        if let Some(wait) = next_try {
            let is_under_way = stats.running > 0 && since_supplied.is_some_and(|ago| ago < PROBE_EVERY);
            if !wait.is_zero() || is_under_way {
                return Ok(());
            }
            // One file shows whether what failed works again. Pods may be busy with files that they fetched before.
            let (pod, held) = self.least_busy(prepared, &pods).await?;
            if held >= HELD_MAX {
                return Ok(());
            }
            (pods, most) = (vec![pod], held + 1);
        }
        if next_try.is_some() || since_supplied.is_none_or(|ago| ago >= PUBLISH_EVERY) {
            self.memory.warm.supplied = Some(self.now);
        } else {
            let served: HashSet<&str> = served.iter().map(String::as_str).collect();
            pods.retain(|pod| served.contains(pod) || !self.memory.pods.served.contains(*pod));
        }
        let pods: Vec<String> = pods.into_iter().map(str::to_owned).collect();
        let most = usize::try_from(most).unwrap_or(1);
        self.memory.pods.served.extend(prepared.queue.fill(&pods, most).await?);
        Ok(())
    }

    /// The pod that holds the fewest files, and how many these are. Pods that hold as many take turns.
    async fn least_busy<'b>(
        &mut self,
        prepared: &Prepared,
        pods: &[&'b str],
    ) -> Result<(&'b str, u64), Error> {
        let names: Vec<String> = pods.iter().map(|pod| (*pod).to_owned()).collect();
        let mut held = HashMap::<String, u64>::new();
        for claim in prepared.queue.claims_of(&names).await? {
            *held.entry(claim.consumer).or_default() += 1;
        }
        let turn = &mut self.memory.warm.probes;
        *turn = turn.wrapping_add(1);
        let of = |pod: &str| held.get(pod).copied().unwrap_or_default();
        let in_turn = pods.iter().cycle().skip(*turn % pods.len()).take(pods.len());
        let pod = in_turn.copied().min_by_key(|pod| of(pod)).unwrap_or(pods[0]);
        Ok((pod, of(pod)))
    }

    /// Tells pods to end: as many as are too many, and those whose keys are refused, or that are old and have not noticed it
    /// themselves. They finish their file.
    pub async fn stop_unwanted(&mut self, prepared: &Prepared, too_many: u64) -> Result<(), Error> {
        let max_age = prepared.snapshot.spec.warm_limits().max_pod_age;
        let serving: Vec<_> = self.view.pods.iter().filter(|pod| pod.can_serve()).collect();
        let warm = &mut self.memory.warm;
        let keys_refused = self.memory.breakers.keys_refused();
        let mut too_many = usize::try_from(too_many).unwrap_or(usize::MAX);
        for pod in &serving {
            if warm.stopping.contains_key(&pod.name) {
                too_many = too_many.saturating_sub(1);
            }
        }
        let mut tell = Vec::new();
        for pod in serving {
            let told = warm.stopping.get(&pod.name).copied();
            let is_old = self.now.duration_since(pod.since) >= max_age;
            // A pod has the keys that it was started with: a new one has the keys of now.
            let has_old_keys = keys_refused.is_some_and(|at| pod.since < at);
            let is_due = match told {
                Some(told) => self.now.duration_since(told) >= PUBLISH_EVERY,
                None if is_old || has_old_keys => true,
                None if too_many > 0 => {
                    too_many -= 1;
                    true
                }
                None => false,
            };
            if is_due {
                warm.stopping.insert(pod.name.clone(), self.now);
                tell.push(pod.name.clone());
            }
        }
        let known: HashSet<&str> = self.view.pods.iter().map(|pod| pod.name.as_str()).collect();
        warm.stopping.retain(|name, _| known.contains(name.as_str()));
        prepared.queue.stop(&tell).await?;
        Ok(())
    }

    /// When reports are to be looked for again.
    pub fn next_reports(&self, stats: &Stats) -> Option<Duration> {
        let is_serving = self.view.pods.iter().any(|pod| pod.can_serve());
        let wait = GATHER * (1 << self.memory.warm.idle_passes.min(6));
        is_serving.then(|| wait.min(if stats.running > 0 { LOOK_AGAIN } else { PUBLISH_EVERY }))
    }

    /// Which of these files had been begun when their pods last spoke, and how far they were.
    pub async fn begun(
        &self,
        prepared: &Prepared,
        claims: &[Pending],
    ) -> Result<HashMap<EntryId, Begun>, Error> {
        let entries: Vec<EntryId> = claims.iter().map(|claim| claim.entry.clone()).collect();
        let said = prepared.queue.reports_of(&entries).await?;
        let of = |(claim, said): (&Pending, Option<String>)| {
            Some((claim.entry.clone(), begun(&claim.consumer, said.as_deref()?)?))
        };
        Ok(claims.iter().zip(said).filter_map(of).collect())
    }
}

/// How far a file is, by what was said about it last; nothing if that is over, not begun, or not said by the pod that holds it.
fn begun(holder: &str, said: &str) -> Option<Begun> {
    let FileState { pod, state } = FileState::parse(said)?;
    if pod != holder {
        return None;
    }
    match state {
        State::Started => Some(Begun::Filtering),
        State::Publishing => Some(Begun::Publishing),
        State::Succeeded | State::Released | State::FilterFailed(_) | State::TransferFailed(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_was_begun_if_the_pod_that_holds_it_said_so_and_not_how_it_ended() {
        assert_eq!(begun("pod", "pod started"), Some(Begun::Filtering));
        assert_eq!(begun("pod", "pod started publishing"), Some(Begun::Publishing));
        for said in
            ["another started", "another started publishing", "pod succeeded", "pod released", "nonsense"]
        {
            assert_eq!(begun("pod", said), None, "{said}");
        }
    }

    #[test]
    fn floods_that_last_or_return_are_too_many_and_short_ones_are_not() {
        let (mut floods, start) = (Floods::default(), Instant::now());
        for flood in 1..FLOODS_MAX {
            let begins = start + FLOOD_LASTS * 2 * u32::try_from(flood).unwrap_or_default();
            for look in 0..50 {
                floods.noticed(begins + LOOK_AGAIN / 10 * look);
            }
            assert!(!floods.are_too_many(), "{flood}");
        }
        floods.noticed(start + FLOODS_WITHIN);
        assert!(floods.are_too_many());
        floods.noticed(start + FLOODS_WITHIN * 2);
        assert!(!floods.are_too_many(), "those before it are long ago");

        let mut lasting = Floods::default();
        for look in 0..=10 {
            lasting.noticed(start + Duration::from_secs(look));
        }
        assert!(lasting.are_too_many(), "one that lasts");
    }
}
