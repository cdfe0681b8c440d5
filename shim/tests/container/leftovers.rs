//! Whatever a file leaves behind is gone before the next file.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use nix::{sys::stat::Mode, unistd::mkfifo};
use shim::wire::Ending;

use crate::harness::{Container, RUN_INPUT, only_child};

/// Daemons of every kind: in the background, in their own session, orphaned, ignoring signals, and zombies.
const DAEMONS: &str = "
    sleep 1000 &
    setsid sleep 1000 &
    (setsid sh -c 'trap \"\" TERM HUP; sleep 1000; sleep 1000' &)
    (sleep 0 & exec sleep 1000) &
    exit 3";

#[test]
fn no_process_outlives_its_file() {
    let mut worker = Container::new(RUN_INPUT).serve();
    for _ in 0..5 {
        assert_eq!(worker.process(DAEMONS).ending, Ending::Exited(3));
    }
    worker.process("echo /proc/[0-9]* >/srv/ws/out/detect/processes");
    let left = fs::read_to_string(worker.running.path("ws/out/detect/processes")).unwrap();
    assert_eq!(left.split_whitespace().count(), 2, "more than the shim and this shell: {left}");
}

#[test]
fn no_process_outlives_its_file_where_the_shim_is_not_pid_1() {
    let mut worker = Container::new(RUN_INPUT).not_as_init().serve();
    assert_eq!(worker.process(DAEMONS).ending, Ending::Exited(3));
    let shim = worker.running.shim();
    let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    assert_eq!(children, "");
}

#[test]
fn stdout_that_is_held_open_from_elsewhere_delays_little() {
    let mut worker = Container::new(RUN_INPUT).serve();
    mkfifo(&worker.running.path("ws/go"), Mode::S_IRWXU).unwrap();
    worker.begin("echo begun; read line </srv/ws/go");
    worker.running.wait_for_log("begun");
    let shell = only_child(worker.running.shim().as_raw());
    let held = OpenOptions::new().write(true).open(format!("/proc/{shell}/fd/1")).unwrap();
    let begun = Instant::now();
    fs::write(worker.running.path("ws/go"), "\n").unwrap();
    assert_eq!(worker.done().ending, Ending::Exited(0));
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(worker.process("exit 0").ending, Ending::Exited(0));
    drop(held);
}

#[test]
fn temporary_files_are_gone_and_what_was_there_before_stays() {
    // Root could remove anything, whatever its mode.
    let container = Container::new(RUN_INPUT).user(1_000);
    fs::write(container.path("tmp/before"), "").unwrap();
    let mut worker = container.serve();
    let script = "
        [ $(id -u) = 1000 ] || exit 9
        echo \"$TMPDIR\" >/srv/ws/out/detect/tmpdir
        mkdir -p \"$TMPDIR/a/b\" /tmp/locked/in && touch \"$TMPDIR/a/b/c\" /tmp/file /tmp/locked/in/file
        ln -s /srv/ws /tmp/link
        chmod 0 /tmp/locked \"$TMPDIR/a\"";
    let mut folders = Vec::new();
    for _ in 0..2 {
        assert_eq!(worker.process(script).ending, Ending::Exited(0));
        let names = fs::read_dir(worker.running.path("tmp")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["before"]);
        folders.push(fs::read_to_string(worker.running.path("ws/out/detect/tmpdir")).unwrap());
    }
    assert!(folders[0].starts_with("/tmp/") && folders[0] != folders[1], "{folders:?}");
    assert!(worker.running.path("ws/input").exists(), "links are removed and not followed");
}

#[test]
fn a_tmpdir_of_the_container_is_used_and_wiped() {
    let container = Container::new(RUN_INPUT).env("TMPDIR", "/srv/scratch");
    fs::create_dir(container.path("scratch")).unwrap();
    let mut worker = container.serve();
    let done = worker.process("touch /srv/scratch/x /tmp/x \"$TMPDIR/x\"; echo $TMPDIR");
    assert!(done.text.starts_with("/srv/scratch/"), "{}", done.text);
    for name in ["scratch", "tmp"] {
        assert_eq!(fs::read_dir(worker.running.path(name)).unwrap().count(), 0, "{name}");
    }
}

/// The worker empties its workspace after each file.
#[test]
fn a_tmpdir_that_was_removed_is_made_again() {
    let mut worker = Container::new(RUN_INPUT).env("TMPDIR", "/srv/ws").serve();
    for _ in 0..2 {
        assert_eq!(worker.process("test -d \"$TMPDIR\"").ending, Ending::Exited(0));
        let mut left = fs::read_dir(worker.running.path("ws")).unwrap().map(|entry| entry.unwrap().path());
        fs::remove_dir(left.find(|path| path.display().to_string().contains("/file-")).unwrap()).unwrap();
    }
}

#[test]
fn results_become_readable_whatever_their_mode() {
    let mut worker = Container::new(RUN_INPUT).user(1_000).serve();
    let script = "
        [ $(id -u) = 1000 ] || exit 9
        cd /srv/ws/out/detect && mkdir -p closed/deep && echo x >closed/deep/file && echo x >closed/tool
        ln -s /srv/outside closed/link
        chmod 700 closed/tool closed && chmod 0 closed/deep/file && chmod 1500 closed/deep";
    fs::write(worker.running.path("outside"), "").unwrap();
    fs::set_permissions(worker.running.path("outside"), fs::Permissions::from_mode(0o600)).unwrap();
    nix::unistd::chown(&worker.running.path("outside"), Some(1_000.into()), None).unwrap();
    assert_eq!(worker.process(script).ending, Ending::Exited(0));
    let mode = |name: &str| fs::metadata(worker.running.path(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode("ws/out/detect/closed"), 0o777);
    assert_eq!(mode("ws/out/detect/closed/deep"), 0o777);
    assert_eq!(mode("ws/out/detect/closed/deep/file"), 0o666);
    assert_eq!(mode("ws/out/detect/closed/tool"), 0o777);
    assert_eq!(mode("outside"), 0o600, "links are not followed");
}
