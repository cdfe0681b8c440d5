//! The canary: after a storage failure the claimer reads one byte of an object that was readable before. That
//! tells a single bad object from a storage outage.

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use protocol::Exit;
use testbed::{Fault, FaultyS3, Rule};
use tests::fake::{Fake, header, status};

use crate::faults::faulty;
use crate::harness::{BUCKET, Bench, Ended, listed, noise};
use crate::publish::with_results;

const MIB: usize = 1024 * 1024;

/// A bench with the file `bad` to fetch, and with `good` as the canary.
async fn with_canary() -> (Bench, FaultyS3) {
    let (mut bench, proxy) = faulty().await;
    bench.offer("bad", b"x").await;
    bench.store("good", b"many bytes").await;
    bench.set("S3_CANARY_KEY", "good");
    (bench, proxy)
}

/// A bench with results to publish, and with `out/before/good` in the sink.
async fn with_sink(results: &[(&str, &[u8])]) -> (Bench, FaultyS3) {
    let mut bench = with_results(results).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_S3_ENDPOINT", &proxy.url);
    bench.s3.client.put("results", "out/before/good", b"2".to_vec()).await.unwrap();
    (bench, proxy)
}

fn ended_as(ended: &Ended) -> (Result<(), Exit>, Option<bool>) {
    let report = ended.report();
    (report.outcome, report.canary)
}

#[tokio::test]
async fn one_object_that_fails_leaves_the_storage_up() {
    for (fault, exit) in [
        (Fault::Forbidden, Exit::NoAccess),
        (Fault::InternalError, Exit::StorageUnreachable),
        (Fault::SlowDown, Exit::StorageUnreachable),
        (Fault::Gateway(404), Exit::StorageUnreachable),
        (Fault::Gateway(200), Exit::StorageUnreachable),
    ] {
        let (bench, proxy) = with_canary().await;
        proxy.inject(Rule::every(fault, "/bad"));
        assert_eq!(ended_as(&bench.claim().await), (Err(exit), Some(true)), "{fault:?}");
        bench.assert_no_input();
    }
}

#[tokio::test]
async fn a_storage_that_fails_for_every_object_is_down() {
    for (fault, exit) in
        [(Fault::Forbidden, Exit::NoAccess), (Fault::InternalError, Exit::StorageUnreachable)]
    {
        let (bench, proxy) = with_canary().await;
        proxy.inject(Rule::every(fault, ""));
        assert_eq!(ended_as(&bench.claim().await), (Err(exit), Some(false)), "{fault:?}");
    }
    let (mut bench, _proxy) = with_canary().await;
    bench.set("S3_ENDPOINT", "http://127.0.0.1:1");
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::StorageUnreachable), Some(false)));
}

/// With the default settings a run soon learns that its storage is gone.
#[tokio::test]
async fn a_refused_connection_is_given_up_within_five_seconds() {
    let (mut bench, _proxy) = with_canary().await;
    bench.set("S3_ENDPOINT", "http://127.0.0.1:1").env.remove("S3_MAX_ATTEMPTS");
    let ended = bench.claim().await;
    assert_eq!(ended_as(&ended), (Err(Exit::StorageUnreachable), Some(false)));
    let report = ended.report();
    assert!(report.ended_ms - report.started_ms < 5_000, "{}", ended.message);
}

#[tokio::test]
async fn without_a_canary_nothing_is_claimed_about_the_storage() {
    let (mut bench, proxy) = with_canary().await;
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    for none in ["", "bad"] {
        bench.set("S3_CANARY_KEY", none);
        assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), None), "canary {none:?}");
    }
    assert!(!proxy.seen().iter().any(|line| line.contains("list-type")), "{:?}", proxy.seen());
}

/// Filters and people delete processed files. A listing then proposes other objects, and reading one is the
/// proof.
#[tokio::test]
async fn when_all_canaries_were_deleted_another_object_is_read() {
    let (mut bench, proxy) = with_canary().await;
    bench.set("S3_CANARY_KEY", "deleted\nand this");
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), Some(true)));
    let asked = |what: &str| proxy.seen().iter().filter(|line| line.contains(what)).count();
    assert_eq!((asked("list-type"), asked("/good")), (1, 1), "{:?}", proxy.seen());
    assert_eq!(asked("/bad"), 1, "the object that failed proves nothing about itself");

    bench.set("S3_PREFIX", "other/");
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), None), "there is none below the prefix");
    bench.store("other/one", b"").await;
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), Some(true)));
}

/// This run has never read the objects that the listing proposes.
#[tokio::test]
async fn a_proposed_object_that_cannot_be_read_and_a_refused_listing_prove_nothing() {
    for fault in [Fault::Forbidden, Fault::InternalError, Fault::Missing] {
        for spoilt in ["/good", "list-type"] {
            let (mut bench, proxy) = with_canary().await;
            bench.set("S3_CANARY_KEY", "deleted");
            proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
            proxy.inject(Rule::every(fault, spoilt));
            assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), None), "{fault:?} for {spoilt}");
            bench.store("more", b"x").await;
            let shown = (spoilt == "/good").then_some(true);
            assert_eq!(
                ended_as(&bench.claim().await),
                (Err(Exit::NoAccess), shown),
                "{fault:?} for {spoilt}, and another object can be read"
            );
        }
    }
}

#[tokio::test]
async fn a_canary_that_was_deleted_gives_way_to_one_that_is_there() {
    let (mut bench, proxy) = with_canary().await;
    bench.set("S3_CANARY_KEY", "deleted\nbad\ngood\nolder");
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), Some(true)));
    let asked = |key: &str| proxy.seen().iter().filter(|line| line.contains(key)).count();
    assert_eq!((asked("/deleted"), asked("/good"), asked("/older")), (1, 1, 0), "{:?}", proxy.seen());
    proxy.inject(Rule::every(Fault::Forbidden, "/good"));
    assert_eq!(
        ended_as(&bench.claim().await),
        (Err(Exit::NoAccess), Some(false)),
        "the existing object is refused"
    );
}

#[tokio::test]
async fn a_failure_of_the_file_itself_asks_for_no_canary() {
    let (bench, proxy) = with_canary().await;
    proxy.inject(Rule::every(Fault::Missing, "/bad"));
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::ObjectGone), None));
    proxy.heal();
    bench.store("bad", b"y").await;
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::ObjectChanged), None));
    let asked = proxy.seen().into_iter().filter(|line| line.contains("/good")).count();
    assert_eq!(asked, 0, "{:?}", proxy.seen());
}

#[tokio::test]
async fn a_body_that_breaks_off_asks_for_no_canary() {
    let (mut bench, proxy) = faulty().await;
    bench.offer("cut", &noise(20 * 1024 * 1024)).await;
    bench.store("good", b"x").await;
    bench.set("S3_CANARY_KEY", "good");
    proxy.inject(Rule::every(Fault::Truncated(3 * 1024 * 1024), "/cut").method(Method::GET));
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::ObjectTruncated), None));
}

#[tokio::test]
async fn one_byte_is_read_and_an_empty_canary_is_as_good() {
    let (bench, proxy) = with_canary().await;
    bench.store("good", b"").await;
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), Some(true)));

    let mut bench = Bench::start().await;
    let server = Fake::start(|request| {
        let canary = request.uri().path() == format!("/{BUCKET}/good");
        // Services answer like this when asked for the first byte of an empty object.
        if canary { status(416) } else { status(403) }
    })
    .await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address)).set("S3_CANARY_KEY", "good");
    bench.enqueue(vec![listed("bad", b"x")]).await;
    assert_eq!(ended_as(&bench.claim().await), (Err(Exit::NoAccess), Some(true)));
    let ranges: Vec<String> =
        server.requests().iter().map(|request| header(request, "range").to_owned()).collect();
    assert_eq!(ranges, ["", "bytes=0-0"]);
}

#[tokio::test]
async fn a_silent_storage_delays_the_end_by_five_seconds_at_most() {
    let (mut bench, proxy) = with_canary().await;
    bench.set("S3_MAX_ATTEMPTS", "1");
    proxy.inject(Rule::every(Fault::InternalError, "/bad"));
    proxy.inject(Rule::every(Fault::Stuck, "/good"));
    let ended = bench.claim().await;
    assert_eq!(ended_as(&ended), (Err(Exit::StorageUnreachable), Some(false)));
    let report = ended.report();
    assert!((5_000..20_000).contains(&(report.ended_ms - report.started_ms)), "{}", ended.message);
}

#[tokio::test]
async fn a_failed_upload_writes_beside_the_last_result() {
    let (mut bench, proxy) = with_sink(&[("bad", b"1")]).await;
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), None), "no canary is known");

    bench.set("SINK_S3_CANARY_KEY", "out/before/good");
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), Some(true)));
    assert!(proxy.seen().iter().any(|line| line.starts_with("HEAD") && line.contains("/good")));
    assert!(!proxy.seen().iter().any(|line| line.starts_with("GET")), "{:?}", proxy.seen());
    assert_eq!(
        bench.s3.client.get("results", "out/before/good").await.unwrap(),
        "2",
        "what was written is not visible"
    );
    let (_, left) = bench.s3.client.request(Method::GET, "/results?uploads=", Bytes::new()).await.unwrap();
    let left = String::from_utf8(left.to_vec()).unwrap();
    assert!(left.contains("ListMultipartUploadsResult") && !left.contains("<Upload>"), "{left}");

    proxy.inject(Rule::every(Fault::InternalError, "/good"));
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), Some(false)));

    // Keys that may only write.
    proxy.heal();
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
    proxy.inject(Rule::every(Fault::Forbidden, "/good").method(Method::HEAD));
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), None));
    proxy.heal();
    proxy.inject(Rule::every(Fault::Forbidden, "/bad"));

    // The name of the very result that fails. A name with a line break is never a canary.
    fs::write(bench.workspace().join("input.source_uri"), format!("s3://{BUCKET}/in/day 2.mp4")).unwrap();
    bench.set("SINK_S3_CANARY_KEY", "out/day 2.mp4/bad");
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), None));
}

/// Such a sink shows every result that it has, and its files are good.
#[tokio::test]
async fn a_sink_that_is_full_or_read_only_is_down_although_its_results_can_be_read() {
    for (fault, exit) in
        [(Fault::Forbidden, Exit::NoAccess), (Fault::InternalError, Exit::StorageUnreachable)]
    {
        let (mut bench, proxy) = with_sink(&[("a", b"1")]).await;
        bench.set("SINK_S3_CANARY_KEY", "out/before/good");
        proxy.inject(Rule::every(fault, "").method(Method::PUT));
        assert_eq!(
            ended_as(&bench.publish().await),
            (Err(exit), Some(false)),
            "{fault:?}: it takes no bytes"
        );
        proxy.inject(Rule::every(fault, "").method(Method::POST));
        assert_eq!(ended_as(&bench.publish().await), (Err(exit), Some(false)), "{fault:?}: it takes nothing");
    }
}

/// Of a sink that has room for some bytes nothing is known about more of them.
#[tokio::test]
async fn as_much_is_written_as_all_results_have_and_of_large_ones_nothing_is_known() {
    let sent = |proxy: &FaultyS3| proxy.seen().iter().filter(|line| line.contains("partNumber")).count();
    for (size, shown) in [(8 * MIB - 1, Some(true)), (8 * MIB, None)] {
        let (mut bench, proxy) = with_sink(&[("a", &noise(size)), ("bad", b"1")]).await;
        bench.set("SINK_S3_CANARY_KEY", "out/before/good");
        proxy.inject(Rule::every(Fault::Forbidden, "/bad"));
        assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), shown), "{size} bytes and one");
        assert_eq!(sent(&proxy), 1, "{:?}", proxy.seen());
        proxy.inject(Rule::every(Fault::InternalError, "partNumber"));
        assert_eq!(
            ended_as(&bench.publish().await),
            (Err(Exit::NoAccess), Some(false)),
            "{size} bytes and one"
        );
    }
}

/// A new operator knows no results, only a file that succeeded.
#[tokio::test]
async fn the_results_of_a_file_that_was_fetched_before_are_canaries_if_they_are_there() {
    let (mut bench, proxy) = with_sink(&[("good", b"1")]).await;
    proxy.inject(Rule::every(Fault::Forbidden, "day%201"));
    for (files, shown) in [
        ("in/never published\nof another prefix", None),
        ("in/day 1/ü", None),
        ("in/never published\nin/before", Some(true)),
    ] {
        bench.set("S3_CANARY_KEY", files);
        assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), shown), "{files:?}");
    }
}

/// Keys that may write a result but not look it up publish nothing, and no file is at fault.
#[tokio::test]
async fn a_sink_that_takes_results_and_shows_none_is_not_up() {
    let (mut bench, proxy) = with_sink(&[("good", b"1")]).await;
    proxy.inject(Rule::every(Fault::Forbidden, "").method(Method::HEAD));
    bench.set("S3_CANARY_KEY", "in/before").set("SINK_S3_CANARY_KEY", "out/before/good");
    assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), None));
}

#[tokio::test]
async fn a_sink_without_unfinished_uploads_says_nothing() {
    for (answer, shown) in [(501, None), (400, None), (405, None), (503, Some(false)), (403, Some(false))] {
        let mut bench = with_results(&[("bad", b"1")]).await;
        let server = Fake::start(move |request| match *request.method() {
            Method::HEAD if request.uri().path().contains("/good") => status(200),
            Method::POST => status(answer),
            _ => status(403),
        })
        .await;
        bench.set("SINK_S3_ENDPOINT", format!("http://{}", server.address));
        bench.set("SINK_S3_CANARY_KEY", "out/before/good");
        assert_eq!(ended_as(&bench.publish().await), (Err(Exit::NoAccess), shown), "{answer}");
    }
}

#[tokio::test]
async fn a_canary_whose_service_does_not_answer_in_time_keeps_sigterm_short() {
    let (mut bench, proxy) = with_canary().await;
    bench.set("S3_MAX_ATTEMPTS", "1");
    proxy.inject(Rule::every(Fault::InternalError, "/bad"));
    proxy.inject(Rule::every(Fault::Stuck, "/good"));
    bench.hand_out("pod-1").await.unwrap();
    let mut child = bench.command().spawn().unwrap();
    tests::eventually("the canary is asked for", || async {
        proxy.seen().iter().any(|line| line.contains("/good"))
    })
    .await;
    let (start, pid) = (std::time::Instant::now(), child.id().unwrap().to_string());
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().await.unwrap().code(), Some(143));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
