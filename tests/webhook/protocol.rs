//! HTTP: the answers to callers, and the treatment of malformed requests.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tests::examples::{grant, pipeline, policy, run, with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use webhook::admit::Settings;
use webhook::server::Limits;

use crate::harness::{Client, Http1, Webhook, over, request, review};

/// Limits that make no answer of these tests late, however slow the machine is.
const LIMITS: Limits = Limits {
    answer: Duration::from_secs(600),
    body: Duration::from_secs(600),
    concurrent: 128,
    bytes: 16 << 20,
};

#[tokio::test(flavor = "multi_thread")]
async fn valid_objects_of_every_kind_are_admitted_over_every_protocol() {
    let webhook = Webhook::start();
    webhook.secret("team-a", "camera-keys", &["accessKeyId", "secretAccessKey"]);
    webhook.pipeline(&pipeline());
    let client = webhook.client();
    for object in [pipeline(), run(), policy(), grant()] {
        assert_eq!(client.create(&object).await["allowed"], true, "{object}");
    }
    let body = serde_json::to_vec(&review("CREATE", &run())).unwrap();
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let (status, _) =
            client.send_with(&[version], "POST", "/validate/pipelinerun", body.clone()).await.unwrap();
        assert_eq!(status, 200);
    }
    let mut connection = client.http2().await;
    let (status, answer) = over(&mut connection, "/validate/pipelinerun", body).await.unwrap();
    assert_eq!(status, 200);
    assert_eq!(serde_json::from_slice::<Value>(&answer).unwrap()["response"]["allowed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_reviews_get_an_error_that_says_what_is_wrong() {
    let webhook = Webhook::with(Settings::default(), LIMITS);
    let client = webhook.client();
    let wrong_kind = serde_json::to_vec(&review("CREATE", &pipeline())).unwrap();
    let mut old = review("CREATE", &run());
    old["apiVersion"] = json!("admission.k8s.io/v1beta1");
    for (body, words) in [
        (b"".to_vec(), "AdmissionReview"),
        (b"{".to_vec(), "AdmissionReview"),
        (b"\xff\xfe".to_vec(), "AdmissionReview"),
        (b"null".to_vec(), "AdmissionReview"),
        (vec![b'['; 100_000], "AdmissionReview"),
        (wrong_kind, "Pipeline"),
        (serde_json::to_vec(&old).unwrap(), "v1beta1"),
    ] {
        let (status, answer) = client.send("POST", "/validate/pipelinerun", body).await.unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(status, 400);
        assert!(answer["message"].as_str().unwrap().contains(words), "{answer}");
    }
    assert_eq!(client.send("POST", "/validate/pod", Vec::new()).await.unwrap().0, 404);
    assert_eq!(client.send("GET", "/validate/pipeline", Vec::new()).await.unwrap().0, 405);
}

/// A caller that sends its whole request before it reads must be able to do so; otherwise it sees a broken
/// pipe and no answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_can_be_sent_to_its_end_and_is_refused() {
    let webhook = Webhook::with(Settings::default(), LIMITS);
    // More than the connection buffers.
    let body = vec![b' '; 64 << 20];
    let mut caller = webhook.client().begin("/validate/pipelinerun", b"", body.len()).await;
    caller.write_all(&body).await.unwrap();
    let mut answer = [0; 300];
    let read = caller.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..read]);
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_metrics_tell_what_happens() {
    let webhook = Webhook::start();
    let client = webhook.client();
    let get = async |path: &str| {
        let (status, body) = client.send("GET", path, Vec::new()).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    assert_eq!(get("/livez").await.0, 200);
    let (status, text) = get("/readyz").await;
    assert!(status == 503 && text.contains("waiting for policies"), "{text}");
    webhook.health.have("policies");
    assert_eq!(get("/readyz").await.0, 200);

    let mut bad = run();
    bad["spec"]["execution"]["timeout"] = json!("soon");
    client.create(&bad).await;
    client.create(&run()).await;
    let (_, text) = get("/metrics").await;
    for line in [
        "openfilter_webhook_requests_total{kind=\"PipelineRun\",step=\"validate\",outcome=\"denied\"} 1",
        "openfilter_webhook_requests_total{kind=\"PipelineRun\",step=\"validate\",outcome=\"warned\"} 1",
        "openfilter_webhook_rules_broken_total{rule=\"duration\"} 1",
        "openfilter_webhook_request_seconds_count{kind=\"PipelineRun\",step=\"validate\"} 2",
        "openfilter_webhook_in_flight 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

/// The API server must be able to ask again, or to let `failurePolicy` decide.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_takes_too_long_is_an_error_and_not_a_verdict() {
    let limits = Limits { answer: Duration::ZERO, concurrent: 1, ..LIMITS };
    let webhook = Webhook::with(Settings::default(), limits);
    let client = webhook.client();
    let body = serde_json::to_vec(&review("CREATE", &policy())).unwrap();
    // Compiling a policy takes longer than this limit.
    let (status, answer) = client.send("POST", "/validate/pipelinepolicy", body).await.unwrap();
    assert_eq!(status, 503, "{}", String::from_utf8_lossy(&answer));
}

/// Sends this many concurrent reviews of a run, each over its own connection as the API server does, and
/// padded with this many ignored bytes.
fn send_many(client: &Client, number: usize, padding: usize) -> Vec<JoinHandle<StatusCode>> {
    let padded = with(review("CREATE", &run()), "/padding", json!("a".repeat(padding)));
    let send = |_| {
        let (client, body) = (client.clone(), serde_json::to_vec(&padded).unwrap());
        tokio::spawn(async move { client.send("POST", "/validate/pipelinerun", body).await.unwrap().0 })
    };
    (0..number).map(send).collect()
}

async fn all_are_answered(requests: Vec<JoinHandle<StatusCode>>) {
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_beyond_the_limit_wait_and_are_all_answered() {
    let webhook = Webhook::with(Settings::default(), Limits { concurrent: 2, ..LIMITS });
    webhook.live.gate.close();
    let requests = send_many(&webhook.client(), 10, 0);
    tests::eventually("all have come", || async { webhook.metrics.in_flight.get() == 10 }).await;
    webhook.live.gate.holds(2).await;
    webhook.live.gate.open();
    all_are_answered(requests).await;
    assert_eq!(webhook.live.gate.most(), 2);
}

/// Many concurrent large bodies would need more memory than the pod has. Small ones do not wait behind them.
#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_wait_for_room_and_small_ones_do_not() {
    let webhook = Webhook::with(Settings::default(), Limits { bytes: 10 << 20, ..LIMITS });
    webhook.live.gate.close();
    let requests = send_many(&webhook.client(), 6, 4 << 20);
    tests::eventually("all have come", || async { webhook.metrics.in_flight.get() == 6 }).await;
    webhook.live.gate.holds(2).await;
    let small = send_many(&webhook.client(), 3, 0);
    webhook.live.gate.holds(5).await;
    webhook.live.gate.open();
    all_are_answered(requests).await;
    all_are_answered(small).await;
    assert_eq!(webhook.live.gate.most(), 5);
}

/// A caller that announces a body and never sends it delays no other.
#[tokio::test(flavor = "multi_thread")]
async fn others_are_answered_while_more_bodies_are_awaited_than_there_are_slots() {
    const STALLED: i64 = 5;
    let webhook = Webhook::with(Settings::default(), Limits { concurrent: 2, ..LIMITS });
    let client = webhook.client();
    let mut stalled = Vec::new();
    for _ in 0..STALLED {
        stalled.push(client.begin("/validate/pipelinerun", b"{", 100).await);
    }
    let come = || async { webhook.metrics.in_flight.get() == STALLED };
    tests::eventually("all have come", come).await;
    let answer = tokio::time::timeout(Duration::from_secs(60), client.create(&run())).await;
    assert_eq!(answer.expect("it waits for bodies of others")["allowed"], true);
    assert_eq!(webhook.metrics.in_flight.get(), STALLED, "they are still awaited");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come_is_not_waited_for_longer_than_its_limit() {
    let limits = Limits { body: Duration::from_millis(50), ..LIMITS };
    let webhook = Webhook::with(Settings::default(), limits);
    let mut stalled = webhook.client().begin("/validate/pipelinerun", b"{", 100).await;
    let mut answer = [0; 300];
    let read = stalled.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..read]);
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_caller_has_gone_is_no_longer_counted() {
    let webhook = Webhook::with(Settings::default(), LIMITS);
    webhook.live.gate.close();
    let body = serde_json::to_vec(&review("CREATE", &run())).unwrap();
    let caller = webhook.client().begin("/validate/pipelinerun", &body, body.len()).await;
    webhook.live.gate.holds(1).await;
    assert_eq!(webhook.metrics.in_flight.get(), 1);
    drop(caller);
    tests::eventually("it is forgotten", || async { webhook.metrics.in_flight.get() == 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_drops_no_request_that_is_on_its_way() {
    let webhook = Webhook::with(Settings::default(), LIMITS);
    let (client, live, metrics) = (webhook.client(), Arc::clone(&webhook.live), Arc::clone(&webhook.metrics));
    live.gate.close();
    let requests = send_many(&client, 5, 0);
    live.gate.holds(5).await;
    let stopped = tokio::spawn(webhook.stop());
    let gone = || async { client.send("GET", "/livez", Vec::new()).await.is_err() };
    tests::eventually("it listens no more", gone).await;
    live.gate.open();
    all_are_answered(requests).await;
    stopped.await.unwrap();
    assert_eq!(metrics.in_flight.get(), 0);
}

/// The API server keeps HTTP/1.1 connections open, and a request fails if its connection is closed while it
/// is sent.
#[tokio::test(flavor = "multi_thread")]
async fn before_it_stops_every_answer_is_the_last_of_its_connection() {
    let webhook = Webhook::start();
    let mut kept = webhook.client().http1().await;
    let last = async |kept: &mut Http1| {
        kept.ready().await.unwrap();
        let answer = kept.send_request(request("GET", "/livez", Vec::new())).await.unwrap();
        assert_eq!(answer.status(), 200);
        let last = answer.headers().get("connection").is_some_and(|value| value == "close");
        answer.into_body().collect().await.unwrap();
        last
    };
    assert!(!last(&mut kept).await && !last(&mut kept).await);
    webhook.announce_stop();
    assert!(last(&mut kept).await);
    assert!(kept.ready().await.is_err(), "the connection is closed after it");
    assert!(last(&mut webhook.client().http1().await).await, "who still comes is answered");
    let mut many = webhook.client().http2().await;
    let body = serde_json::to_vec(&review("CREATE", &run())).unwrap();
    assert_eq!(over(&mut many, "/validate/pipelinerun", body).await.unwrap().0, 200);
}
