//! Fetching: exactly the right bytes, whatever the key and the size.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode};
use tests::s3::escape;

use crate::harness::{BUCKET, Bench, listed, noise};
use tests::fake::{Fake, object, part_of};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

const MIB: usize = 1024 * 1024;

/// Odd keys, as far as a server on a file system allows: it refuses `..`, a leading `/` and parts over 255
/// bytes.
#[tokio::test]
async fn odd_keys_are_fetched_exactly_from_a_real_server() {
    let bench = Bench::start().await;
    let long = format!("{}/{}", "long/".repeat(163), "ü".repeat(104));
    assert_eq!(long.len(), 1_024);
    for (number, key) in [
        "a b  c",
        "new\nline",
        "ünïcödé/日本語",
        "1+1=2",
        "100%25 %",
        "a&b?c#d;e",
        "...",
        "tab\there",
        "quote\"'",
        &long,
    ]
    .iter()
    .enumerate()
    {
        let content = format!("content of {number}");
        bench.offer_next(key, content.as_bytes(), number).await;
        bench.run(bench.command().env("CONSUMER_NAME", format!("pod-{number}"))).await.assert_ok();
        assert_eq!(bench.input(), content.as_bytes(), "{key:?}");
        let uri = fs::read_to_string(bench.workspace().join("input.source_uri")).unwrap();
        assert_eq!(uri, format!("s3://{BUCKET}/{key}"));
    }
    let mut names: Vec<_> =
        fs::read_dir(bench.workspace()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["input", "input.attempt", "input.source_uri", "out"], "no key became a path");
}

/// The other odd keys: the request contains the escaped key, without any normalization.
#[tokio::test]
async fn keys_that_look_like_paths_are_sent_as_they_are() {
    let mut bench = Bench::start().await;
    let server = Fake::start(|request| object(request.uri().path().as_bytes(), "\"x-1\"")).await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    let keys = [
        "/lead",
        "//two",
        "../../etc/passwd",
        "a/../b",
        "a/./b",
        "a//b",
        "end/",
        "nul\u{1}",
        &"x".repeat(1_024),
    ];
    for (number, key) in keys.iter().enumerate() {
        let path = format!("/{BUCKET}/{}", escape(key));
        let mut file = listed(key, path.as_bytes());
        file.etag = "\"x-1\"".to_owned();
        bench.enqueue_next(file, number).await;
        bench.run(bench.command().env("CONSUMER_NAME", format!("pod-{number}"))).await.assert_ok();
        assert_eq!(String::from_utf8(bench.input()).unwrap(), path);
        let sent = server.paths().pop().unwrap();
        assert_eq!(sent.split('?').next().unwrap(), path);
    }
}

#[tokio::test]
async fn an_empty_file_is_a_file() {
    let bench = Bench::start().await;
    bench.offer("empty", b"").await;
    bench.claim().await.assert_ok();
    assert_eq!(bench.input(), b"");
}

#[tokio::test]
async fn a_large_file_comes_in_parts_and_memory_stays_flat() {
    let bench = Bench::start().await;
    let mut memory = Vec::new();
    for (number, size) in [9 * MIB + 1, 256 * MIB + 12_345].into_iter().enumerate() {
        let content = noise(size);
        bench.offer_next(&format!("large-{size}"), &content, number).await;
        let ended = bench.run(bench.command().env("CONSUMER_NAME", format!("pod-{number}"))).await;
        ended.assert_ok();
        assert!(bench.input() == content, "{size} bytes differ");
        println!("{size} bytes: {} MiB at most, {:?}", ended.memory / MIB as u64, ended.took);
        memory.push(ended.memory);
    }
    assert!(memory.iter().all(|memory| *memory < 96 * MIB as u64), "memory grows with the file: {memory:?}");
}

/// Every part waits until four are requested, and then a moment longer for a fifth that must not come. Only a
/// HEAD and a range request could still normalize this key.
#[tokio::test]
async fn parts_of_a_large_file_come_four_at_a_time() {
    let mut bench = Bench::start().await;
    let content = Arc::new(noise(48 * MIB));
    let mut file = listed("/../two//parts", &content);
    file.etag = "\"x-6\"".to_owned();
    let (open, most) = (Arc::new(watch::Sender::new(0)), Arc::new(watch::Sender::new(0)));
    let (served, seen) = (Arc::clone(&content), Arc::clone(&most));
    let server = Fake::start_slow(move |request| {
        let (response, open, most) =
            (part_of(request, &served, "\"x-6\""), Arc::clone(&open), Arc::clone(&seen));
        let is_part = request.method() == Method::GET;
        async move {
            if is_part {
                open.send_modify(|open| *open += 1);
                most.send_modify(|most| *most = (*most).max(*open.borrow()));
                let _ = timeout(Duration::from_secs(10), most.subscribe().wait_for(|most| *most >= 4)).await;
                sleep(Duration::from_millis(200)).await;
                open.send_modify(|open| *open -= 1);
            }
            response
        }
    })
    .await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    let path = format!("/{BUCKET}/{}", escape(&file.key));
    bench.enqueue(vec![file]).await;
    bench.claim().await.assert_ok();
    assert!(bench.input() == *content);
    assert_eq!(*most.borrow(), 4);
    let paths = server.paths();
    assert_eq!(paths.len(), 7);
    assert!(paths.iter().all(|sent| sent.split('?').next() == Some(path.as_str())), "{paths:?}");
}

/// Services without If-Match, or with meaningless etags: the claimer compares the answers, and all parts come
/// from one object.
#[tokio::test]
async fn a_service_that_ignores_conditions_is_not_trusted() {
    let mut bench = Bench::start().await;
    let server = Fake::start(|_| object(b"other", "\"new-1\"")).await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    let mut file = listed("a", b"other");
    file.etag = "\"old-1\"".to_owned();
    bench.enqueue(vec![file]).await;
    bench.claim().await.assert_failed(16, &["ObjectChanged", "new-1", "old-1"]);
    bench.assert_no_input();
    assert_eq!(server.header("if-match"), "\"old-1\"");
}

#[tokio::test]
async fn content_that_does_not_match_its_etag_is_refused_unless_etags_are_no_md5() {
    let mut bench = Bench::start().await;
    let file = listed("a", b"right");
    let etag = file.etag.clone();
    let server = Fake::start(move |_| object(b"wrong", &etag)).await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    bench.enqueue(vec![file]).await;
    bench.claim().await.assert_failed(16, &["ObjectChanged", "MD5"]);
    bench.assert_no_input();
    bench.set("S3_ETAG_IS_MD5", "false").claim().await.assert_ok();
}

#[tokio::test]
async fn content_that_does_not_match_the_services_checksum_is_refused() {
    let mut bench = Bench::start().await;
    let server = Fake::start(|_| {
        let mut response = object(b"hello", "\"x-1\"");
        response.headers_mut().insert("x-amz-checksum-crc32", "AAAAAA==".parse().unwrap());
        response
    })
    .await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    let mut file = listed("a", b"hello");
    file.etag = "\"x-1\"".to_owned();
    bench.enqueue(vec![file]).await;
    bench.claim().await.assert_failed(16, &["ObjectChanged", "checksum"]);
    bench.assert_no_input();
}

/// A large object has no single answer with a checksum: the HEAD's covers the whole.
#[tokio::test]
async fn a_large_file_that_does_not_match_the_services_checksum_is_refused() {
    let mut bench = Bench::start().await;
    let content = vec![0; 9 * MIB];
    let sums = [
        ("sha256", "0u5HA82WmJRcp7n+FonqMJVZfqwaCv2NugDKx4lP3EM="),
        ("sha1", "j3ZZsPo5lPzOK+Biu+oNGD6bxE4="),
        ("crc64nvme", "1q6/IYHP8XY="),
        ("crc32c", "Gs/MBw=="),
        ("crc32", "YyFLrQ=="),
    ];
    let mut file = listed("a", &content);
    file.etag = "\"x-2\"".to_owned();
    bench.enqueue(vec![file]).await;
    for (algorithm, right) in sums {
        // The last one is a checksum of parts, which says nothing about the whole.
        for (sum, code) in [(right, 0), ("AAAAAA==", 16), ("AAAAAA==-2", 0)] {
            let (content, name) = (content.clone(), format!("x-amz-checksum-{algorithm}"));
            let server = Fake::start(move |request| {
                let mut response = part_of(request, &content, "\"x-2\"");
                if request.method() == Method::HEAD {
                    response.headers_mut().insert(name.parse::<HeaderName>().unwrap(), sum.parse().unwrap());
                }
                response
            })
            .await;
            bench.set("S3_ENDPOINT", format!("http://{}", server.address));
            let ended = bench.claim().await;
            assert_eq!(server.header("x-amz-checksum-mode"), "ENABLED");
            if code == 0 {
                ended.assert_ok();
                assert!(bench.input() == vec![0; 9 * MIB]);
            } else {
                ended.assert_failed(code, &["ObjectChanged", algorithm, right, sum]);
                bench.assert_no_input();
            }
        }
    }
}

#[tokio::test]
async fn any_user_can_read_the_file_and_write_results() {
    let mut bench = Bench::start().await;
    bench.set("OPENFILTER_FILTERS", "detect, blur");
    bench.offer("a", b"x").await;
    bench.run(&mut bench.wrapped(&["sh", "-c", "umask 077; exec \"$0\""])).await.assert_ok();
    let mode = |name: &str| fs::metadata(bench.workspace().join(name)).unwrap().permissions().mode() & 0o7777;
    for name in ["input", "input.source_uri", "input.attempt"] {
        assert_eq!(mode(name), 0o644, "{name}");
    }
    assert_eq!((mode("out"), mode("out/detect"), mode("out/blur")), (0o1777, 0o777, 0o777));
}

#[tokio::test]
async fn a_full_disk_is_called_so() {
    let bench = Bench::start().await;
    bench.offer("a", &noise(2 * MIB)).await;
    let mount = format!("mount -t tmpfs -o size=1m tmpfs {} && exec \"$0\"", bench.workspace().display());
    let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", &mount];
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_failed(18, &["DiskFull", "No space left"]);
}

#[tokio::test]
async fn a_workspace_that_is_not_there_is_called_so() {
    let mut bench = Bench::start().await;
    bench.set("WORKSPACE", "/proc/nowhere");
    bench.claim().await.assert_failed(19, &["LocalIo", "/proc/nowhere"]);
}

#[tokio::test]
async fn another_refusal_has_its_own_code() {
    let mut bench = Bench::start().await;
    let server = Fake::start(|_| {
        let mut response =
            object(b"<Error><Code>InvalidRequest</Code><Message>no</Message></Error>", "\"e\"");
        *response.status_mut() = StatusCode::BAD_REQUEST;
        response
    })
    .await;
    bench.set("S3_ENDPOINT", format!("http://{}", server.address));
    bench.enqueue(vec![listed("a", b"x")]).await;
    bench.claim().await.assert_failed(24, &["StorageRefused", "InvalidRequest"]);
}
