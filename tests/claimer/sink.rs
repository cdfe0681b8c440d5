//! Publishing to a sink whose answers no real one gives: checksums of different content, or none.

use std::fs;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::Full;
use protocol::{Exit, Report};
use tests::eventually;
use tests::fake::{Fake, header, object, status};
use tests::s3::escape;

use crate::harness::{BUCKET, Bench};
use crate::publish::with_results;

const MIB: usize = 1024 * 1024;
const SUM: &str = "x-amz-checksum-sha256";

/// SHA-256 of `hello`, and of 9 MiB of zeros: of their two parts, and of the two checksums.
const OF_HELLO: &str = "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=";
const OF_PARTS: [&str; 2] =
    ["La6x82CVtEsxhBCz9Oi12Yncx7sCPRQmxJLasKMFPnQ=", "MOFJVevxNSJm3C/4Bn5oEEYH51CrudOzZYK4r5Cfy1g="];
const OF_CHECKSUMS: &str = "zWifJvli3SaQ9LZtHxzpOjkUE9x4ovgJZ+34As/NMwc=-2";
const OF_SOMETHING_ELSE: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

/// The checksum that a sink answers, given the right one; empty for no checksum.
type Says = fn(&Request<Bytes>, &str) -> String;

/// A sink that has every object, of this size.
async fn sink(bench: &mut Bench, size: usize, says: Says) -> Fake {
    let fake = Fake::start(move |request| {
        let query = request.uri().query().unwrap_or_default();
        match *request.method() {
            Method::HEAD => object(&vec![0; size], "\"e\""),
            Method::PUT => {
                let mut response = object(b"", "\"e\"");
                let sum = says(request, header(request, SUM));
                if !sum.is_empty() {
                    response.headers_mut().insert(SUM, HeaderValue::try_from(sum).unwrap());
                }
                response
            }
            Method::POST if query.contains("uploadId") => {
                let sum = says(request, OF_CHECKSUMS);
                let sum =
                    if sum.is_empty() { sum } else { format!("<ChecksumSHA256>{sum}</ChecksumSHA256>") };
                xml(&format!("<CompleteMultipartUploadResult>{sum}</CompleteMultipartUploadResult>"))
            }
            Method::POST => {
                xml("<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            }
            _ => status(204),
        }
    })
    .await;
    bench.set("SINK_S3_ENDPOINT", format!("http://{}", fake.address));
    fake
}

fn xml(text: &str) -> Response<Full<Bytes>> {
    Response::new(Full::new(Bytes::copy_from_slice(text.as_bytes())))
}

fn of_method(sink: &Fake, method: Method) -> Vec<Request<Bytes>> {
    sink.requests().into_iter().filter(|request| request.method() == method).collect()
}

#[tokio::test]
async fn every_upload_carries_its_checksum() {
    let truth: Says = |_, sum| sum.to_owned();
    let mut bench = with_results(&[("small", b"hello")]).await;
    let small = sink(&mut bench, 5, truth).await;
    bench.publish().await.assert_ok();
    let puts = of_method(&small, Method::PUT);
    assert_eq!(puts.iter().map(|put| header(put, SUM)).collect::<Vec<_>>(), [OF_HELLO]);

    let mut bench = with_results(&[("large", &vec![0; 9 * MIB])]).await;
    let large = sink(&mut bench, 9 * MIB, truth).await;
    bench.publish().await.assert_ok();
    let mut puts = of_method(&large, Method::PUT);
    // Parts are sent concurrently; the second is the shorter one.
    puts.sort_by_key(|put| std::cmp::Reverse(put.body().len()));
    assert_eq!(puts.iter().map(|put| header(put, SUM)).collect::<Vec<_>>(), OF_PARTS);
    let posts = of_method(&large, Method::POST);
    assert_eq!(header(&posts[0], "x-amz-checksum-algorithm"), "SHA256");
    let parts = String::from_utf8(posts[1].body().to_vec()).unwrap();
    let sums = parts.split("<ChecksumSHA256>").skip(1).map(|rest| rest.split('<').next().unwrap());
    assert_eq!(sums.collect::<Vec<_>>(), OF_PARTS);
}

#[tokio::test]
async fn a_checksum_of_something_else_fails_the_attempt() {
    let large = vec![0; 9 * MIB];
    let about_small: Says = |_, _| OF_SOMETHING_ELSE.to_owned();
    let about_a_part: Says = |request, sum| {
        let lies = request.uri().query().unwrap_or_default().contains("partNumber=2");
        if lies { OF_SOMETHING_ELSE } else { sum }.to_owned()
    };
    let about_the_whole: Says = |request, sum| {
        if request.method() == Method::POST { format!("{OF_SOMETHING_ELSE}-2") } else { sum.to_owned() }
    };
    let uploads: [(&[u8], Says, &str, usize); 3] = [
        (b"hello", about_small, OF_HELLO, 0),
        (&large, about_a_part, OF_PARTS[1], 1),
        // Nothing is left to abort.
        (&large, about_the_whole, OF_CHECKSUMS, 0),
    ];
    for (content, says, right, aborted) in uploads {
        let mut bench = with_results(&[("a", content)]).await;
        let sink = sink(&mut bench, content.len(), says).await;
        let words = ["StorageUnreachable", "s3://results/out/", "SHA-256", OF_SOMETHING_ELSE, right];
        bench.publish().await.assert_failed(17, &words);
        assert_eq!(of_method(&sink, Method::DELETE).len(), aborted, "{:?}", sink.paths());
    }
}

/// Some services keep no checksums, and some keep one of the whole, which cannot be computed from the parts.
#[tokio::test]
async fn a_sink_without_checksums_is_believed_by_the_length() {
    let large = vec![0; 9 * MIB];
    let nothing: Says = |_, _| String::new();
    let of_the_whole: Says = |request, sum| {
        if request.method() == Method::POST { OF_SOMETHING_ELSE.to_owned() } else { sum.to_owned() }
    };
    let uploads: [(&[u8], Says); 3] = [(b"hello", nothing), (&large, nothing), (&large, of_the_whole)];
    for (content, says) in uploads {
        let mut bench = with_results(&[("a", content)]).await;
        let _good = sink(&mut bench, content.len(), says).await;
        bench.publish().await.assert_ok();
        let _short = sink(&mut bench, content.len() - 1, says).await;
        bench.publish().await.assert_failed(17, &["StorageUnreachable", "bytes instead of"]);
    }
}

/// Names of results contain keys, and are therefore as odd as these.
#[tokio::test]
async fn results_of_keys_that_look_like_paths_are_named_exactly() {
    let mut bench = with_results(&[("a b", b"hello")]).await;
    let sink = sink(&mut bench, 5, |_, sum| sum.to_owned()).await;
    bench.set("S3_PREFIX", "").set("SINK_S3_PREFIX", "");
    for key in ["/lead", "//two", "../../etc/passwd", "a/../b", "a//b", "end/", "1+1 %2F", "nul\u{1}\n"] {
        fs::write(bench.workspace().join("input.source_uri"), format!("s3://{BUCKET}/{key}")).unwrap();
        bench.publish().await.assert_ok();
        let path = format!("/results/{}", escape(&format!("{key}/a b")));
        let (paths, sent) = (sink.paths(), of_method(&sink, Method::PUT).len());
        for sent in &paths[paths.len() - 2..] {
            assert_eq!(sent.split('?').next().unwrap(), path);
        }
        assert_eq!(paths.len(), 2 * sent, "one PUT and one HEAD for each");
    }
}

#[tokio::test]
async fn sigterm_ends_publishing_at_once() {
    let mut bench = with_results(&[("a", b"hello")]).await;
    let sink = Fake::start_slow(|_| std::future::pending()).await;
    bench.set("SINK_S3_ENDPOINT", format!("http://{}", sink.address));
    let mut child = bench.command().arg("publish").spawn().unwrap();
    eventually("the result is sent", || async { !sink.paths().is_empty() }).await;
    let (start, pid) = (Instant::now(), child.id().unwrap().to_string());
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().await.unwrap().code(), Some(143));
    // Much sooner than the storage is given up.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let message = fs::read_to_string(bench.folder.path().join("termination-log")).unwrap();
    let report = Report::parse(&message).unwrap();
    assert_eq!((report.outcome, report.text.as_str()), (Err(Exit::Terminated), "ended by a signal"));
}
