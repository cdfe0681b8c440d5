//! Pods that process many files: takes their workers' reports, keeps them supplied with files, and asks
//! unneeded pods to end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
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

/// The most files that a pod holds: those that it fetches while it processes one, and those that wait to be
/// settled.
const HELD_MAX: u64 = 16;
/// A report has at most a kilobyte of text; the server adds some.
const REPORT_BYTES_MAX: u64 = 2_048;
/// The allowance for small runs, which need no precise limit.
const REPORTS_SPARE: u64 = 200;
/// The longest wait before checking for reports again, while files are processed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How often another pod becomes a probe while files are processed that were fetched earlier.
const PROBE_EVERY: Duration = Duration::from_secs(5);

/// A flood is counted once in this time, so that a run may have one short flood.
const FLOOD_LASTS: Duration = Duration::from_secs(5);
/// How many floods within [`FLOODS_WITHIN`] end a run: a single one may be our own mistake in counting pods.
const FLOODS_MAX: usize = 3;
const FLOODS_WITHIN: Duration = Duration::from_secs(600);

/// The results of taking reports.
#[derive(Default)]
pub struct TakenReports {
    /// Files that were settled.
    pub files: usize,
    /// Pods that have room for more files.
    pub served: Vec<String>,
}

/// A run's memory of pods that process many files.
#[derive(Default)]
pub struct WarmMemory {
    /// Pods that were asked to end.
    pub stopping: HashMap<String, Instant>,
    /// When workers wrote more than reports can take up.
    pub floods: Floods,
    /// Passes in a row without a report.
    idle_passes: u32,
    /// When all pods, or one as a probe, were last supplied.
    supplied: Option<Instant>,
    /// How often one pod was supplied as a probe.
    probes: usize,
}

/// Which pods are not wanted any more.
struct Unwanted {
    /// This many, whichever they are.
    too_many: usize,
    /// Those that are as old as this.
    max_age: Duration,
    /// Those that were started with the keys that were refused then.
    keys_refused: Option<Instant>,
}

impl WarmMemory {
    /// The pods to tell now that they must end, which is noted. A pod that continues is told so again later.
    fn tell_to_end(&mut self, pods: &[Arc<WorkerPod>], unwanted: &Unwanted, now: Instant) -> Vec<String> {
        let Unwanted { mut too_many, max_age, keys_refused } = *unwanted;
        let serving: Vec<_> = pods.iter().filter(|pod| pod.can_serve()).collect();
        for pod in &serving {
            if self.stopping.contains_key(&pod.name) {
                too_many = too_many.saturating_sub(1);
            }
        }
        let mut tell = Vec::new();
        for pod in serving {
            let told = self.stopping.get(&pod.name).copied();
            let is_old = now.duration_since(pod.since) >= max_age;
            // A pod has the keys that it was started with: a new one has the keys of now.
            let has_old_keys = keys_refused.is_some_and(|at| pod.since < at);
            let is_due = match told {
                Some(told) => now.duration_since(told) >= PUBLISH_EVERY,
                None if is_old || has_old_keys => true,
                None if too_many > 0 => {
                    too_many -= 1;
                    true
                }
                None => false,
            };
            if is_due {
                self.stopping.insert(pod.name.clone(), now);
                tell.push(pod.name.clone());
            }
        }
        let known: HashSet<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        self.stopping.retain(|name, _| known.contains(name.as_str()));
        tell
    }
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

    /// Whether there were enough floods to stop the run.
    pub fn are_too_many(&self) -> bool {
        self.0.len() >= FLOODS_MAX
    }
}

impl Pass<'_> {
    /// Settles files that workers report.
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
        // Files may have been fetched long before they ended, and the storage may have failed since then.
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
            // The pod is ending, for whatever reason: it returns new files at once.
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

    /// Gives files to pods that have room: those that have just had files settled and, at intervals, all of
    /// them.
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
        // Spread the last files of a run over all pods, including those that are still starting, instead of
        // letting them wait in the slots of a few pods.
        let mut most = (waiting / (2 * prepared.limits.parallelism.max(1))).clamp(1, HELD_MAX);
        let since_supplied = self.memory.warm.supplied.map(|last| self.now.duration_since(last));
        let next_try = self.memory.breakers.next_try(self.now);
        if let Some(wait) = next_try {
            let is_under_way = stats.running > 0 && since_supplied.is_some_and(|ago| ago < PROBE_EVERY);
            if !wait.is_zero() || is_under_way {
                return Ok(());
            }
            // One file shows whether the failed dependency works again. Pods may be busy with files that they
            // fetched before.
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

    /// The pod that holds the fewest files, and their number. Pods with equal numbers take turns.
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

    /// Asks pods to end: the excess ones, those whose keys are refused, and those that are too old and have
    /// not noticed it themselves. They finish their file.
    pub async fn stop_unwanted(&mut self, prepared: &Prepared, too_many: u64) -> Result<(), Error> {
        let max_age = prepared.snapshot.spec.warm_limits().max_pod_age;
        let unwanted = Unwanted {
            too_many: usize::try_from(too_many).unwrap_or(usize::MAX),
            max_age,
            keys_refused: self.memory.breakers.keys_refused(),
        };
        let tell = self.memory.warm.tell_to_end(&self.view.pods, &unwanted, self.now);
        prepared.queue.stop(&tell).await?;
        Ok(())
    }

    /// When to check for reports again.
    pub fn next_reports(&self, stats: &Stats) -> Option<Duration> {
        let is_serving = self.view.pods.iter().any(|pod| pod.can_serve());
        let wait = GATHER * (1 << self.memory.warm.idle_passes.min(6));
        is_serving.then(|| wait.min(if stats.running > 0 { LOOK_AGAIN } else { PUBLISH_EVERY }))
    }

    /// The files among these that had been begun according to the last reports, and how far each was.
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

/// How far a file is, according to the last report about it. `None` if the file has ended or was not begun,
/// or if the report is not from the pod that holds it.
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
    use crate::pods::Stage;

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
    fn a_pod_that_is_old_and_goes_on_is_told_to_end_now_and_then_until_it_is_gone() {
        const MAX_AGE: Duration = Duration::from_secs(3_600);
        let serving = |name: &str, since| {
            let pod = WorkerPod { is_warm: true, ..WorkerPod::in_stage(name, Stage::Working, since) };
            Arc::new(pod)
        };
        let start = Instant::now();
        let (old, young) = (serving("old", start), serving("young", start + Duration::from_secs(1)));
        let pods = [Arc::clone(&old), Arc::clone(&young)];
        let mut warm = WarmMemory::default();
        let mut told = |pods: &[Arc<WorkerPod>], too_many, now| {
            warm.tell_to_end(pods, &Unwanted { too_many, max_age: MAX_AGE, keys_refused: None }, now)
        };
        let none: [&str; 0] = [];
        let due = start + MAX_AGE;
        assert_eq!(told(&pods, 0, due - Duration::from_millis(1)), none, "not yet");
        assert_eq!(told(&pods, 0, due), ["old"]);
        assert_eq!(told(&pods, 0, due + PUBLISH_EVERY / 2), none, "it was just told");
        assert_eq!(told(&pods, 1, due + PUBLISH_EVERY / 2), none, "it is the one too many");
        let later = due + Duration::from_secs(1) + PUBLISH_EVERY;
        assert_eq!(told(&pods, 0, later), ["old", "young"], "it has not listened, and the other is old too");
        assert_eq!(
            told(std::slice::from_ref(&young), 0, later + PUBLISH_EVERY),
            ["young"],
            "the first is gone"
        );

        // One that still starts cannot be told, and one that has ended need not be.
        for stage in [Stage::Starting, Stage::Succeeded] {
            let pod = WorkerPod { is_warm: true, ..WorkerPod::in_stage("idle", stage, start) };
            assert_eq!(told(&[Arc::new(pod)], 0, later), none);
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
