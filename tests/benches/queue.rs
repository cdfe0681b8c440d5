//! `make bench`, queue part: the cost of the protocol compared with the bare stream commands, with the same
//! client, server and data in one run. Ratios are asserted, because machines are shared and noisy; on both
//! sides the best of several rounds counts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ops::Range;
use std::time::{Duration, Instant};

use protocol::RunId;
use queue::{Connection, File, Opened, Page, RetryPolicy, RunQueue, Settlement, Verdict, Worker};
use redis::aio::MultiplexedConnection;
use tests::valkey::{Flavor, KEEP, TestServer, owner};

/// Files of one round: enough for a round to take a large part of a second.
const FILES: usize = 50_000;
const BATCH: usize = queue::BATCH_MAX;
const ROUNDS: usize = 5;
/// Claims, one round trip after another, as pods make them.
const CLAIMS: usize = 2_000;
const STALE: usize = 10_000;

const POLICY: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    max_disruptions: 10,
    backoff_initial: Duration::ZERO,
    backoff_max: Duration::ZERO,
    keep_results: 0,
};

struct Bench {
    server: TestServer,
    connection: Connection,
    bare: MultiplexedConnection,
}

fn main() {
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let server = TestServer::start(Flavor::Valkey).await;
        let connection = server.connect();
        let bare = server.raw_connection().await;
        let failures = Bench { server, connection, bare }.run().await;
        for failure in &failures {
            eprintln!("below its aim: {failure}");
        }
        std::process::exit(i32::from(!failures.is_empty()));
    });
}

/// The best rates of both sides, in files per second.
#[derive(Default)]
struct Best {
    bare: f64,
    ours: f64,
}

impl Best {
    fn note(&mut self, files: usize, bare: Duration, ours: Duration) {
        self.bare = self.bare.max(files as f64 / bare.as_secs_f64());
        self.ours = self.ours.max(files as f64 / ours.as_secs_f64());
    }
}

impl Bench {
    async fn run(&mut self) -> Vec<String> {
        let (mut enqueue, mut claim) = (Best::default(), Best::default());
        let (mut settle, mut reclaim) = (Best::default(), Best::default());
        let mut memory = (0.0, 0.0);
        for round in 0..ROUNDS {
            eprintln!("round {} of {ROUNDS}: {FILES} files", round + 1);
            let run: RunId = format!("bench-{round}").parse().unwrap();
            let queue = self.open(&run).await;

            let bare_time = self.bare_enqueue("bare").await;
            let our_time = time(self.our_enqueue(&queue)).await;
            enqueue.note(FILES, bare_time, our_time);
            // Both sides store the same fields, so this compares everything else that the protocol stores.
            memory =
                (self.memory(&["bare"]).await, self.memory(&[&queue.keys().work, &queue.keys().meta]).await);

            let bare_time = time(self.bare_claims()).await;
            let our_time = time(self.our_claims(&queue)).await;
            claim.note(CLAIMS, bare_time, our_time);
            self.claim_files("bare", "bare", CLAIMS..FILES).await;
            self.claim_files(&queue.keys().work, &queue.keys().group, CLAIMS..FILES).await;

            let bare_time = self.bare_settle().await;
            let our_time = self.our_settle(&queue).await;
            settle.note(FILES, bare_time, our_time);
            let bare_time = self.bare_reclaim().await;
            let our_time = self.our_reclaim(&run).await;
            reclaim.note(STALE, bare_time, our_time);
            self.server.raw(redis::cmd("FLUSHALL").arg("SYNC")).await;
        }
        report(&enqueue, &claim, &settle, &reclaim, memory)
    }

    async fn open(&self, run: &RunId) -> RunQueue {
        match RunQueue::open(&self.connection, run, &owner("uid"), "spec", &KEEP).await.unwrap() {
            Opened::Created(queue) => queue,
            Opened::Resumed(_) | Opened::Finished(_) | Opened::Taken { .. } | Opened::Used => {
                panic!("{run} is not new")
            }
        }
    }

    /// Fills a new stream with a group of the same name.
    async fn bare_enqueue(&mut self, stream: &str) -> Duration {
        let mut create = redis::cmd("XGROUP");
        self.server.raw(create.arg(&["CREATE", stream, stream, "0", "MKSTREAM"])).await;
        let start = Instant::now();
        for batch in 0..FILES / BATCH {
            let mut pipeline = redis::pipe();
            for number in 0..BATCH {
                bare_add(&mut pipeline, stream, batch * BATCH + number);
            }
            pipeline.query_async::<()>(&mut self.bare).await.unwrap();
        }
        start.elapsed()
    }

    async fn our_enqueue(&self, queue: &RunQueue) {
        let cursor = |batch: usize| if batch == 0 { String::new() } else { batch.to_string() };
        for batch in 0..FILES / BATCH {
            let next = ((batch + 1) * BATCH < FILES).then(|| cursor(batch + 1));
            let files = (0..BATCH).map(|number| file(batch * BATCH + number)).collect();
            queue.enqueue(&Page { after: cursor(batch), next, files, skipped: 0 }, u64::MAX).await.unwrap();
        }
    }

    /// Makes each claim with its own connection, as pods do.
    async fn bare_claims(&self) {
        let client = redis::Client::open(self.server.server().url).unwrap();
        for pod in 0..CLAIMS {
            let mut connection = client.get_multiplexed_async_connection().await.unwrap();
            let mut command = redis::cmd("XREADGROUP");
            command
                .arg("GROUP")
                .arg("bare")
                .arg(pod_name(pod))
                .arg("COUNT")
                .arg(1)
                .arg("STREAMS")
                .arg("bare")
                .arg(">");
            command.query_async::<redis::Value>(&mut connection).await.unwrap();
        }
    }

    async fn our_claims(&self, queue: &RunQueue) {
        for pod in 0..CLAIMS {
            queue.hand_out(&[pod_name(pod)]).await.unwrap();
            let mut worker = Worker::new(self.server.server(), &queue.keys().work, &pod_name(pod));
            worker.claim(Duration::from_millis(1)).await.unwrap().expect("a file");
        }
    }

    /// Claims each file for its own pod.
    async fn claim_files(&mut self, stream: &str, group: &str, files: Range<usize>) {
        for batch in files.start / BATCH..files.end / BATCH {
            let mut pipeline = redis::pipe();
            for number in 0..BATCH {
                let command =
                    pipeline.cmd("XREADGROUP").arg("GROUP").arg(group).arg(pod_name(batch * BATCH + number));
                command.arg("COUNT").arg(1).arg("STREAMS").arg(stream).arg(">").ignore();
            }
            pipeline.query_async::<()>(&mut self.bare).await.unwrap();
        }
    }

    async fn bare_settle(&mut self) -> Duration {
        let ids = self.ids("bare").await;
        let start = Instant::now();
        for batch in ids.chunks(BATCH) {
            let mut pipeline = redis::pipe();
            for id in batch {
                pipeline.cmd("XACK").arg("bare").arg("bare").arg(id).ignore();
                pipeline.cmd("XDEL").arg("bare").arg(id).ignore();
            }
            pipeline.query_async::<()>(&mut self.bare).await.unwrap();
        }
        start.elapsed()
    }

    async fn our_settle(&mut self, queue: &RunQueue) -> Duration {
        let settlements: Vec<Settlement> = self
            .ids(&queue.keys().work)
            .await
            .into_iter()
            .enumerate()
            .map(|(pod, id)| Settlement {
                entry: id.into(),
                consumer: pod_name(pod),
                verdict: Verdict::Succeeded,
            })
            .collect();
        let start = Instant::now();
        queue.settle(&settlements, &POLICY).await.unwrap();
        let elapsed = start.elapsed();
        assert_eq!(queue.stats().await.unwrap().succeeded, FILES as u64);
        elapsed
    }

    /// Knows the stale entries and their contents, which the protocol has to find.
    async fn bare_reclaim(&mut self) -> Duration {
        const STREAM: &str = "bare-stale";
        self.bare_enqueue(STREAM).await;
        self.claim_files(STREAM, STREAM, 0..STALE).await;
        let ids = self.ids(STREAM).await;
        let start = Instant::now();
        for (batch, ids) in ids[..STALE].chunks(BATCH).enumerate() {
            let mut pipeline = redis::pipe();
            for (number, id) in ids.iter().enumerate() {
                pipeline.cmd("XACK").arg(STREAM).arg(STREAM).arg(id).ignore();
                pipeline.cmd("XDEL").arg(STREAM).arg(id).ignore();
                bare_add(&mut pipeline, STREAM, batch * BATCH + number);
            }
            pipeline.query_async::<()>(&mut self.bare).await.unwrap();
        }
        start.elapsed()
    }

    async fn our_reclaim(&mut self, run: &RunId) -> Duration {
        let queue = self.open(&format!("{run}-stale").parse().unwrap()).await;
        self.our_enqueue(&queue).await;
        self.claim_files(&queue.keys().work, &queue.keys().group, 0..STALE).await;
        let start = Instant::now();
        let reclaimed = queue.reclaim(Duration::ZERO, &POLICY, |_| Some("PodLost".into())).await.unwrap();
        assert_eq!(reclaimed.fates.len(), STALE);
        start.elapsed()
    }

    async fn ids(&mut self, stream: &str) -> Vec<String> {
        let mut command = redis::cmd("XRANGE");
        let entries: redis::streams::StreamRangeReply =
            command.arg(stream).arg("-").arg("+").query_async(&mut self.bare).await.unwrap();
        entries.ids.into_iter().map(|entry| entry.id).collect()
    }

    /// Bytes per file.
    async fn memory(&self, keys: &[&str]) -> f64 {
        let mut bytes = 0;
        for key in keys {
            let mut command = redis::cmd("MEMORY");
            let usage = self.server.raw(command.arg("USAGE").arg(key).arg("SAMPLES").arg(0)).await;
            bytes += redis::from_redis_value::<u64>(usage).unwrap();
        }
        bytes as f64 / FILES as f64
    }
}

/// Adds a file with the fields that the protocol writes.
fn bare_add(pipeline: &mut redis::Pipeline, stream: &str, number: usize) {
    let File { key, size, etag } = file(number);
    let command = pipeline.cmd("XADD").arg(stream).arg("*").arg("run").arg("bench-0").arg("file").arg(key);
    command
        .arg("attempts")
        .arg(0)
        .arg("disruptions")
        .arg(0)
        .arg("size")
        .arg(size)
        .arg("etag")
        .arg(etag)
        .ignore();
}

async fn time(work: impl Future<Output = ()>) -> Duration {
    let start = Instant::now();
    work.await;
    start.elapsed()
}

fn file(number: usize) -> File {
    let key = format!("camera-7/2026/11/16/{:02}/frame-{number:08}.jpg", number % 24);
    File { key, size: 183_204, etag: format!("\"{number:032x}\"") }
}

fn pod_name(number: usize) -> String {
    format!("nightly-job-{number:05}")
}

fn report(enqueue: &Best, claim: &Best, settle: &Best, reclaim: &Best, memory: (f64, f64)) -> Vec<String> {
    let mut failures = Vec::new();
    println!("| queue | bare | protocol | ratio | aim |\n|---|---|---|---|---|");
    let rates = [
        ("enqueue", enqueue, 0.8),
        ("connect and claim", claim, 0.0),
        ("settle", settle, 0.6),
        ("reclaim", reclaim, 0.0),
    ];
    for (name, best, aim) in rates {
        let ratio = best.ours / best.bare;
        let wanted = if aim > 0.0 { format!("≥ {aim}") } else { "–".into() };
        println!("| {name} | {:.0}/s | {:.0}/s | {ratio:.2} | {wanted} |", best.bare, best.ours);
        if ratio < aim {
            failures.push(format!("{name}: {ratio:.2} of bare"));
        }
    }
    let ratio = memory.1 / memory.0;
    println!("| memory per file | {:.0} B | {:.0} B | {ratio:.2} | ≤ 1.3 |", memory.0, memory.1);
    let (bare, ours) = (STALE as f64 / reclaim.bare, STALE as f64 / reclaim.ours);
    println!("| reclaim {STALE} stale | {bare:.2} s | {ours:.2} s | – | ≤ 2 s |");
    if ratio > 1.3 {
        failures.push(format!("memory per file: {ratio:.2} of bare"));
    }
    if ours > 2.0 {
        failures.push(format!("reclaim of {STALE}: {ours:.2} s"));
    }
    failures
}
