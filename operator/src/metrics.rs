//! The operator's metrics for Prometheus. Labels are our own names (phases, outcomes, variants of errors) or
//! reasons of Kubernetes, never data, so their number is bounded. docs/metrics.md is generated from
//! [`Metrics::described`].

mod breakers;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use breakers::Breakers;

pub use breakers::OpenBreakers;

/// The prefix of every name.
const PREFIX: &str = "openfilter";
/// From a pass that finds nothing to do to one that waits for a slow API server.
const PASS_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0];
/// From the target of a fraction of a second to an operator that was unavailable.
const SETTLE_SECONDS: [f64; 11] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0];

/// The values of the label of breakers.
const DEPENDENCIES: [&str; 4] = ["source", "sink", "credentials", "image"];

/// The result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum FileOutcome {
    /// Every filter processed the file.
    Succeeded,
    /// It failed and will be retried.
    Retried,
    /// It failed permanently.
    Failed,
    /// It was given back untried.
    Released,
    /// It was taken from a dead pod.
    Reclaimed,
    /// Something other than the file failed: it was given back without being charged.
    Disrupted,
}

impl FileOutcome {
    /// Every outcome.
    pub const ALL: [Self; 6] =
        [Self::Succeeded, Self::Retried, Self::Failed, Self::Released, Self::Reclaimed, Self::Disrupted];
}

/// Every metric of the operator.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    described: Vec<Described>,
    runs: Family<PhaseLabel, Gauge>,
    runs_degraded: Family<ReasonLabel, Gauge>,
    files_settled: Family<OutcomeLabel, Counter>,
    breakers: BTreeMap<&'static str, Arc<Breakers>>,
    pass_duration: Histogram,
    pass_errors: Family<ErrorLabel, Counter>,
    pods_created: Counter,
    pods_deleted: Counter,
    listing_pages: Counter,
    listing_files: Counter,
    files_skipped: Counter,
    settle_latency: Histogram,
    valkey_errors: Family<ErrorLabel, Counter>,
    kubernetes_requests: Counter,
    leader: Gauge,
}

/// A metric, as listed in the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its name in queries.
    pub name: String,
    /// Counter, gauge or histogram.
    pub kind: &'static str,
    /// Its label, or nothing.
    pub label: &'static str,
    /// The help text.
    pub help: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: FileOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabel {
    error: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DependencyLabel {
    dependency: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers all metrics. Outcomes start at zero, so that a rate over them has a beginning.
    pub fn new() -> Self {
        let mut add = Registration { registry: Registry::with_prefix(PREFIX), described: Vec::new() };
        let runs = add.family("runs", "phase", "PipelineRuns by phase");
        let runs_degraded = add.family(
            "runs_degraded",
            "reason",
            "PipelineRuns that are blocked, by the reason of their condition Degraded",
        );
        let files_settled = add.family("files_settled", "outcome", "Attempts to process a file, by outcome");
        let breaker_open = add.family(
            "breaker_open",
            "dependency",
            "PipelineRuns that only probe a failing dependency: source, sink, credentials or image",
        );
        let breaker_next_probe = add.family(
            "breaker_next_probe_timestamp_seconds",
            "dependency",
            "Unix time of the next probe of a failing dependency, the earliest of all runs; in the past while a probe is in progress or stuck; 0 while no breaker is open",
        );
        let breakers = DEPENDENCIES.map(|dependency| {
            let label = DependencyLabel { dependency };
            let gauge = |family: &Family<DependencyLabel, Gauge>| family.get_or_create(&label).clone();
            (dependency, Breakers::new(gauge(&breaker_open), gauge(&breaker_next_probe)))
        });
        let pass_duration = add.seconds("pass_duration", "Duration of a pass over a run", PASS_SECONDS);
        let pass_errors = add.family("pass_errors", "error", "Failed passes over a run, by error");
        let pods_created = add.plain("pods_created", "Pods created");
        let pods_deleted = add.plain("pods_deleted", "Pods deleted");
        let listing_pages = add.plain("listing_pages", "Pages of buckets listed and queued");
        let listing_files = add.plain("listing_files", "Files listed and queued");
        let files_skipped =
            add.plain("files_skipped", "Files not queued because their key or etag is too long");
        let settle_latency = add.seconds(
            "settle_latency",
            "Time from when the operator saw that a pod had finished until its file was settled",
            SETTLE_SECONDS,
        );
        let valkey_errors = add.family("valkey_errors", "error", "Failed calls to Valkey, by error");
        let kubernetes_requests =
            add.plain("kubernetes_requests", "Requests to the Kubernetes API, not counting retries");
        let leader = add.plain("leader", "1 while this replica leads, 0 otherwise");
        let Registration { registry, described } = add;
        let metrics = Self {
            registry,
            described,
            runs,
            runs_degraded,
            files_settled,
            breakers: breakers.into(),
            pass_duration,
            pass_errors,
            pods_created,
            pods_deleted,
            listing_pages,
            listing_files,
            files_skipped,
            settle_latency,
            valkey_errors,
            kubernetes_requests,
            leader,
        };
        FileOutcome::ALL.iter().for_each(|outcome| metrics.settled(*outcome, 0));
        metrics
    }

    /// Counts a run under exactly the dependencies whose breakers are open. Each comes with the time of its
    /// next probe.
    pub fn set_open(
        &self,
        of_run: &mut OpenBreakers,
        next_probes: impl Iterator<Item = (&'static str, Instant)>,
    ) {
        of_run.set(&self.breakers, next_probes);
    }

    /// Sets the number of runs in a phase. Call it for every phase, even those without runs, because a gauge
    /// keeps its last value.
    pub fn set_runs(&self, phase: &str, runs: usize) {
        let label = PhaseLabel { phase: phase.to_owned() };
        self.runs.get_or_create(&label).set(i64::try_from(runs).unwrap_or(i64::MAX));
    }

    /// Sets the number of runs that are blocked for this reason. Call it for every reason, as with phases.
    pub fn set_degraded(&self, reason: &str, runs: usize) {
        let label = ReasonLabel { reason: reason.to_owned() };
        self.runs_degraded.get_or_create(&label).set(i64::try_from(runs).unwrap_or(i64::MAX));
    }

    /// Counts settled files.
    pub fn settled(&self, outcome: FileOutcome, files: u64) {
        self.files_settled.get_or_create(&OutcomeLabel { outcome }).inc_by(files);
    }

    /// Records the duration of a pass over a run.
    pub fn passed(&self, took: Duration) {
        self.pass_duration.observe(took.as_secs_f64());
    }

    /// Counts a failed pass over a run, by the variant of its error, never by its data.
    pub fn pass_failed(&self, variant: &str) {
        self.pass_errors.get_or_create(&ErrorLabel { error: variant.to_owned() }).inc();
    }

    /// Counts a created pod.
    pub fn pod_created(&self) {
        self.pods_created.inc();
    }

    /// Counts a deleted pod.
    pub fn pod_deleted(&self) {
        self.pods_deleted.inc();
    }

    /// Counts a listed page, the files of it that were queued, and those that were skipped.
    pub fn page_listed(&self, files: u64, skipped: u64) {
        self.listing_pages.inc();
        self.listing_files.inc_by(files);
        self.files_skipped.inc_by(skipped);
    }

    /// Records the time from when a pod was seen to finish until its file was settled.
    pub fn settled_after(&self, latency: Duration) {
        self.settle_latency.observe(latency.as_secs_f64());
    }

    /// Counts a failed call to Valkey, by the variant of its error, never by its data.
    pub fn valkey_failed(&self, variant: &str) {
        self.valkey_errors.get_or_create(&ErrorLabel { error: variant.to_owned() }).inc();
    }

    /// Counts a request to the Kubernetes API.
    pub fn kubernetes_request(&self) {
        self.kubernetes_requests.inc();
    }

    /// Sets whether this replica leads.
    pub fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// Encodes all metrics for Prometheus.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Every metric, for the reference.
    pub fn described(&self) -> &[Described] {
        &self.described
    }
}

/// Registers and describes at once, so that neither can be forgotten.
struct Registration {
    registry: Registry,
    described: Vec<Described>,
}

impl Registration {
    fn plain<M: Kept + Default>(&mut self, name: &str, help: &'static str) -> M {
        self.add(name, "", help, None, M::default())
    }

    fn family<L: Label, M: Kept + Default>(
        &mut self,
        name: &str,
        label: &'static str,
        help: &'static str,
    ) -> Family<L, M>
    where
        Family<L, M>: Kept,
    {
        self.add(name, label, help, None, Family::default())
    }

    fn seconds(&mut self, name: &str, help: &'static str, buckets: [f64; 11]) -> Histogram {
        self.add(name, "", help, Some(Unit::Seconds), Histogram::new(buckets))
    }

    fn add<M: Kept>(
        &mut self,
        name: &str,
        label: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        metric: M,
    ) -> M {
        let kind = M::TYPE.as_str();
        let seconds = if unit.is_some() { "_seconds" } else { "" };
        let total = if kind == "counter" { "_total" } else { "" };
        let full = format!("{PREFIX}_{name}{seconds}{total}");
        self.described.push(Described { name: full, kind, label, help });
        match unit {
            Some(unit) => self.registry.register_with_unit(name, help, unit, metric.clone()),
            None => self.registry.register(name, help, metric.clone()),
        }
        metric
    }
}

/// A metric that both the registry and we keep.
trait Kept: TypedMetric + EncodeMetric + Clone + fmt::Debug + Send + Sync + 'static {}
impl<M: TypedMetric + EncodeMetric + Clone + fmt::Debug + Send + Sync + 'static> Kept for M {}

trait Label: EncodeLabelSet + Clone + fmt::Debug + Eq + std::hash::Hash + Send + Sync + 'static {}
impl<L: EncodeLabelSet + Clone + fmt::Debug + Eq + std::hash::Hash + Send + Sync + 'static> Label for L {}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched() -> Metrics {
        let metrics = Metrics::new();
        metrics.set_runs("Running", 2);
        metrics.settled(FileOutcome::Succeeded, 3);
        metrics.passed(Duration::from_millis(20));
        metrics.pass_failed("Observe");
        metrics.pod_created();
        metrics.pod_deleted();
        metrics.set_degraded("ImagePullFailed", 1);
        metrics.page_listed(1_000, 2);
        metrics.settled_after(Duration::from_secs(2));
        metrics.valkey_failed("Unavailable");
        metrics.set_leader(true);
        metrics
    }

    #[test]
    fn every_count_shows_up_under_its_name() {
        let text = touched().encode().unwrap();
        for line in [
            "openfilter_runs{phase=\"Running\"} 2",
            "openfilter_files_settled_total{outcome=\"Succeeded\"} 3",
            "openfilter_files_settled_total{outcome=\"Reclaimed\"} 0",
            "openfilter_files_settled_total{outcome=\"Disrupted\"} 0",
            "openfilter_pass_duration_seconds_count 1",
            "openfilter_pass_errors_total{error=\"Observe\"} 1",
            "openfilter_pods_created_total 1",
            "openfilter_pods_deleted_total 1",
            "openfilter_runs_degraded{reason=\"ImagePullFailed\"} 1",
            "openfilter_listing_pages_total 1",
            "openfilter_listing_files_total 1000",
            "openfilter_files_skipped_total 2",
            "openfilter_settle_latency_seconds_sum 2.0",
            "openfilter_valkey_errors_total{error=\"Unavailable\"} 1",
            "openfilter_leader 1",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn what_is_described_is_what_is_exposed() {
        let metrics = touched();
        let text = metrics.encode().unwrap();
        let exposed: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let described: Vec<String> = metrics
            .described()
            .iter()
            .map(|Described { name, kind, .. }| format!("{} {kind}", name.trim_end_matches("_total")))
            .collect();
        assert_eq!(exposed, described);
        for Described { name, label, help, .. } in metrics.described() {
            assert!(text.contains(help), "{name} has no help");
            let labelled = text.contains(&format!("{name}{{{label}="));
            assert!(labelled != label.is_empty(), "{name} has not the label {label:?}");
        }
    }
}
