//! `make bench`, claimer part: how soon it claims a file, and how large its image is (without the release
//! build's cross-crate optimization, which makes it even smaller).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "../claimer/harness.rs"]
mod harness;

use std::time::{Duration, Instant};

use harness::Bench;
use testbed::Paths;
use testbed::images::{Set, build};
use testbed::programs::Profile;

const CLAIMS: usize = 20;
/// From the start of the program to the claim; on a busy machine, this multiple of the time that the smallest
/// program takes.
const CLAIMED_WITHIN: Duration = Duration::from_millis(50);
const CLAIMED_WITHIN_STARTS: u32 = 20;
/// Bytes of the uncompressed image.
const IMAGE_MAX: u64 = 25_000_000;

fn main() {
    // `cargo test --benches` asks for tests, and there are none.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let archives = build(&Paths::find().unwrap(), &[Set::Worker], Profile::own()).unwrap();
    let image = std::fs::metadata(&archives[0]).unwrap().len();
    let (mut claims, mut starts) = (Vec::new(), Vec::new());
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut bench = Bench::start().await;
        for page in 0..CLAIMS {
            bench.offer_next(&format!("{page}"), b"x", page).await;
            // Another pod each time, because a restarted pod gets its previous file again.
            bench.set("CONSUMER_NAME", format!("pod-{page}")).set("POD_NAME", format!("pod-{page}"));
            let start = Instant::now();
            std::process::Command::new("/bin/true").status().unwrap();
            starts.push(start.elapsed());
            let ended = bench.claim().await;
            ended.assert_ok();
            claims.push(claimed_after(&ended.stderr));
        }
    });
    claims.sort();
    starts.sort();
    let (claim, start) = (claims[CLAIMS / 2], starts[CLAIMS / 2]);
    let limit = CLAIMED_WITHIN.max(start * CLAIMED_WITHIN_STARTS);
    println!("| claimer | figure | aim |\n|---|---|---|");
    println!(
        "| start to claim, median | {claim:.1?} | ≤ {limit:.1?}: the greater of {CLAIMED_WITHIN:?} and {CLAIMED_WITHIN_STARTS} starts of the smallest program |"
    );
    println!("| the smallest program, start to end | {start:.1?} | |");
    println!("| image, not compressed | {:.1} MB | < {:.0} MB |", image as f64 / 1e6, IMAGE_MAX as f64 / 1e6);
    assert!(claim <= limit, "claimed after {claim:?}, which is more than {limit:?}");
    assert!(image < IMAGE_MAX, "the image has {image} bytes");
}

/// Reads the time from the claimer's message: `… after 12.3ms`.
fn claimed_after(stderr: &str) -> Duration {
    let text = stderr.split(" after ").nth(1).unwrap().split_whitespace().next().unwrap();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number: f64 = digits.parse().unwrap();
    let seconds = match &text[digits.len()..] {
        "s" => number,
        "ms" => number / 1e3,
        "µs" => number / 1e6,
        other => panic!("{other}"),
    };
    Duration::from_secs_f64(seconds)
}
