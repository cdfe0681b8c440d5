//! `make bench`, admission part, on the real API server: how much longer it takes to create a run when
//! sixteen rules are checked, by the API server itself (ValidatingAdmissionPolicy) and by the webhook
//! (PipelinePolicy). The three cases take turns on the same objects, so that noise of the machine affects all
//! of them. The creates are dry runs: admission is the same, and the disk is not measured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "../webhook/on_cluster.rs"]
mod on_cluster;

use std::time::{Duration, Instant};

use on_cluster::{Cluster, Replica, WAIT};
use serde_json::{Value, json};
use tests::examples::{pipeline, with};

const RULES: usize = 16;
const ROUNDS: usize = 5;
const CREATES: usize = 200;
/// How much longer a create may take at the median with two calls over TLS, to default and to validate, than
/// without.
const SLOWER_MAX: f64 = 2.5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judge {
    Nobody,
    ApiServer,
    Webhook,
}

fn main() {
    // `cargo test --benches` asks for tests, and there are none.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let cluster = Cluster::start("bench").await;
        // The objects that runs refer to exist. The webhook would look up a missing one in the API server, in
        // case it is new.
        for object in [cluster.secret(), cluster.placed(pipeline(), "thumbnails")] {
            cluster.create(&object, false).await.unwrap();
        }
        let replica = cluster.replica().await;
        let judges = [Judge::Nobody, Judge::ApiServer, Judge::Webhook];
        let mut took = judges.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (judge, took) in judges.iter().zip(&mut took) {
                install(&cluster, &replica, *judge).await;
                took.extend(creates(&cluster).await);
                remove(&cluster, *judge).await;
            }
        }
        took.iter_mut().for_each(|took| took.sort());
        let at = |took: &[Duration], share: f64| {
            took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1_000.0
        };
        let alone = at(&took[0], 0.5);
        println!(
            "| {RULES} rules, {} dry runs of a create | p50 | p99 | added at p50 | of one without (aim for the webhook: ≤ {SLOWER_MAX}) |\n|---|---|---|---|---|",
            took[0].len()
        );
        for (judge, took) in judges.iter().zip(&took) {
            let (median, slow) = (at(took, 0.5), at(took, 0.99));
            println!(
                "| {judge:?} | {median:.2} ms | {slow:.2} ms | {:.2} ms | {:.2} |",
                median - alone,
                median / alone
            );
        }
        let slower = at(&took[2], 0.5) / alone;
        assert!(
            slower <= SLOWER_MAX,
            "with the webhook a create takes {slower:.2} of one without; the aim is ≤ {SLOWER_MAX}"
        );
    });
}

/// Each rule refuses another object, because the API server names only one of several rules that refuse.
fn condition(rule: usize) -> String {
    format!(
        "object.spec.execution.parallelism != {} && object.spec.pipelineRef.name.startsWith('thumb')",
        refused_by(rule)
    )
}

fn refused_by(rule: usize) -> usize {
    101 + rule
}

/// The same rules, for the API server or for the webhook.
fn rules(cluster: &Cluster, judge: Judge) -> Vec<Value> {
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": cluster.namespace.name } });
    let (api, version) = ("admissionregistration.k8s.io/v1", "filter.plainsight.ai/v1alpha1");
    let rule = |rule: usize| {
        let name = format!("bench-{rule}");
        match judge {
            Judge::Nobody => vec![],
            Judge::ApiServer => vec![
                json!({ "apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": { "name": name }, "spec": {
                    "matchConstraints": { "resourceRules": [{ "apiGroups": ["filter.plainsight.ai"], "apiVersions": ["v1alpha1"],
                                                              "operations": ["CREATE", "UPDATE"], "resources": ["pipelineruns"] }] },
                    "validations": [{ "expression": condition(rule), "message": "too many" }] } }),
                json!({ "apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": name }, "spec": {
                    "policyName": name, "validationActions": ["Deny"], "matchResources": { "namespaceSelector": selector } } }),
            ],
            Judge::Webhook => vec![
                json!({ "apiVersion": version, "kind": "PipelinePolicy", "metadata": { "name": name }, "spec": {
                "appliesTo": ["PipelineRun"], "namespaceSelector": selector,
                "rules": [{ "name": "r", "message": "too many", "cel": condition(rule) }] } }),
            ],
        }
    };
    (0..RULES).flat_map(rule).collect()
}

async fn install(cluster: &Cluster, replica: &Replica, judge: Judge) {
    if judge == Judge::Webhook {
        cluster.route_to(replica).await;
    }
    rules(cluster, judge).iter().for_each(|rule| cluster.apply(rule));
    // The rules are in force once each of them refuses.
    for rule in (0..RULES).filter(|_| judge != Judge::Nobody) {
        let refused = with(candidate(cluster), "/spec/execution/parallelism", json!(refused_by(rule)));
        let refusal = async || {
            Ok(cluster
                .create(&refused, true)
                .await
                .err()
                .filter(|text| text.contains(&format!("bench-{rule}"))))
        };
        cluster.testbed.eventually("the rules are in force", WAIT, refusal).await.unwrap();
    }
}

async fn remove(cluster: &Cluster, judge: Judge) {
    cluster.remove_applied();
    cluster.unroute();
    let refused = with(candidate(cluster), "/spec/execution/parallelism", json!(refused_by(0)));
    let admitted = async || Ok(cluster.create(&refused, true).await.ok());
    cluster
        .testbed
        .eventually(&format!("the rules of {judge:?} are forgotten"), WAIT, admitted)
        .await
        .unwrap();
}

fn candidate(cluster: &Cluster) -> Value {
    with(cluster.run("monday"), "/spec/execution/parallelism", json!(50))
}

async fn creates(cluster: &Cluster) -> Vec<Duration> {
    let object = candidate(cluster);
    let mut took = Vec::with_capacity(CREATES);
    for _ in 0..CREATES {
        let started = Instant::now();
        cluster.create(&object, true).await.unwrap();
        took.push(started.elapsed());
    }
    took
}
