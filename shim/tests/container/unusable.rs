//! A command that cannot be executed is a problem of the run, never of a file.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use shim::wire::Message;

use crate::harness::{Container, Worker};

/// An architecture far from any of ours.
const FOREIGN_ELF: &[u8] = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xf3\xff\x01\0\0\0";

fn write(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The shim explains itself to the worker and in the pod's status.
fn assert_unusable(worker: Worker, message: Message, named: &str) {
    let Message::Unusable(text) = message else { panic!("{message}: {}", worker.running.log()) };
    assert!(text.contains(named), "{text}");
    let mut termination_log = File::open(worker.running.path("log")).unwrap();
    let (status, log) = worker.leave();
    assert_eq!(status.code(), Some(i32::from(shim::UNUSABLE)), "{log}");
    let mut explained = String::new();
    termination_log.read_to_string(&mut explained).unwrap();
    assert_eq!(explained, text);
}

#[test]
fn a_command_that_is_missing_or_not_executable_is_no_hello() {
    for (command, named) in [
        ("no-such-filter", "no such program"),
        ("/srv/ws/missing", "No such file"),
        ("/srv/ws", "not an executable file"),
        ("/srv/ws/plain", "not an executable file"),
    ] {
        let container = Container::new(&[command]);
        write(&container.path("ws/plain"), b"", 0o644);
        let (worker, message) = container.connect();
        assert_unusable(worker, message, named);
    }
}

#[test]
fn a_program_of_the_wrong_format_is_found_at_the_first_file() {
    for (content, named) in [
        (FOREIGN_ELF, "another architecture"),
        (b"echo a script without a first line\n", "without `#!`"),
        (b"#!/no/such/interpreter\n", "its interpreter or loader is missing"),
    ] {
        let container = Container::new(&["/srv/ws/tool"]);
        write(&container.path("ws/tool"), content, 0o755);
        let mut worker = container.serve();
        worker.begin("");
        let message = worker.receive();
        assert_unusable(worker, message, named);
    }
}

#[test]
fn a_program_that_vanishes_between_files_blames_no_file() {
    let container = Container::new(&["/srv/ws/tool"]);
    write(&container.path("ws/tool"), b"#!/bin/sh\n", 0o755);
    let mut worker = container.serve();
    worker.process("");
    fs::remove_file(worker.running.path("ws/tool")).unwrap();
    worker.begin("");
    let message = worker.receive();
    assert_unusable(worker, message, "it is gone");
}

#[test]
fn lines_are_started_before_the_hello() {
    let container = Container::new(&["/srv/ws/tool"]).option("--lines");
    write(&container.path("ws/tool"), FOREIGN_ELF, 0o755);
    let (worker, message) = container.connect();
    assert_unusable(worker, message, "another architecture");
}
