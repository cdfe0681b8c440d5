//! While a filter works, the next files are fetched and earlier results are uploaded, so a run takes hardly
//! longer than its filters.

use std::time::Duration;

use super::stage::{Case, PODS, Stage};
use crate::harness::Mode;

const SLEEP: Duration = Duration::from_millis(50);
/// A run may take this multiple of its sleeps.
const RATIO_MAX: f64 = 1.15;
/// With a sink, because uploads should overlap too.
const CASE: Case = Case {
    what: "one filter that copies, one that sleeps 50 ms, with a sink",
    bytes: 1_024,
    filters: &[&["copy"], &["sleep", "0.05"]],
    has_sink: true,
    few: 0,
    many: 4_000,
};

pub async fn transfers_overlap_with_processing() {
    let stage = Stage::new(CASE).await;
    let run = stage.run(Mode::Warm).await;
    let sleeps_of = |files: u64| SLEEP.as_secs_f64() * files as f64 / PODS as f64;
    let files = CASE.many as u64;
    let (took, sleeps) = (run.took.as_secs_f64(), sleeps_of(files));
    let ratio = took / sleeps;
    println!(
        "| {PODS} pods, {} | first claim to last settled | sleeps alone | ratio (aim: ≤ {RATIO_MAX}) |",
        CASE.what
    );
    println!("|---|---|---|---|\n| {files} files | {took:.1} s | {sleeps:.1} s | {ratio:.2} |");
    // Excludes the time in which some pods were still starting.
    let first_settled = run.start_up.first_settled.unwrap().as_secs_f64();
    let (all_served, settled) = run.start_up.all_served.unwrap();
    let (steady, sleeps) = (took - all_served.as_secs_f64(), sleeps_of(files - settled));
    println!(
        "| {} of them, after all pods had files | {steady:.1} s | {sleeps:.1} s | {:.2} |\n",
        files - settled,
        steady / sleeps
    );
    println!(
        "After the first claim the first file was settled within {first_settled:.1} s, and all pods had files within {:.1} s.\n",
        all_served.as_secs_f64()
    );
    run.usage.print(CASE.many);
    assert!(ratio <= RATIO_MAX, "a run takes {ratio:.2} of its sleeps");
}
