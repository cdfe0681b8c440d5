//! Concurrent listings: their memory is bounded, Valkey answers, and no listing waits for another to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::{join_all, select};
use operator::listing::{Bounds, Progress, list_into};
use operator::turns::Turns;
use queue::{Listing, Opened, RunQueue};
use storage::{Lister, Selection};
use tests::fake::{Fake, listed_page, parameter};
use tests::valkey::{Flavor, KEEP, TestServer, owner};

/// Pages that the service answered and that are not queued yet: the current number and the maximum.
#[derive(Default)]
struct Pages {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Pages {
    fn answered(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
    }

    fn queued(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A service whose buckets have this many pages of 100 keys each, and which takes a moment to answer.
async fn service(last_page: usize, pages: &Arc<Pages>) -> Fake {
    let pages = Arc::clone(pages);
    Fake::start_slow(move |request| {
        let after = parameter(request, "start-after");
        let page = after.split('-').next().and_then(|page| page.parse::<usize>().ok()).unwrap_or(0) + 1;
        pages.answered();
        async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let keys: Vec<String> = (0..100).map(|key| format!("{page:04}-{key:04}")).collect();
            listed_page(Some("more").filter(|_| page < last_page), &keys)
        }
    })
    .await
}

async fn lister(server: &Fake) -> Lister {
    let bucket = tests::s3::bucket(&format!("http://{}", server.address), "videos");
    Lister::new(&bucket, "", Selection::new("", &[], &[]).unwrap()).await
}

async fn open(valkey: &TestServer, run: &str) -> RunQueue {
    match RunQueue::open(&valkey.connect(), &run.parse().unwrap(), &owner("uid-1"), "spec-1", &KEEP)
        .await
        .unwrap()
    {
        Opened::Created(queue) => queue,
        _ => panic!("{run} is not new"),
    }
}

#[tokio::test]
async fn runs_that_start_together_have_few_pages_in_memory_and_valkey_answers_meanwhile() {
    let (valkey, pages) = (TestServer::start(Flavor::Valkey).await, Arc::new(Pages::default()));
    let (server, turns) = (service(2, &pages).await, Turns::new(4));
    let lister = lister(&server).await;
    let bystander = open(&valkey, "bystander").await;
    let listings = join_all((0..100).map(|number| {
        let (lister, pages, valkey, turns) = (&lister, &pages, &valkey, &turns);
        async move {
            let queue = open(valkey, &format!("run-{number}")).await;
            let from = Listing::UpTo(String::new());
            list_into(
                &queue,
                lister,
                from,
                Bounds { turns, namespace: "team-a", max_files: None, high_water: u64::MAX },
                |_: Progress| pages.queued(),
            )
            .await
            .unwrap()
        }
    }));
    let meanwhile = async {
        loop {
            bystander.stats().await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let done = select(Box::pin(listings), Box::pin(meanwhile)).await;
    let futures::future::Either::Left((totals, _)) = done;
    assert!(totals.iter().all(|total| *total == 200), "{totals:?}");
    let most = pages.most.load(Ordering::SeqCst);
    // At the end, while turns are free, each listing with a turn may hold one more page.
    assert!((2..=7).contains(&most), "{most} pages");
}

#[tokio::test]
async fn a_small_bucket_does_not_wait_for_the_end_of_a_large_one() {
    let (valkey, pages) = (TestServer::start(Flavor::Valkey).await, Arc::new(Pages::default()));
    let (large, small, turns) = (service(200, &pages).await, service(1, &pages).await, Turns::new(1));
    let (large, small) = (lister(&large).await, lister(&small).await);
    let (one, other) = (open(&valkey, "large").await, open(&valkey, "small").await);
    let (bounds, from) = (
        Bounds { turns: &turns, namespace: "team-a", max_files: None, high_water: u64::MAX },
        Listing::UpTo(String::new()),
    );
    let large = list_into(&one, &large, from.clone(), bounds, |_| ());
    let small = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        list_into(&other, &small, from, bounds, |_| ()).await.unwrap()
    };
    let done = select(Box::pin(large), Box::pin(small)).await;
    assert!(matches!(done, futures::future::Either::Right((100, _))), "the small one waited");
}

/// The second page never arrives, so the listing waits for it forever, and after a while in the lane for slow
/// services.
#[tokio::test]
async fn a_page_that_is_queued_takes_no_room_while_the_next_one_is_awaited() {
    let valkey = TestServer::start(Flavor::Valkey).await;
    let server = Fake::start_slow(|request| {
        let first = parameter(request, "start-after").is_empty();
        async move {
            if !first {
                std::future::pending::<()>().await;
            }
            listed_page(Some("more"), &(0..100).map(|key| format!("{key:04}")).collect::<Vec<_>>())
        }
    })
    .await;
    let (lister, queue, turns) =
        (lister(&server).await, open(&valkey, "waiting").await, Turns::with_room_for(2, 4));
    let bounds = Bounds { turns: &turns, namespace: "team-a", max_files: None, high_water: u64::MAX };
    let listing = list_into(&queue, &lister, Listing::UpTo(String::new()), bounds, |_| ());
    let other = async {
        tests::eventually("the next page is asked for", || async { server.requests().len() == 2 }).await;
        tests::eventually("all room is free", || async {
            let turn = turns.next("team-b").await;
            let (one, two) = (turn.room_ahead(), turn.room_ahead());
            one.is_some() && two.is_some()
        })
        .await;
        queue.stats().await.unwrap().total
    };
    let done = select(Box::pin(listing), Box::pin(other)).await;
    assert!(matches!(done, futures::future::Either::Right((100, _))), "the first page is queued");
}
