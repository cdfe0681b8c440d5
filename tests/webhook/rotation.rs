//! Two replicas share one Secret, which is changed and deleted, while the real API server asks both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::{join, join_all};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::Patch;
use serde_json::{Value, json};
use time::OffsetDateTime;
use webhook::admit::Settings;
use webhook::args::SECRET;
use webhook::server::Limits;
use webhook::tls::issue::Material;
use webhook::tls::managed::{Managed, ManagedError};

use crate::harness::Webhook;
use crate::on_cluster::{Cluster, HOST};

/// Between two passes: much longer than the API server needs to learn of a change, and much shorter than in
/// production.
const PAUSE: Duration = Duration::from_secs(3);
/// Of two replicas that write at once, one must repeat its pass, and new material is served in the pass after
/// its publication.
const LOOKS_MAX: usize = 5;

/// A webhook that maintains its certificates when the test tells it to; in production this happens once a
/// minute.
struct Replica {
    webhook: Webhook,
    managed: Managed,
    trusted: Option<String>,
}

impl Replica {
    fn start(cluster: &Cluster) -> Self {
        let webhook = Webhook::at(HOST, Settings::default(), Limits::default());
        webhook.namespace(&cluster.namespace.name, &[]);
        // One connection per request, so that each request meets the current certificate.
        webhook.announce_stop();
        let managed = Managed {
            client: cluster.client(),
            namespace: cluster.namespace.name.clone(),
            secret: SECRET.to_owned(),
            names: vec![HOST.to_owned()],
            configuration: cluster.namespace.name.clone(),
            certificates: Arc::clone(&webhook.certificates),
            metrics: Arc::clone(&webhook.metrics),
        };
        Self { webhook, managed, trusted: None }
    }

    async fn look(&mut self) {
        match self.managed.pass(self.trusted.as_deref()).await {
            Ok(bundle) => self.trusted = Some(bundle),
            Err(ManagedError::Beaten) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn serves(&self) -> Vec<u8> {
        self.webhook.certificates.chain().unwrap()
    }
}

/// Runs passes of both replicas at the same moment, until both serve the Secret's certificate.
async fn settle(secrets: &Api<Secret>, [one, other]: &mut [Replica; 2]) {
    for _ in 0..LOOKS_MAX {
        join(one.look(), other.look()).await;
        tokio::time::sleep(PAUSE).await;
        let stored = secrets.get(SECRET).await.unwrap().data.unwrap()["tls.crt"].0.clone();
        if one.serves() == stored && other.serves() == stored {
            return;
        }
    }
    panic!("the replicas do not agree after {LOOKS_MAX} looks");
}

/// The data of a Secret that is this many days old, as a backup would restore it.
fn aged(days: i64) -> Value {
    let then = OffsetDateTime::now_utc() - time::Duration::days(days);
    let Material { bundle, authority_key, certificate, key } =
        Material::create(&[HOST.to_owned()], then).unwrap();
    let bytes = |text: String| ByteString(text.into_bytes());
    json!({ "ca.crt": bytes(bundle), "ca.key": bytes(authority_key), "tls.crt": bytes(certificate), "tls.key": bytes(key) })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn whatever_becomes_of_the_secret_no_request_fails_and_two_replicas_agree() {
    let cluster = Cluster::start("rotation").await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), &cluster.namespace.name);
    let mut replicas = [Replica::start(&cluster), Replica::start(&cluster)];
    settle(&secrets, &mut replicas).await;
    cluster.route_to_ports(replicas.each_ref().map(|replica| replica.webhook.address.port())).await;
    // The next pass knows what routing has published.
    settle(&secrets, &mut replicas).await;

    let stop = AtomicBool::new(false);
    let load = join_all((0..4).map(|number| {
        let (cluster, stop, run) = (&cluster, &stop, cluster.run(&format!("load-{number}")));
        async move {
            let mut answered = 0;
            while !stop.load(Ordering::Relaxed) {
                cluster.create(&run, true).await.unwrap();
                answered += 1;
            }
            answered
        }
    }));
    let changes = async {
        let broken = json!({ "tls.key": ByteString(b"nonsense".to_vec()) });
        // A Secret whose certificate is due for renewal, and one that both replicas take up unchanged.
        let (old, younger) = (aged(80), aged(1));
        for change in [None, Some(broken), Some(old), Some(younger), None] {
            match &change {
                None => drop(secrets.delete(SECRET, &Default::default()).await.unwrap()),
                Some(data) => {
                    let patch = Patch::Merge(json!({ "data": data }));
                    secrets.patch(SECRET, &Default::default(), &patch).await.unwrap();
                }
            }
            let before = replicas.each_ref().map(Replica::serves);
            let [one, other] = &mut replicas;
            join(one.look(), other.look()).await;
            assert_eq!(
                replicas.each_ref().map(Replica::serves),
                before,
                "the API server was told a moment ago"
            );
            tokio::time::sleep(PAUSE).await;
            settle(&secrets, &mut replicas).await;
            assert_ne!(replicas[0].serves(), before[0]);
        }
        stop.store(true, Ordering::Relaxed);
    };
    let (answered, ()) = join(load, changes).await;
    assert!(answered.iter().all(|answered| *answered > 0), "{answered:?}");
}
