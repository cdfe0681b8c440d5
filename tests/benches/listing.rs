//! `make bench`, listing part: the cost of queueing the files of a bucket compared with only listing them,
//! with the same client and the same server, and the memory it takes, which is one page whatever the size of
//! the bucket. Ratios are asserted, because machines are shared and noisy; on all sides the best of several
//! rounds counts.
//!
//! The server generates its keys. If a page takes as long as in a near and fast service, queueing hides
//! behind the next request, and that is asserted. If a page takes no time at all, as in no real service,
//! listing and queueing compete for the machine's cores: those rows show the limit, and that memory does not
//! depend on the number of files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::convert::Infallible;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use operator::listing::{Bounds, list_into};
use operator::turns::Turns;
use protocol::RunId;
use queue::{Connection, File, Listing, Opened, Page, RunQueue};
use storage::{Lister, Selection};
use tests::program::mortal;
use tests::s3::TestS3;
use tests::valkey::{Flavor, KEEP, TestServer, owner};
use tokio::net::TcpListener;

/// Files of one round.
const FILES: u64 = 100_000;
const ROUNDS: u32 = 5;
/// How long a nearby service takes for a page; AWS takes several times as long.
const PAGE_TIME: Duration = Duration::from_millis(25);
/// Queueing that hides behind the next request adds hardly any time.
const RATIO_MAX: f64 = 1.2;
/// The part of the operator's memory limit that remains for one listing.
const GROWTH_MAX: u64 = 32 * MIB;
const MIB: u64 = 1024 * 1024;
/// Fewer, because real objects are stored one by one.
const STORED: u64 = 3_000;

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if std::env::var_os(SERVE).is_some() {
        return runtime.block_on(serve());
    }
    let failures = runtime.block_on(run());
    for failure in &failures {
        eprintln!("below its aim: {failure}");
    }
    std::process::exit(i32::from(!failures.is_empty()));
}

async fn run() -> Vec<String> {
    let mut failures = Vec::new();
    let valkey = TestServer::start(Flavor::Valkey).await;
    let connection = valkey.connect();
    let server = Server::start();
    println!(
        "| listing | listed only | queued only | both | to listing (aim at {PAGE_TIME:?} a page: ≤ {RATIO_MAX}) | to the slower | memory growth (aim for made-up keys: ≤ {} MiB) |",
        GROWTH_MAX / MIB
    );
    println!("|---|---|---|---|---|---|---|");
    // The first case also pays for threads, connections and buffers, which later cases reuse.
    let fast = [(1_000, 1), (10_000, ROUNDS), (FILES, ROUNDS), (1_000_000, 1)];
    let cases = fast.map(|(files, rounds)| (files, rounds, false)).into_iter().chain([(FILES, 3, true)]);
    for (files, rounds, slow) in cases {
        let lister = lister(&server.url, &format!("{files}{}", if slow { SLOW } else { "" })).await;
        let measured = measure(&connection, &lister, files, rounds).await;
        valkey.raw(redis::cmd("FLUSHALL").arg("SYNC")).await;
        if files == 1_000 {
            continue;
        }
        measured.print(&if slow { format!("{files}, {PAGE_TIME:?} a page") } else { files.to_string() });
        if slow && measured.to_listing() > RATIO_MAX {
            failures.push(format!("{files} files: {:.2} of listing alone", measured.to_listing()));
        }
        if measured.growth > GROWTH_MAX {
            failures.push(format!("{files} files: memory grows by {} MiB", measured.growth / MIB));
        }
    }
    let s3 = TestS3::start("stored").await;
    let client = &s3.client;
    let puts =
        (0..STORED).map(|number| async move { client.put("stored", &key(number), "x").await.unwrap() });
    stream::iter(puts).buffer_unordered(8).collect::<()>().await;
    let lister = lister(&s3.url, "stored").await;
    measure(&connection, &lister, STORED, ROUNDS).await.print(&format!("{STORED} in versitygw"));
    failures
}

struct Measured {
    files: u64,
    listed: Duration,
    queued: Duration,
    both: Duration,
    /// Peak memory of listing and queueing together, above the memory before.
    growth: u64,
}

impl Measured {
    fn to_listing(&self) -> f64 {
        self.both.as_secs_f64() / self.listed.as_secs_f64()
    }

    fn to_slower(&self) -> f64 {
        self.both.as_secs_f64() / self.listed.max(self.queued).as_secs_f64()
    }

    fn print(&self, name: &str) {
        let rate = |took: Duration| format!("{:.0}/s", self.files as f64 / took.as_secs_f64());
        println!(
            "| {name} | {} | {} | {} | {:.2} | {:.2} | {:.1} MiB |",
            rate(self.listed),
            rate(self.queued),
            rate(self.both),
            self.to_listing(),
            self.to_slower(),
            self.growth as f64 / MIB as f64
        );
    }
}

async fn measure(connection: &Connection, lister: &Lister, files: u64, rounds: u32) -> Measured {
    let ([listed, queued, both], turns) = ([Duration::MAX; 3], Turns::new(8));
    let mut measured = Measured { files, listed, queued, both, growth: 0 };
    for round in 0..rounds {
        eprintln!("{files} files, round {} of {rounds}", round + 1);
        let start = Instant::now();
        assert_eq!(list_only(lister).await, files);
        measured.listed = measured.listed.min(start.elapsed());
        let (alone, queue) = (open(connection).await, open(connection).await);
        measured.queued = measured.queued.min(queue_only(&alone, files).await);

        // Resets the high-water mark to the current memory.
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = memory("VmRSS:");
        let bounds = Bounds { turns: &turns, namespace: "bench", max_files: None, high_water: u64::MAX };
        let start = Instant::now();
        let total = list_into(&queue, lister, Listing::UpTo(String::new()), bounds, |_| ()).await.unwrap();
        measured.both = measured.both.min(start.elapsed());
        measured.growth = measured.growth.max(memory("VmHWM:").saturating_sub(before));
        assert_eq!(total, files);
    }
    measured
}

/// The time that the queue takes, without the time to generate the pages.
async fn queue_only(queue: &RunQueue, files: u64) -> Duration {
    let (mut took, mut after) = (Duration::ZERO, String::new());
    for first in (0..files).step_by(1_000) {
        let last = files.min(first + 1_000);
        let file = |number| File { key: key(number), size: 183_204, etag: format!("\"{number:032x}\"") };
        let next = (last < files).then(|| key(last - 1));
        let page = Page { after, next: next.clone(), files: (first..last).map(file).collect(), skipped: 0 };
        let start = Instant::now();
        queue.enqueue(&page, u64::MAX).await.unwrap();
        took += start.elapsed();
        after = next.unwrap_or_default();
    }
    took
}

async fn list_only(lister: &Lister) -> u64 {
    let (mut files, mut after) = (0, String::new());
    loop {
        let page = lister.page(&after).await.unwrap();
        files += page.files.len() as u64;
        match page.next {
            Some(next) => after = next,
            None => return files,
        }
    }
}

async fn open(connection: &Connection) -> RunQueue {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let run = format!("bench-{}", RUNS.fetch_add(1, Ordering::Relaxed)).parse::<RunId>().unwrap();
    match RunQueue::open(connection, &run, &owner("uid"), "spec", &KEEP).await.unwrap() {
        Opened::Created(queue) => queue,
        _ => panic!("{run} is not new"),
    }
}

async fn lister(url: &str, bucket: &str) -> Lister {
    let bucket = tests::s3::bucket(url, bucket);
    // One glob that selects everything, as users write it.
    Lister::new(&bucket, "", Selection::new("", &["**/*.jpg".to_owned()], &[]).unwrap()).await
}

/// The value of a line of /proc/self/status, in bytes.
fn memory(line: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let value = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn key(number: u64) -> String {
    format!("camera-7/2026/11/16/frame-{number:09}.jpg")
}

/// Set in the server process, so that its memory and time are not measured.
const SERVE: &str = "SERVE_LISTINGS";
/// Suffix of a bucket whose pages take time.
const SLOW: &str = "-slow";

struct Server {
    url: String,
    process: Child,
}

impl Server {
    fn start() -> Self {
        let mut command = mortal(std::env::current_exe().unwrap());
        let mut process =
            command.env(SERVE, "1").stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { url: url.trim().to_owned(), process }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Serves listings with as many keys as the bucket's name says.
async fn serve() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(|request: Request<Incoming>| async move {
                let bucket = request.uri().path().trim_matches('/');
                if bucket.ends_with(SLOW) {
                    tokio::time::sleep(PAGE_TIME).await;
                }
                let page = page(bucket.trim_end_matches(SLOW), request.uri().query().unwrap_or_default());
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(page))))
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn page(files: &str, query: &str) -> String {
    let files: u64 = files.parse().unwrap();
    let after = query.split('&').find_map(|pair| pair.strip_prefix("start-after="));
    // `…frame-000000123.jpg`: the digits are the number, whatever is escaped before them.
    let first = after.filter(|after| !after.is_empty()).map_or(0, |after| {
        let digits = after.trim_end_matches(".jpg");
        digits[digits.len() - 9..].parse::<u64>().unwrap() + 1
    });
    let last = files.min(first + 1_000);
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult \
         xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>{files}</Name><Prefix></Prefix>\
         <MaxKeys>1000</MaxKeys><EncodingType>url</EncodingType><KeyCount>{}</KeyCount>\
         <IsTruncated>{}</IsTruncated>",
        last - first,
        last < files
    );
    for number in first..last {
        write!(
            text,
            "<Contents><Key>{}</Key><LastModified>2026-11-16T08:00:00.000Z</LastModified>\
             <ETag>&quot;{number:032x}&quot;</ETag><Size>183204</Size><StorageClass>STANDARD</StorageClass></Contents>",
            key(number)
        )
        .unwrap();
    }
    text + "</ListBucketResult>"
}
