//! A filter's process sees what it would see without the shim.

use std::{collections::BTreeSet, time::Duration};

use shim::wire::Ending;

use crate::harness::{Container, RUN_INPUT};

#[test]
fn environment_and_working_directory_are_the_containers() {
    let mut worker = Container::new(RUN_INPUT).env("MODEL", "two words\nand lines").serve();
    let done = worker.process("pwd; tr '\\0' '|' </proc/$$/environ");
    let (folder, environment) = done.text.split_once("\\n").unwrap_or((&done.text, ""));
    assert_eq!(folder, "/usr");
    let names: BTreeSet<&str> =
        environment.split('|').filter_map(|pair| pair.split_once('=')).map(|pair| pair.0).collect();
    // `unshare` runs a shell before the shim, and the shell exports its folder.
    let expected = BTreeSet::from(["MODEL", "PATH", "PWD", "TMPDIR"]);
    assert_eq!(names, expected, "{environment}");
    assert!(environment.contains("MODEL=two words\\nand lines"), "{environment}");
}

#[test]
fn arguments_are_passed_on_and_the_first_is_the_commands_own_name() {
    let mut worker = Container::new(&["cat", "/proc/self/cmdline"]).serve();
    assert_eq!(worker.process("").text, "cat\\u{0}/proc/self/cmdline\\u{0}");
}

#[test]
fn signals_have_their_defaults() {
    let mut worker = Container::new(&["cat", "/proc/self/status"]).serve();
    worker.process("");
    let (_, log) = worker.leave();
    for name in ["SigBlk", "SigIgn", "SigCgt"] {
        let set = log.lines().find_map(|line| line.strip_prefix(&format!("{name}:\t"))).unwrap();
        // The C library reserves signals 32 and 33 for itself.
        let set = u64::from_str_radix(set, 16).unwrap() & 0x7fff_ffff;
        assert_eq!(set, 0, "{name}");
    }
}

#[test]
fn stdin_is_empty_and_the_process_leads_its_group() {
    let mut worker = Container::new(RUN_INPUT).serve();
    let done = worker.process("cat; ps -o pid=,pgid= -p $$ | { read pid group; test $pid = $group; }");
    assert_eq!(done.ending, Ending::Exited(0), "{}", done.text);
}

#[test]
fn the_kernel_kills_the_filter_before_the_shim() {
    let mut worker = Container::new(RUN_INPUT).serve();
    assert_eq!(worker.process("sleep 0.01; cat /proc/self/oom_score_adj").text, "1000");
}

#[test]
fn cpu_time_and_memory_are_measured() {
    let mut worker = Container::new(RUN_INPUT).serve();
    let done = worker.process("i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done");
    assert!(done.cpu > Duration::from_millis(10), "{done:?}");
    assert!((500..100_000).contains(&done.peak_memory_kib), "{done:?}");
    assert!(!done.oom_killed);
    let idle = worker.process("sleep 0.2");
    assert!(idle.cpu < Duration::from_millis(100), "{idle:?}");
    let large = worker.process("head -c 50000000 /dev/zero | tail -n 1 | wc -c");
    assert!(large.peak_memory_kib > 40_000, "{large:?}");
}
