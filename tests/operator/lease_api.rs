//! The part of the API server that an election needs, in memory: it can stop answering or lose an answer at
//! the right moment, and time can be skipped. The same scenarios also run on a real API server, as far as it
//! can be made to behave this way.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::Full;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// One lease, and one contender's access to it.
#[derive(Clone, Default)]
pub struct LeaseApi {
    stored: Arc<Mutex<Stored>>,
    /// Whether this contender's requests remain unanswered.
    pub silent: Arc<AtomicBool>,
    /// Whether this contender's next write takes effect, but its answer is lost.
    pub forgetful: Arc<AtomicBool>,
}

#[derive(Default)]
struct Stored {
    version: u64,
    lease: Option<Lease>,
}

impl LeaseApi {
    /// Another contender's access to the same lease.
    pub fn for_another(&self) -> Self {
        Self { stored: Arc::clone(&self.stored), ..Self::default() }
    }

    pub fn client(&self) -> Client {
        let api = self.clone();
        Client::new(
            tower::service_fn(move |request| {
                let api = api.clone();
                async move { Ok::<_, Infallible>(api.answer(request).await) }
            }),
            "default",
        )
    }

    pub fn spec(&self) -> LeaseSpec {
        self.stored.lock().unwrap().lease.clone().unwrap().spec.unwrap()
    }

    /// Changes the lease, as a third party would.
    pub fn change(&self, change: impl FnOnce(&mut Option<Lease>)) {
        let mut stored = self.stored.lock().unwrap();
        change(&mut stored.lease);
        stored.version += 1;
        let version = stored.version.to_string();
        if let Some(lease) = &mut stored.lease {
            lease.metadata.resource_version = Some(version);
        }
    }

    async fn answer(&self, request: Request<Body>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let sent: Option<Lease> = serde_json::from_slice(&body.collect_bytes().await.unwrap()).ok();
        if self.silent.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let (code, answer) = self.act(&parts.method, sent);
        if parts.method != Method::GET && self.forgetful.swap(false, Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Response::builder().status(code).body(Full::new(Bytes::from(answer.to_string()))).unwrap()
    }

    fn act(&self, method: &Method, sent: Option<Lease>) -> (u16, Value) {
        let known = self.stored.lock().unwrap().lease.clone();
        let version =
            |lease: &Option<Lease>| lease.as_ref().and_then(|l| l.metadata.resource_version.clone());
        match (method, &known) {
            (&Method::GET | &Method::PUT, None) => return failure(404, "NotFound"),
            (&Method::GET, Some(_)) => {}
            (&Method::POST, Some(_)) => return failure(409, "AlreadyExists"),
            (&Method::PUT, Some(_)) if version(&known) != version(&sent) => return failure(409, "Conflict"),
            (&Method::POST | &Method::PUT, _) => self.change(|lease| *lease = sent),
            (other, _) => panic!("{other}"),
        }
        (200, serde_json::to_value(&self.stored.lock().unwrap().lease).unwrap())
    }
}

fn failure(code: u16, reason: &str) -> (u16, Value) {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason,
        "reason": reason, "code": code });
    (code, status)
}
