//! How a file ends, and how the shim ends.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use shim::wire::{Ending, KILL_TIMEOUT, Message, Request};

use crate::harness::{Container, RUN_INPUT, Worker};

#[test]
fn every_exit_code_is_reported() {
    let mut worker = Container::new(RUN_INPUT).serve();
    for code in 0..=255 {
        assert_eq!(worker.process(&format!("exit {code}")).ending, Ending::Exited(code));
    }
}

#[test]
fn signals_are_reported_by_number() {
    let mut worker = Container::new(RUN_INPUT).serve();
    for signal in [1, 2, 6, 9, 11, 13, 15] {
        assert_eq!(worker.process(&format!("kill -{signal} $$")).ending, Ending::Signaled(signal));
    }
    assert_eq!(worker.process("kill -40 $$").ending, Ending::Signaled(0), "a real-time signal");
}

#[test]
fn a_timeout_ends_the_whole_process_group() {
    let mut worker = Container::new(RUN_INPUT).serve();
    let done = worker.process_within(Duration::from_millis(50), "sleep 1000 | sleep 1000");
    assert_eq!(done.ending, Ending::TimedOut);
    assert_eq!(worker.process("exit 0").ending, Ending::Exited(0));
}

#[test]
fn a_process_that_ignores_sigterm_is_killed_10_seconds_after_its_timeout() {
    let mut worker = Container::new(RUN_INPUT).serve();
    let begun = Instant::now();
    let done = worker.process_within(Duration::from_millis(50), "trap '' TERM; while :; do sleep 1000; done");
    assert_eq!(done.ending, Ending::TimedOut);
    assert!(begun.elapsed() >= Duration::from_secs(10));
}

/// As one that hangs in the kernel.
#[test]
fn a_process_that_cannot_be_killed_ends_the_shim_after_10_seconds() {
    let container = Container::new(RUN_INPUT).user(1000).not_as_init();
    // A program that becomes root, to which the shim may send no signal.
    let root = container.path("root");
    fs::copy("/usr/bin/setpriv", &root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut worker = container.serve();
    let begun = Instant::now();
    worker.begin(
        "/srv/root --reuid 0 sh -c 'echo $$ >/srv/root.pid; exec sleep 1000' &
        while [ ! -s /srv/root.pid ]; do sleep 0.01; done",
    );
    worker.wait_for_end();
    let pid = fs::read_to_string(worker.running.path("root.pid")).unwrap();
    kill(Pid::from_raw(pid.trim().parse().unwrap()), Signal::SIGKILL).unwrap();
    let (status, log) = worker.leave();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("processes of the filter still run"), "{log}");
    assert!(begun.elapsed() >= KILL_TIMEOUT);
}

#[test]
fn a_stop_kills_after_a_second() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.begin("trap '' TERM; echo trapped; while :; do sleep 1000; done");
    worker.running.wait_for_log("trapped");
    let begun = Instant::now();
    worker.send(&Request::Stop);
    assert_eq!(worker.done().ending, Ending::Stopped);
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_stop_right_after_its_file_counts_and_a_late_one_does_not() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.running.input("sleep 1000");
    worker.send_text("file 0\nstop\n");
    assert_eq!(worker.done().ending, Ending::Stopped);
    worker.send(&Request::Stop);
    assert_eq!(worker.process("exit 0").ending, Ending::Exited(0));
}

#[test]
fn a_sigterm_before_the_end_marks_the_result_and_all_later_ones() {
    let mut worker = Container::new(RUN_INPUT).serve();
    assert!(!worker.process("exit 0").after_term);
    mkfifo(&worker.running.path("ws/go"), Mode::S_IRWXU).unwrap();
    worker.begin("echo begun; read line </srv/ws/go; exit 4");
    worker.running.wait_for_log("begun");
    worker.running.signal(Signal::SIGTERM);
    fs::write(worker.running.path("ws/go"), "\n").unwrap();
    let done = worker.done();
    assert_eq!((done.ending, done.after_term), (Ending::Exited(4), true));
    assert!(worker.process("exit 0").after_term);
}

#[test]
fn the_end_of_the_worker_ends_everything() {
    let mut worker = Container::new(RUN_INPUT).serve();
    worker.begin("echo begun; trap '' TERM; setsid sleep 1000 & sleep 1000");
    worker.running.wait_for_log("begun");
    let begun = Instant::now();
    let (status, log) = worker.leave();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_worker_may_start_later() {
    let container = Container::new(RUN_INPUT).option("--socket").option("/srv/socket");
    let running = container.start();
    running.wait_for_exec();
    let listener = UnixListener::bind(running.path("socket")).unwrap();
    let (worker, message) = Worker::accept(running, &listener);
    assert_eq!(message, Message::Hello);
    assert_eq!(worker.leave().0.code(), Some(0));
}

#[test]
fn without_a_worker_a_sigterm_is_obeyed() {
    let running = Container::new(RUN_INPUT).option("--socket").option("/srv/socket").start();
    running.wait_for_exec();
    running.signal(Signal::SIGTERM);
    assert_eq!(running.finish().0.code(), Some(0));
}

#[test]
fn what_the_worker_must_not_send_ends_the_shim() {
    for text in ["nonsense\n", "file 0\nfile 0\n"] {
        let mut worker = Container::new(RUN_INPUT).serve();
        worker.running.input("sleep 1000");
        worker.send_text(text);
        let (status, log) = worker.leave();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("shim: "), "{log}");
    }
}
