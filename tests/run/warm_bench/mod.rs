//! `make bench`, Warm part: how many files per second pods that stay up process, against a pod per file and
//! against a bare loop without queue and Kubernetes, all in one run on the same machine; what a file costs;
//! and where the bottleneck is.

mod bare_loop;
mod cost;
mod overlap;
mod processes;
mod stage;

pub use cost::{cost_per_file, many_files_end_to_end};
pub use overlap::transfers_overlap_with_processing;

use crate::harness::Mode;
use stage::{Case, PODS, Stage};

const KIB: usize = 1_024;
const MIB: usize = 1_024 * KIB;
/// How many times faster than a pod per file.
const TIMES_FASTER: f64 = 100.0;
/// The share of the bare loop's files per second.
const OF_BARE_LOOP: f64 = 0.6;

const SMALL: Case =
    Case { what: "1 KiB", bytes: KIB, filters: &[&["copy"]], has_sink: false, few: 40, many: 12_000 };
/// Recorded only: each differs from [`SMALL`] in one respect.
const OTHERS: [Case; 3] = [
    Case { what: "1 MiB", bytes: MIB, few: 20, many: 1_000, ..SMALL },
    Case { what: "1 KiB, two filters", filters: &[&["copy"], &["copy"]], few: 20, many: 2_000, ..SMALL },
    Case { what: "1 KiB, with a sink", has_sink: true, few: 20, many: 2_000, ..SMALL },
];

/// The files per second of one case.
struct Rates {
    pod_per_file: f64,
    warm: f64,
    bare_loop: f64,
}

/// Small files, one filter, no sink: the two promised ratios.
pub async fn warm_beats_a_pod_per_file() {
    print_head(&format!(" (aim: ≥ {TIMES_FASTER})"), &format!(" (aim: ≥ {OF_BARE_LOOP})"));
    let Rates { pod_per_file, warm, bare_loop } = rates_of(SMALL).await;
    let (faster, share) = (warm / pod_per_file, warm / bare_loop);
    assert!(faster >= TIMES_FASTER, "Warm is {faster:.0} times as fast as a pod per file");
    assert!(share >= OF_BARE_LOOP, "Warm has {share:.2} of the bare loop's files a second");
}

/// Larger files, more filters, a sink.
pub async fn other_sizes() {
    for case in OTHERS {
        print_head("", "");
        rates_of(case).await;
    }
}

/// With what is asserted of each ratio, if anything is.
fn print_head(times_faster: &str, of_bare_loop: &str) {
    println!(
        "| files, {PODS} pods | a pod per file, files/s | Warm, files/s | bare loop, files/s | Warm / a pod per file{times_faster} | \
         Warm / bare loop{of_bare_loop} |\n|---|---|---|---|---|---|"
    );
}

/// Measures a case and prints it. The bare loop runs before and after Warm, so that a machine that becomes
/// slower or faster meanwhile does not decide.
async fn rates_of(case: Case) -> Rates {
    let stage = Stage::new(case).await;
    let files = |count: usize| count as f64;
    let slow = stage.run(Mode::PodPerFile).await;
    stage.calm().await;
    let before = stage.bare_loop("before").await;
    let warm = stage.run(Mode::Warm).await;
    stage.calm().await;
    let after = stage.bare_loop("after").await;
    let rates = Rates {
        pod_per_file: files(case.few) / slow.took.as_secs_f64(),
        warm: files(case.many) / warm.took.as_secs_f64(),
        bare_loop: files(2 * case.many) / (before + after).as_secs_f64(),
    };
    let Rates { pod_per_file, warm: rate, bare_loop } = rates;
    println!(
        "| {} | {pod_per_file:.2} | {rate:.0} | {bare_loop:.0} | {:.0} | {:.2} |\n",
        case.what,
        rate / pod_per_file,
        rate / bare_loop
    );
    warm.usage.print(case.many);
    rates
}
