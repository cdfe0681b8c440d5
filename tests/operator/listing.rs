//! Listing into the queue: every file of the bucket once, despite crashes, competing listings and failures.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use operator::listing::{Bounds, ListingError, Progress, list_into};
use operator::turns::Turns;
use protocol::RunId;
use queue::{File, Listing, Opened, RunQueue};
use redis::streams::StreamRangeReply;
use storage::{Lister, Selection, StorageError};
use testbed::{Fault, FaultyS3, Rule};
use tests::fake::{Fake, listed_page, parameter};
use tests::s3::{TestS3, escape};
use tests::valkey::{Flavor, KEEP, TestServer, owner};

const BUCKET: &str = "videos";
const RETRY: queue::RetryPolicy = queue::RetryPolicy {
    max_attempts: 1,
    max_disruptions: 1,
    backoff_initial: Duration::from_secs(1),
    backoff_max: Duration::from_secs(1),
    keep_results: 0,
};
/// Three pages; the last one is not full.
const FILES: usize = 2_345;

struct Bench {
    valkey: TestServer,
    s3: TestS3,
    queue: RunQueue,
    turns: Turns,
}

impl Bench {
    async fn start(files: usize) -> Self {
        let valkey = TestServer::start(Flavor::Valkey).await;
        let s3 = TestS3::start(BUCKET).await;
        let puts = (0..files).map(|number| {
            let s3 = &s3;
            async move { s3.client.put(BUCKET, &escape(&key(number)), vec![b'x'; number % 7]).await.unwrap() }
        });
        stream::iter(puts).buffer_unordered(8).collect::<()>().await;
        let queue = open(&valkey, &RunId::derive("team-a", "monday").unwrap()).await;
        Self { valkey, s3, queue, turns: Turns::new(8) }
    }

    async fn lister(&self, url: &str) -> Lister {
        let bucket = tests::s3::bucket(url, BUCKET);
        Lister::new(&bucket, "", Selection::new("", &[], &["**/*.tmp".to_owned()]).unwrap()).await
    }

    fn bounds(&self) -> Bounds<'_> {
        Bounds { turns: &self.turns, namespace: "team-a", max_files: None, high_water: u64::MAX }
    }

    async fn listed(&self) -> Listing {
        self.queue.stats().await.unwrap().listing
    }

    /// Lists from the cursor in the queue.
    async fn list(&self, lister: &Lister) -> Result<u64, ListingError> {
        list_into(&self.queue, lister, self.listed().await, self.bounds(), |_| ()).await
    }

    /// How often the queue holds each key.
    async fn queued(&self) -> BTreeMap<String, usize> {
        let mut command = redis::cmd("XRANGE");
        let reply = self.valkey.raw(command.arg(&self.queue.keys().work).arg("-").arg("+")).await;
        let entries: StreamRangeReply = redis::from_redis_value(reply).unwrap();
        let mut keys = BTreeMap::new();
        for entry in entries.ids {
            *keys.entry(entry.get::<String>("file").unwrap()).or_default() += 1;
        }
        keys
    }

    async fn assert_every_file_once(&self) {
        let stats = self.queue.stats().await.unwrap();
        assert_eq!(
            (stats.listing, stats.total, stats.queued),
            (Listing::Complete, FILES as u64, FILES as u64)
        );
        let expected: BTreeMap<String, usize> = (0..FILES).map(|number| (key(number), 1)).collect();
        assert!(self.queued().await == expected, "a file is missing or there twice");
    }
}

async fn open(valkey: &TestServer, run: &RunId) -> RunQueue {
    match RunQueue::open(&valkey.connect(), run, &owner("uid-1"), "spec-1", &KEEP).await.unwrap() {
        Opened::Created(queue) => queue,
        _ => panic!("{run} is not new"),
    }
}

fn key(number: usize) -> String {
    format!("camera {}/+frame%{number:05}.jpg", number % 3)
}

#[tokio::test]
async fn every_file_is_queued_as_it_is_listed_and_progress_is_told() {
    let bench = Bench::start(FILES).await;
    bench.s3.client.put(BUCKET, "left.tmp", "x").await.unwrap();
    bench.s3.client.put(BUCKET, "out/left.tmp", "x").await.unwrap();
    let lister = bench.lister(&bench.s3.url).await;
    let told = RefCell::new(Vec::new());
    let progress = |page: Progress| told.borrow_mut().push(page.total);
    let total =
        list_into(&bench.queue, &lister, bench.listed().await, bench.bounds(), progress).await.unwrap();
    assert_eq!((total, told.into_inner()), (FILES as u64, vec![1_000, 2_000, FILES as u64]));
    bench.assert_every_file_once().await;
    // A worker gets exactly the file that was listed.
    bench.queue.hand_out(&["pod-1".to_owned()]).await.unwrap();
    let mut worker = queue::Worker::new(bench.valkey.server(), &bench.queue.keys().work, "pod-1");
    let File { key: first, size, etag } = worker.claim(Duration::from_secs(1)).await.unwrap().unwrap().file;
    assert_eq!((first, size), (key(0), 0));
    assert_eq!(etag, "\"d41d8cd98f00b204e9800998ecf8427e\"");
    // A second listing has nothing left to do.
    assert_eq!(bench.list(&lister).await.unwrap(), FILES as u64);
}

#[tokio::test]
async fn an_empty_bucket_is_listed_to_its_end() {
    let bench = Bench::start(0).await;
    let lister = bench.lister(&bench.s3.url).await;
    assert_eq!(bench.list(&lister).await.unwrap(), 0);
    assert_eq!(bench.listed().await, Listing::Complete);
}

#[tokio::test]
async fn files_that_no_run_can_process_are_reported_and_the_others_are_queued() {
    let bench = Bench::start(0).await;
    let server = Fake::start(|request| match parameter(request, "start-after").as_str() {
        "" => listed_page(Some("more"), &["a".to_owned(), "b".repeat(2_000), "c".to_owned()]),
        _ => listed_page(None, &["d".repeat(3_000), "e".to_owned()]),
    })
    .await;
    let lister = bench.lister(&format!("http://{}", server.address)).await;
    let reported = RefCell::new(Vec::new());
    let progress = |page: Progress| reported.borrow_mut().push((page.total, page.skipped.files));
    list_into(&bench.queue, &lister, bench.listed().await, bench.bounds(), progress).await.unwrap();
    assert_eq!(reported.into_inner(), [(2, 1), (3, 1)]);
    assert_eq!(bench.queued().await.into_keys().collect::<Vec<_>>(), ["a", "c", "e"]);
    assert_eq!(bench.queue.stats().await.unwrap().skipped, 2, "the next operator knows");
}

#[tokio::test]
async fn a_bucket_with_more_files_than_a_run_may_have_is_not_listed_to_its_end() {
    let mut bench = Bench::start(0).await;
    let server = Fake::start(|request| {
        let after = parameter(request, "start-after");
        let keys: Vec<String> = (b'a'..=b'z').map(|key| char::from(key).to_string()).collect();
        let page: Vec<&String> = keys.iter().filter(|key| **key > after).take(2).collect();
        listed_page(Some("more").filter(|_| page.last() != keys.last().as_ref()), &page)
    })
    .await;
    let lister = bench.lister(&format!("http://{}", server.address)).await;
    for (max, total) in [(3, 4), (25, 26)] {
        bench.queue = open(&bench.valkey, &format!("at-most-{max}").parse().unwrap()).await;
        let bounds = Bounds { max_files: Some(max), ..bench.bounds() };
        let listed = list_into(&bench.queue, &lister, bench.listed().await, bounds, |_| ()).await;
        assert!(matches!(listed, Err(ListingError::TooMany { listed, .. }) if listed == total), "{listed:?}");
        assert_eq!(bench.queue.stats().await.unwrap().total, total, "no page more than it takes");
    }
    bench.queue = open(&bench.valkey, &"as-many".parse().unwrap()).await;
    let bounds = Bounds { max_files: Some(26), ..bench.bounds() };
    assert_eq!(list_into(&bench.queue, &lister, bench.listed().await, bounds, |_| ()).await.unwrap(), 26);
}

#[tokio::test]
async fn a_listing_pauses_at_the_high_water_without_a_turn_and_goes_on_below_half() {
    let bench = Bench::start(0).await;
    let server = Fake::start(|request| match parameter(request, "start-after").as_str() {
        "" => listed_page(Some("more"), &["a", "b", "c", "d"]),
        "d" => listed_page(None, &["e", "f"]),
        other => panic!("asked for what follows {other}"),
    })
    .await;
    let lister = bench.lister(&format!("http://{}", server.address)).await;
    let bounds = Bounds { high_water: 4, ..bench.bounds() };
    let from = bench.listed().await;
    let listing = async { list_into(&bench.queue, &lister, from, bounds, |_| ()).await.unwrap() };
    let drain = async {
        // Long enough for the first page to be queued and the second one to be refused.
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(bench.queue.stats().await.unwrap().total, 4, "the second page waits");
        assert!(bench.turns.next("team-a").now_or_never().is_some(), "its turn is free");
        let keys = bench.queue.keys();
        for _ in 0..3 {
            bench.queue.hand_out(&["pod-1".to_owned()]).await.unwrap();
            let mut worker = queue::Worker::new(bench.valkey.server(), &keys.work, "pod-1");
            let claim = worker.claim(Duration::from_secs(1)).await.unwrap().unwrap();
            let done = queue::Settlement {
                entry: claim.entry,
                consumer: "pod-1".to_owned(),
                verdict: queue::Verdict::Succeeded,
            };
            bench.queue.settle(&[done], &RETRY).await.unwrap();
        }
    };
    let (total, ()) = tokio::join!(listing, drain);
    assert_eq!(total, 6);
}

/// After every page, the process dies as soon as the page is queued, and another process continues.
#[tokio::test]
async fn a_crash_at_any_page_is_resumed() {
    let bench = Bench::start(FILES).await;
    let lister = bench.lister(&bench.s3.url).await;
    for expected in [1_000, 2_000, FILES as u64] {
        let (crash, crashed) = tokio::sync::oneshot::channel();
        let crash = RefCell::new(Some(crash));
        let progress = |_| crash.borrow_mut().take().into_iter().for_each(|crash| crash.send(()).unwrap());
        let from = bench.listed().await;
        tokio::select! {
            biased;
            _ = crashed => {}
            listed = list_into(&bench.queue, &lister, from, bench.bounds(), progress) => {
                assert_eq!(listed.unwrap(), expected);
            }
        }
        let total = bench.queue.stats().await.unwrap().total;
        // A page in flight at the crash may have arrived, but only as a whole.
        assert!(total >= expected && (total % 1_000 == 0 || total == FILES as u64), "{total}");
    }
    bench.list(&lister).await.unwrap();
    bench.assert_every_file_once().await;
}

#[tokio::test]
async fn two_listings_at_once_add_every_file_once() {
    let bench = Bench::start(FILES).await;
    let (one, other) = (bench.lister(&bench.s3.url).await, bench.lister(&bench.s3.url).await);
    let (one, other) = tokio::join!(bench.list(&one), bench.list(&other));
    assert_eq!((one.unwrap(), other.unwrap()), (FILES as u64, FILES as u64));
    bench.assert_every_file_once().await;
}

#[tokio::test]
async fn a_listing_that_was_overtaken_goes_on_where_the_queue_is() {
    let mut bench = Bench::start(FILES).await;
    let lister = bench.lister(&bench.s3.url).await;
    let overtake = async |queue: &RunQueue, after: &str| {
        let storage::ListedPage { files, next, .. } = lister.page(after).await.unwrap();
        let file = |file: storage::ListedFile| File { key: file.key, size: file.size, etag: file.etag };
        let files = files.into_iter().map(file).collect();
        let page = queue::Page { after: after.to_owned(), next: next.clone(), files, skipped: 0 };
        queue.enqueue(&page, u64::MAX).await.unwrap();
        next.unwrap_or_default()
    };
    for pages in [1, 2, 3] {
        let run = format!("overtaken-by-{pages}").parse().unwrap();
        bench.queue = open(&bench.valkey, &run).await;
        let mut after = String::new();
        for _ in 0..pages {
            after = overtake(&bench.queue, &after).await;
        }
        // As if this listing had asked the queue before the other one added its pages.
        let total = list_into(&bench.queue, &lister, Listing::UpTo(String::new()), bench.bounds(), |_| ())
            .await
            .unwrap();
        assert_eq!(total, FILES as u64);
        bench.assert_every_file_once().await;
    }
}

#[tokio::test]
async fn a_failure_in_the_middle_keeps_what_was_listed_and_is_resumed() {
    let bench = Bench::start(FILES).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    let lister = bench.lister(&proxy.url).await;
    proxy.inject(Rule::every(Fault::InternalError, "start-after"));
    let error = bench.list(&lister).await.unwrap_err();
    let ListingError::List { after, source } = error else { panic!("{error:?}") };
    assert!(matches!(source, StorageError::Unreachable(_)), "{source:?}");
    let stats = bench.queue.stats().await.unwrap();
    assert_eq!((stats.total, stats.listing), (1_000, Listing::UpTo(after)), "the page before is not lost");
    bench.list(&bench.lister(&bench.s3.url).await).await.unwrap();
    bench.assert_every_file_once().await;
}

#[tokio::test]
async fn a_queue_that_is_away_stops_the_listing_and_loses_nothing() {
    let mut bench = Bench::start(FILES).await;
    let lister = bench.lister(&bench.s3.url).await;
    let from = bench.listed().await;
    bench.valkey.kill();
    let error = list_into(&bench.queue, &lister, from, bench.bounds(), |_| ()).await.unwrap_err();
    assert!(matches!(error, ListingError::Enqueue(queue::Error::Unavailable { .. })), "{error:?}");
}
