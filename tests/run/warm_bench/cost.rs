//! What a file costs the API server, Valkey and the operator, and what stays constant for any number of
//! files.

use std::collections::BTreeMap;

use super::SMALL;
use super::processes::seconds_used;
use super::stage::{Case, FEW, Stage, is_of_work};
use crate::figures::{all_valkey_calls, api_writes, valkey_calls};
use crate::harness::{Lab, Mode};

/// The API server's writes per file.
const WRITES_MAX: f64 = 0.01;
/// Valkey's commands per file may differ by this much between few and many files.
const GROWTH_MAX: f64 = 1.2;
const MIB: f64 = 1_048_576.0;
/// The operator's peak memory.
const MEMORY_MAX: f64 = 48.0 * MIB;

const COUNTED: Case = Case { few: 2_000, many: 20_000, ..SMALL };
const LARGE: Case = Case { few: 0, many: 100_000, ..SMALL };

/// The cost of one run per file.
struct Cost {
    writes: f64,
    /// Commands that Valkey executed, including those inside scripts.
    commands: f64,
    /// Commands that the operator sent.
    calls: f64,
    /// The operator's processor time, in seconds.
    cpu: f64,
}

/// The counters of Valkey and the operator since they started.
struct Counted {
    commands: f64,
    calls: f64,
    cpu: f64,
}

impl Counted {
    async fn read(lab: &Lab) -> Self {
        let (commands, calls) = (all_valkey_calls(lab).await, valkey_calls(lab).await);
        Self { commands, calls, cpu: seconds_used(lab.operator_pid()) }
    }
}

/// Counts for few files and for many. Nothing reads the queue meanwhile, because that would be counted too.
pub async fn cost_per_file() {
    let stage = Stage::new(COUNTED).await;
    println!(
        "| files | API server writes per file (aim for many: < {WRITES_MAX}) | Valkey commands per file, in scripts too (aim for many: ≤ {GROWTH_MAX} of those for few) | of them sent by the operator (the same aim) | operator CPU per 1,000 files |"
    );
    println!("|---|---|---|---|---|");
    let few = cost_of(&stage, "few", FEW, COUNTED.few).await;
    let many = cost_of(&stage, "many", "", COUNTED.many).await;
    println!("\noperator memory at most: {:.1} MiB", stage.lab.operator_memory() as f64 / MIB);
    assert!(many.writes < WRITES_MAX, "{:.4} writes for each file", many.writes);
    for (what, few, many) in [("commands", few.commands, many.commands), ("calls", few.calls, many.calls)] {
        assert!(many / few <= GROWTH_MAX, "{what} of Valkey per file grow from {few:.2} to {many:.2}");
    }
}

async fn cost_of(stage: &Stage, name: &str, prefix: &str, files: usize) -> Cost {
    stage.calm().await;
    let lab = &stage.lab;
    let writes_before = writes(stage);
    let before = Counted::read(lab).await;
    stage.create_run(name, Mode::Warm, prefix).await;
    stage.ended(name, files).await;
    let after = Counted::read(lab).await;
    // The pods' last writes come after the run's end.
    stage.calm().await;
    let mut of_run = writes(stage);
    for (resource, count) in &mut of_run {
        *count -= writes_before.get(resource).unwrap_or(&0.0);
    }
    of_run.retain(|_, count| *count > 0.0);
    eprintln!("writes of {files} files: {of_run:?}");
    let each = |count: f64| count / files as f64;
    let cost = Cost {
        writes: each(of_run.values().sum()),
        commands: each(after.commands - before.commands),
        calls: each(after.calls - before.calls),
        cpu: each(after.cpu - before.cpu),
    };
    let Cost { writes, commands, calls, cpu } = &cost;
    println!("| {files} | {writes:.4} | {commands:.2} | {calls:.2} | {:.2} s |", 1_000.0 * cpu);
    cost
}

/// Writes of the whole cluster, by resource.
fn writes(stage: &Stage) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for write in api_writes(&stage.lab).into_iter().filter(is_of_work) {
        *found.entry(write.resource).or_default() += write.count;
    }
    found
}

/// A hundred thousand files, from the creation of the run to its end.
pub async fn many_files_end_to_end() {
    let stage = Stage::new(LARGE).await;
    let files = LARGE.many;
    let before = seconds_used(stage.lab.operator_pid());
    let run = stage.run(Mode::Warm).await;
    let cpu = (seconds_used(stage.lab.operator_pid()) - before) / files as f64;
    let (whole, took) = (run.whole.as_secs_f64(), run.took.as_secs_f64());
    let memory = stage.lab.operator_memory() as f64;
    println!(
        "| files | created to ended | files/s, end to end | files/s, first claim to last settled | operator CPU per 1,000 files | operator memory (aim: ≤ {} MiB) |",
        MEMORY_MAX / MIB
    );
    println!("|---|---|---|---|---|---|");
    println!(
        "| {files} | {whole:.0} s | {:.0} | {:.0} | {:.2} s | {:.1} MiB |\n",
        files as f64 / whole,
        files as f64 / took,
        1_000.0 * cpu,
        memory / MIB
    );
    run.usage.print(files);
    assert!(memory <= MEMORY_MAX, "the operator has {:.1} MiB", memory / MIB);
}
