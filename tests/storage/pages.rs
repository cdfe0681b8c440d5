//! Legal but unusual pages: the listing continues, and no file is silently left out.

use std::sync::atomic::{AtomicUsize, Ordering};

use storage::{ETAG_BYTES_MAX, KEY_BYTES_MAX, ListedPage, Lister, Skipped, StorageError};
use tests::fake::{Fake, listed_page, parameter, xml};

use crate::harness::{all, bucket, keys, lister, selecting};

async fn lister_of(server: &Fake) -> Lister {
    lister(&bucket(&format!("http://{}", server.address))).await
}

fn example(page: &ListedPage) -> &str {
    page.skipped.example.as_deref().unwrap_or_default()
}

#[tokio::test]
async fn a_key_that_is_too_long_is_counted_and_skipped() {
    let fits = "b".repeat(KEY_BYTES_MAX);
    let stored = ["a".to_owned(), fits.clone() + "x", "c".repeat(5_000), "d".to_owned()];
    let server = Fake::start(move |_| listed_page(None, &stored)).await;
    let page = lister_of(&server).await.page("").await.unwrap();
    assert_eq!((keys(&page.files), page.skipped.files), (vec!["a", "d"], 2));
    let example = example(&page);
    assert!(example.contains("1025 bytes") && example.contains("1024"), "{example}");
    assert!(example.contains("\"bbbb") && example.len() < 200, "{example}");

    let server = Fake::start(move |_| listed_page(None, &[&fits])).await;
    let page = lister_of(&server).await.page("").await.unwrap();
    assert_eq!((page.files.len(), page.skipped), (1, Skipped::default()), "the longest that S3 allows");
}

#[tokio::test]
async fn an_etag_that_is_too_long_is_counted_and_skipped() {
    for (bytes, files) in [(ETAG_BYTES_MAX, 2), (ETAG_BYTES_MAX + 1, 1)] {
        let object = |key: &str, etag: &str| {
            format!("<Contents><Key>{key}</Key><Size>7</Size><ETag>{etag}</ETag></Contents>")
        };
        let contents = object("a", &"e".repeat(bytes)) + &object("b", "e");
        let text = format!("<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>");
        let server = Fake::start(move |_| xml(&text)).await;
        let page = lister_of(&server).await.page("").await.unwrap();
        assert_eq!((page.files.len(), page.skipped.files), (files, 2 - files as u64), "{bytes}");
        assert_eq!(example(&page).contains("etag of \"a\" has 257 bytes"), files == 1, "{page:?}");
    }
}

#[tokio::test]
async fn an_object_that_is_not_selected_is_not_reported_as_skipped() {
    let server = Fake::start(|_| listed_page(None, &["a".repeat(2_000)])).await;
    let bucket = bucket(&format!("http://{}", server.address));
    let page = selecting(&bucket, "", &["*.jpg"], &[]).await.page("").await.unwrap();
    assert_eq!(page.skipped, Skipped::default());
}

/// The cursor is stored and sent, so it must stay short, and it must not skip any file that could be
/// processed.
#[tokio::test]
async fn a_page_that_ends_with_a_key_that_is_too_long_leads_to_the_next() {
    let stem = "k".repeat(KEY_BYTES_MAX - 1);
    let mut stored: Vec<String> = ["", "a", "aa", "ü", "日本", "z"].map(|end| stem.clone() + end).to_vec();
    stored.extend(["b", "l", "m"].map(str::to_owned));
    stored.sort();
    let all = stored.clone();
    let server = Fake::start(move |request| {
        let after = parameter(request, "start-after");
        let next = all.iter().find(|key| **key > after);
        let is_last = next == all.last();
        listed_page(Some("token").filter(|_| !is_last), next.as_slice())
    })
    .await;
    let lister = lister_of(&server).await;
    let (mut after, mut found, mut skipped) = (String::new(), Vec::new(), 0);
    loop {
        let page = lister.page(&after).await.unwrap();
        found.extend(page.files.into_iter().map(|file| file.key));
        skipped += page.skipped.files;
        let Some(next) = page.next else { break };
        assert!(next.len() <= KEY_BYTES_MAX + 4, "{} bytes", next.len());
        after = next;
    }
    let fits: Vec<String> = stored.iter().filter(|key| key.len() <= KEY_BYTES_MAX).cloned().collect();
    assert_eq!((found, skipped > 0), (fits, true));
}

#[tokio::test]
async fn pages_without_keys_are_passed_over_by_their_continuation_tokens() {
    let server = Fake::start(|request| {
        let none: [&str; 0] = [];
        match parameter(request, "continuation-token").as_str() {
            "" => listed_page(Some("one"), &none),
            "one" => listed_page(Some("two/+"), &none),
            "two/+" => listed_page(Some("three"), &["k", "l"]),
            other => panic!("the token {other} was sent"),
        }
    })
    .await;
    let page = lister_of(&server).await.page("j").await.unwrap();
    // The cursor is a key again, because keys do not expire and tokens do.
    assert_eq!((keys(&page.files), page.next.as_deref()), (vec!["k", "l"], Some("l")));
    assert!(server.requests().iter().all(|request| parameter(request, "start-after") == "j"));
}

#[tokio::test]
async fn a_listing_may_end_with_pages_without_keys() {
    let server = Fake::start(|request| {
        let none: [&str; 0] = [];
        listed_page(Some("more").filter(|_| parameter(request, "continuation-token").is_empty()), &none)
    })
    .await;
    let page = lister_of(&server).await.page("j").await.unwrap();
    assert_eq!((page.files, page.next), (vec![], None));
}

#[tokio::test]
async fn a_service_that_never_gets_further_is_given_up() {
    let none: [&str; 0] = [];
    let same = Fake::start(move |_| listed_page(Some("same"), &none)).await;
    let error = lister_of(&same).await.page("j").await.unwrap_err();
    assert!(matches!(error, StorageError::Unusable(_)), "{error:?}");
    assert_eq!(same.paths().len(), 2, "a token that leads to itself");

    let ignoring = Fake::start(|_| listed_page(Some("more"), &["j"])).await;
    let error = lister_of(&ignoring).await.page("j").await.unwrap_err();
    assert!(matches!(error, StorageError::Unusable(_)), "{error:?}");
}

#[tokio::test]
async fn pages_without_keys_are_not_passed_over_without_end() {
    let pages = AtomicUsize::new(0);
    let server = Fake::start(move |_| {
        let (none, page): ([&str; 0], _) = ([], pages.fetch_add(1, Ordering::Relaxed));
        if page < 20 { listed_page(Some(&page.to_string()), &none) } else { listed_page(None, &["a"]) }
    })
    .await;
    let error = lister_of(&server).await.passing_over(19).page("").await.unwrap_err();
    assert!(error.to_string().contains("more than 19 pages"), "{error}");
    assert_eq!(server.paths().len(), 20);
}

#[tokio::test]
async fn a_service_whose_pages_begin_with_the_cursor_lists_no_file_twice() {
    let stored: Vec<String> = (0..7).map(|number| format!("key{number}")).collect();
    let kept = stored.clone();
    let server = Fake::start(move |request| {
        let after = parameter(request, "start-after");
        let rest: Vec<&String> = kept.iter().filter(|key| **key >= after).take(3).collect();
        let is_last = rest.last() == kept.last().as_ref();
        listed_page(Some("token").filter(|_| !is_last), &rest)
    })
    .await;
    let (files, _) = all(&lister_of(&server).await, "").await;
    assert_eq!(keys(&files), stored);
}
