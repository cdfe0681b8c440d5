//! A failing storage: the claimer waits for transient faults, and reports lasting ones with a code and a
//! reason, and without leaving a file.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use http::Method;
use testbed::{Fault, FaultyS3, Rule};
use tests::eventually;
use tests::fake::{Fake, part_of, status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::harness::{BUCKET, Bench, listed, noise};

const MIB: usize = 1024 * 1024;

/// A bench whose storage is behind a proxy that can inject faults.
pub async fn faulty() -> (Bench, FaultyS3) {
    let mut bench = Bench::start().await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("S3_ENDPOINT", &proxy.url).set("SINK_S3_ENDPOINT", &proxy.url);
    (bench, proxy)
}

#[tokio::test]
async fn an_error_that_goes_away_is_not_noticed() {
    for fault in [Fault::InternalError, Fault::SlowDown] {
        let (bench, proxy) = faulty().await;
        bench.offer("a", b"x").await;
        proxy.inject(Rule::every(fault, "/a").times(1));
        bench.claim().await.assert_ok();
        assert_eq!((bench.input().as_slice(), proxy.seen().len()), (b"x".as_slice(), 2), "{fault:?}");
    }
}

/// A gateway's limit: the gateway knows no S3 codes, and a HEAD has no body for one anyway.
#[tokio::test]
async fn a_request_that_comes_too_soon_is_repeated_and_given_up_in_the_end() {
    let mut bench = Bench::start().await;
    let content = noise(9 * MIB);
    let (file, met) = (listed("large", &content), Mutex::new(HashSet::new()));
    let etag = file.etag.clone();
    let server = Fake::start(move |request| {
        let too_soon = met.lock().unwrap().insert(request.method().clone());
        if too_soon { status(429) } else { part_of(request, &content, &etag) }
    })
    .await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    bench.enqueue(vec![file]).await;
    bench.claim().await.assert_ok();
    let asked = |method| server.requests().iter().filter(|request| request.method() == method).count();
    // One HEAD, and two parts, one of them twice.
    assert_eq!((asked(Method::HEAD), asked(Method::GET)), (2, 3));
    let server = Fake::start(|_| status(429)).await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    bench.claim().await.assert_failed(17, &["StorageUnreachable", "429"]);
    assert_eq!(server.paths().len(), 2);
    bench.assert_no_input();
}

#[tokio::test]
async fn a_body_that_breaks_off_once_is_fetched_again() {
    let (bench, proxy) = faulty().await;
    let content = noise(20 * MIB);
    bench.offer("large", &content).await;
    proxy.inject(Rule::every(Fault::Truncated(3 * MIB), "/large").method(Method::GET).times(1));
    bench.claim().await.assert_ok();
    assert!(bench.input() == content);
    // One HEAD, and three parts, one of them twice.
    assert_eq!(proxy.seen().len(), 5, "{:?}", proxy.seen());
}

/// A connection that ends early must not make a truncated file look complete.
#[tokio::test]
async fn a_truncated_body_is_a_failure_with_a_reason() {
    let (bench, proxy) = faulty().await;
    bench.offer("cut", &noise(20 * MIB)).await;
    proxy.inject(Rule::every(Fault::Truncated(3 * MIB), "/cut").method(Method::GET));
    bench.claim().await.assert_failed(21, &["ObjectTruncated", "s3://videos/cut", "bytes, 2 times"]);
    bench.assert_no_input();
}

/// The same for a small object, byte by byte: the proxy's connection ends before such a small number of bytes
/// is sent.
#[tokio::test]
async fn a_small_body_that_ends_or_stalls_in_the_middle_is_a_failure_with_a_reason() {
    for stalls in [false, true] {
        let mut bench = Bench::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        bench.set("S3_ENDPOINT", format!("http://{}", listener.local_addr().unwrap()));
        bench.set("S3_TIMEOUT", "3s").offer("cut", &noise(1_000)).await;
        let server = tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4_096]).await.unwrap();
                let start = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n0123456789";
                stream.write_all(start).await.unwrap();
                open.extend(stalls.then_some(stream));
            }
        });
        let words = ["ObjectTruncated", "s3://videos/cut", "after 10 of 1000 bytes, 2 times"];
        let ended = bench.claim().await;
        ended.assert_failed(21, &words);
        bench.assert_no_input();
        server.abort();
    }
}

/// The run covers the object that was listed, not one that has replaced it since.
#[tokio::test]
async fn an_object_that_changed_since_the_listing_is_a_failure_with_a_reason() {
    for size in [1_000, 9 * MIB] {
        let bench = Bench::start().await;
        bench.offer("a", &noise(size)).await;
        bench.store("a", &noise(size)[1..]).await;
        bench.claim().await.assert_failed(16, &["ObjectChanged", "s3://videos/a"]);
        bench.assert_no_input();
    }
}

#[tokio::test]
async fn each_refusal_has_its_own_code() {
    for (fault, code, words) in [
        (Fault::Forbidden, 14, ["NoAccess", "403", "AccessDenied"]),
        (Fault::Missing, 15, ["ObjectGone", "404", "NoSuchKey"]),
        (Fault::InternalError, 17, ["StorageUnreachable", "500", "InternalError"]),
        (Fault::SlowDown, 17, ["StorageUnreachable", "503", "SlowDown"]),
        // Not S3's words: a gateway answers so for every object while the service is down.
        (Fault::Gateway(404), 17, ["StorageUnreachable", "404", "nothing found"]),
        (Fault::Gateway(200), 17, ["StorageUnreachable", "without an etag", "was listed"]),
    ] {
        let (bench, proxy) = faulty().await;
        bench.offer("a", b"x").await;
        proxy.inject(Rule::every(fault, "/a"));
        bench.claim().await.assert_failed(code, &words);
        bench.assert_no_input();
    }
}

#[tokio::test]
async fn an_object_that_is_really_gone_and_keys_that_are_really_wrong_are_called_so() {
    let mut bench = Bench::start().await;
    bench.offer("a", b"x").await;
    bench.s3.client.request(Method::DELETE, &format!("/{BUCKET}/a"), Default::default()).await.unwrap();
    bench.claim().await.assert_failed(15, &["ObjectGone"]);
    // A gateway whose volume is not mounted reports this for every bucket, and no file is at fault.
    bench
        .set("S3_BUCKET", "elsewhere")
        .claim()
        .await
        .assert_failed(17, &["StorageUnreachable", "NoSuchBucket"]);
    bench.set("S3_BUCKET", BUCKET);
    bench
        .set("S3_SECRET_ACCESS_KEY", "wrong")
        .claim()
        .await
        .assert_failed(14, &["NoAccess", "SignatureDoesNotMatch"]);
}

/// A large object's properties are requested first, and the answer to that has no words: neither a deleted
/// object nor a gateway must be mistaken for the other.
#[tokio::test]
async fn a_large_object_is_gone_only_in_the_words_of_s3() {
    let (bench, proxy) = faulty().await;
    bench.offer("a", &noise(9 * MIB)).await;
    for status in [404, 502] {
        proxy.inject(Rule::every(Fault::Gateway(status), "/a"));
        bench.claim().await.assert_failed(17, &["StorageUnreachable", &status.to_string()]);
        proxy.heal();
    }
    proxy.inject(Rule::every(Fault::Gateway(404), "/a").method(Method::HEAD));
    bench.claim().await.assert_failed(17, &["StorageUnreachable", "nothing found"]);
    proxy.heal();
    bench.s3.client.request(Method::DELETE, &format!("/{BUCKET}/a"), Default::default()).await.unwrap();
    bench.claim().await.assert_failed(15, &["ObjectGone", "NoSuchKey"]);
}

/// A key may have 1,024 bytes, and the reason follows it.
#[tokio::test]
async fn a_long_key_leaves_room_for_the_reason() {
    let (bench, proxy) = faulty().await;
    let key = format!("{}end", "part/".repeat(204));
    bench.offer(&key, b"x").await;
    proxy.inject(Rule::every(Fault::Forbidden, "/part"));
    bench
        .claim()
        .await
        .assert_failed(14, &["NoAccess", "s3://videos/part/", "…", "/end: access refused", "AccessDenied"]);
}

#[tokio::test]
async fn a_slow_server_is_waited_for_and_a_silent_one_is_not() {
    let (mut bench, proxy) = faulty().await;
    bench.offer("a", b"x").await;
    proxy.inject(Rule::every(Fault::Slow(Duration::from_millis(1_500)), "/a").times(1));
    bench.set("S3_TIMEOUT", "5s").claim().await.assert_ok();
    proxy.inject(Rule::every(Fault::Slow(Duration::from_secs(60)), "/a"));
    let ended = bench.set("S3_TIMEOUT", "500ms").claim().await;
    ended.assert_failed(17, &["StorageUnreachable", "time"]);
    assert!(ended.took < Duration::from_secs(10), "{:?}", ended.took);
    bench.assert_no_input();
}

#[tokio::test]
async fn a_storage_that_is_not_there_is_called_so() {
    let mut bench = Bench::start().await;
    bench.offer("a", b"x").await;
    bench.set("S3_ENDPOINT", "http://127.0.0.1:1").claim().await.assert_failed(17, &["StorageUnreachable"]);
    bench.assert_no_input();
}

#[tokio::test]
async fn sigterm_ends_a_fetch_at_once() {
    let (bench, proxy) = faulty().await;
    bench.offer("a", b"x").await;
    proxy.inject(Rule::every(Fault::Slow(Duration::from_secs(60)), "/a"));
    bench.hand_out("pod-1").await.unwrap();
    let mut child = bench.command().spawn().unwrap();
    eventually("the object is asked for", || async { !proxy.seen().is_empty() }).await;
    let (start, pid) = (Instant::now(), child.id().unwrap().to_string());
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().await.unwrap().code(), Some(143));
    // Much sooner than the storage answers.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(!bench.workspace().join("input").exists());
}
