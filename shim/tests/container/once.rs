//! One file of a `Lines` filter in a pod of its own.

use std::fs;

use nix::sys::signal::Signal;

use crate::harness::{Container, Running};

fn start(script: &str) -> Running {
    let container = Container::new(&["sh", "-c", script]).option("--once").option("--lines");
    fs::write(container.path("ws/input.source_uri"), "s3://videos/a").unwrap();
    container.start()
}

/// Returns the exit code, the termination log and the log.
fn run(script: &str) -> (i32, String, String) {
    let running = start(script);
    // An open descriptor outlives the folder.
    let mut termination = fs::File::open(running.path("log")).unwrap();
    let (status, log) = running.finish();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut termination, &mut text).unwrap();
    (status.code().unwrap(), text, log)
}

#[test]
fn it_gets_one_line_and_the_end_of_input() {
    let (code, text, log) = run("cat; echo; echo '::openfilter::{\"ok\":true}'");
    assert_eq!((code, text.as_str()), (0, ""), "{log}");
    assert!(log.contains(r#""source":"s3://videos/a","attempt":1}"#), "{log}");
}

#[test]
fn the_exit_code_is_the_answer() {
    for (script, code, text) in [
        (r#"echo '::openfilter::{"ok":true}'; exit 3"#, 3, ""),
        (r#"echo '::openfilter::{"ok":false,"reason":"busy"}'"#, 1, "busy"),
        (r#"echo '::openfilter::{"ok":false,"reason":"no video","retry":false}'; exit 1"#, 65, "no video"),
        (r#"printf '::openfilter::{"ok":true}'"#, 0, ""),
        ("echo ::openfilter::fine", 1, "is not"),
        ("echo nothing to say", 1, "nothing to say"),
        ("echo out of luck; exit 9", 9, "out of luck"),
        ("kill -9 $$", 137, ""),
    ] {
        let ended = run(script);
        assert!(ended.0 == code && ended.1.contains(text), "{script}: {ended:?}");
    }
}

#[test]
fn a_sigterm_is_passed_on() {
    let running = start("trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done");
    running.wait_for_log("ready");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.finish().0.code(), Some(5));
}

#[test]
fn a_command_that_cannot_be_executed_is_told_apart() {
    let container = Container::new(&["no-such-filter"]).option("--once").option("--lines");
    let (status, log) = container.start().finish();
    assert_eq!(status.code(), Some(i32::from(shim::UNUSABLE)), "{log}");
}
