//! The cost of the shim: from its start to its hello, and per file of a filter that does nothing.
//!
//! `cargo bench --package shim` prints the figures beside those of a bare loop of the same forks.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use shim::wire::{Message, Request};

const STARTS: u32 = 50;
const FILES: u32 = 2_000;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let start = || {
        let mut shim = Command::new(env!("CARGO_BIN_EXE_shim"));
        shim.arg("--socket").arg(&socket).args(["--filter", "bench", "--workspace"]).arg(folder.path());
        // A separate folder, so that the contents of the machine's own do not matter.
        shim.env("TMPDIR", folder.path()).args(["--", "true"]).stdout(Stdio::null());
        let shim = shim.spawn().unwrap();
        let mut link = BufReader::new(listener.accept().unwrap().0);
        assert_eq!(receive(&mut link), Message::Hello);
        (shim, link)
    };

    let (mut starting, mut ending) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..STARTS {
        let begun = Instant::now();
        let started = start();
        starting += begun.elapsed();
        let left = Instant::now();
        end(started);
        ending += left.elapsed();
    }
    println!("from its start to its hello: {:?}", starting / STARTS);
    println!("from the worker's end to its own: {:?}", ending / STARTS);

    let (shim, mut link) = start();
    let mut cpu = Duration::ZERO;
    let begun = Instant::now();
    for _ in 0..FILES {
        writeln!(link.get_mut(), "{}", Request::File { timeout: Some(Duration::from_secs(60)) }).unwrap();
        if let Message::Done(done) = receive(&mut link) {
            cpu += done.cpu;
        }
    }
    report("files through the shim", begun.elapsed());
    println!("CPU of the filter as reported: {:?} per file", cpu / FILES);
    end((shim, link));

    let begun = Instant::now();
    for _ in 0..FILES {
        Command::new("true").stdin(Stdio::null()).status().unwrap();
    }
    report("forks in a bare loop", begun.elapsed());
}

fn receive(link: &mut BufReader<UnixStream>) -> Message {
    let mut line = String::new();
    link.read_line(&mut line).unwrap();
    line.trim_end_matches('\n').parse().unwrap()
}

fn end((mut shim, link): (Child, BufReader<UnixStream>)) {
    drop(link);
    shim.wait().unwrap();
}

fn report(what: &str, elapsed: Duration) {
    println!(
        "{what}: {:.0} per second, {:?} each",
        f64::from(FILES) / elapsed.as_secs_f64(),
        elapsed / FILES
    );
}
