//! The queue on real servers: Valkey 8 and Redis 7.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod acl;
mod age;
mod checker;
mod connection;
mod faults;
mod history;
mod known_runs;
mod lifecycle;
mod limits;
mod memory;
mod names;
mod ownership;
mod paging;
mod reports;

use std::time::Duration;

use protocol::RunId;
use queue::{
    Claim, Connection, Disruption, EntryId, Failure, File, Opened, Page, RetryPolicy, RunQueue, Server,
    Settlement, Verdict, Worker,
};
use tests::valkey::{KEEP, TestServer, owner};

/// Three attempts, without waits between them.
const AT_ONCE: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    max_disruptions: 2,
    backoff_initial: Duration::ZERO,
    backoff_max: Duration::ZERO,
    keep_results: 0,
};

/// Long enough for a reply, short enough not to slow down tests.
const SHORT: Duration = Duration::from_millis(20);

/// No listing pauses at this mark.
const PLENTY: u64 = u64::MAX;

fn run_id(name: &str) -> RunId {
    RunId::derive("team-a", name).unwrap()
}

async fn open_as(connection: &Connection, run: &RunId, uid: &str, spec: &str) -> Opened {
    RunQueue::open(connection, run, &owner(uid), spec, &KEEP).await.unwrap()
}

async fn open(connection: &Connection, run: &RunId) -> RunQueue {
    match open_as(connection, run, "uid-1", "spec-1").await {
        Opened::Created(queue) | Opened::Resumed(queue) => queue,
        Opened::Finished(_) | Opened::Taken { .. } | Opened::Used => {
            panic!("the queue of {run} cannot be opened")
        }
    }
}

fn file(key: impl Into<String>) -> File {
    File { key: key.into(), size: 7, etag: "\"abc\"".into() }
}

/// A page from `after` to the end.
fn last_page<K: Into<String>>(keys: impl IntoIterator<Item = K>) -> Page {
    Page { after: String::new(), next: None, files: keys.into_iter().map(file).collect(), skipped: 0 }
}

/// An open queue with these files, all listed.
async fn queue_with(server: &TestServer, name: &str, keys: &[&str]) -> RunQueue {
    let queue = open(&server.connect(), &run_id(name)).await;
    queue.enqueue(&last_page(keys.iter().copied()), PLENTY).await.unwrap();
    queue
}

fn worker(server: Server, queue: &RunQueue, pod: &str) -> Worker {
    Worker::new(server, &queue.keys().work, pod)
}

/// Gives a pod a file, and reads it as that pod.
async fn claim(server: &TestServer, queue: &RunQueue, pod: &str) -> Claim {
    assert_eq!(queue.hand_out(&[pod.to_owned()]).await.unwrap(), [pod], "there is a file");
    worker(server.server(), queue, pod).claim(SHORT).await.unwrap().expect("a file")
}

fn settlement(entry: &EntryId, pod: &str, verdict: Verdict) -> Settlement {
    Settlement { entry: entry.clone(), consumer: pod.into(), verdict }
}

fn failed(reason: &str) -> Verdict {
    Verdict::Failed(Failure::new(reason, Some(1)))
}

fn disrupted(reason: &str, counts: bool) -> Verdict {
    Verdict::Disrupted(Disruption { failure: Failure::new(reason, None), counts })
}

/// `(total, queued, running, succeeded, failed)`.
async fn counts(queue: &RunQueue) -> (u64, u64, u64, u64, u64) {
    let stats = queue.stats().await.unwrap();
    (stats.total, stats.queued, stats.running, stats.succeeded, stats.failed)
}
