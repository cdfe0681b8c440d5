//! `Lines`: one process for many files.

use std::{
    fs,
    time::{Duration, Instant},
};

use nix::{sys::stat::Mode, unistd::mkfifo};
use shim::wire::{Ending, TEXT_BYTES_MAX};

use crate::harness::{Container, Worker};

/// Runs each file as part of one process, in which `$line` is the shim's line.
const LOOP: &[&str] = &["sh", "-c", "while read -r line; do . /srv/ws/input; done"];

const OK: &str = "echo '::openfilter::{\"ok\":true}'";

fn serve() -> Worker {
    Container::new(LOOP).option("--lines").serve()
}

/// The pid of the process within its container.
fn pid(worker: &mut Worker) -> String {
    assert_eq!(worker.process(&format!("echo $$ >/srv/ws/out/detect/pid; {OK}")).ending, Ending::Accepted);
    fs::read_to_string(worker.running.path("ws/out/detect/pid")).unwrap()
}

#[test]
fn one_process_answers_many_files() {
    let mut worker = serve();
    let first = pid(&mut worker);
    for _ in 0..100 {
        assert_eq!(worker.process(&format!("echo log; {OK}; echo after")).ending, Ending::Accepted);
    }
    assert_eq!(pid(&mut worker), first);
    let (status, log) = worker.leave();
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(log.matches("log\n").count(), 100);
    assert_eq!(log.matches("after\n").count(), 100);
    assert!(!log.contains("{\"ok\""), "answers are not log: {log}");
}

#[test]
fn output_that_comes_with_the_answer_shares_the_write_of_its_marks() {
    const FILES: usize = 20;
    let file = "::openfilter:: begin s3://videos/day 1.mp4\nlog\n::openfilter:: end ok\n";
    let mut worker = serve();
    for files in 1..=FILES {
        worker.process("printf 'log\\n::openfilter::{\"ok\":true}\\n'");
        // Before the next, so that a slow reader does not make one read of two files.
        worker.running.wait_for_log_length(files * file.len());
    }
    let reads = worker.running.log_reads();
    let (_, log) = worker.leave();
    assert_eq!(log, file.repeat(FILES));
    assert!(reads <= FILES, "{reads} reads");
}

#[test]
fn the_line_names_the_file() {
    let mut worker = serve();
    worker.process(&format!("printf '%s' \"$line\" >/srv/ws/out/detect/line; {OK}"));
    let line = fs::read_to_string(worker.running.path("ws/out/detect/line")).unwrap();
    assert_eq!(
        line,
        r#"{"input":"/srv/ws/input","out":"/srv/ws/out/detect","source":"s3://videos/day 1.mp4","attempt":2}"#
    );
}

#[test]
fn a_refusal_has_a_reason_and_keeps_the_process() {
    let mut worker = serve();
    let first = pid(&mut worker);
    let done = worker.process(r#"echo '::openfilter::{"ok":false,"reason":"no\\u0020video","retry":false}'"#);
    assert_eq!((done.ending, done.text.as_str()), (Ending::Refused { retry: false }, "no video"));
    let done = worker.process(r#"echo busy; echo '::openfilter:: {"ok":false}'"#);
    assert_eq!((done.ending, done.text.as_str()), (Ending::Refused { retry: true }, "busy"));
    assert_eq!(pid(&mut worker), first);
}

#[test]
fn a_long_reason_is_cut() {
    let mut worker = serve();
    let done = worker.process(
        r#"long=$(head -c 5000 /dev/zero | tr '\0' x); echo '::openfilter::{"ok":false,"reason":"'$long'"}'"#,
    );
    assert_eq!((done.ending, done.text.len()), (Ending::Refused { retry: true }, TEXT_BYTES_MAX));
}

#[test]
fn garbage_and_two_answers_replace_the_process() {
    let mut worker = serve();
    for (script, named) in [
        ("echo '::openfilter::fine'".to_owned(), "is not"),
        (format!("twice=$({OK}; {OK}); echo \"$twice\""), "more than once"),
    ] {
        let before = pid(&mut worker);
        let done = worker.process(&script);
        assert_eq!(done.ending, Ending::BadAnswer);
        assert!(done.text.contains(named), "{}", done.text);
        assert_ne!(pid(&mut worker), before);
    }
}

#[test]
fn an_answer_without_a_file_is_not_taken_for_the_next() {
    let mut worker = serve();
    mkfifo(&worker.running.path("ws/go"), Mode::S_IRWXU).unwrap();
    let before = pid(&mut worker);
    assert_eq!(
        worker.process(&format!("{OK}; ( read x </srv/ws/go; {OK}; echo spoken ) &")).ending,
        Ending::Accepted
    );
    fs::write(worker.running.path("ws/go"), "\n").unwrap();
    worker.running.wait_for_log("spoken");
    let done = worker.process("exit 7");
    assert_eq!(done.ending, Ending::Exited(7));
    assert_ne!(pid(&mut worker), before);
}

#[test]
fn a_process_that_dies_fails_its_file_and_is_started_later_and_later() {
    let mut worker = serve();
    let begun = Instant::now();
    assert_eq!(worker.process("echo why; exit 7").ending, Ending::Exited(7));
    assert_eq!(worker.process("kill -9 $$").ending, Ending::Signaled(9));
    let done = worker.process("echo why; exit 0");
    assert_eq!((done.ending, done.text.as_str()), (Ending::BadAnswer, "why"), "no answer is no success");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    pid(&mut worker);
}

#[test]
fn an_answer_right_before_the_end_counts() {
    let mut worker = serve();
    for _ in 0..10 {
        assert_eq!(worker.process(&format!("{OK}; exit 0")).ending, Ending::Accepted);
    }
}

#[test]
fn a_process_that_dies_before_it_reads_a_file_fails_none() {
    let mut worker = serve();
    mkfifo(&worker.running.path("ws/go"), Mode::S_IRWXU).unwrap();
    // It answers, but ends only when the next file is there.
    assert_eq!(worker.process(&format!("{OK}; read x </srv/ws/go; exit 7")).ending, Ending::Accepted);
    worker.begin(OK);
    worker.running.wait_for_log("end ok\n::openfilter:: begin");
    fs::write(worker.running.path("ws/go"), "\n").unwrap();
    assert_eq!(worker.done().ending, Ending::Accepted);
}

#[test]
fn a_process_that_never_reads_fails_its_files() {
    let mut worker = Container::new(&["sh", "-c", "exit 7"]).option("--lines").serve();
    for _ in 0..2 {
        assert_eq!(worker.process("").ending, Ending::Exited(7));
    }
}

#[test]
fn silence_ends_by_the_timeout() {
    let mut worker = serve();
    let before = pid(&mut worker);
    assert_eq!(worker.process_within(Duration::from_millis(50), "true").ending, Ending::TimedOut);
    assert_ne!(pid(&mut worker), before);
}

#[test]
fn helpers_live_as_long_as_the_process() {
    let mut worker = serve();
    assert_eq!(worker.process(&format!("sleep 1000 & helper=$!; {OK}")).ending, Ending::Accepted);
    assert_eq!(worker.process(&format!("kill -0 $helper && {OK}")).ending, Ending::Accepted);
    assert_eq!(worker.process("exit 1").ending, Ending::Exited(1));
    assert_eq!(worker.process(&format!("pgrep sleep || {OK}")).ending, Ending::Accepted);
}

#[test]
fn its_tmpdir_lasts_as_long_as_the_process() {
    let mut worker = serve();
    assert_eq!(worker.process(&format!("touch $TMPDIR/model /tmp/cache; {OK}")).ending, Ending::Accepted);
    assert_eq!(
        worker.process(&format!("test -e $TMPDIR/model -a -e /tmp/cache && {OK}")).ending,
        Ending::Accepted
    );
    assert_eq!(worker.process("exit 1").ending, Ending::Exited(1));
    assert_eq!(fs::read_dir(worker.running.path("tmp")).unwrap().count(), 0);
}

#[test]
fn cpu_time_is_that_of_the_file() {
    let mut worker = serve();
    let busy = worker.process(&format!("i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done; {OK}"));
    assert!(busy.cpu > Duration::from_millis(10) && busy.peak_memory_kib > 500, "{busy:?}");
    let idle = worker.process(OK);
    assert!(idle.cpu < busy.cpu / 2, "{idle:?}");
    let dead = worker.process("exit 1");
    assert!(dead.cpu < busy.cpu / 2, "{dead:?}");
}
