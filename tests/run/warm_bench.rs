//! `make bench`, Warm part: how many files a second pods that stay up process, against a pod per file, and against a bare loop
//! without queue and Kubernetes. All in one run, on the same machine.

use std::process::Command;
use std::time::{Duration, Instant};

use crds::v1alpha1::Phase;
use serde_json::{Value, json};

use crate::harness::{Lab, Mode, counts, phase};

/// Small files, of which a pod per file processes few.
const FEW: usize = 40;
const MANY: usize = 4_000;
const KIB: usize = 1_024;
/// Pods at once, in both modes.
const PARALLELISM: usize = 4;
/// How many times faster pods that stay up are.
const TIMES_FASTER: f64 = 100.0;

/// Both modes on files of one size.
pub async fn warm_beats_a_pod_per_file() {
    println!("| 1 KiB files, one filter, no sink, {PARALLELISM} pods | files | files/s |\n|---|---|---|");
    let slow = rate(Mode::PodPerFile, FEW, json!({})).await;
    println!("| a pod per file | {FEW} | {slow:.2} |");
    let warm = rate(Mode::Warm, MANY, json!({})).await;
    println!("| Warm | {MANY} | {warm:.0} |");
    println!("| ratio | | {:.0} (aim: ≥ {TIMES_FASTER}) |", warm / slow);
    let fork = forks_per_second();
    println!("| fork and exec of the filter alone, one after the other | | {fork:.0} |");
    assert!(warm / slow >= TIMES_FASTER, "Warm is {:.0} times faster", warm / slow);
}

/// Files a second, from the first claim to the last settled file.
async fn rate(mode: Mode, files: usize, pipeline: Value) -> f64 {
    let lab = Lab::in_mode("rate", mode).await;
    let content = format!("copy\n{}", "x".repeat(KIB));
    lab.put_many("", files, |_| content.clone()).await;
    lab.pipeline(pipeline).await;
    lab.run("r", json!({"execution": {"parallelism": PARALLELISM}})).await;
    let queue = queue::RunQueue::of_epoch(&lab.valkey(), &lab.run_id("r"), &epoch(&lab).await);
    let begun = async || {
        let stats = queue.stats().await;
        Ok(stats.is_ok_and(|stats| stats.running + stats.succeeded > 0).then(Instant::now))
    };
    let begun: Instant = lab.eventually("the first file is claimed", begun).await;
    let mut settled = Instant::now();
    for _ in 0..36_000 {
        match queue.stats().await {
            Ok(stats) if stats.succeeded < files as u64 => {}
            _ => break,
        }
        settled = Instant::now();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((files as i64, files as i64, 0), Some(Phase::Succeeded)));
    files as f64 / settled.duration_since(begun).as_secs_f64()
}

async fn epoch(lab: &Lab) -> String {
    let found = async || Ok(lab.meta("r", "epoch").await);
    lab.eventually("the queue is open", found).await
}

/// What a machine can do at most with one process per file.
fn forks_per_second() -> f64 {
    const TIMES: usize = 500;
    let begun = Instant::now();
    for _ in 0..TIMES {
        Command::new("/bin/true").status().unwrap();
    }
    TIMES as f64 / begun.elapsed().as_secs_f64()
}
