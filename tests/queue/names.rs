//! Claimers of older versions chose their consumer's name, and no access rule bounded it. No name that a pod
//! cannot have survives a scan, and none exhausts the memory of the server or the operator.

use std::time::Duration;

use queue::Verdict;
use tests::valkey::{Flavor, TestServer};

use super::{AT_ONCE, PLENTY, claim, counts, file, last_page, open, queue_with, run_id, settlement};

/// The most memory that the server may need in addition: some copies of one name, not one for every entry.
const SPARE: u64 = 64 << 20;

async fn read_as(server: &TestServer, queue: &queue::RunQueue, consumer: &[u8], count: usize) {
    let mut read = redis::cmd("XREADGROUP");
    read.arg("GROUP").arg(&queue.keys().group).arg(consumer).arg("COUNT").arg(count);
    server.raw(read.arg("STREAMS").arg(&queue.keys().work).arg(">")).await;
}

async fn consumers(server: &TestServer, queue: &queue::RunQueue) -> u64 {
    let mut info = redis::cmd("XINFO");
    let groups = server.raw(info.arg("GROUPS").arg(&queue.keys().work)).await;
    let groups: Vec<std::collections::HashMap<String, redis::Value>> =
        redis::from_redis_value(groups).unwrap();
    redis::from_redis_value(groups[0]["consumers"].clone()).unwrap()
}

async fn peak_memory(server: &TestServer) -> u64 {
    let info: String = redis::from_redis_value(server.raw(redis::cmd("INFO").arg("memory")).await).unwrap();
    let number =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse::<u64>().unwrap();
    // Lua has its own heap.
    number("used_memory_peak:") + number("used_memory_lua:")
}

#[tokio::test]
async fn a_name_of_a_megabyte_with_a_thousand_entries_is_removed_within_bounded_memory() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("attack")).await;
        queue.enqueue(&last_page((0..1_000).map(|n| format!("file-{n}"))), PLENTY).await.unwrap();
        let honest = claim(&server, &queue, "pod-1").await;
        read_as(&server, &queue, &vec![b'a'; 1 << 20], 1_000).await;
        assert_eq!(counts(&queue).await, (1_000, 0, 1_000, 0, 0));
        let before = peak_memory(&server).await;

        let mut visited = Vec::new();
        let removed =
            queue.for_each_pending(Duration::ZERO, |pending| visited.push(pending.consumer.clone())).await;
        assert_eq!((removed.unwrap(), visited), (1, vec!["pod-1".to_owned()]));
        let grown = peak_memory(&server).await - before;
        assert!(grown < SPARE, "the server needed {} MiB more", grown >> 20);
        assert_eq!(counts(&queue).await, (1_000, 999, 1, 0, 0), "its entries are queued again");
        assert_eq!(consumers(&server, &queue).await, 1);
        queue.settle(&[settlement(&honest.entry, "pod-1", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
        let again = claim(&server, &queue, "pod-2").await;
        assert_eq!((again.attempts, again.disruptions), (0, 0), "no pod of ours had it");
    }
}

#[tokio::test]
async fn names_that_no_pod_can_have_are_removed_whether_they_hold_entries_or_not() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "odd-names", &["a", "b", "c", "d", "e"]).await;
        let longest = "p".repeat(253);
        claim(&server, &queue, &longest).await;
        for name in [&b"Upper"[..], b"\xff\x00", b"", "p".repeat(254).as_bytes()] {
            read_as(&server, &queue, name, 1).await;
        }
        let mut idle = redis::cmd("XGROUP");
        idle.arg("CREATECONSUMER").arg(&queue.keys().work).arg(&queue.keys().group).arg("idle one");
        server.raw(&idle).await;
        assert_eq!(counts(&queue).await, (5, 0, 5, 0, 0));
        assert_eq!(consumers(&server, &queue).await, 6);
        // Entries that are not idle for long enough are not visited, but these names are removed all the
        // same.
        let hour = Duration::from_secs(3_600);
        let removed = queue.for_each_pending(hour, |pending| panic!("{pending:?} is not idle")).await;
        assert_eq!(removed.unwrap(), 5);
        assert_eq!(counts(&queue).await, (5, 4, 1, 0, 0));
        assert_eq!(consumers(&server, &queue).await, 1);
        let mut held = 0;
        queue
            .for_each_pending(Duration::ZERO, |pending| held += usize::from(pending.consumer == longest))
            .await
            .unwrap();
        assert_eq!(held, 1);
    }
}

#[tokio::test]
async fn removing_goes_on_over_as_many_calls_as_it_needs() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = open(&server.connect(), &run_id("slices")).await.with_batch(2);
    let files = (0..7).map(|n| file(n.to_string())).collect();
    let page = queue::Page { after: String::new(), next: None, files, skipped: 0 };
    queue.enqueue(&page, PLENTY).await.unwrap();
    read_as(&server, &queue, b"NOT-A-POD", 5).await;
    claim(&server, &queue, "pod").await;
    let reclaimed = queue.reclaim(Duration::ZERO, &AT_ONCE, |_| None).await.unwrap();
    assert_eq!((reclaimed.removed_consumers, reclaimed.held_by_nobody), (1, 0));
    assert_eq!(counts(&queue).await, (7, 6, 1, 0, 0));
}
