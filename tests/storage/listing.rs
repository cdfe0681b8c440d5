//! Listing a real server: every file once, whatever its key, from the beginning or from any cursor.

use tests::s3::{TestS3, escape};

use crate::harness::{BUCKET, all, bucket, first_page, keys, lister, selecting, store};

#[tokio::test]
async fn every_file_is_listed_once_from_any_cursor() {
    let s3 = TestS3::start(BUCKET).await;
    let mut stored: Vec<String> =
        (0..2_600).map(|number| format!("camera-{}/frame {number:05}+.jpg", number % 3)).collect();
    stored.sort();
    store(&s3, &stored).await;
    let lister = lister(&bucket(&s3.url)).await;
    let (files, pages) = all(&lister, "").await;
    assert_eq!((keys(&files), pages), (stored.iter().map(String::as_str).collect(), 3));
    for place in [0, 1, 998, 999, 1_000, 1_001, 1_999, 2_598, 2_599] {
        let (rest, _) = all(&lister, &stored[place]).await;
        assert_eq!(keys(&rest), keys(&files[place + 1..]), "after {place}");
    }
    // A cursor outlives its object, and need not name one.
    let (rest, _) = all(&lister, "camera-1").await;
    assert_eq!(keys(&rest), keys(&files[867..]));
    assert_eq!(all(&lister, "camera-2/~").await.0, []);
}

/// Odd keys, as far as a server on a file system supports them; the rest is in `answers`.
#[tokio::test]
async fn odd_keys_are_listed_exactly_with_size_and_etag() {
    let s3 = TestS3::start(BUCKET).await;
    let long = format!("{}{}x", "long/".repeat(163), "ü".repeat(104));
    assert_eq!(long.len(), 1_024);
    let odd = [
        "a b  c",
        " lead and trail ",
        "new\nline",
        "cr\rlf",
        "ünïcödé/日本語",
        "1+1=2",
        "100%25 %",
        "a&b?c#d;e",
        "<tag>&amp;",
        "...",
        "tab\there",
        "quote\"'",
        &long,
        // Folders sort with their slash, unlike in a file system.
        "f-b",
        "f.txt",
        "f/b",
        "f0",
    ];
    let mut odd: Vec<String> = odd.iter().map(|&key| key.to_owned()).collect();
    odd.sort();
    store(&s3, &odd).await;
    let lister = lister(&bucket(&s3.url)).await;
    let (files, _) = all(&lister, "").await;
    assert_eq!(keys(&files), odd);
    for (place, file) in files.iter().enumerate() {
        let md5 = <md5::Md5 as md5::Digest>::digest(file.key.as_bytes());
        let etag: String = md5.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            (file.size, &file.etag),
            (file.key.len() as u64, &format!("\"{etag}\"")),
            "{:?}",
            file.key
        );
        assert_eq!(keys(&all(&lister, &file.key).await.0), odd[place + 1..], "after {:?}", file.key);
    }
}

#[tokio::test]
async fn files_are_selected_below_the_prefix_and_the_cursor_moves_over_the_others() {
    let s3 = TestS3::start(BUCKET).await;
    let stored =
        ["other/a.jpg", "cam/a.jpg", "cam/b.tmp", "cam/deep/c.jpg", "cam/deep/d.txt", "camera/e.jpg"];
    store(&s3, &stored.map(str::to_owned)).await;
    let bucket = bucket(&s3.url);
    for (prefix, include, exclude, expected) in [
        ("cam/", &[][..], &[][..], &["cam/a.jpg", "cam/b.tmp", "cam/deep/c.jpg", "cam/deep/d.txt"][..]),
        ("cam/", &["*.jpg"], &[], &["cam/a.jpg"]),
        ("cam/", &["**/*.jpg"], &[], &["cam/a.jpg", "cam/deep/c.jpg"]),
        ("cam/", &[], &["**/*.{tmp,txt}"], &["cam/a.jpg", "cam/deep/c.jpg"]),
        ("cam", &["**/*.jpg"], &["[/]deep/*"], &["cam/a.jpg", "camera/e.jpg"]),
        ("nothing/", &[], &[], &[]),
    ] {
        let (files, _) = all(&selecting(&bucket, prefix, include, exclude).await, "").await;
        assert_eq!(keys(&files), expected, "{prefix} {include:?} {exclude:?}");
    }
}

#[tokio::test]
async fn a_page_without_selected_files_still_leads_to_the_next() {
    let s3 = TestS3::start(BUCKET).await;
    let mut stored: Vec<String> = (0..1_000).map(|number| format!("a/{number:04}.tmp")).collect();
    stored.push("b/only.jpg".to_owned());
    store(&s3, &stored).await;
    let lister = selecting(&bucket(&s3.url), "", &["**/*.jpg"], &[]).await;
    let first = lister.page("").await.unwrap();
    assert_eq!((first.files.len(), first.next.as_deref()), (0, Some("a/0999.tmp")));
    assert_eq!(keys(&lister.page("a/0999.tmp").await.unwrap().files), ["b/only.jpg"]);
}

#[tokio::test]
async fn folders_are_no_files_and_empty_files_are() {
    let s3 = TestS3::start(BUCKET).await;
    for key in ["folder/", "folder/empty"] {
        s3.client.put(BUCKET, &escape(key), Vec::new()).await.unwrap();
    }
    let page = first_page(&bucket(&s3.url)).await.unwrap();
    assert_eq!((keys(&page.files), page.next), (vec!["folder/empty"], None));
}

#[tokio::test]
async fn an_empty_bucket_has_no_files() {
    let s3 = TestS3::start(BUCKET).await;
    let page = first_page(&bucket(&s3.url)).await.unwrap();
    assert_eq!((page.files, page.next), (vec![], None));
}
