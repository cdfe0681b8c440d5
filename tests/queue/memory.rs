//! A bucket that is larger than the server's memory, and a server without free memory.

use std::time::Duration;

use queue::{
    Closed, Ending, Enqueued, Error, Fate, Listing, Opened, Page, Pause, Reporter, ReportsLimit, RetryPolicy,
    RunQueue, Settlement, State, Verdict,
};
use tests::valkey::{Flavor, KEEP, TestServer};

use super::{
    AT_ONCE, PLENTY, claim, counts, disrupted, failed, file, last_page, open, open_as, queue_with, run_id,
    settlement, worker,
};

/// A page of an endless bucket.
fn page(number: usize, files: usize) -> Page {
    let cursor = |number: usize| if number == 0 { String::new() } else { number.to_string() };
    let files = (0..files).map(|n| file(format!("{number}-{n}"))).collect();
    Page { after: cursor(number), next: Some(cursor(number + 1)), files, skipped: 0 }
}

async fn used_memory(server: &TestServer) -> u64 {
    let info: String = redis::from_redis_value(server.raw(redis::cmd("INFO").arg("memory")).await).unwrap();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    used.parse().unwrap()
}

async fn set_maxmemory(server: &TestServer, bytes: u64) {
    server.raw(redis::cmd("CONFIG").arg(&["SET", "maxmemory", &bytes.to_string()])).await;
}

/// Settles this many files with this verdict, each claimed by its own pod.
async fn settle(server: &TestServer, queue: &RunQueue, files: usize, verdict: &Verdict) {
    let mut settlements: Vec<Settlement> = Vec::new();
    for number in 0..files {
        let pod = format!("pod-{number}");
        let claimed = claim(server, queue, &pod).await;
        settlements.push(settlement(&claimed.entry, &pod, verdict.clone()));
    }
    queue.settle(&settlements, &AT_ONCE).await.unwrap();
}

#[tokio::test]
async fn a_full_server_lets_every_run_settle_and_end() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let connection = server.connect();
        let queue =
            queue_with(&server, "full", &["ok", "bad", "waits", "disrupted", "vanished", "rest"]).await;
        let aborted = queue_with(&server, "aborted", &["a", "b"]).await;
        let deleted = queue_with(&server, "deleted", &["a"]).await;
        let growing = open(&connection, &run_id("growing")).await;
        growing.enqueue(&page(0, 3), PLENTY).await.unwrap();
        // Well below the limit, because its memory use varies with its connections.
        set_maxmemory(&server, used_memory(&server).await * 3 / 4).await;
        let write = server.raw_connection().await;
        let refused = redis::cmd("SET").arg(&["key", "value"]).query_async::<()>(&mut write.clone()).await;
        assert!(refused.unwrap_err().to_string().contains("OOM"), "the server is not full");

        assert_eq!(counts(&queue).await, (6, 6, 0, 0, 0));
        let waits = RetryPolicy {
            max_attempts: 2,
            backoff_initial: Duration::from_millis(2),
            backoff_max: Duration::from_millis(2),
            ..AT_ONCE
        };
        let mut claims = Vec::new();
        for number in 0..5 {
            let pod = format!("pod-{number}");
            claims.push((claim(&server, &queue, &pod).await, pod));
        }
        let rejected = Verdict::Rejected(queue::Failure::new("bad", None));
        let verdicts = [Verdict::Succeeded, rejected, failed("boom"), disrupted("NodeLost", true)];
        let settlements: Vec<Settlement> = claims
            .iter()
            .zip(verdicts)
            .map(|((claimed, pod), verdict)| settlement(&claimed.entry, pod, verdict))
            .collect();
        queue.settle(&settlements, &waits).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(queue.promote().await.unwrap().moved, 1);
        let reclaimed = queue.reclaim(Duration::ZERO, &waits, |_| Some("PodLost".into())).await.unwrap();
        assert_eq!(reclaimed.fates, [Fate::Disrupted { file: "vanished".into(), disruptions: 1 }]);
        assert_eq!(queue.recover().await.unwrap(), 0);
        // Pods that are told to end give back what they hold.
        queue.stop(&["idle".into()]).await.unwrap();
        let told = worker(server.server(), &queue, "idle").held(1).await.unwrap();
        assert!(told.is_told_to_stop && told.claims.is_empty());
        let Opened::Resumed(queue) = open_as(&connection, &run_id("full"), "uid-1", "spec-1").await else {
            panic!("an open queue cannot be opened again")
        };
        settle(&server, &queue, 4, &Verdict::Succeeded).await;
        assert_eq!(counts(&queue).await, (6, 0, 0, 5, 1));
        let closed = queue.close(Ending::Finish, "", &KEEP).await.unwrap();
        assert!(matches!(closed, Closed::Closed(_)), "{closed:?}");

        let closed = aborted.close(Ending::Abort { reason: "Aborted" }, "", &KEEP).await.unwrap();
        assert!(matches!(closed, Closed::Closed(end) if end.counts.failed == 2));
        RunQueue::delete(&connection, &run_id("deleted"), "uid-1").await.unwrap();
        assert!(matches!(deleted.stats().await, Err(Error::Lost { .. })));
        // Only growth is refused, and the run may process what it has.
        let paused = growing.enqueue(&page(1, 3), PLENTY).await.unwrap();
        assert_eq!(paused, Enqueued::Paused(Pause::MemoryFull));
        let stats = growing.stats().await.unwrap();
        assert_eq!((stats.paused, stats.started, stats.total), (Some(Pause::MemoryFull), true, 3));
        set_maxmemory(&server, 0).await;
        assert_eq!(growing.enqueue(&page(1, 3), PLENTY).await.unwrap(), Enqueued::Added { total: 6 });
    }
}

#[tokio::test]
async fn above_four_fifths_of_the_memory_a_run_keeps_one_page_and_keeps_moving() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("short")).await;
        queue.enqueue(&page(0, 1_000), PLENTY).await.unwrap();
        // Another run, which may process what it has.
        let other = open(&server.connect(), &run_id("other")).await;
        other.enqueue(&page(0, 1_000), PLENTY).await.unwrap();
        let used = used_memory(&server).await;

        set_maxmemory(&server, used * 2).await;
        assert!(matches!(queue.enqueue(&page(1, 10), PLENTY).await.unwrap(), Enqueued::Added { .. }));
        // At 83 %, and below 100 % including what the server itself needs for half a page of inboxes.
        set_maxmemory(&server, used * 6 / 5).await;
        let third = page(2, 10);
        let enqueue = || queue.enqueue(&third, PLENTY);
        assert_eq!(enqueue().await.unwrap(), Enqueued::Paused(Pause::MemoryFull));
        settle(&server, &queue, 510, &Verdict::Succeeded).await;
        assert_eq!(enqueue().await.unwrap(), Enqueued::Paused(Pause::MemoryFull), "half of a page waits");
        settle(&server, &queue, 1, &Verdict::Succeeded).await;
        assert_eq!(enqueue().await.unwrap(), Enqueued::Added { total: 1_020 });
        assert_eq!(queue.stats().await.unwrap().paused, None);
    }
}

/// The last fifth takes what workers report. A server without any room refuses that, but what was reported
/// before counts, and makes room for the rest.
#[tokio::test]
async fn above_four_fifths_of_the_memory_reports_of_workers_are_taken_and_settled() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("reported")).await;
        queue.enqueue(&page(0, 1_000), PLENTY).await.unwrap();
        let pod = "pod".to_owned();
        queue.fill(std::slice::from_ref(&pod), 4).await.unwrap();
        let held = worker(server.server(), &queue, &pod).held(100).await.unwrap().claims;
        assert_eq!(held.len(), 4);
        let mut reporter = Reporter::new(server.server(), &queue.keys().work);
        let mut say = async |number: usize, words: &str| {
            reporter.report(&[(held[number].entry.clone(), format!("{pod} {words}"))]).await
        };
        let limit = ReportsLimit { reports: 1_000, bytes: 1 << 20 };
        let used = used_memory(&server).await;

        // At 83 %.
        set_maxmemory(&server, used * 6 / 5).await;
        let more = page(1, 10);
        let paused = queue.enqueue(&more, PLENTY).await.unwrap();
        assert_eq!(paused, Enqueued::Paused(Pause::MemoryFull));
        say(0, "succeeded").await.unwrap();
        say(1, "filter f exit:1 oom=0 term=0 boom").await.unwrap();
        let taken = queue.take(limit, &AT_ONCE).await.unwrap();
        assert_eq!((taken.succeeded, taken.reports.len()), (1, 1));
        queue.settle(&[settlement(&held[1].entry, &pod, failed("boom"))], &AT_ONCE).await.unwrap();
        assert_eq!(counts(&queue).await, (1_000, 997, 2, 1, 0));

        // Above 100 %.
        say(2, "succeeded").await.unwrap();
        set_maxmemory(&server, used * 3 / 4).await;
        let refused = say(3, "succeeded").await.unwrap_err();
        assert!(format!("{refused:?}").contains("OOM"), "{refused:?}");
        assert_eq!(queue.take(limit, &AT_ONCE).await.unwrap().succeeded, 1);
        set_maxmemory(&server, used * 6 / 5).await;
        say(3, "succeeded").await.unwrap();
        assert_eq!(queue.take(limit, &AT_ONCE).await.unwrap().succeeded, 1);
        assert_eq!(counts(&queue).await, (1_000, 997, 0, 3, 0));
    }
}

#[tokio::test]
async fn a_listing_pauses_at_high_water_and_resumes_below_half() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("high-water")).await;
        let enqueue = |number| {
            let queue = &queue;
            async move { queue.enqueue(&page(number, 3), 6).await.unwrap() }
        };
        assert_eq!(enqueue(0).await, Enqueued::Added { total: 3 });
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.started, stats.paused), (false, None));
        assert_eq!(enqueue(1).await, Enqueued::Added { total: 6 });
        assert_eq!(enqueue(2).await, Enqueued::Paused(Pause::HighWater));
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.started, stats.paused), (true, Some(Pause::HighWater)));
        assert_eq!(stats.listing, Listing::UpTo("2".into()));

        // Retries count too, because they are files of the run.
        let hour = Duration::from_secs(3_600);
        let waits = RetryPolicy { backoff_initial: hour, backoff_max: hour, ..AT_ONCE };
        let claimed = claim(&server, &queue, "pod").await;
        queue.settle(&[settlement(&claimed.entry, "pod", failed("boom"))], &waits).await.unwrap();
        settle(&server, &queue, 3, &Verdict::Succeeded).await;
        assert_eq!(queue.stats().await.unwrap().delayed, 1);
        // A restarted operator finds the pause.
        let queue = &open(&server.connect(), &run_id("high-water")).await;
        assert_eq!(queue.stats().await.unwrap().queued, 3);
        let third = || async { queue.enqueue(&page(2, 3), 6).await.unwrap() };
        assert_eq!(third().await, Enqueued::Paused(Pause::HighWater), "half of it is not done");
        // A page that needs no memory is not refused: every file on it is excluded.
        let empty = Page { files: Vec::new(), ..page(2, 0) };
        assert_eq!(queue.enqueue(&empty, 6).await.unwrap(), Enqueued::Added { total: 6 });
        settle(&server, queue, 1, &Verdict::Succeeded).await;
        assert_eq!(queue.enqueue(&page(3, 3), 6).await.unwrap(), Enqueued::Added { total: 9 });
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.started, stats.paused), (true, None));
    }
}

#[tokio::test]
async fn a_run_that_is_aborted_while_its_bucket_is_listed_says_how_far_that_got() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let (connection, run) = (server.connect(), run_id("half-listed"));
        let queue = open(&connection, &run).await;
        queue.enqueue(&page(0, 3), 3).await.unwrap();
        assert_eq!(queue.enqueue(&page(1, 3), 3).await.unwrap(), Enqueued::Paused(Pause::HighWater));
        let closed = queue.close(Ending::Abort { reason: "TimedOut" }, "", &KEEP).await.unwrap();
        let Closed::Closed(finished) = closed else { panic!("{closed:?}") };
        assert_eq!((finished.listed, finished.cursor.as_str(), finished.counts.failed), (false, "1", 3));
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.state, stats.paused), (State::Closed, None));
        let late = queue.enqueue(&page(1, 3), 3).await.unwrap();
        assert_eq!(late, Enqueued::Superseded(Listing::Complete), "a listing that is under way ends");
        let found = open_as(&connection, &run, "uid-1", "spec-1").await;
        assert!(matches!(found, Opened::Finished(found) if found == finished));

        let whole = open(&connection, &run_id("listed")).await;
        whole.enqueue(&last_page(["a"]), PLENTY).await.unwrap();
        let closed = whole.close(Ending::Abort { reason: "TimedOut" }, "", &KEEP).await.unwrap();
        assert!(matches!(closed, Closed::Closed(finished) if finished.listed));
    }
}
