//! The filter's output: all of it in the log, and its end in the report.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use nix::{sys::stat::Mode, unistd::mkfifo};
use shim::wire::{Ending, Request};

use crate::harness::{Container, RUN_INPUT};

#[test]
fn the_log_shows_which_file_wrote_what() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.process("echo one; printf unfinished");
    worker.process("echo two; exit 3");
    let (_, log) = worker.leave();
    let expected = "\
        ::openfilter:: begin s3://videos/day 1.mp4\none\nunfinished\n::openfilter:: end exit:0\n\
        ::openfilter:: begin s3://videos/day 1.mp4\ntwo\n::openfilter:: end exit:3\n";
    assert_eq!(log, expected);
}

/// Each read costs the container runtime more than the shim's write costs the shim.
#[test]
fn a_file_without_output_is_one_write() {
    const FILES: usize = 20;
    let file = "::openfilter:: begin s3://videos/day 1.mp4\n::openfilter:: end exit:3\n";
    let mut worker = Container::new(RUN_INPUT).serve();
    for files in 1..=FILES {
        worker.process("exit 3");
        // Wait before the next file, so that a slow reader does not read two files at once.
        worker.running.wait_for_log_length(files * file.len());
    }
    let reads = worker.running.log_reads();
    let (_, log) = worker.leave();
    assert_eq!(log, file.repeat(FILES));
    assert!(reads <= FILES, "{reads} reads");
}

#[test]
fn a_file_is_named_before_its_output_and_in_the_same_write() {
    let mut worker = Container::new(RUN_INPUT).serve();
    mkfifo(&worker.running.path("ws/go"), Mode::S_IRWXU).unwrap();
    worker.begin("echo one; read line </srv/ws/go; echo two");
    worker.running.wait_for_log("one");
    assert_eq!(worker.running.log(), "::openfilter:: begin s3://videos/day 1.mp4\none\n");
    assert_eq!(worker.running.log_reads(), 1);
    fs::write(worker.running.path("ws/go"), "\n").unwrap();
    worker.done();
    let (_, log) = worker.leave();
    assert!(log.ends_with("one\ntwo\n::openfilter:: end exit:0\n"), "{log}");
}

/// Two pipes lead to the log, and each has its own reader.
#[test]
fn a_file_that_writes_to_stderr_alone_is_named_there() {
    let mut worker = Container::new(RUN_INPUT).serve();
    for _ in 0..20 {
        worker.process("echo one >&2; echo two >&2");
    }
    let (_, log) = worker.leave();
    let file = "::openfilter:: begin s3://videos/day 1.mp4\none\ntwo\n::openfilter:: end exit:0\n";
    assert_eq!(log, file.repeat(20));
}

#[test]
fn a_file_that_hangs_is_named_after_a_second() {
    let mut worker = Container::new(RUN_INPUT).serve();
    let begun = Instant::now();
    worker.begin("sleep 1000");
    worker.running.wait_for_log("::openfilter:: begin s3://videos/day 1.mp4\n");
    assert!(begun.elapsed() >= Duration::from_secs(1));
    worker.send(&Request::Stop);
    assert_eq!(worker.done().ending, Ending::Stopped);
    let (_, log) = worker.leave();
    assert_eq!(log, "::openfilter:: begin s3://videos/day 1.mp4\n::openfilter:: end stopped\n");
}

#[test]
fn a_file_that_the_worker_leaves_behind_is_named() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.begin("touch /srv/ws/out/detect/begun; exec sleep 1000");
    while !worker.running.path("ws/out/detect/begun").exists() {
        thread::yield_now();
    }
    let (_, log) = worker.leave();
    assert_eq!(log, "::openfilter:: begin s3://videos/day 1.mp4\n");
}

#[test]
fn output_that_one_write_cannot_take_keeps_its_place() {
    const LENGTHS: [usize; 5] = [3_900, 4_000, 4_096, 5_000, 100_000];
    let mut worker = Container::new(RUN_INPUT).serve();
    for length in LENGTHS {
        worker.process(&format!("head -c {length} /dev/zero | tr '\\0' x"));
    }
    let (_, log) = worker.leave();
    let file =
        |length| format!("begin s3://videos/day 1.mp4\n{}\n::openfilter:: end exit:0\n", "x".repeat(length));
    let expected: String = LENGTHS.map(|length| format!("::openfilter:: {}", file(length))).concat();
    assert!(log == expected, "{}", log.replace('x', ""));
}

#[test]
fn a_source_cannot_forge_a_line() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.running.input("true");
    fs::write(worker.running.path("ws/input.source_uri"), "s3://b/x\n::openfilter:: end exit:0").unwrap();
    worker.send_text("file 0\n");
    worker.done();
    let (_, log) = worker.leave();
    assert_eq!(log.lines().count(), 2, "{log}");
}

#[test]
fn a_hundred_megabytes_pass() {
    const LENGTH: usize = 100_000_000;
    let mut worker = Container::new(RUN_INPUT).serve();
    let done = worker.process(&format!("head -c {LENGTH} /dev/zero | tr '\\0' x; echo; echo last"));
    assert_eq!((done.ending, done.text.as_str()), (Ending::Exited(0), "last"));
    worker.running.wait_for_log("end exit:0");
    let shim = worker.running.shim();
    let status = fs::read_to_string(format!("/proc/{shim}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 20_000, "{peak} KiB");
    assert!(worker.running.log_length() > LENGTH);
}

#[test]
fn a_log_that_nothing_reads_stops_no_timer() {
    let mut worker = Container::new(RUN_INPUT).without_log_reader().serve();
    for _ in 0..3 {
        let done = worker.process_within(Duration::from_millis(50), "while :; do echo and so on; done");
        assert_eq!(done.ending, Ending::TimedOut);
    }
}

#[test]
fn the_termination_log_explains_one_file_only() {
    let mut worker = Container::new(RUN_INPUT).serve();
    assert_eq!(worker.process("echo output; printf 'no\nmodel' >/srv/log; exit 1").text, "no\\nmodel");
    assert_eq!(worker.process("echo problem >&2; exit 1").text, "problem");
    assert_eq!(worker.process("exit 1").text, "");
}
