//! Watches on an API server that stops answering: a half-open connection looks like an idle one.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use follow::{Listed, Sink};
use futures::stream;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::client::Body;
use kube::{Api, Client, Config};
use serde_json::json;
use tests::eventually;
use tests::fake::Fake;
use tokio::time::Instant;

/// Counts the events that it receives.
#[derive(Default)]
struct Counts {
    rounds: AtomicUsize,
    broke: AtomicUsize,
    forgotten: Mutex<Vec<String>>,
}

impl Sink<Pod> for Counts {
    fn put(&self, _: Pod) {}

    fn forget(&self, pod: &ObjectMeta) {
        self.forgotten.lock().unwrap().extend(pod.name.clone());
    }

    fn listed(&self, _: &Listed) {
        self.rounds.fetch_add(1, Ordering::SeqCst);
    }

    fn broke(&self) {
        self.broke.fetch_add(1, Ordering::SeqCst);
    }
}

fn list() -> Bytes {
    let list =
        json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": []});
    list.to_string().into()
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_falls_silent_is_asked_for_again_within_a_minute() {
    let watches: Arc<Mutex<Vec<(Instant, String)>>> = Arc::default();
    let kept = Arc::clone(&watches);
    let server = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let body: BoxBody<Bytes, Infallible> = if query.contains("watch=true") {
            kept.lock().unwrap().push((Instant::now(), query));
            StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>()).boxed()
        } else {
            Full::new(list()).boxed()
        };
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    let (counts, start) = (Arc::new(Counts::default()), Instant::now());
    let api = Api::all(Client::new(server, "default"));
    tokio::spawn(follow::objects::<Pod>(api, None, Arc::clone(&counts), || {}));
    tokio::time::sleep(Duration::from_secs(180)).await;
    let watches = watches.lock().unwrap();
    let times: Vec<Duration> = watches.iter().map(|(when, _)| *when - start).collect();
    assert!(times.len() >= 3, "{times:?}");
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] < Duration::from_secs(60)), "{times:?}");
    for (_, query) in watches.iter() {
        let has = |wanted: &str| query.split('&').any(|parameter| parameter == wanted);
        assert!(has("timeoutSeconds=50") && has("resourceVersion=7"), "{query}");
    }
    assert_eq!(counts.rounds.load(Ordering::SeqCst), 1, "it goes on where it was");
}

/// Neither pod fits its type, so a watch knows only their names.
#[tokio::test]
async fn the_deletion_of_an_object_that_cannot_be_read_is_noticed_at_once() {
    let server = tower::service_fn(|request: Request<Body>| {
        let watched = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let body: BoxBody<Bytes, Infallible> = if watched {
            let event = |kind: &str, name: &str| {
                let pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": 5,
                    "metadata": {"name": name, "namespace": "default", "resourceVersion": "8"}});
                Ok(Frame::data(Bytes::from(format!("{}\n", json!({"type": kind, "object": pod})))))
            };
            let events = [event("MODIFIED", "changed"), event("DELETED", "deleted")];
            let events = futures::StreamExt::chain(stream::iter(events), stream::pending());
            StreamBody::new(events).boxed()
        } else {
            Full::new(list()).boxed()
        };
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    let counts = Arc::new(Counts::default());
    let api = Api::all(Client::new(server, "default"));
    tokio::spawn(follow::objects::<Pod>(api, None, Arc::clone(&counts), || {}));
    eventually("it is forgotten", || async { *counts.forgotten.lock().unwrap() == ["deleted"] }).await;
    assert_eq!(counts.rounds.load(Ordering::SeqCst), 1, "without another list");
}

#[tokio::test]
async fn an_api_server_that_never_answers_is_given_up_and_asked_again() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let server = Fake::start_slow(|_| std::future::pending::<Response<Full<Bytes>>>()).await;
    let mut config = Config::new(format!("http://{}", server.address).parse().unwrap());
    follow::notice_silence(&mut config);
    let counts = Arc::new(Counts::default());
    let api = Api::all(Client::try_from(config).unwrap());
    tokio::spawn(follow::objects::<Pod>(api, None, Arc::clone(&counts), || {}));
    eventually("it asks", || async { server.requests().len() == 1 }).await;
    assert_eq!(counts.broke.load(Ordering::SeqCst), 0);
    tokio::time::pause();
    tokio::time::advance(follow::SILENCE_MAX).await;
    tokio::time::resume();
    eventually("it gives up", || async { counts.broke.load(Ordering::SeqCst) == 1 }).await;
    eventually("it asks again", || async { server.requests().len() >= 2 }).await;
}
