//! A container with a shim in it, and the worker's end of its socket.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use shim::wire::{Done, Message, Request};
use tempfile::TempDir;

/// Far longer than anything here takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Mounts the test's folder at /srv and its `tmp` at /tmp, and becomes the shim. Mounts of programs come
/// first, because they may be below /tmp.
const ENTER: &str = r#"mount --bind "$1" "$0/shim" && mount --rbind "$0" /srv && mount --bind /srv/tmp /tmp && shift && exec "$@""#;

/// The filter of most tests: it runs the file.
pub const RUN_INPUT: &[&str] = &["sh", "/srv/ws/input"];

/// A container that has not started yet.
pub struct Container {
    pub folder: TempDir,
    options: Vec<String>,
    command: Vec<String>,
    environment: Vec<(String, String)>,
    user: u32,
    is_init: bool,
    is_log_read: bool,
}

/// A running shim.
pub struct Running {
    pub folder: TempDir,
    process: Child,
    log: Arc<Log>,
    readers: Vec<JoinHandle<()>>,
}

/// A running shim, with a connection to it.
pub struct Worker {
    pub running: Running,
    link: BufReader<UnixStream>,
}

#[derive(Default)]
struct Log {
    bytes: Mutex<Vec<u8>>,
    grown: Condvar,
    /// At most as many as there were writes.
    reads: AtomicUsize,
}

impl Container {
    pub fn new(command: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tmp", "ws/out/detect"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        for name in ["shim", "log"] {
            File::create(folder.path().join(name)).unwrap();
        }
        Self {
            folder,
            options: Vec::new(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            environment: vec![("PATH".to_owned(), std::env::var("PATH").unwrap())],
            user: 0,
            is_init: true,
            is_log_read: true,
        }
    }

    pub fn option(mut self, option: &str) -> Self {
        self.options.push(option.to_owned());
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs shim and filter as a user other than root.
    pub fn user(mut self, user: u32) -> Self {
        for name in ["", "tmp", "ws", "ws/out", "ws/out/detect", "log"] {
            fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o777)).unwrap();
        }
        self.user = user;
        self
    }

    /// Leaves the shim a child of `unshare`, as in a pod that shares its processes.
    pub fn not_as_init(mut self) -> Self {
        self.is_init = false;
        self
    }

    /// Leaves the container's log unread, so that it fills up.
    pub fn without_log_reader(mut self) -> Self {
        self.is_log_read = false;
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the shim; its worker may connect later.
    pub fn start(self) -> Running {
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--kill-child"]);
        if self.is_init {
            unshare.args(["--pid", "--mount-proc"]);
        }
        unshare.args(["--fork", "sh", "-c", ENTER]).arg(self.folder.path()).arg(env!("CARGO_BIN_EXE_shim"));
        if self.user != 0 {
            let user = self.user.to_string();
            unshare.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
            // A change of user undoes `--kill-child`.
            unshare.args(["--pdeathsig", "KILL"]);
        }
        unshare.args([
            "/srv/shim",
            "--filter",
            "detect",
            "--workspace",
            "/srv/ws",
            "--termination-log",
            "/srv/log",
        ]);
        unshare.args(&self.options).arg("--").args(&self.command);
        unshare.env_clear().envs(self.environment).current_dir("/usr");
        let mut process =
            unshare.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Log::default());
        let mut readers = Vec::new();
        if self.is_log_read {
            readers.push(log.follow(process.stdout.take().unwrap()));
            readers.push(log.follow(process.stderr.take().unwrap()));
        }
        Running { folder: self.folder, process, log, readers }
    }

    /// Starts the shim, and waits for its hello.
    pub fn serve(self) -> Worker {
        let (worker, message) = self.connect();
        assert_eq!(message, Message::Hello, "{}", worker.running.log());
        worker.running.input("true");
        worker
    }

    /// Starts the shim, and waits for its first message.
    pub fn connect(self) -> (Worker, Message) {
        let listener = UnixListener::bind(self.path("socket")).unwrap();
        // As the worker does, which does not know the filter's user.
        fs::set_permissions(self.path("socket"), fs::Permissions::from_mode(0o666)).unwrap();
        let running = self.option("--socket").option("/srv/socket").start();
        Worker::accept(running, &listener)
    }
}

impl Worker {
    pub fn accept(running: Running, listener: &UnixListener) -> (Self, Message) {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut worker = Self { running, link: BufReader::new(stream) };
        let message = worker.receive();
        (worker, message)
    }

    /// Processes a file.
    pub fn process(&mut self, script: &(impl AsRef<[u8]> + ?Sized)) -> Done {
        self.begin(script);
        self.done()
    }

    /// Processes a file, with a time limit.
    pub fn process_within(&mut self, timeout: Duration, script: &str) -> Done {
        self.running.input(script);
        self.send(&Request::File { timeout: Some(timeout) });
        self.done()
    }

    /// Hands over a file.
    pub fn begin(&mut self, script: &(impl AsRef<[u8]> + ?Sized)) {
        self.running.input(script);
        self.send(&Request::File { timeout: None });
    }

    pub fn send(&mut self, request: &Request) {
        self.send_text(&format!("{request}\n"));
    }

    pub fn send_text(&mut self, text: &str) {
        self.link.get_mut().write_all(text.as_bytes()).unwrap();
    }

    pub fn done(&mut self) -> Done {
        match self.receive() {
            Message::Done(done) => done,
            message => panic!("{message}: {}", self.running.log()),
        }
    }

    pub fn receive(&mut self) -> Message {
        let mut line = String::new();
        self.link.read_line(&mut line).unwrap();
        let message = line.strip_suffix('\n').map(str::parse);
        message.unwrap_or_else(|| panic!("the shim has gone: {}", self.running.log())).unwrap()
    }

    /// Waits until the shim closes the connection.
    pub fn wait_for_end(&mut self) {
        let mut line = String::new();
        assert_eq!(self.link.read_line(&mut line).unwrap(), 0, "{line}");
    }

    /// Closes the connection, as the end of the worker would; returns how the shim ended, and its whole log.
    pub fn leave(self) -> (ExitStatus, String) {
        drop(self.link);
        self.running.finish()
    }
}

impl Running {
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Puts a file into the workspace.
    pub fn input(&self, script: &(impl AsRef<[u8]> + ?Sized)) {
        // As the worker does: a process of the last file may still be reading that one.
        fs::write(self.path("next"), script).unwrap();
        fs::rename(self.path("next"), self.path("ws/input")).unwrap();
        fs::write(self.path("ws/input.source_uri"), "s3://videos/day 1.mp4").unwrap();
        fs::write(self.path("ws/input.attempt"), "2").unwrap();
    }

    /// The shim's pid outside the container.
    pub fn shim(&self) -> Pid {
        let unshare = self.process.id();
        only_child(unshare.cast_signed())
    }

    /// Waits until the mounts are done and the shim runs, which blocks SIGTERM before it looks for the
    /// worker.
    pub fn wait_for_exec(&self) {
        let unshare = self.process.id();
        let is_blocked = |shim: &str| {
            let status = fs::read_to_string(format!("/proc/{}/status", shim.trim())).unwrap_or_default();
            status.contains("Name:\tshim\n") && status.contains("SigBlk:\t0000000000014000\n")
        };
        let children = || fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap();
        while !is_blocked(&children()) {
            thread::yield_now();
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.shim(), signal).unwrap();
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.log.bytes.lock().unwrap()).into_owned()
    }

    pub fn log_length(&self) -> usize {
        self.log.bytes.lock().unwrap().len()
    }

    /// How often the log had something to read.
    pub fn log_reads(&self) -> usize {
        self.log.reads.load(Ordering::Relaxed)
    }

    /// Waits until the end of the log contains a text.
    pub fn wait_for_log(&self, text: &str) {
        let bytes = self.log.bytes.lock().unwrap();
        let end =
            |bytes: &[u8]| String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(4_096)..]).into_owned();
        let is_missing = |bytes: &mut Vec<u8>| !end(bytes).contains(text);
        let (bytes, waited) = self.log.grown.wait_timeout_while(bytes, PATIENCE, is_missing).unwrap();
        assert!(!waited.timed_out(), "{text} is not in the log: {}", end(&bytes));
    }

    /// Waits until the log has this many bytes.
    pub fn wait_for_log_length(&self, length: usize) {
        let bytes = self.log.bytes.lock().unwrap();
        let is_shorter = |bytes: &mut Vec<u8>| bytes.len() < length;
        let (bytes, waited) = self.log.grown.wait_timeout_while(bytes, PATIENCE, is_shorter).unwrap();
        assert!(!waited.timed_out(), "{} bytes, not {length}", bytes.len());
    }

    /// Waits for the end of the shim; also returns its whole log.
    pub fn finish(mut self) -> (ExitStatus, String) {
        self.wait()
    }

    /// Does the same, and keeps its folder.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let status = self.process.wait().unwrap();
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        (status, self.log())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // `unshare` takes its child with it, and so everything in the container.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Log {
    fn follow(self: &Arc<Self>, mut from: impl Read + Send + 'static) -> JoinHandle<()> {
        let log = Arc::clone(self);
        thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                log.bytes.lock().unwrap().extend_from_slice(&buffer[..length]);
                log.reads.fetch_add(1, Ordering::Relaxed);
                log.grown.notify_all();
            }
        })
    }
}

/// The one child of a process.
pub fn only_child(of: i32) -> Pid {
    let children = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap();
    Pid::from_raw(children.trim().parse().unwrap_or_else(|_| panic!("{of} has the children {children}")))
}
