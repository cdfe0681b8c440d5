//! Publishing: all results, or a failure.

use std::fs;
use std::os::unix::fs::symlink;

use bytes::Bytes;
use http::Method;
use testbed::{Fault, FaultyS3, Rule};
use tests::s3::escape;

use crate::harness::{BUCKET, Bench, noise};

const MIB: usize = 1024 * 1024;

/// A bench whose filter has written these results for the file `in/day 1/ü\n.mp4`.
pub async fn with_results(results: &[(&str, &[u8])]) -> Bench {
    let mut bench = Bench::start().await;
    let out = bench.workspace().join("out/detect");
    fs::create_dir_all(&out).unwrap();
    for (name, content) in results {
        let path = out.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    fs::write(bench.workspace().join("input.source_uri"), format!("s3://{BUCKET}/in/day 1/ü\n.mp4")).unwrap();
    bench.s3.client.make_bucket("results").await.unwrap();
    bench.set("SINK_S3_BUCKET", "results").set("SINK_S3_PREFIX", "out/").set("S3_PREFIX", "in/");
    bench
}

async fn published(bench: &Bench, name: &str) -> Bytes {
    let key = format!("out/day 1/ü\n.mp4/{name}");
    bench.s3.client.get("results", &escape(&key)).await.unwrap()
}

/// Every key in the sink, as the listing spells it.
async fn keys(bench: &Bench) -> Vec<String> {
    let (_, body) =
        bench.s3.client.request(Method::GET, "/results?encoding-type=url", Bytes::new()).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    text.split("<Key>").skip(1).map(|rest| rest.split("</Key>").next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_result_is_uploaded_under_the_files_name_and_again_under_the_same() {
    let bench = with_results(&[("a.json", b"{}"), ("deep/er/b c+%", b"2"), ("empty", b"")]).await;
    bench.publish().await.assert_ok();
    let first = keys(&bench).await;
    assert_eq!(first.len(), 3, "{first:?}");
    fs::write(bench.workspace().join("out/detect/a.json"), b"{\"second\":true}").unwrap();
    bench.publish().await.assert_ok();
    assert_eq!(keys(&bench).await, first, "a retry has the same names");
    assert_eq!(published(&bench, "a.json").await, "{\"second\":true}");
    assert_eq!(published(&bench, "deep/er/b c+%").await, "2");
    assert_eq!(published(&bench, "empty").await, "");
}

#[tokio::test]
async fn a_large_result_is_uploaded_in_parts_and_memory_stays_flat() {
    let content = noise(100 * MIB + 7);
    let bench = with_results(&[("large", &content)]).await;
    let ended = bench.publish().await;
    ended.assert_ok();
    println!("{} MiB at most, {:?}", ended.memory / MIB as u64, ended.took);
    assert!(published(&bench, "large").await == content);
    assert!(ended.memory < 96 * MIB as u64, "{}", ended.memory);
}

#[tokio::test]
async fn many_small_results_all_arrive() {
    let names: Vec<String> = (0..200).map(|number| format!("{number}.json")).collect();
    let results: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    let bench = with_results(&results).await;
    bench.publish().await.assert_ok();
    assert_eq!(keys(&bench).await.len(), 200);
}

#[tokio::test]
async fn what_was_published_can_be_fetched_with_its_checksum() {
    let content = noise(20 * MIB);
    let bench = with_results(&[("large", &content), ("small", b"x")]).await;
    bench.publish().await.assert_ok();
    let (_, body) =
        bench.s3.client.request(Method::GET, "/results?encoding-type=url", Bytes::new()).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    let etags = text.split("<ETag>").skip(1).map(|rest| rest.split("</ETag>").next().unwrap());
    let etags: Vec<String> = etags.map(|etag| etag.replace("&#34;", "\"").replace("&quot;", "\"")).collect();
    for (number, (name, size)) in [("large", content.len()), ("small", 1)].into_iter().enumerate() {
        let key = format!("out/day 1/ü\n.mp4/{name}");
        bench.enqueue_next(queue::File { key, size: size as u64, etag: etags[number].clone() }, number).await;
        let mut command = bench.command();
        command.env("CONSUMER_NAME", format!("pod-{number}")).env("S3_BUCKET", "results");
        bench.run(&mut command).await.assert_ok();
        assert_eq!(bench.input().len(), size);
    }
}

#[tokio::test]
async fn one_result_that_cannot_be_uploaded_fails_the_attempt() {
    let large = noise(20 * MIB);
    let mut bench = with_results(&[("good", b"1"), ("bad", &large)]).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_S3_ENDPOINT", &proxy.url);
    proxy.inject(Rule::every(Fault::InternalError, "partNumber=2"));
    bench.publish().await.assert_failed(17, &["StorageUnreachable", "s3://results/out/", "/bad", "500"]);
    assert!(proxy.seen().iter().any(|line| line.starts_with("DELETE")), "the unfinished upload is aborted");
    proxy.heal();
    proxy.inject(Rule::every(Fault::Forbidden, "/good").method(Method::PUT));
    bench.publish().await.assert_failed(14, &["NoAccess", "/good"]);
    proxy.heal();
    proxy.inject(Rule::every(Fault::InternalError, "").times(1));
    bench.publish().await.assert_ok();
    assert!(published(&bench, "bad").await == large);
}

/// Whatever the answers were, an object that does not exist in the end was not published.
#[tokio::test]
async fn a_result_that_vanished_fails_the_attempt() {
    let mut bench = with_results(&[("a", b"1")]).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_S3_ENDPOINT", &proxy.url);
    proxy.inject(Rule::every(Fault::Missing, "/a").method(Method::HEAD));
    bench.publish().await.assert_failed(17, &["StorageUnreachable", "s3://results/out/", "404"]);
}

#[tokio::test]
async fn an_empty_folder_is_a_failure_and_so_is_none() {
    let bench = with_results(&[]).await;
    bench.publish().await.assert_failed(23, &["NothingToPublish"]);
    fs::remove_dir(bench.workspace().join("out/detect")).unwrap();
    bench.publish().await.assert_failed(23, &["NothingToPublish", "out/detect"]);
}

#[tokio::test]
async fn a_link_out_of_the_folder_is_not_followed() {
    let bench = with_results(&[("a", b"1")]).await;
    symlink("/etc/passwd", bench.workspace().join("out/detect/users")).unwrap();
    bench.publish().await.assert_failed(20, &["PublishIncomplete", "a link out of the folder"]);
    assert_eq!(keys(&bench).await, Vec::<String>::new(), "nothing is sent before everything is looked at");
}

#[tokio::test]
async fn a_file_that_is_not_of_the_source_is_refused() {
    let mut bench = with_results(&[("a", b"1")]).await;
    bench.set("S3_PREFIX", "other/").publish().await.assert_failed(10, &["BadSettings", "other/"]);
    bench.set("S3_BUCKET", "another").publish().await.assert_failed(19, &["another"]);
}

#[tokio::test]
async fn a_name_that_is_too_long_is_refused_before_anything_is_sent() {
    let long = format!("{}/{}", "x/".repeat(450), "b".repeat(150));
    let bench = with_results(&[("a", b"1"), (&long, b"2")]).await;
    bench.publish().await.assert_failed(20, &["PublishIncomplete", "1024 bytes"]);
    assert_eq!(keys(&bench).await, Vec::<String>::new());
}
