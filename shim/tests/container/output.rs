//! The filter's output: in the log, and its end in the result.

use std::{fs, time::Duration};

use shim::wire::Ending;

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
