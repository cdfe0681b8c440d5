//! The limits that ship with Valkey, against a worker that abuses its own run's credentials: the server stays
//! within the memory of its container, and other runs continue. SECURITY.md says what these limits cannot
//! prevent. Also, a run of which every file fails: as many dead letters as a run may have fit.

use queue::{
    Closed, Ending, Failure, Page, ReportsLimit, Rights, RunQueue, Server, Settlement, Verdict, WorkerUser,
};
use tests::valkey::{Flavor, KEEP, Options, TestServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{AT_ONCE, PLENTY, claim, counts, file, open, queue_with, run_id, settlement};

/// The arguments of the StatefulSet.
const SHIPPED: Options = Options {
    password: Some("secret"),
    persistent: false,
    tls: false,
    cluster: false,
    config: Some("kustomize/components/valkey/valkey.conf"),
};

/// The memory limit of its container, above which the kernel kills it.
const CONTAINER: u64 = 512 << 20;

/// `maxmemory-clients`, and as much again as one connection can add before the server notices.
const CLIENTS: u64 = (64 + 2) << 20;

/// More connections than can keep a megabyte each within the limit, and few enough for a test's descriptors.
const CONNECTIONS: usize = 128;

/// An attacker's run, and another run that must not notice.
struct Attacked {
    server: TestServer,
    queue: RunQueue,
    login: Server,
    neighbour: RunQueue,
}

impl Attacked {
    async fn start(flavor: Flavor, files: &[&str]) -> Self {
        Self::start_with(flavor, files, Rights::Claim).await
    }

    async fn start_with(flavor: Flavor, files: &[&str], rights: Rights) -> Self {
        let server = TestServer::start_with(flavor, SHIPPED).await;
        let queue = queue_with(&server, "attacker", files).await;
        let neighbour = queue_with(&server, "neighbour", &["a", "b", "c"]).await;
        let user = WorkerUser::generate(&run_id("attacker"), "uid-1", rights).unwrap();
        user.ensure(&server.connect()).await.unwrap();
        let login = server.server().with_user(&user.name, user.password.clone());
        Self { server, queue, login, neighbour }
    }

    /// A connection that is logged in as a worker of the attacker's run.
    async fn connect(&self) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.port())).await.unwrap();
        let (user, password) = (self.login.username.clone(), self.login.password.clone());
        let login = command(&[b"AUTH", user.unwrap().as_bytes(), password.unwrap().reveal().as_bytes()]);
        stream.write_all(&login).await.unwrap();
        let mut reply = [0; 5];
        stream.read_exact(&mut reply).await.unwrap();
        assert_eq!(&reply, b"+OK\r\n");
        stream
    }

    /// Requests the files of the attacker's run under this name, and returns the first line of the reply.
    async fn take(&self, name: &[u8], count: &str) -> String {
        let mut stream = self.connect().await;
        let (work, group) = (self.queue.keys().work.as_bytes(), self.queue.keys().group.as_bytes());
        let words: [&[u8]; 9] =
            [b"XREADGROUP", b"GROUP", group, name, b"COUNT", count.as_bytes(), b"STREAMS", work, b">"];
        stream.write_all(&command(&words)).await.unwrap();
        first_line(&mut stream).await
    }

    /// Another run claims and settles a file, and a new run can be opened.
    async fn neighbour_goes_on(&self, pod: &str) {
        let file = claim(&self.server, &self.neighbour, pod).await;
        let done = [settlement(&file.entry, pod, Verdict::Succeeded)];
        self.neighbour.settle(&done, &AT_ONCE).await.unwrap();
        open(&self.server.connect(), &run_id(pod)).await;
    }

    /// The server is still the same process, within the memory of its container.
    async fn survived(&self) {
        let peak = self.server.peak_memory();
        assert!(peak < CONTAINER, "the server took {} MiB", peak >> 20);
        assert_eq!(counts(&self.neighbour).await.0, 3);
    }

    async fn info(&self, name: &str) -> u64 {
        info(&self.server, name).await
    }
}

/// A number that the server says about itself.
async fn info(server: &TestServer, name: &str) -> u64 {
    let info = server.raw(redis::cmd("INFO").arg("everything")).await;
    let info: String = redis::from_redis_value(info).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.parse().unwrap()
}

/// A request in Valkey's protocol.
fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
    request
}

async fn first_line(stream: &mut TcpStream) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(line).unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn a_ping_of_400_mb_is_refused_before_it_is_read() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start(flavor, &["x"]).await;
        let mut streams = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut stream = attacked.connect().await;
            stream.write_all(b"*2\r\n$4\r\nPING\r\n$419430400\r\n").await.unwrap();
            assert_eq!(first_line(&mut stream).await, "-ERR Protocol error: invalid bulk length");
            streams.push(stream);
        }
        attacked.neighbour_goes_on("meanwhile").await;
        attacked.survived().await;
    }
}

#[tokio::test]
async fn requests_that_never_end_take_no_more_than_all_connections_may() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start(flavor, &["x"]).await;
        let mut request = command(&[b"PING", &[b'x'; 1_000_000]]);
        request.truncate(request.len() - 3);
        let mut streams = Vec::new();
        for number in 0..CONNECTIONS {
            let mut stream = attacked.connect().await;
            // The largest connections are closed, perhaps including this one before it has sent everything.
            let _ = stream.write_all(&request).await;
            streams.push(stream);
            if number == CONNECTIONS / 2 {
                attacked.neighbour_goes_on("meanwhile").await;
            }
        }
        tests::eventually("the largest connections are closed", || async {
            attacked.info("evicted_clients").await > 0 && attacked.info("mem_clients_normal").await < CLIENTS
        })
        .await;
        attacked.neighbour_goes_on("afterwards").await;
        attacked.survived().await;
    }
}

#[tokio::test]
async fn connections_that_never_read_are_closed_before_the_server_is_full() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start(flavor, &["x"]).await;
        // 64 MB of replies for each of 16 connections: twice the memory of the container, if the server kept
        // them.
        let request = command(&[b"PING", &[b'x'; 500_000]]);
        let mut streams = Vec::new();
        for number in 0..16 {
            let mut stream = attacked.connect().await;
            let mut sent = 0;
            while sent < 128 && stream.write_all(&request).await.is_ok() {
                sent += 1;
            }
            assert!(sent < 128, "the connection was not closed");
            streams.push(stream);
            if number == 8 {
                attacked.neighbour_goes_on("meanwhile").await;
            }
        }
        attacked.neighbour_goes_on("afterwards").await;
        assert!(attacked.info("mem_clients_normal").await < CLIENTS);
        attacked.survived().await;
    }
}

/// Each name would be kept past `maxmemory`, and logged once for every file.
#[tokio::test]
async fn files_cannot_be_taken_under_a_name_of_a_megabyte() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start(flavor, &["x"]).await;
        let before = attacked.info("used_memory_dataset").await;
        let mut name = vec![b'p'; 1_000_000];
        for number in 0..CONNECTIONS {
            name.truncate(1_000_000);
            name.extend_from_slice(number.to_string().as_bytes());
            let answer = attacked.take(&name, "1000").await;
            assert!(answer.starts_with("-NOPERM"), "{answer}");
        }
        let grown = attacked.info("used_memory_dataset").await.saturating_sub(before);
        assert!(grown < 1 << 20, "the server keeps {grown} bytes of it");
        assert_eq!(counts(&attacked.queue).await.1, 1, "the file waits");
        attacked.neighbour_goes_on("meanwhile").await;
        claim(&attacked.server, &attacked.queue, "honest").await;
        attacked.survived().await;
    }
}

/// A worker may wait for as many inboxes, of any name, as fit into a request.
#[tokio::test]
async fn waiting_for_inboxes_of_huge_names_takes_no_more_than_all_connections_may() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start(flavor, &["x"]).await;
        let inbox = attacked.queue.keys().inbox(&"p".repeat(500_000));
        let request = command(&[b"XREAD", b"BLOCK", b"600000", b"STREAMS", inbox.as_bytes(), b"0"]);
        let mut streams = Vec::new();
        for number in 0..2 * CONNECTIONS {
            let mut stream = attacked.connect().await;
            let _ = stream.write_all(&request).await;
            streams.push(stream);
            if number == CONNECTIONS {
                attacked.neighbour_goes_on("meanwhile").await;
            }
        }
        attacked.neighbour_goes_on("afterwards").await;
        attacked.survived().await;
    }
}

/// Workers of a Warm run may write reports, as many as fit. Files that were begun are still settled, and
/// nothing else is lost: the operator drops reports beyond the possible size.
#[tokio::test]
async fn reports_that_fill_the_server_are_dropped_and_no_run_loses_anything() {
    for flavor in Flavor::ALL {
        let attacked = Attacked::start_with(flavor, &["x"], Rights::Serve).await;
        let file = claim(&attacked.server, &attacked.neighbour, "begun").await;
        let (mut stream, value) = (attacked.connect().await, vec![b'x'; 500_000]);
        let states = attacked.queue.keys().states.clone();
        let mut written = 0_u64;
        let refusal = loop {
            let field = format!("{written}-1");
            let request = command(&[b"HSET", states.as_bytes(), field.as_bytes(), &value]);
            stream.write_all(&request).await.unwrap();
            let answer = first_line(&mut stream).await;
            if answer.starts_with('-') {
                break answer;
            }
            written += 1;
            assert!(written * 500_000 < CONTAINER, "the server takes more than its container has");
        };
        assert!(refusal.starts_with("-OOM"), "{refusal}");
        let done = [settlement(&file.entry, "begun", Verdict::Succeeded)];
        attacked.neighbour.settle(&done, &AT_ONCE).await.unwrap();
        let limit = ReportsLimit { reports: 1_000, bytes: 2 << 20 };
        assert!(attacked.queue.take(limit, &AT_ONCE).await.unwrap().is_flooded);
        attacked.neighbour_goes_on("afterwards").await;
        attacked.survived().await;
    }
}

/// The default of `--max-dead-letters`.
const DEAD_LETTERS: usize = 50_000;
/// The bytes of their keys and reasons: a reason is cut to this length.
const KEY_BYTES: usize = 200;
const REASON_BYTES: usize = 512;
/// Files of a page, and pods that hold them.
const PAGE: usize = 1_000;
const HOLDERS: usize = 10;

/// Settles the files that these pods can get, each with a long reason.
async fn fail_all(queue: &RunQueue, pods: &[String]) {
    queue.fill(pods, PAGE / HOLDERS).await.unwrap();
    let claims = queue.claims_of(pods).await.unwrap();
    assert_eq!(claims.len(), PAGE);
    let reason = Verdict::Rejected(Failure::new(&"r".repeat(REASON_BYTES), Some(1)));
    let rejected = |claim: queue::Pending| Settlement {
        entry: claim.entry,
        consumer: claim.consumer,
        verdict: reason.clone(),
    };
    queue.settle(&claims.into_iter().map(rejected).collect::<Vec<_>>(), &AT_ONCE).await.unwrap();
}

#[tokio::test]
async fn as_many_dead_letters_as_a_run_may_have_leave_room_for_other_runs() {
    let server = TestServer::start_with(Flavor::Valkey, SHIPPED).await;
    let failing = open(&server.connect(), &run_id("failing")).await;
    let pods: Vec<String> = (0..HOLDERS).map(|pod| format!("{pod:0>60}")).collect();
    let cursor = |page: usize| if page == 0 { String::new() } else { page.to_string() };
    let pages = DEAD_LETTERS / PAGE;
    for page in 0..pages {
        let files = (0..PAGE).map(|number| file(format!("{:0>KEY_BYTES$}", page * PAGE + number))).collect();
        let next = (page + 1 < pages).then(|| cursor(page + 1));
        failing.enqueue(&Page { after: cursor(page), next, files, skipped: 0 }, PLENTY).await.unwrap();
        fail_all(&failing, &pods).await;
    }
    let all = DEAD_LETTERS as u64;
    assert_eq!(counts(&failing).await, (all, 0, 0, 0, all));
    let letters = failing.newest_dead_letters(1).await.unwrap();
    assert_eq!((letters[0].file.len(), letters[0].reason.len()), (KEY_BYTES, REASON_BYTES));
    let (used, limit) = (info(&server, "used_memory").await, info(&server, "maxmemory").await);
    println!("{DEAD_LETTERS} dead letters: {} of {} MiB are used", used >> 20, limit >> 20);
    // Above four fifths, every run would keep one page of files at a time.
    assert!(used < limit / 5 * 4, "{used} of {limit} bytes are used");

    let small = queue_with(&server, "small", &["a", "b"]).await;
    for pod in ["one", "two"] {
        let claimed = claim(&server, &small, pod).await;
        small.settle(&[settlement(&claimed.entry, pod, Verdict::Succeeded)], &AT_ONCE).await.unwrap();
    }
    let closed = small.close(Ending::Finish, "", &KEEP).await.unwrap();
    assert!(matches!(&closed, Closed::Closed(end) if end.counts.succeeded == 2), "{closed:?}");
}
