//! Answers of services, including answers that must not be trusted.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use http::StatusCode;
use storage::{ListedPage, StorageError};
use tests::fake::{Fake, status, xml as answer};
use tests::s3::escape;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::harness::{bucket, first_page, keys, lister, selecting};

fn listing(rest: &str, keys: &[&str]) -> String {
    let contents: String = keys.iter().map(|key| object(&format!("<Key>{key}</Key>"))).collect();
    format!("<ListBucketResult><Name>videos</Name>{rest}{contents}</ListBucketResult>")
}

fn object(fields: &str) -> String {
    format!("<Contents>{fields}<Size>7</Size><ETag>&quot;e&quot;</ETag></Contents>")
}

const LAST: &str = "<IsTruncated>false</IsTruncated>";
const MORE: &str = "<IsTruncated>true</IsTruncated>";
const URL: &str = "<EncodingType>url</EncodingType>";

async fn page_of(xml: String) -> Result<ListedPage, StorageError> {
    let server = Fake::start(move |_| answer(&xml)).await;
    first_page(&bucket(&format!("http://{}", server.address))).await
}

#[track_caller]
fn assert_unusable(listed: Result<ListedPage, StorageError>, words: &[&str]) {
    let error = listed.unwrap_err();
    assert!(matches!(error, StorageError::Unusable(_)) && !error.is_transient(), "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "no {word:?} in {error}");
    }
}

/// Keys that no file system can hold, encoded as AWS encodes them.
#[tokio::test]
async fn encoded_keys_are_decoded_exactly() {
    let long = "%C3%BC".repeat(512);
    let encoded = [
        "%01control",
        "../../etc/passwd",
        "/lead",
        "//two",
        "1%2B1%3D2",
        "100%2525+%25",
        "a+b%20c",
        "new%0Aline",
        "%E6%97%A5%E6%9C%AC",
        &long,
    ];
    let decoded = [
        "\u{1}control",
        "../../etc/passwd",
        "/lead",
        "//two",
        "1+1=2",
        "100%25 %",
        "a b c",
        "new\nline",
        "日本",
        &"ü".repeat(512),
    ];
    for (encoded, decoded) in encoded.iter().zip(decoded) {
        let page = page_of(listing(&format!("{LAST}{URL}"), &[encoded])).await.unwrap();
        assert_eq!(keys(&page.files), [decoded]);
    }
}

#[tokio::test]
async fn keys_that_the_service_did_not_encode_are_not_decoded() {
    let page = page_of(listing(LAST, &["1+1", "100%25 %", "new&#xA;line"])).await.unwrap();
    assert_eq!(keys(&page.files), ["1+1", "100%25 %", "new\nline"]);
}

#[tokio::test]
async fn the_request_asks_for_encoded_keys_and_has_the_cursor_escaped() {
    let server = Fake::start(|_| answer(&listing(LAST, &[]))).await;
    let lister = lister(&bucket(&format!("http://{}", server.address))).await;
    lister.page("a+b c/%\nü").await.unwrap();
    let path = server.paths().pop().unwrap();
    for part in ["list-type=2", "encoding-type=url", "max-keys=1000", "start-after=a%2Bb%20c%2F%25%0A%C3%BC"]
    {
        assert!(path.contains(part), "no {part} in {path}");
    }
}

/// Keys that look like paths are not treated as paths.
#[tokio::test]
async fn prefixes_and_cursors_are_sent_as_they_are() {
    let server = Fake::start(|_| answer(&listing(LAST, &[]))).await;
    let bucket = bucket(&format!("http://{}", server.address));
    for key in ["/", "/lead", "//two", "../../etc/passwd", "a/./b", " ", "\u{1}", &"ü".repeat(512)] {
        selecting(&bucket, key, &[], &[]).await.page(key).await.unwrap();
        let path = server.paths().pop().unwrap();
        let (place, query) = path.split_once('?').unwrap();
        assert_eq!(place.trim_end_matches('/'), "/videos", "{key:?}");
        for name in ["prefix", "start-after"] {
            let sent = format!("{name}={}", escape(key).replace('/', "%2F"));
            assert!(query.split('&').any(|part| part == sent), "no {sent} in {query}");
        }
    }
}

#[tokio::test]
async fn a_key_that_cannot_be_read_is_named_and_not_left_out() {
    let xml = |key: &str| listing(&format!("{LAST}{URL}"), &["a", key]);
    assert_unusable(page_of(xml("bad%FFkey")).await, &["bad%FFkey", "UTF-8"]);
    assert_unusable(page_of(xml("bad%zz")).await, &["bad%zz", "percent"]);
}

#[tokio::test]
async fn a_service_that_ignores_the_cursor_is_not_listed_for_ever() {
    let server = Fake::start(|_| answer(&listing(MORE, &["a", "b"]))).await;
    let lister = lister(&bucket(&format!("http://{}", server.address))).await;
    assert_eq!(lister.page("").await.unwrap().next.as_deref(), Some("b"));
    assert_unusable(lister.page("b").await, &["order", "\"a\"", "\"b\""]);
}

#[tokio::test]
async fn a_listing_out_of_order_is_refused_because_it_could_not_be_resumed() {
    assert_unusable(page_of(listing(MORE, &["b", "a"])).await, &["order"]);
    assert_unusable(page_of(listing(MORE, &["a", "a"])).await, &["order"]);
}

#[tokio::test]
async fn an_answer_that_leaves_out_what_matters_is_refused() {
    assert_unusable(page_of(listing("", &["a"])).await, &["more follows"]);
    assert_unusable(page_of(listing(MORE, &[])).await, &["without keys", "not where"]);
    let nameless = LAST.to_owned() + &object("");
    assert_unusable(page_of(listing(&nameless, &[])).await, &["without a key"]);
    let sizeless = format!("{LAST}<Contents><Key>a</Key></Contents>");
    assert_unusable(page_of(listing(&sizeless, &[])).await, &["no size", "\"a\""]);
    let many: Vec<String> = (0..1_001).map(|number| format!("{number:05}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_unusable(page_of(listing(LAST, &many)).await, &["1001"]);
}

#[tokio::test]
async fn an_answer_without_end_is_not_read_to_its_end() {
    let endless = format!("<ListBucketResult>{}", " ".repeat(9 * 1024 * 1024));
    assert_unusable(page_of(endless).await, &["too long"]);
}

#[tokio::test]
async fn an_answer_that_comes_drop_by_drop_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut bucket = bucket(&format!("http://{}", listener.local_addr().unwrap()));
    (bucket.timeout, bucket.max_attempts) = (Duration::from_secs(1), 1);
    let drops = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n<ListBucketResult>")
            .await
            .unwrap();
        while stream.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let error =
        tokio::time::timeout(Duration::from_secs(20), first_page(&bucket)).await.unwrap().unwrap_err();
    assert!(matches!(error, StorageError::Unreachable(_)), "{error:?}");
    drops.await.unwrap();
}

#[tokio::test]
async fn etags_have_quotes_however_they_are_listed() {
    let etag = async |listed: &str| {
        let xml = format!("{LAST}<Contents><Key>a</Key><Size>1</Size>{listed}</Contents>");
        page_of(listing(&xml, &[])).await.unwrap().files.remove(0).etag
    };
    assert_eq!(etag("<ETag>&#34;x-1&#34;</ETag>").await, "\"x-1\"");
    assert_eq!(etag("<ETag>x-1</ETag>").await, "\"x-1\"");
    assert_eq!(etag("").await, "");
}

#[tokio::test]
async fn a_failure_that_goes_away_is_not_noticed_and_one_that_stays_is_reported() {
    let tries = AtomicUsize::new(0);
    let server = Fake::start(move |_| {
        let mut response = answer(&listing(LAST, &["a"]));
        if tries.fetch_add(1, Ordering::SeqCst) != 1 {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        response
    })
    .await;
    let bucket = bucket(&format!("http://{}", server.address));
    assert_eq!(keys(&first_page(&bucket).await.unwrap().files), ["a"]);
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(error, StorageError::Unreachable(_)) && error.is_transient(), "{error:?}");
}

/// By status alone, because gateways and proxies send no S3 error codes.
#[tokio::test]
async fn what_a_service_says_while_it_is_busy_is_tried_again_and_a_refusal_is_not() {
    for (code, tries) in [
        (408, 2),
        (429, 2),
        (500, 2),
        (502, 2),
        (503, 2),
        (504, 2),
        (507, 2),
        (520, 2),
        (529, 2),
        (400, 1),
        (403, 1),
        (404, 1),
        (409, 1),
    ] {
        let first = AtomicBool::new(true);
        let server = Fake::start(move |_| {
            if first.swap(false, Ordering::SeqCst) { status(code) } else { answer(&listing(LAST, &["a"])) }
        })
        .await;
        let page = first_page(&bucket(&format!("http://{}", server.address))).await;
        assert_eq!((page.is_ok(), server.paths().len()), (tries == 2, tries), "{code}: {page:?}");
    }
}

/// The client library has one retry budget for the whole process, which one tenant's service must not use up.
#[tokio::test]
async fn however_many_requests_fail_each_has_all_its_tries() {
    let server = Fake::start(|_| status(503)).await;
    let bucket = bucket(&format!("http://{}", server.address));
    let failed = join_all((0..200).map(|_| first_page(&bucket))).await;
    assert!(failed.iter().all(|page| matches!(page, Err(StorageError::Unreachable(_)))));
    assert_eq!(server.paths().len(), 400);
}
