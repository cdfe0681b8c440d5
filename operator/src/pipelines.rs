//! The status of Pipelines: whether each is valid and has its keys, and its newest run. No run depends on
//! this status.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::rules::{BucketKeys, Context as Rules, Validate};
use crds::v1alpha1::{Bucket, LastRun, Phase, Pipeline, PipelineRun, PipelineStatus};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use strum::VariantArray;

use crate::context::Context;
use crate::error::{Error, Reason, chain};
use crate::metrics::Metrics;
use crate::run::obstacle;
use crate::world::{Key, pipeline_of};

/// Changes are collected for this long; no run waits for this status.
const GATHER: Duration = Duration::from_secs(1);
/// How often keys are checked again. Secrets are not watched, because that requires the right to read all of
/// them.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Whether a Pipeline can be run; if not, a reason and a message.
type Verdict = Result<(), (&'static str, String)>;

/// The result of checking a Pipeline, and its time.
struct Checked {
    generation: Option<i64>,
    when: Instant,
    verdict: Verdict,
}

/// Keeps the status of all Pipelines current.
pub async fn keep_statuses(ctx: Arc<Context>) {
    let mut checked: HashMap<Key, Checked> = HashMap::new();
    loop {
        let runs = ctx.world.runs();
        count_runs(&ctx.metrics, &runs);
        let runs = newest_runs(&runs);
        // Entries are removed one by one; the rest belongs to Pipelines that are gone.
        let mut before = std::mem::take(&mut checked);
        for pipeline in ctx.world.pipelines() {
            let key = key_of(&pipeline);
            let known = before.remove(&key).filter(|known| {
                known.generation == pipeline.metadata.generation && known.when.elapsed() < LOOK_AGAIN
            });
            if let Err(error) = keep_status(&ctx, &pipeline, known, runs.get(&key), &mut checked).await {
                tracing::debug!(
                    pipeline = key.1,
                    error = chain(&error),
                    "the status of a Pipeline was not written"
                );
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            () = ctx.world.pipelines_touched() => tokio::time::sleep(GATHER).await,
        }
    }
}

async fn keep_status(
    ctx: &Context,
    pipeline: &Pipeline,
    known: Option<Checked>,
    newest: Option<&Arc<PipelineRun>>,
    checked: &mut HashMap<Key, Checked>,
) -> Result<(), Error> {
    let known = match known {
        Some(known) => known,
        None => Checked {
            generation: pipeline.metadata.generation,
            when: Instant::now(),
            verdict: check(ctx, pipeline).await?,
        },
    };
    let known = checked.entry(key_of(pipeline)).insert_entry(known);
    publish(ctx, pipeline, &known.get().verdict, newest).await
}

fn count_runs(metrics: &Metrics, runs: &[Arc<PipelineRun>]) {
    use Phase::{Failed, Listing, Pending, Running, Succeeded, Suspended};
    for phase in [Pending, Listing, Running, Suspended, Succeeded, Failed] {
        let in_it = runs
            .iter()
            .filter(|run| run.status.as_ref().and_then(|status| status.phase).unwrap_or_default() == phase);
        metrics.set_runs(&phase.to_string(), in_it.count());
    }
    let mut degraded: HashMap<Reason, usize> = HashMap::new();
    for obstacle in runs.iter().filter_map(|run| obstacle(run)) {
        *degraded.entry(obstacle.reason).or_default() += 1;
    }
    for reason in Reason::VARIANTS {
        metrics.set_degraded(reason.as_ref(), degraded.get(reason).copied().unwrap_or_default());
    }
}

fn key_of(pipeline: &Pipeline) -> Key {
    (pipeline.namespace().unwrap_or_default(), pipeline.name_any())
}

/// The newest run of each Pipeline.
fn newest_runs(runs: &[Arc<PipelineRun>]) -> HashMap<Key, Arc<PipelineRun>> {
    let mut newest: HashMap<Key, Arc<PipelineRun>> = HashMap::new();
    for run in runs {
        let known = newest.entry(pipeline_of(run)).or_insert_with(|| Arc::clone(run));
        if run.creation_timestamp() > known.creation_timestamp() {
            *known = Arc::clone(run);
        }
    }
    newest
}

async fn check(ctx: &Context, pipeline: &Pipeline) -> Result<Verdict, Error> {
    let own = pipeline.namespace().unwrap_or_default();
    let grants = ctx.world.grants_in(&foreign_namespaces(pipeline, &own));
    let rules = Rules { endpoints: ctx.endpoints(), grants: Some(&grants), ..Rules::default() };
    let violations: Vec<String> = pipeline.validate(&rules).iter().map(ToString::to_string).collect();
    if !violations.is_empty() {
        return Ok(Err((Reason::PipelineInvalid.into(), violations.join("; "))));
    }
    for bucket in pipeline.spec.buckets() {
        if let Err(missing) = check_keys(ctx, bucket, &own).await? {
            return Ok(Err(missing));
        }
    }
    Ok(Ok(()))
}

/// The other namespaces that hold keys of a Pipeline: only their grants matter to it.
fn foreign_namespaces(pipeline: &Pipeline, own: &str) -> Vec<String> {
    let secrets = pipeline.spec.buckets().filter_map(|bucket| bucket.credentials_secret.as_ref());
    secrets.filter_map(|secret| secret.namespace.clone()).filter(|namespace| namespace != own).collect()
}

async fn check_keys(ctx: &Context, bucket: &Bucket, own: &str) -> Result<Verdict, Error> {
    let Some(reference) = &bucket.credentials_secret else { return Ok(Ok(())) };
    let namespace = reference.namespace.as_deref().unwrap_or(own);
    let api: Api<Secret> = Api::namespaced(ctx.client.clone(), namespace);
    let name = &reference.name;
    let found =
        api.get_opt(name).await.map_err(Error::kubernetes(format!("read Secret {namespace}/{name}")))?;
    Ok(match BucketKeys::read(found.as_ref()) {
        Ok(_) => Ok(()),
        Err(problem) => Err((Reason::of_secret(&problem).into(), problem.of(namespace, name))),
    })
}

async fn publish(
    ctx: &Context,
    pipeline: &Pipeline,
    verdict: &Verdict,
    newest: Option<&Arc<PipelineRun>>,
) -> Result<(), Error> {
    let status = status(pipeline, verdict, newest.map(Arc::as_ref), Time(Timestamp::now()));
    if pipeline.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let mut wanted = Pipeline::clone(pipeline);
    wanted.status = Some(status);
    let api: Api<Pipeline> = Api::namespaced(ctx.client.clone(), &pipeline.namespace().unwrap_or_default());
    match api.replace_status(&pipeline.name_any(), &PostParams::default(), &wanted).await {
        // It was changed or deleted meanwhile: the next check sees that.
        Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(()),
        written => written.map(|_| ()).map_err(Error::kubernetes("write the status of a Pipeline")),
    }
}

fn status(pipeline: &Pipeline, verdict: &Verdict, newest: Option<&PipelineRun>, now: Time) -> PipelineStatus {
    let old = pipeline.status.clone().unwrap_or_default();
    let (word, reason, message) = match verdict {
        Ok(()) => ("True", "Valid", "the Pipeline is valid and its keys exist"),
        Err((reason, message)) => ("False", *reason, message.as_str()),
    };
    let same = old.conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == word);
    PipelineStatus {
        observed_generation: pipeline.metadata.generation,
        conditions: vec![Condition {
            type_: "Ready".to_owned(),
            status: word.to_owned(),
            reason: reason.to_owned(),
            message: message[..message.floor_char_boundary(1_024)].to_owned(),
            last_transition_time: same.map_or(now, |same| same.last_transition_time.clone()),
            observed_generation: pipeline.metadata.generation,
        }],
        last_run: newest.map(last_run),
    }
}

fn last_run(run: &PipelineRun) -> LastRun {
    let status = run.status.clone().unwrap_or_default();
    LastRun {
        name: run.name_any(),
        namespace: run.namespace().unwrap_or_default(),
        phase: status.phase.unwrap_or(Phase::Pending),
        start_time: status.start_time,
        completion_time: status.completion_time,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(name: &str, created: &str) -> Arc<PipelineRun> {
        let metadata = json!({"name": name, "namespace": "n", "creationTimestamp": created});
        let spec = json!({"pipelineRef": {"name": "p"}});
        let kind = "PipelineRun";
        Arc::new(serde_json::from_value(json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})).unwrap())
    }

    #[test]
    fn the_newest_run_is_the_last_that_was_created() {
        let runs = [
            run("b", "2026-01-02T00:00:00Z"),
            run("c", "2026-01-03T00:00:00Z"),
            run("a", "2026-01-01T00:00:00Z"),
        ];
        assert_eq!(newest_runs(&runs)[&("n".to_owned(), "p".to_owned())].name_any(), "c");
    }

    #[test]
    fn only_grants_of_namespaces_that_hold_its_keys_matter_to_a_pipeline() {
        let bucket = |namespace: Option<&str>| json!({"bucket": {"name": "b", "credentialsSecret": {"name": "s", "namespace": namespace}}});
        let spec = json!({"source": bucket(Some("keys")), "sink": bucket(Some("n")), "filters": []});
        let pipeline = Pipeline::new("p", serde_json::from_value(spec).unwrap());
        assert_eq!(foreign_namespaces(&pipeline, "n"), ["keys"]);
    }

    /// An alert must disappear with its cause.
    #[test]
    fn runs_that_are_held_up_are_counted_by_reason_while_they_are() {
        let metrics = Metrics::new();
        let mut held_up = PipelineRun::clone(&run("a", "2026-01-01T00:00:00Z"));
        let condition = json!({"type": "Degraded", "status": "True", "reason": "ImagePullFailed", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        held_up.status = serde_json::from_value(json!({"conditions": [condition]})).unwrap();
        let has = |line: &str| metrics.encode().unwrap().lines().any(|found| found == line);
        count_runs(&metrics, &[Arc::new(held_up), run("b", "2026-01-01T00:00:00Z")]);
        assert!(has("openfilter_runs_degraded{reason=\"ImagePullFailed\"} 1"));
        assert!(has("openfilter_runs_degraded{reason=\"QuotaExceeded\"} 0"));
        count_runs(&metrics, &[]);
        assert!(has("openfilter_runs_degraded{reason=\"ImagePullFailed\"} 0"));
    }

    #[test]
    fn a_status_that_says_the_same_is_the_same() {
        let mut pipeline = Pipeline::new("p", Default::default());
        let at = |second| Time(Timestamp::from_second(second).unwrap());
        let bad: Verdict = Err(("CredentialsMissing", "no Secret".to_owned()));
        pipeline.status = Some(status(&pipeline, &bad, None, at(1)));
        assert_eq!(pipeline.status.as_ref(), Some(&status(&pipeline, &bad, None, at(2))));
        assert_ne!(pipeline.status, Some(status(&pipeline, &Ok(()), None, at(3))));
    }
}
