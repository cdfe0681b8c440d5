//! Follows Kubernetes objects: one watch per kind and namespace feeds the [`World`].

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crds::v1alpha1::{Pipeline, PipelineRun, ReferenceGrant};
use follow::Sink;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::names::RUN_UID_LABEL;
use crate::world::World;

/// How long all namespaces may take to deliver their objects. One that cannot be read must not stop the
/// others forever: it may have been deleted, or its rights may not be there yet.
const SYNCED_WITHIN: Duration = Duration::from_secs(30);

/// Starts all watches. Returns once each of them has delivered all existing objects or, if that takes too
/// long, once those of any namespace have. The runs of a namespace appear last, when everything else in it is
/// known: an operator that knows a run but not its pods would create them again.
pub async fn start(client: &Client, namespaces: &[String], world: &Arc<World>, tasks: &mut JoinSet<()>) {
    let namespaces: Vec<Option<&str>> = match namespaces {
        [] => vec![None],
        names => names.iter().map(|name| Some(name.as_str())).collect(),
    };
    let mut rounds = JoinSet::new();
    let mut missing = BTreeSet::new();
    for namespace in namespaces {
        // Each watch drops its sender after its first round.
        let (synced, mut done) = mpsc::channel::<()>(1);
        let watches = Watches { client: client.clone(), namespace, world: Arc::clone(world), synced };
        tasks.spawn(watches.follow::<Pipeline>(None));
        tasks.spawn(watches.follow::<ReferenceGrant>(None));
        tasks.spawn(watches.follow::<Job>(Some(RUN_UID_LABEL)));
        tasks.spawn(watches.follow::<Pod>(Some(RUN_UID_LABEL)));
        let (runs_synced, mut runs_done) = mpsc::channel::<()>(1);
        let runs = Watches { synced: runs_synced, ..watches }.follow::<PipelineRun>(None);
        if let Some(namespace) = namespace {
            world.await_namespace(namespace);
        }
        let (world, known) = (Arc::clone(world), namespace.map(str::to_owned));
        tasks.spawn(async move {
            while done.recv().await.is_some() {}
            if let Some(namespace) = known {
                world.namespace_is_read(&namespace);
            }
            runs.await;
        });
        let name = namespace.map(str::to_owned);
        missing.insert(name.clone());
        rounds.spawn(async move {
            while runs_done.recv().await.is_some() {}
            name
        });
    }
    let all = missing.len();
    let late = tokio::time::sleep(SYNCED_WITHIN);
    tokio::pin!(late);
    while !missing.is_empty() {
        tokio::select! {
            joined = rounds.join_next() => match joined {
                Some(Ok(name)) => drop(missing.remove(&name)),
                Some(Err(_)) | None => return,
            },
            () = &mut late, if missing.len() < all => {
                let namespaces: Vec<&str> = missing.iter().flatten().map(String::as_str).collect();
                tracing::warn!(?namespaces, "these namespaces cannot be read: their runs wait until they can be");
                return;
            }
        }
    }
}

/// The shared parts of the watches of one namespace, or of all.
struct Watches<'a> {
    client: Client,
    namespace: Option<&'a str>,
    world: Arc<World>,
    synced: mpsc::Sender<()>,
}

impl Watches<'_> {
    fn follow<K>(&self, labels: Option<&'static str>) -> impl Future<Output = ()> + Send + 'static + use<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
        World: Sink<K>,
    {
        let client = self.client.clone();
        let api: Api<DeserializeGuard<K>> = match self.namespace {
            None => Api::all(client),
            Some(namespace) => Api::namespaced(client, namespace),
        };
        let (world, synced) = (Arc::clone(&self.world), self.synced.clone());
        follow::objects(api, labels, world, move || drop(synced))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Mutex;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use crate::world::Uid;

    /// A deleted namespace, or one whose rights are not there yet, concerns only its own runs.
    #[tokio::test(start_paused = true)]
    async fn a_namespace_that_cannot_be_read_delays_the_others_once_and_its_runs_come_last() {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = Arc::clone(&asked);
        let server = tower::service_fn(move |request: Request<Body>| {
            let path = request.uri().path().to_owned();
            let kind = path.rsplit('/').next().unwrap_or_default().to_owned();
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            kept.lock().unwrap().push(path.clone());
            let run = json!({"metadata": {"name": "r", "namespace": "good", "uid": "u", "resourceVersion": "7"},
                "spec": {"pipelineRef": {"name": "p"}}});
            let items = if kind == "pipelineruns" { vec![run] } else { Vec::new() };
            let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "7"}, "items": items});
            async move {
                if is_watch {
                    std::future::pending::<()>().await;
                }
                let status = if path.contains("/bad/") { 403 } else { 200 };
                let body = if status == 200 { list.to_string() } else { "{}".to_owned() };
                Ok::<_, Infallible>(
                    Response::builder().status(status).body(Body::from(body.into_bytes())).unwrap(),
                )
            }
        });
        let (world, _touched) = World::new();
        let mut tasks = JoinSet::new();
        let client = Client::new(server, "default");
        let began = tokio::time::Instant::now();
        start(&client, &["bad".to_owned(), "good".to_owned()], &world, &mut tasks).await;
        assert_eq!(began.elapsed().as_secs(), SYNCED_WITHIN.as_secs());
        assert!(world.is_unread("bad") && !world.is_unread("good"), "the grants of one are unknown");
        let uid: Uid = "u".into();
        assert!(world.view(&uid).is_some(), "the run of the other namespace is known");
        let asked = asked.lock().unwrap();
        assert!(!asked.iter().any(|path| path.contains("/bad/pipelineruns")), "{asked:?}");
        let first =
            |kind: &str| asked.iter().position(|path| path.ends_with(&format!("/good/{kind}"))).unwrap();
        for before in ["pods", "jobs", "pipelines", "referencegrants"] {
            assert!(first(before) < first("pipelineruns"), "{asked:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn namespaces_that_can_all_be_read_delay_nothing() {
        let server = tower::service_fn(|request: Request<Body>| {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            async move {
                if is_watch {
                    std::future::pending::<()>().await;
                }
                let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "7"}, "items": []});
                Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
            }
        });
        let (world, _touched) = World::new();
        let began = tokio::time::Instant::now();
        start(
            &Client::new(server, "default"),
            &["a".to_owned(), "b".to_owned()],
            &world,
            &mut JoinSet::new(),
        )
        .await;
        assert!(began.elapsed() < SYNCED_WITHIN);
    }
}
