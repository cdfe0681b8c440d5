//! The webhook's Prometheus metrics.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use crds::rules::Kind;
use crds::v1alpha1::PolicyAction;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use strum::IntoStaticStr;

/// From a tenth of a millisecond, which most requests take, to the API server's own limit of ten seconds.
const BUCKETS: [f64; 15] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)]
pub enum ReviewOutcome {
    Allowed,
    Warned,
    Patched,
    Denied,
    Malformed,
    Late,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    kind: String,
    step: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabels {
    kind: String,
    step: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PolicyLabels {
    policy: String,
    rule: String,
    action: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WatchLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

type Seconds = Gauge<f64, AtomicU64>;

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    latency: Family<StepLabels, Histogram, fn() -> Histogram>,
    rules: Family<RuleLabels, Counter>,
    policies: Family<PolicyLabels, Counter>,
    evaluation: Histogram,
    policy_count: Family<StateLabels, Gauge>,
    /// Requests that are being answered.
    pub in_flight: Gauge,
    watch: Family<WatchLabels, Seconds>,
    watch_errors: Family<WatchLabels, Counter>,
    certificate: Seconds,
}

impl Default for Metrics {
    fn default() -> Self {
        let buckets: fn() -> Histogram = || Histogram::new(BUCKETS);
        let mut metrics = Self {
            registry: Registry::with_prefix("openfilter_webhook"),
            requests: Family::default(),
            latency: Family::new_with_constructor(buckets),
            rules: Family::default(),
            policies: Family::default(),
            evaluation: buckets(),
            policy_count: Family::default(),
            in_flight: Gauge::default(),
            watch: Family::default(),
            watch_errors: Family::default(),
            certificate: Seconds::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let Self {
            registry,
            requests,
            latency,
            rules,
            policies,
            evaluation,
            policy_count,
            in_flight,
            watch,
            watch_errors,
            certificate,
        } = self;
        registry.register(
            "requests",
            "Requests by kind, step (mutate or validate) and outcome",
            requests.clone(),
        );
        registry.register_with_unit("request", "Time to answer a request", Unit::Seconds, latency.clone());
        registry.register("rules_broken", "Rejections by the rule that was broken", rules.clone());
        registry.register("policies_broken", "Policy rules that objects broke", policies.clone());
        registry.register_with_unit(
            "policies",
            "Time to evaluate all policies of a request",
            Unit::Seconds,
            evaluation.clone(),
        );
        registry.register(
            "policies_known",
            "Policies by state: in force, or broken and denying",
            policy_count.clone(),
        );
        registry.register("in_flight", "Requests that are being answered", in_flight.clone());
        // This cannot show that a watch is alive: the client does not report that a quiet watch was renewed.
        let help = "When a watch last delivered an event, which on a quiet cluster may be long ago; \
                    a broken watch shows in watch_errors";
        registry.register_with_unit("watch_news_timestamp", help, Unit::Seconds, watch.clone());
        let help = "Watches that broke and were restarted";
        registry.register("watch_errors", help, watch_errors.clone());
        let help = "When the serving certificate expires";
        registry.register_with_unit("certificate_expiry_timestamp", help, Unit::Seconds, certificate.clone());
    }

    /// Counts an answered request.
    pub fn answered(&self, kind: Kind, step: &'static str, outcome: ReviewOutcome, took: Duration) {
        let kind = kind.to_string();
        self.requests
            .get_or_create(&RequestLabels { kind: kind.clone(), step, outcome: outcome.into() })
            .inc();
        self.latency.get_or_create(&StepLabels { kind, step }).observe(took.as_secs_f64());
    }

    /// Counts an object that a rule refused.
    pub fn rule_broken(&self, rule: &str) {
        self.rules.get_or_create(&RuleLabels { rule: rule.to_owned() }).inc();
    }

    /// Counts an object that broke a policy.
    pub fn policy_broken(&self, policy: &str, rule: &str, action: PolicyAction) {
        let labels =
            PolicyLabels { policy: policy.to_owned(), rule: rule.to_owned(), action: action.to_string() };
        self.policies.get_or_create(&labels).inc();
    }

    /// Records how long the policies of a request took.
    pub fn policies_evaluated(&self, took: Duration) {
        self.evaluation.observe(took.as_secs_f64());
    }

    /// Sets how many policies are in force, and how many are broken.
    pub fn policies_known(&self, in_force: usize, broken: usize) {
        let set = |state, count: usize| {
            self.policy_count
                .get_or_create(&StateLabels { state })
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        };
        set("in_force", in_force);
        set("broken", broken);
    }

    /// Records that a watch brought an event.
    pub fn watch_news(&self, kind: &'static str) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.watch.get_or_create(&WatchLabels { kind }).set(now.as_secs_f64());
    }

    /// Counts a broken watch.
    pub fn watch_broke(&self, kind: &'static str) {
        self.watch_errors.get_or_create(&WatchLabels { kind }).inc();
    }

    /// Sets when the serving certificate expires.
    pub fn certificate_expires(&self, unix_seconds: i64) {
        self.certificate.set(unix_seconds as f64);
    }

    /// All metrics in the format that Prometheus reads.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_breaks_brings_no_news() {
        let metrics = Metrics::default();
        metrics.watch_broke("runs");
        let text = metrics.text();
        assert!(text.contains("watch_errors_total{kind=\"runs\"} 1"), "{text}");
        assert!(!text.contains("watch_news_timestamp_seconds{"), "{text}");
        metrics.watch_news("runs");
        assert!(metrics.text().contains("watch_news_timestamp_seconds{kind=\"runs\"}"));
    }
}
