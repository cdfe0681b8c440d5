//! Fetching: exactly the bytes, whatever the key and the size.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use http::StatusCode;
use tests::s3::escape;

use crate::harness::{BUCKET, Bench, listed, noise};
use tests::fake::{Fake, object};

const MIB: usize = 1024 * 1024;

/// Trap 20, as far as a server on a file system goes: it refuses `..`, a leading `/` and parts over 255 bytes.
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

/// Trap 20, the rest: what is on the wire is the key, escaped, with nothing tidied up.
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

/// Services without If-Match, or with etags that say nothing: the answers are compared, and all parts are of one object.
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
