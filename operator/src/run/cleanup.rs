//! Removes what a deleted run has in Valkey and in Kubernetes. An unavailable Valkey does not block the
//! deletion: the remaining work is noted, and done when Valkey is back.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use crds::v1alpha1::PipelineRun;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt};
use protocol::RunId;
use queue::{KnownRuns, Owner, RunQueue, WorkerUser};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::build::owner;
use super::build::snapshot::Role;
use super::pass::{Next, Pass};
use super::setup;
use super::status::is_finished;
use crate::context::Context;
use crate::error::{Error, chain};
use crate::names::{self, FINALIZER, MANAGER};
use crate::world::World;

/// Field manager of the empty ConfigMap: applied by another one than what it holds, it takes nothing away.
const FOUNDER: &str = "openfilter-operator-founder";
/// How long a deleted run waits for Valkey.
const PATIENCE: Duration = Duration::from_secs(30);
/// The ConfigMap that lists what is still to be removed from Valkey, one entry per run: `<uid>: <key of its
/// stream>`. An entry that is not due yet also has, after a space, the Unix time at which it is.
pub const NOTES: &str = "openfilter-operator-cleanup";

impl Pass<'_> {
    /// Adds our finalizer, so that the run exists until [`Self::finalize`] has removed its belongings.
    pub async fn ensure_finalizer(&self) -> Result<(), Error> {
        if has_finalizer(self.run) {
            return Ok(());
        }
        let mut finalizers = self.run.finalizers().to_vec();
        finalizers.push(FINALIZER.to_owned());
        set_finalizers(self.ctx, self.run, &finalizers).await
    }

    /// Removes everything of a deleted run, then its finalizer.
    pub async fn finalize(&mut self) -> Result<Next, Error> {
        let (ctx, run) = (self.ctx, self.run);
        self.memory.listing.task = None;
        if !has_finalizer(run) {
            // Another program removed our finalizer while a third one's keeps the run. This operator may see
            // the run for the first time.
            if let Ok(run_id) = setup::run_id(run) {
                note_vanished(ctx, self.uid, &run_id, true).await?;
            }
            return Ok(Next::Done);
        }
        self.memory.run_id = setup::run_id(run).ok();
        let since = *self.memory.deleting.get_or_insert(self.now);
        // Garbage collection removes the workers too, so a lasting refusal does not block the run.
        if let Err(error) = remove_workers(ctx, run).await {
            if since.elapsed() < PATIENCE {
                return Err(error);
            }
            tracing::warn!(run = %run.name_any(), error = chain(&error), "the workers of a deleted run are left to garbage collection");
        }
        // Garbage collection removes these too, but later, and a run that is created again at once needs
        // their names. So a refusal does not block this run.
        if let Err(error) = remove_named(ctx, run).await {
            tracing::warn!(run = %run.name_any(), error = chain(&error), "the objects of a deleted run are left to garbage collection");
        }
        if let Ok(run_id) = setup::run_id(run)
            && let Err(error) = forget(ctx, &run_id, &self.owner().uid).await
        {
            if since.elapsed() < PATIENCE {
                return Err(error);
            }
            tracing::warn!(run = %run_id, error = chain(&error), "a deleted run is removed from Valkey later");
            note_left(ctx, &self.owner().uid, &run_id.key("work")).await?;
        }
        let others = run.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER);
        set_finalizers(ctx, run, &others.cloned().collect::<Vec<_>>()).await?;
        Ok(Next::Done)
    }
}

fn has_finalizer(run: &PipelineRun) -> bool {
    run.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

async fn set_finalizers(ctx: &Context, run: &PipelineRun, finalizers: &[String]) -> Result<(), Error> {
    let api: Api<PipelineRun> = ctx.api(run);
    // Send the version, so that a finalizer that another program adds at the same time is not lost.
    let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": run.resource_version()}});
    match api.patch(&run.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        patched => patched.map(|_| ()).map_err(Error::kubernetes("write the finalizers of the run")),
    }
}

async fn remove_workers(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    remove_owned::<Job>(ctx, run, &names::job(&run.name_any())).await?;
    let pods: Api<Pod> = ctx.api(run);
    let ours = owner::pods(run);
    // Delete at once: nothing depends on their last output.
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete_collection(&at_once, &ours)
        .await
        .map(|_| ())
        .map_err(Error::kubernetes("delete the pods of the run"))
}

async fn remove_named(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    remove_secrets(ctx, run).await?;
    remove_owned::<ControllerRevision>(ctx, run, &names::snapshot(&run.name_any())).await
}

/// Removes the Secrets of the run's workers.
pub async fn remove_secrets(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    remove_owned::<Secret>(ctx, run, &names::queue_secret(&run.name_any())).await?;
    remove_copied_keys(ctx, run).await
}

/// Removes the copies of keys from other namespaces.
pub async fn remove_copied_keys(ctx: &Context, run: &PipelineRun) -> Result<(), Error> {
    for role in [Role::Source, Role::Sink] {
        remove_owned::<Secret>(ctx, run, &names::credentials_copy(&run.name_any(), role.as_ref())).await?;
    }
    Ok(())
}

/// Removes the object of this name, if it exists and the run owns it.
async fn remove_owned<K>(ctx: &Context, run: &PipelineRun, name: &str) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let api: Api<K> = ctx.api(run);
    let kind = K::kind(&());
    let found =
        api.get_metadata_opt(name).await.map_err(Error::kubernetes(format!("look for {kind} {name}")))?;
    let Some(found) = found.filter(|found| owner::owns(run, found)) else { return Ok(()) };
    // Delete this object only, not one that has taken its name meanwhile.
    let this = Preconditions { uid: found.uid(), resource_version: None };
    match api.delete(name, &DeleteParams::background().preconditions(this)).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        deleted => deleted.map(|_| ()).map_err(Error::kubernetes(format!("delete {kind} {name}"))),
    }
}

/// Removes the run from Valkey, the user first: from then on no worker claims a file.
async fn forget(ctx: &Context, run_id: &RunId, uid: &str) -> Result<(), Error> {
    WorkerUser::remove(&ctx.valkey, run_id, uid).await?;
    RunQueue::delete(&ctx.valkey, run_id, uid).await?;
    let forgotten = async {
        let Some(known) = known_runs(ctx).await? else { return Ok(()) };
        known.remove(uid).await.map_err(Error::from)
    };
    // Nothing waits for this: a name too many is removed by the next operator, which finds neither a run nor
    // a queue.
    if let Err(error) = forgotten.await {
        tracing::debug!(run = %run_id, error = chain(&error), "the run is still in the list of known runs");
    }
    Ok(())
}

/// The runs that this installation knows. Its id is the UID of the ConfigMap with the notes, because several
/// installations can share a Valkey. An operator that may not write that knows none.
async fn known_runs(ctx: &Context) -> Result<Option<&KnownRuns>, Error> {
    let read = async || {
        let api: Api<ConfigMap> = Api::namespaced(ctx.client.clone(), &ctx.settings.operator_namespace);
        let wanted = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NOTES}});
        let applied = api.patch(NOTES, &PatchParams::apply(FOUNDER), &Patch::Apply(wanted)).await;
        match applied.map_err(Error::kubernetes(format!("read the UID of ConfigMap {NOTES}"))) {
            Ok(applied) => Ok(applied.uid().map(|uid| KnownRuns::of(&ctx.valkey, &uid))),
            Err(error) if error.is_refusal() => {
                tracing::warn!(
                    error = chain(&error),
                    "what runs leave in Valkey that go while no operator runs stays there"
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    };
    Ok(ctx.known_runs.get_or_try_init(read).await?.as_ref())
}

/// Remembers a run whose queue is about to be opened. No failure blocks the run: it costs keys in Valkey at
/// worst.
pub async fn remember(ctx: &Context, run_id: &RunId, owner: &Owner) {
    let remembered = async {
        let Some(known) = known_runs(ctx).await? else { return Ok(()) };
        known.add(run_id, owner).await.map_err(Error::from)
    };
    if let Err(error) = remembered.await {
        tracing::warn!(
            run = %run_id,
            error = chain(&error),
            "if this run is removed by force while no operator runs, its queue stays"
        );
    }
}

/// Notes the runs that went while no operator ran, although they had our finalizer.
pub async fn note_gone_unseen(ctx: &Context) -> Result<(), Error> {
    let Some(known) = known_runs(ctx).await? else { return Ok(()) };
    let known = known.all().await?;
    if known.is_empty() {
        return Ok(());
    }
    let noted = notes(ctx).await?;
    let mut failed = None;
    for (uid, (run_id, owner)) in missing(known, &noted, &ctx.settings.namespaces, &ctx.world) {
        // A run that cannot be read looks as if it were gone. It must not hide the others.
        let api: Api<PipelineRun> = Api::namespaced(ctx.client.clone(), &owner.namespace);
        match api.get_metadata_opt(&owner.name).await {
            Ok(found) if found.as_ref().and_then(ResourceExt::uid).as_deref() == Some(&uid) => {}
            Ok(_) => note_vanished(ctx, &uid, &run_id, false).await?,
            Err(error) => failed = Some(Error::kubernetes("look for a run that seems to be gone")(error)),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Notes a run that is still to be removed from Valkey, or deletes its note.
async fn note(ctx: &Context, uid: &str, stream: Option<&str>) -> Result<(), Error> {
    let api: Api<ConfigMap> = Api::namespaced(ctx.client.clone(), &ctx.settings.operator_namespace);
    let doing = || Error::kubernetes(format!("write ConfigMap {NOTES}"));
    let patch = Patch::Merge(json!({"data": {uid: stream}}));
    match api.patch(NOTES, &PatchParams::default(), &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let data: BTreeMap<&str, &str> = stream.into_iter().map(|stream| (uid, stream)).collect();
            let wanted =
                json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NOTES}, "data": data});
            api.patch(NOTES, &PatchParams::apply(MANAGER).force(), &Patch::Apply(wanted))
                .await
                .map_err(doing())?;
        }
        patched => {
            patched.map_err(doing())?;
        }
    }
    Ok(())
}

/// Notes the rest of a run in Valkey. If the operator may not write the note, the rest stays there: the run
/// does not wait for it.
async fn note_left(ctx: &Context, uid: &str, noted: &str) -> Result<(), Error> {
    match note(ctx, uid, Some(noted)).await {
        Err(error) if error.is_refusal() => {
            tracing::warn!(noted, error = chain(&error), "the data of a deleted run stays in Valkey");
            Ok(())
        }
        written => written,
    }
}

/// Notes a run that is gone although it had our finalizer: a person or a program removed the finalizer, or a
/// backup is being restored. Its queue is kept as long as the details of a finished run, because the same
/// run, created again, continues from there. A run that was being deleted leaves nothing.
pub async fn note_vanished(
    ctx: &Context,
    uid: &str,
    run_id: &RunId,
    was_being_deleted: bool,
) -> Result<(), Error> {
    let stream = run_id.key("work");
    if was_being_deleted {
        return note_left(ctx, uid, &stream).await;
    }
    let kept = SignedDuration::try_from(ctx.settings.retention.details).unwrap_or(SignedDuration::MAX);
    let due = Timestamp::now().saturating_add(kept).map_or(i64::MAX, Timestamp::as_second);
    tracing::warn!(stream, uid, due, "a run was removed without its finalizer: its queue is removed later");
    note_left(ctx, uid, &format!("{stream} {due}")).await
}

/// Makes the ledger remember finished runs for as long as their PipelineRuns exist, so that YAML that is
/// still in Git never runs again.
pub async fn renew_ledger(ctx: &Context) -> Result<(), Error> {
    let runs = ctx.world.runs();
    let finished = runs.iter().filter(|run| is_finished(run)).filter_map(|run| setup::run_id(run).ok());
    RunQueue::seen(&ctx.valkey, &finished.collect::<Vec<_>>(), &ctx.settings.retention).await?;
    Ok(())
}

/// The known runs that seem to be gone. Those that are noted were noted with the time at which they are due,
/// and in a namespace that is not watched nothing is seen.
fn missing(
    mut known: BTreeMap<String, (RunId, Owner)>,
    noted: &BTreeMap<String, String>,
    watched: &[String],
    world: &World,
) -> BTreeMap<String, (RunId, Owner)> {
    known.retain(|uid, (_, owner)| {
        let is_watched = watched.is_empty() || watched.contains(&owner.namespace);
        is_watched && !noted.contains_key(uid) && world.view(&uid.as_str().into()).is_none()
    });
    known
}

/// What is still to be removed from Valkey, by UID.
async fn notes(ctx: &Context) -> Result<BTreeMap<String, String>, Error> {
    let api: Api<ConfigMap> = Api::namespaced(ctx.client.clone(), &ctx.settings.operator_namespace);
    let found = api.get_opt(NOTES).await.map_err(Error::kubernetes(format!("read ConfigMap {NOTES}")))?;
    Ok(found.and_then(|found| found.data).unwrap_or_default())
}

/// Removes from Valkey what could not be removed before.
pub async fn sweep(ctx: &Context) -> Result<(), Error> {
    for (uid, noted) in notes(ctx).await? {
        let Noted { run_id, due } = read_note(&noted);
        if due > Timestamp::now().as_second() {
            continue;
        }
        // Skip a run that is back: one that could not be read for a while looked as if it were gone.
        let view = ctx.world.view(&uid.as_str().into());
        let is_back = view.is_some_and(|view| view.run.metadata.deletion_timestamp.is_none());
        if let Some(run_id) = run_id.filter(|_| !is_back) {
            forget(ctx, &run_id, &uid).await?;
        }
        note(ctx, &uid, None).await?;
    }
    Ok(())
}

/// The run to be removed, and when; a note without a time is due at once.
#[derive(Debug, PartialEq, Eq)]
struct Noted {
    run_id: Option<RunId>,
    due: i64,
}

fn read_note(text: &str) -> Noted {
    let (stream, due) = text.split_once(' ').unwrap_or((text, ""));
    let run_id = stream.strip_prefix("pr:").and_then(|rest| rest.strip_suffix(":work"));
    Noted { run_id: run_id.and_then(|id| id.parse().ok()), due: due.parse().unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use follow::Sink;

    /// Two finalizers were removed by hand while no operator ran.
    #[test]
    fn runs_that_went_while_no_operator_ran_are_noted_once_and_only_where_it_would_see_them() {
        let (world, _touched) = World::new();
        let there = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun",
            "metadata": {"name": "there", "namespace": "a", "uid": "there"}, "spec": {"pipelineRef": {"name": "p"}}});
        world.put(serde_json::from_value::<PipelineRun>(there).expect("a run"));
        let known = |uid: &str, namespace: &str| {
            let run_id = RunId::derive(namespace, uid).expect("a runId");
            let owner = Owner { uid: uid.into(), namespace: namespace.into(), name: uid.into() };
            (uid.to_owned(), (run_id, owner))
        };
        let all = BTreeMap::from([
            known("there", "a"),
            known("gone", "a"),
            known("noted", "a"),
            known("elsewhere", "b"),
        ]);
        let noted = BTreeMap::from([("noted".to_owned(), "pr:a.r:work 1".to_owned())]);
        let found = |watched: &[String]| {
            missing(all.clone(), &noted, watched, &world).into_keys().collect::<Vec<_>>()
        };
        assert_eq!(found(&["a".to_owned()]), ["gone"]);
        assert_eq!(found(&[]), ["elsewhere", "gone"], "every namespace is watched");
    }

    #[test]
    fn a_note_names_a_run_and_when_it_goes() {
        let run_id: RunId = "team-a.monday".parse().expect("a runId");
        let noted = |due| Noted { run_id: Some(run_id.clone()), due };
        assert_eq!(read_note("pr:team-a.monday:work"), noted(0), "as versions before wrote it");
        assert_eq!(read_note("pr:team-a.monday:work 1800000000"), noted(1_800_000_000));
        assert_eq!(read_note("pr:team-a.monday:work soon"), noted(0));
        assert_eq!(read_note("nonsense 1800000000"), Noted { run_id: None, due: 1_800_000_000 });
    }
}
