//! Certificates change while requests are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tests::examples::run;
use time::OffsetDateTime;
use webhook::tls::issue::Material;

use crate::harness::{Client, Webhook, names, over, review};

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_under_load_loses_no_request() {
    let webhook = Webhook::start();
    let next = Material::create(&names(), OffsetDateTime::now_utc()).unwrap();
    // Trusts both authorities, as the API server does during a rotation.
    let client = Client::new(webhook.address, &format!("{}{}", webhook.material.bundle, next.bundle));
    let body = serde_json::to_vec(&review("CREATE", &run())).unwrap();
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let workers: Vec<_> = (0..4)
        .map(|number| {
            let (client, body, stop, answered) =
                (client.clone(), body.clone(), Arc::clone(&stop), Arc::clone(&answered));
            tokio::spawn(async move {
                let mut kept = client.http2().await;
                while !stop.load(Ordering::Relaxed) {
                    // Half of the requests use connections that stay open, half use new ones.
                    let (status, _) = match number % 2 {
                        0 => over(&mut kept, "/validate/pipelinerun", body.clone()).await.unwrap(),
                        _ => client.send("POST", "/validate/pipelinerun", body.clone()).await.unwrap(),
                    };
                    assert_eq!(status, 200);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    // At least 20 rounds, and more if too few requests were answered meanwhile.
    for round in 0..1_000 {
        if round >= 20 && answered.load(Ordering::Relaxed) > 20 {
            break;
        }
        let material = if round % 2 == 0 { &next } else { &webhook.material };
        let taken = webhook.certificates.take_up(material.certificate.as_bytes(), material.key.as_bytes());
        assert!(taken.unwrap().is_some());
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    assert!(answered.load(Ordering::Relaxed) > 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_trust_the_authority_gets_no_answer_and_gives_none() {
    let webhook = Webhook::start();
    let stranger = Material::create(&names(), OffsetDateTime::now_utc()).unwrap();
    let client = Client::new(webhook.address, &stranger.bundle);
    assert!(client.send("GET", "/livez", Vec::new()).await.is_err());
    // The next client gets the new certificate, without a restart.
    webhook.certificates.take_up(stranger.certificate.as_bytes(), stranger.key.as_bytes()).unwrap();
    assert_eq!(client.send("GET", "/livez", Vec::new()).await.unwrap().0, 200);
}
