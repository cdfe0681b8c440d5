//! A run's queue, a bucket, a workspace, and the claimer's program with the environment that a pod would give
//! it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use protocol::{Exit, Report, RunId};
use queue::{File, Opened, Page, RunQueue, WorkerUser};
use tempfile::TempDir;
use tests::s3::{ACCESS_KEY, SECRET_KEY, TestS3, escape};
use tests::valkey::{Flavor, KEEP, Options, TestServer, owner};
use tokio::process::Command;

pub const BUCKET: &str = "videos";
/// The number of tries per request in tests, so that failures come soon.
const TRIES: &str = "2";

/// Everything a claimer needs.
pub struct Bench {
    pub valkey: TestServer,
    pub s3: TestS3,
    pub queue: RunQueue,
    pub user: WorkerUser,
    pub folder: TempDir,
    /// The environment of the next claimer.
    pub env: BTreeMap<String, String>,
}

/// How a claimer ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stderr: String,
    /// The termination message.
    pub message: String,
    pub took: Duration,
    /// Its peak memory, in bytes.
    pub memory: u64,
}

impl Bench {
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    pub async fn start_with(options: Options) -> Self {
        let valkey = TestServer::start_with(Flavor::Valkey, options).await;
        let s3 = TestS3::start(BUCKET).await;
        let run = RunId::derive("team-a", "monday").unwrap();
        let queue =
            match RunQueue::open(&valkey.connect(), &run, &owner("uid-1"), "spec-1", &KEEP).await.unwrap() {
                Opened::Created(queue) => queue,
                _ => panic!("a new server has no queue"),
            };
        let user = WorkerUser::generate(&run, "uid-1", queue::Rights::Claim).unwrap();
        user.ensure(&valkey.connect()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("ws")).unwrap();
        fs::write(folder.path().join("termination-log"), "").unwrap();
        let env = environment(&valkey, &s3, &queue, &user, folder.path());
        Self { valkey, s3, queue, user, folder, env }
    }

    pub fn set(&mut self, name: &str, value: impl Into<String>) -> &mut Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }

    pub fn workspace(&self) -> PathBuf {
        self.folder.path().join("ws")
    }

    /// The input as a filter sees it.
    pub fn input(&self) -> Vec<u8> {
        fs::read(self.workspace().join("input")).unwrap()
    }

    /// Stores an object, and returns it as a listing would.
    pub async fn store(&self, key: &str, content: &[u8]) -> File {
        self.s3.client.put(BUCKET, &escape(key), content.to_vec()).await.unwrap();
        listed(key, content)
    }

    /// Stores an object and queues it.
    pub async fn offer(&self, key: &str, content: &[u8]) {
        let file = self.store(key, content).await;
        self.enqueue(vec![file]).await;
    }

    pub async fn enqueue(&self, files: Vec<File>) {
        let page = Page { after: String::new(), next: None, files, skipped: 0 };
        self.queue.enqueue(&page, u64::MAX).await.unwrap();
    }

    /// Does the same when more files follow: the listing continues, page by page.
    pub async fn offer_next(&self, key: &str, content: &[u8], page: usize) {
        let file = self.store(key, content).await;
        self.enqueue_next(file, page).await;
    }

    pub async fn enqueue_next(&self, file: File, page: usize) {
        let after = if page == 0 { String::new() } else { format!("page {page}") };
        let page = Page { after, next: Some(format!("page {}", page + 1)), files: vec![file], skipped: 0 };
        self.queue.enqueue(&page, u64::MAX).await.unwrap();
    }

    /// The program with only its own environment.
    pub fn command(&self) -> Command {
        self.wrapped(&[])
    }

    /// The same, started by another program.
    pub fn wrapped(&self, wrapper: &[&str]) -> Command {
        let mut words: Vec<PathBuf> = wrapper.iter().map(PathBuf::from).collect();
        words.push(program().to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env_clear().envs(&self.env).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    pub async fn claim(&self) -> Ended {
        self.run(&mut self.command()).await
    }

    /// Waits until a claimer has found no file and waits for one.
    pub async fn claimer_waits(&self) {
        tests::eventually("the claimer waits", || async {
            let mut clients = redis::cmd("CLIENT");
            let value = self.valkey.raw(clients.arg("LIST")).await;
            format!("{value:?}").contains("cmd=xread ")
        })
        .await;
    }

    /// Gives a pod a file, as the operator does; `None` if there is no file, or no Valkey.
    pub async fn hand_out(&self, pod: &str) -> Option<()> {
        let served = self.queue.hand_out(&[pod.to_owned()]).await.unwrap_or_default();
        (!served.is_empty()).then_some(())
    }

    fn pod_of(&self, command: &Command) -> String {
        let set = command.as_std().get_envs().find(|(name, _)| *name == "CONSUMER_NAME");
        let set = set.and_then(|(_, value)| value?.to_str()).map(str::to_owned);
        set.unwrap_or_else(|| self.env["CONSUMER_NAME"].clone())
    }

    pub async fn publish(&self) -> Ended {
        self.run(self.command().arg("publish")).await
    }

    /// Runs the program to its end, and checks that it kept its secrets.
    pub async fn run(&self, command: &mut Command) -> Ended {
        let log = self.folder.path().join("termination-log");
        fs::write(&log, "").unwrap();
        let pod = self.pod_of(command);
        let operator = self.hand_out(&pod).await.is_none().then(|| {
            let (queue, pod) = (self.queue.clone(), pod.clone());
            tokio::spawn(async move {
                // Until the pod has a file, but no longer than the claimer may run.
                while queue.hand_out(std::slice::from_ref(&pod)).await.is_ok_and(|served| served.is_empty()) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        });
        let started = Instant::now();
        let child = command.spawn().unwrap();
        let pid = child.id().unwrap();
        let watch = tokio::spawn(peak_memory(pid));
        let output = tokio::time::timeout(Duration::from_secs(120), child.wait_with_output()).await;
        let output = output.expect("the claimer ends").unwrap();
        if let Some(operator) = operator {
            operator.abort();
        }
        let ended = Ended {
            code: output.status.code().unwrap_or(-1),
            stderr: String::from_utf8(output.stderr).unwrap() + &String::from_utf8(output.stdout).unwrap(),
            message: fs::read_to_string(&log).unwrap(),
            took: started.elapsed(),
            memory: watch.await.unwrap(),
        };
        for secret in [SECRET_KEY, self.user.password.reveal()] {
            assert!(!ended.stderr.contains(secret) && !ended.message.contains(secret), "a secret is printed");
        }
        ended
    }

    /// Checks that nothing exists that a filter could mistake for a file.
    pub fn assert_no_input(&self) {
        for name in ["input", ".input.part", "input.source_uri", "input.attempt"] {
            assert!(!self.workspace().join(name).exists(), "{name} was left behind");
        }
    }
}

impl Ended {
    #[track_caller]
    pub fn assert_ok(&self) {
        assert_eq!((self.code, self.report().outcome), (0, Ok(())), "{}", self.stderr);
    }

    /// The content of the termination message.
    #[track_caller]
    pub fn report(&self) -> Report {
        Report::parse(&self.message).unwrap_or_else(|| panic!("no report: {:?}", self.message))
    }

    /// Checks that it failed with this code, and that the message contains everything in one line.
    #[track_caller]
    pub fn assert_failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{}", self.stderr);
        assert_eq!(self.report().outcome.map_err(Exit::code), Err(code), "{}", self.message);
        assert_eq!(self.message.lines().count(), 1, "{}", self.message);
        for word in words {
            assert!(self.message.contains(word), "no {word:?} in {:?}", self.message);
        }
    }
}

/// A file as a listing shows it.
pub fn listed(key: &str, content: &[u8]) -> File {
    let md5: String = md5::Digest::finalize(<md5::Md5 as md5::Digest>::new_with_prefix(content))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    File { key: key.to_owned(), size: content.len() as u64, etag: format!("\"{md5}\"") }
}

/// Bytes without a pattern that could hide a wrong offset.
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).take(length).collect()
}

fn environment(
    valkey: &TestServer,
    s3: &TestS3,
    queue: &RunQueue,
    user: &WorkerUser,
    folder: &Path,
) -> BTreeMap<String, String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let server = valkey.server();
    let mut env = BTreeMap::from([
        ("STREAM", queue.keys().work.clone()),
        ("VALKEY_URL", server.url),
        ("VALKEY_USERNAME", user.name.clone()),
        ("VALKEY_PASSWORD", user.password.reveal().to_owned()),
        ("CONSUMER_NAME", "pod-1".to_owned()),
        ("POD_NAME", "pod-1".to_owned()),
        ("POD_NAMESPACE", "team-a".to_owned()),
        ("WORKSPACE", path("ws")),
        ("TERMINATION_LOG", path("termination-log")),
        ("SINK_FROM", "detect".to_owned()),
    ]);
    if let Some(ca) = server.ca_certificate {
        env.insert("VALKEY_CA_CERTIFICATE", String::from_utf8(ca).unwrap());
    }
    let mut env: BTreeMap<String, String> =
        env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    for prefix in ["", "SINK_"] {
        for (name, value) in [
            ("BUCKET", BUCKET),
            ("ENDPOINT", &s3.url),
            ("USE_PATH_STYLE", "true"),
            ("ACCESS_KEY_ID", ACCESS_KEY),
            ("SECRET_ACCESS_KEY", SECRET_KEY),
            ("MAX_ATTEMPTS", TRIES),
        ] {
            env.insert(format!("{prefix}S3_{name}"), value.to_owned());
        }
    }
    env
}

/// The program, built once.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| tests::program::program("claimer"))
}

/// The peak memory of a process, polled until the process is gone.
async fn peak_memory(pid: u32) -> u64 {
    let mut peak = 0;
    while let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) {
        let Some(line) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) else { break };
        peak = line.trim().trim_end_matches(" kB").parse().unwrap_or(peak);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    peak * 1024
}
