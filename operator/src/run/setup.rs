//! What a run needs before its bucket can be listed: a valid spec, its Pipeline, keys, a queue and a user for its workers.
//! Each step either has its result or says what stands in the way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::rules::{Context as Rules, Rule, Validate, Violation};
use crds::run_id::RunId;
use crds::v1alpha1::{Bucket, Pipeline, PipelineRun};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use queue::{Finished, Opened, RunQueue, WorkerUser};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use storage::{AddressGuard, Keys};

use super::build::snapshot::{Credentials, Role, Snapshot};
use super::build::{owner, secret};
use super::limits::Limits;
use super::memory::Memory;
use super::{Stop, cleanup};
use crate::args::Settings;
use crate::context::Context;
use crate::error::{Error, Obstacle, Reason};
use crate::names::{self, EPOCH_ANNOTATION, MANAGER};

/// How long the operator waits for an answer of the storage, and how often it asks.
const STORAGE_PATIENCE: (Duration, u32) = (Duration::from_secs(30), 6);

/// The runId, from the run's own keys or from its name.
pub fn run_id(run: &PipelineRun) -> Result<RunId, Stop> {
    let id = match &run.spec.queue {
        Some(keys) => RunId::from_keys(keys),
        None => RunId::derive(&run.namespace().unwrap_or_default(), &run.name_any()),
    };
    id.map_err(|error| Reason::InvalidSpec.because(error.to_string()).into())
}

/// What the run allows, if its spec is valid.
pub fn limits(ctx: &Context, run: &PipelineRun) -> Result<Limits, Stop> {
    refuse(Reason::InvalidSpec, run.validate(&Rules { endpoints: ctx.endpoints(), ..Rules::default() }))?;
    Limits::parse(&run.spec.execution, ctx.settings.keep_results)
        .map(|limits| Limits { max_files: ctx.settings.max_files, ..limits })
        .ok_or_else(|| Reason::InvalidSpec.because("spec.execution cannot be read").into())
}

/// The Pipeline of the run: as it was stored, or as it is now, which is then stored.
pub async fn snapshot(
    ctx: &Context,
    run: &PipelineRun,
    run_id: &RunId,
    memory: &mut Memory,
) -> Result<Arc<Snapshot>, Stop> {
    if let Some(snapshot) = &memory.snapshot {
        return Ok(Arc::clone(snapshot));
    }
    let api: Api<ControllerRevision> = ctx.api(run);
    let name = names::snapshot(&run.name_any());
    let found =
        api.get_opt(&name).await.map_err(Error::kubernetes("look for the snapshot of the Pipeline"))?;
    let stored = match found {
        Some(stored) => stored,
        None => {
            let wanted = Snapshot::of(&*pipeline(ctx, run)?).stored(run, run_id).map_err(Error::Json)?;
            match api.create(&PostParams::default(), &wanted).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    api.get(&name).await.map_err(Error::kubernetes("read the snapshot of the Pipeline"))?
                }
                created => created.map_err(Error::kubernetes("store the Pipeline as it is"))?,
            }
        }
    };
    if !owner::owns(run, &stored) {
        return Err(Error::NotOurs { what: format!("ControllerRevision {name}") }.into());
    }
    let snapshot = Arc::new(Snapshot::read(&stored).map_err(Error::Json)?);
    memory.snapshot = Some(Arc::clone(&snapshot));
    Ok(snapshot)
}

/// The Pipeline as it is now, if the run may use it.
fn pipeline(ctx: &Context, run: &PipelineRun) -> Result<Arc<Pipeline>, Stop> {
    let reference = &run.spec.pipeline_ref;
    let own = run.namespace().unwrap_or_default();
    let namespace = reference.namespace.as_deref().unwrap_or(&own);
    let grants = ctx.world.grants();
    let rules =
        |pipeline| Rules { endpoints: ctx.endpoints(), grants: Some(&grants), pipeline, old_run: None };
    // The grant first: whether a Pipeline of another namespace exists is nobody's business without one.
    refuse(Reason::InvalidSpec, run.validate(&rules(None)))?;
    let name = &reference.name;
    let missing = |what: String| Stop::from(Reason::PipelineNotFound.because(what));
    let pipeline = ctx.world.pipeline(namespace, name).ok_or_else(|| {
        missing(format!(
            "there is no Pipeline {name:?} in namespace {namespace:?}; the run starts when it is created"
        ))
    })?;
    if pipeline.metadata.deletion_timestamp.is_some() {
        return Err(missing(format!(
            "the Pipeline {name:?} in namespace {namespace:?} is being deleted; the run starts when it is created again"
        )));
    }
    refuse(Reason::PipelineInvalid, pipeline.validate(&rules(None)))?;
    refuse(Reason::InvalidSpec, run.validate(&rules(Some(&pipeline))))?;
    Ok(pipeline)
}

fn refuse(reason: Reason, violations: Vec<Violation>) -> Result<(), Stop> {
    let Some(first) = violations.first() else { return Ok(()) };
    // A grant can come later; nothing about the run itself can change.
    let reason = if first.rule == Rule::ReferenceGrant { Reason::ReferenceNotGranted } else { reason };
    let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
    Err(reason.because(all.join("; ")).into())
}

/// The keys of the run's buckets, present and well-formed. Those of other namespaces are copied, if a grant allows it.
pub async fn credentials(
    ctx: &Context,
    run: &PipelineRun,
    run_id: &RunId,
    snapshot: &Snapshot,
) -> Result<Option<Keys>, Stop> {
    check_grant(ctx, run, snapshot)?;
    let (mut source, mut copies) = (None, Vec::new());
    for wanted in snapshot.secrets() {
        let secret = credentials_secret(ctx, &wanted).await?;
        let keys = keys(&wanted, &secret)?;
        if Some(&wanted.namespace) != run.metadata.namespace.as_ref() {
            copies.push(secret::copy(run, run_id, wanted.role, &secret));
        }
        if wanted.role == Role::Source {
            source = Some(keys);
        }
    }
    // Only when all are there: a run that lacks one has no use for the other.
    for copy in &copies {
        apply_secret(ctx, run, copy).await?;
    }
    Ok(source)
}

async fn credentials_secret(ctx: &Context, wanted: &Credentials) -> Result<Secret, Stop> {
    let Credentials { name, namespace, .. } = wanted;
    let api: Api<Secret> = Api::namespaced(ctx.client.clone(), namespace);
    let found =
        api.get_opt(name).await.map_err(Error::kubernetes(format!("read Secret {namespace}/{name}")))?;
    found.ok_or_else(|| {
        let message = format!(
            "there is no Secret {name:?} in namespace {namespace:?} for the {} bucket; create it with the keys accessKeyId and secretAccessKey",
            wanted.role.as_ref()
        );
        Reason::CredentialsMissing.because(message).into()
    })
}

fn keys(wanted: &Credentials, found: &Secret) -> Result<Keys, Stop> {
    let text = |key: &str| {
        secret::text(found, key).ok_or_else(|| {
            let Credentials { name, namespace, .. } = wanted;
            let message =
                format!("Secret {namespace}/{name} has no {key}, or it is empty; add it to the Secret");
            Stop::from(Reason::CredentialsInvalid.because(message))
        })
    };
    Ok(Keys { id: text(secret::ACCESS_KEY_ID)?.into(), secret: text(secret::SECRET_ACCESS_KEY)?.into() })
}

/// Checked in every pass, and before anything is read: a grant that was taken back does not last.
fn check_grant(ctx: &Context, run: &PipelineRun, snapshot: &Snapshot) -> Result<(), Stop> {
    let own = run.namespace().unwrap_or_default();
    let mut others: Vec<String> = snapshot.secrets().into_iter().map(|secret| secret.namespace).collect();
    others.push(snapshot.namespace.clone());
    others.retain(|namespace| *namespace != own);
    if others.is_empty() {
        return Ok(());
    }
    let grants = ctx.world.grants_in(&others);
    let mut pipeline = Pipeline::new(&snapshot.name, snapshot.spec.clone());
    pipeline.metadata.namespace = Some(snapshot.namespace.clone());
    let rules =
        Rules { endpoints: ctx.endpoints(), grants: Some(&grants), pipeline: Some(&pipeline), old_run: None };
    refuse(Reason::InvalidSpec, run.validate(&rules))
}

async fn apply_secret(ctx: &Context, run: &PipelineRun, wanted: &Secret) -> Result<Secret, Stop> {
    let api: Api<Secret> = ctx.api(run);
    let name = wanted.name_any();
    let found = api.get_opt(&name).await.map_err(Error::kubernetes(format!("look for Secret {name}")))?;
    match found {
        Some(found) if owner::owns(run, &found) && found.data == wanted.data => Ok(found),
        found => write_secret(ctx, run, found.as_ref(), wanted).await,
    }
}

/// Writes a Secret over the one that was found, if any was and it is the run's.
async fn write_secret(
    ctx: &Context,
    run: &PipelineRun,
    found: Option<&Secret>,
    wanted: &Secret,
) -> Result<Secret, Stop> {
    let name = wanted.name_any();
    if found.is_some_and(|found| !owner::owns(run, found)) {
        return Err(Error::NotOurs { what: format!("Secret {name}") }.into());
    }
    let api: Api<Secret> = ctx.api(run);
    let applied = api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(wanted)).await;
    Ok(applied.map_err(Error::kubernetes(format!("apply Secret {name}")))?)
}

/// The bucket that is listed.
pub fn source_bucket(
    settings: &Settings,
    bucket: &Bucket,
    keys: Option<Keys>,
) -> Result<storage::Bucket, Obstacle> {
    let endpoint = Some(bucket.endpoint.as_str()).filter(|endpoint| !endpoint.is_empty());
    let endpoint = endpoint.map(storage::parse_endpoint).transpose();
    let endpoint = endpoint
        .map_err(|error| Reason::PipelineInvalid.because(format!("source.bucket.endpoint: {error}")))?;
    let networks = settings.allowed_networks.clone();
    let guard = AddressGuard::new(move |address| {
        crds::rules::EndpointPolicy { allowed_networks: &networks, allowed_hosts: &[] }.allows(address)
    });
    // A host that an administrator allows by name may be anywhere.
    let by_name = endpoint
        .as_ref()
        .and_then(|url| url.host_str())
        .is_some_and(|host| settings.allowed_hosts.iter().any(|allowed| allowed == host));
    Ok(storage::Bucket {
        name: bucket.name.clone(),
        endpoint,
        region: Some(bucket.region.clone()).filter(|region| !region.is_empty()),
        path_style: bucket.use_path_style,
        skip_tls_verify: bucket.insecure_skip_tls_verify,
        keys,
        timeout: STORAGE_PATIENCE.0,
        max_attempts: STORAGE_PATIENCE.1,
        // Nothing is fetched here.
        etag_is_md5: true,
        addresses: (!by_name).then_some(guard),
    })
}

/// What became of the queue.
pub enum Queue {
    /// It is open.
    Open(Box<RunQueue>),
    /// The run was executed before.
    Finished(Finished),
}

/// The queue of the run, opened if it is not.
pub async fn queue(
    ctx: &Context,
    run: &PipelineRun,
    run_id: &RunId,
    memory: &mut Memory,
) -> Result<Queue, Stop> {
    if let Some(queue) = &memory.queue {
        return Ok(Queue::Open(Box::new(queue.clone())));
    }
    let uid = run.uid().unwrap_or_default();
    let queue = match RunQueue::open(&ctx.valkey, run_id, &uid, &spec_hash(run)).await? {
        Opened::Created(queue) | Opened::Resumed(queue) => queue,
        Opened::Finished(finished) => return Ok(Queue::Finished(finished)),
        Opened::Taken { owner } => {
            let message = format!(
                "the runId {run_id} belongs to the PipelineRun with UID {owner}; give this run another name or other queue keys"
            );
            return Err(Reason::RunIdTaken.because(message).into());
        }
        Opened::Used => {
            let message = format!(
                "a run with another spec was executed under the runId {run_id}; a run happens once, so create it under a new name"
            );
            return Err(Reason::RunIdUsed.because(message).into());
        }
    };
    user(ctx, run, run_id, &queue, memory).await?;
    memory.queue = Some(queue.clone());
    Ok(Queue::Open(Box::new(queue)))
}

/// The Secret of the workers' user, which also holds the epoch of the queue: another one than before means loss.
async fn user(
    ctx: &Context,
    run: &PipelineRun,
    run_id: &RunId,
    queue: &RunQueue,
    memory: &mut Memory,
) -> Result<(), Stop> {
    let api: Api<Secret> = ctx.api(run);
    let name = names::queue_secret(&run.name_any());
    let found = api.get_opt(&name).await.map_err(Error::kubernetes(format!("look for Secret {name}")))?;
    let existing = found.as_ref().and_then(|found| secret::read_queue(run, run_id, found));
    let user = match existing {
        Some(user) => user,
        None => WorkerUser::generate(run_id, &run.uid().unwrap_or_default())?,
    };
    let before = found.as_ref().and_then(secret::epoch);
    let mut wanted = secret::queue(run, run_id, &user);
    wanted.metadata.annotations = Some([(EPOCH_ANNOTATION.to_owned(), queue.epoch().to_owned())].into());
    let is_whole = found.as_ref().is_some_and(|found| found.data == wanted.data);
    if before != Some(queue.epoch()) || !is_whole {
        write_secret(ctx, run, found.as_ref(), &wanted).await?;
        if before.is_some_and(|before| before != queue.epoch()) {
            memory.everything_lost();
            ctx.warn(run, Reason::QueueLost.as_ref(), "Valkey has lost the queue of this run: the bucket is listed again, and files may be processed twice");
        }
    }
    user.ensure(&ctx.valkey).await?;
    memory.user = Some((user, Instant::now()));
    Ok(())
}

/// What can be taken away from a run while it runs is looked for now and then, and restored: a restarted Valkey has
/// forgotten the workers' user, somebody deleted a Secret, keys were exchanged. While its keys are missing, or a grant for
/// them was taken back, the run is without them: it starts nothing, and what it has copied goes.
pub async fn restore(
    ctx: &Context,
    run: &PipelineRun,
    run_id: &RunId,
    snapshot: &Snapshot,
    queue: &RunQueue,
    memory: &mut Memory,
    every: Duration,
) -> Result<(), Stop> {
    let due = memory.user.as_ref().is_some_and(|(_, checked)| checked.elapsed() >= every);
    if due {
        user(ctx, run, run_id, queue, memory).await?;
    }
    if due || memory.withheld.is_some() || check_grant(ctx, run, snapshot).is_err() {
        let withheld = match credentials(ctx, run, run_id, snapshot).await {
            Ok(_) => None,
            Err(Stop::Obstacle(obstacle)) => Some(obstacle),
            Err(error) => return Err(error),
        };
        let before = std::mem::replace(&mut memory.withheld, withheld);
        if memory.withheld.is_some() && (before.is_none() || due) {
            memory.listing = None;
            cleanup::remove_copied_keys(ctx, run).await?;
        }
    }
    Ok(())
}

/// The hash of what makes the run this run: all of its spec that cannot change.
fn spec_hash(run: &PipelineRun) -> String {
    let mut spec = json!(run.spec);
    for path in ["/suspend", "/execution/parallelism", "/execution/maxFailedFiles"] {
        if let Some(value) = spec.pointer_mut(path) {
            *value = Value::Null;
        }
    }
    // A map and a set, which may be written in any order.
    let by_text = |one: &Value| one.to_string();
    for path in ["/env", "/execution/nonRetryableExitCodes"] {
        if let Some(items) = spec.pointer_mut(path).and_then(Value::as_array_mut) {
            items.sort_by_key(by_text);
        }
    }
    let mut text = String::new();
    canonical(&spec, &mut text);
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// JSON with sorted fields and without empty ones: the same however it was written.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut sorted: Vec<_> = fields.iter().filter(|(_, value)| !value.is_null()).collect();
            sorted.sort_by_key(|(name, _)| name.as_str());
            out.push('{');
            for (name, value) in sorted {
                out.push_str(&Value::from(name.as_str()).to_string());
                out.push(':');
                canonical(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::Args;
    use clap::Parser;

    fn hash(spec: Value) -> String {
        let run = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun", "metadata": {"name": "r"}, "spec": spec});
        spec_hash(&serde_json::from_value(run).unwrap())
    }

    fn listed(bucket: Value, settings: &[&str]) -> storage::Bucket {
        let needed = ["operator", "--valkey-url", "redis://v:6379", "--claimer-image", "c:1"];
        let settings = Args::try_parse_from(needed.iter().chain(settings)).unwrap().usable().unwrap();
        source_bucket(&settings, &serde_json::from_value(bucket).unwrap(), None).unwrap()
    }

    /// Trap 22: whoever writes a Pipeline must not make the operator ask the metadata service.
    #[test]
    fn the_operator_asks_only_allowed_addresses() {
        let metadata_service: std::net::IpAddr = "169.254.169.254".parse().unwrap();
        let bucket = json!({"name": "bkt", "endpoint": "http://inside.example:9000"});
        let is_asked = |settings: &[&str]| {
            let guard = listed(bucket.clone(), settings).addresses;
            guard.is_none_or(|guard| guard.allows(metadata_service))
        };
        assert!(!is_asked(&[]));
        assert!(is_asked(&["--allowed-endpoint-networks", "169.254.0.0/16"]));
        assert!(is_asked(&["--allowed-endpoint-hosts", "inside.example"]));
        assert!(!is_asked(&["--allowed-endpoint-hosts", "other.example"]));
    }

    /// Trap 19.
    #[test]
    fn the_bucket_is_listed_as_the_pipeline_says() {
        let all = listed(
            json!({"name": "bkt", "endpoint": "s3.example", "region": "eu-1", "usePathStyle": true,
                "insecureSkipTLSVerify": true}),
            &[],
        );
        assert_eq!(all.endpoint.unwrap().as_str(), "https://s3.example/");
        assert_eq!((all.name.as_str(), all.region.as_deref()), ("bkt", Some("eu-1")));
        assert!(all.path_style && all.skip_tls_verify);
        let least = listed(json!({"name": "bkt"}), &[]);
        assert!(least.endpoint.is_none() && least.region.is_none(), "those of AWS");
        assert!(!least.skip_tls_verify && least.keys.is_none());
    }

    #[test]
    fn only_what_cannot_change_makes_a_run() {
        let plain = hash(json!({"pipelineRef": {"name": "p"}}));
        let paused = json!({"pipelineRef": {"name": "p"}, "suspend": true, "execution": {"parallelism": 77, "maxFailedFiles": "3%"}});
        assert_eq!(hash(paused), plain);
        assert_ne!(hash(json!({"pipelineRef": {"name": "q"}})), plain);
        assert_ne!(hash(json!({"pipelineRef": {"name": "p"}, "execution": {"maxAttempts": 4}})), plain);
        assert_eq!(hash(json!({"execution": {}, "pipelineRef": {"name": "p"}})), plain);
    }

    /// The webhook accepts another order as no change, so the ledger must too.
    #[test]
    fn the_order_of_variables_and_exit_codes_means_nothing() {
        let with = |env: [&str; 2], codes: [i32; 2]| {
            let env = env.map(|name| json!({"name": name, "value": "1"}));
            hash(
                json!({"pipelineRef": {"name": "p"}, "env": env, "execution": {"nonRetryableExitCodes": codes}}),
            )
        };
        assert_eq!(with(["A", "B"], [2, 3]), with(["B", "A"], [3, 2]));
        assert_ne!(with(["A", "B"], [2, 3]), with(["A", "C"], [2, 3]));
    }
}
