//! Reports of workers that process many files: only the holder of a file is believed, and only once.

use std::collections::HashSet;
use std::time::Duration;

use queue::{Claim, EntryId, Reporter, ReportsLimit, Rights, RunQueue, WorkerUser};
use tests::valkey::{Flavor, TestServer};

use super::{AT_ONCE, SHORT, claim, counts, failed, queue_with, run_id, settlement, worker};

const PLENTY: ReportsLimit = ReportsLimit { reports: 1_000, bytes: 1 << 20 };

fn reporter(server: &TestServer, queue: &RunQueue) -> Reporter {
    Reporter::new(server.server(), &queue.keys().work)
}

async fn say(server: &TestServer, queue: &RunQueue, entry: &EntryId, words: &str) {
    reporter(server, queue).report(&[(entry.clone(), words.to_owned())]).await.unwrap();
}

async fn said(server: &TestServer, queue: &RunQueue) -> usize {
    let mut raw = server.raw_connection().await;
    redis::cmd("HLEN").arg(&queue.keys().states).query_async(&mut raw).await.unwrap()
}

/// The files that a pod holds.
async fn held(server: &TestServer, queue: &RunQueue, pod: &str) -> Vec<Claim> {
    worker(server.server(), queue, pod).held(100).await.unwrap().claims
}

#[tokio::test]
async fn a_pod_is_given_as_many_files_as_it_may_hold_and_finds_all_of_them() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "slots", &["a", "b", "c", "d", "e"]).await;
        let pods = ["one".to_owned(), "two".to_owned()];
        assert_eq!(queue.fill(&pods, 2).await.unwrap(), pods);
        assert_eq!(counts(&queue).await, (5, 1, 4, 0, 0));
        let first = held(&server, &queue, "one").await;
        assert_eq!(first.iter().map(|claim| claim.file.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        // One file is settled: it is gone from the inbox, and another takes its place.
        say(&server, &queue, &first[0].entry, "one succeeded").await;
        assert_eq!(queue.take(PLENTY, &AT_ONCE).await.unwrap().served, ["one"]);
        queue.fill(&pods, 2).await.unwrap();
        let keys: Vec<String> =
            held(&server, &queue, "one").await.into_iter().map(|claim| claim.file.key).collect();
        assert_eq!(keys, ["b", "e"]);
        let mut worker = worker(server.server(), &queue, "one");
        let new = worker.claim_after(Some(&first[1].entry), 100, SHORT).await.unwrap();
        assert_eq!(new.claims.len(), 1, "only what it does not know");
        // A lost inbox is restored, in order.
        server.raw(redis::cmd("DEL").arg(queue.keys().inbox("one"))).await;
        queue.fill(&pods, 1).await.unwrap();
        assert_eq!(held(&server, &queue, "one").await.len(), 2, "what it holds it keeps");
    }
}

#[tokio::test]
async fn only_the_holder_of_a_file_is_believed_and_only_once() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "believed", &["a", "b"]).await;
        let (a, b) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
        say(&server, &queue, &a.entry, "two succeeded").await;
        for (entry, words) in [("no id", "one succeeded"), ("1-1", "one succeeded"), ("-", "one succeeded")] {
            say(&server, &queue, &EntryId::from(entry.to_owned()), words).await;
        }
        say(&server, &queue, &b.entry, "nonsense").await;
        let taken = queue.take(PLENTY, &AT_ONCE).await.unwrap();
        assert_eq!((taken.succeeded, taken.reports.len()), (0, 0));
        assert_eq!((counts(&queue).await, said(&server, &queue).await), ((2, 0, 2, 0, 0), 0));

        // Reports on files in progress stay, in case the pod ends.
        for under_way in ["one started", "one started publishing"] {
            say(&server, &queue, &a.entry, under_way).await;
            let taken = queue.take(PLENTY, &AT_ONCE).await.unwrap();
            assert_eq!((taken.succeeded, taken.reports.len()), (0, 0), "{under_way}");
            let begun = queue.reports_of(&[a.entry.clone(), b.entry.clone()]).await.unwrap();
            assert_eq!(begun, [Some(under_way.to_owned()), None]);
        }
        for expected in [1, 0] {
            say(&server, &queue, &a.entry, "one succeeded").await;
            assert_eq!(queue.take(PLENTY, &AT_ONCE).await.unwrap().succeeded, expected);
        }
        // The caller judges any other end; the report stays until then.
        say(&server, &queue, &b.entry, "two filter f exit:1 oom=0 term=0 boom").await;
        for _ in 0..2 {
            assert_eq!(queue.take(PLENTY, &AT_ONCE).await.unwrap().reports[0].entry, b.entry);
        }
        queue.settle(&[settlement(&b.entry, "two", failed("boom"))], &AT_ONCE).await.unwrap();
        assert_eq!((counts(&queue).await, said(&server, &queue).await), ((2, 1, 0, 1, 0), 0));
    }
}

#[tokio::test]
async fn more_than_reports_can_be_is_dropped_unread_and_honest_ones_are_repeated() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "flood", &["a"]).await;
        let a = claim(&server, &queue, "one").await;
        for number in 0..50 {
            say(&server, &queue, &EntryId::from(format!("{number}-9")), "one succeeded").await;
        }
        let few = ReportsLimit { reports: 20, ..PLENTY };
        assert!(queue.take(few, &AT_ONCE).await.unwrap().is_flooded);
        say(&server, &queue, &a.entry, &format!("one succeeded {}", "x".repeat(2 << 20))).await;
        assert!(queue.take(PLENTY, &AT_ONCE).await.unwrap().is_flooded, "too many bytes");
        assert_eq!((said(&server, &queue).await, counts(&queue).await), (0, (1, 0, 1, 0, 0)));
        say(&server, &queue, &a.entry, "one succeeded").await;
        assert_eq!(queue.take(few, &AT_ONCE).await.unwrap().succeeded, 1);
    }
}

/// A failing storage is known to work again as soon as a file that was handed out since then is fetched.
#[tokio::test]
async fn a_file_that_was_fetched_tells_when_it_was_handed_out() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "fetched", &["a", "b", "c"]).await;
        let old = claim(&server, &queue, "one").await;
        let fetched_within = async || queue.take(PLENTY, &AT_ONCE).await.unwrap().fetched_within;
        // Longer than a few round trips take on a busy machine.
        let pause = Duration::from_secs(3);
        tokio::time::sleep(pause).await;
        let (new, other) = (claim(&server, &queue, "two").await, claim(&server, &queue, "three").await);
        assert_eq!(fetched_within().await, None, "nothing was said");
        say(&server, &queue, &new.entry, "two fetch NoAccess 50 x").await;
        say(&server, &queue, &other.entry, "one started").await;
        assert_eq!(fetched_within().await, None, "neither was fetched by its holder");
        say(&server, &queue, &old.entry, "one started").await;
        assert!(fetched_within().await.unwrap() >= pause, "it may have been fetched at once");
        for state in ["started", "started publishing", "succeeded"] {
            say(&server, &queue, &other.entry, &format!("three {state}")).await;
            assert!(fetched_within().await.unwrap() < pause, "{state}");
        }
        assert!(fetched_within().await.unwrap() >= pause, "it is settled");
    }
}

#[tokio::test]
async fn many_reports_are_taken_in_one_go() {
    let server = TestServer::start(Flavor::Valkey).await;
    let keys: Vec<String> = (0..900).map(|number| format!("file-{number}")).collect();
    let queue = queue_with(&server, "many", &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let pods: Vec<String> = (0..90).map(|number| format!("pod-{number}")).collect();
    queue.fill(&pods, 10).await.unwrap();
    for pod in &pods {
        let held = held(&server, &queue, pod).await;
        let words = held.iter().map(|claim| (claim.entry.clone(), format!("{pod} succeeded")));
        reporter(&server, &queue).report(&words.collect::<Vec<_>>()).await.unwrap();
    }
    let taken = queue.take(PLENTY, &AT_ONCE).await.unwrap();
    let served: HashSet<String> = taken.served.into_iter().collect();
    assert_eq!((taken.succeeded, served.len()), (900, 90));
    assert_eq!((counts(&queue).await, said(&server, &queue).await), ((900, 0, 0, 900, 0), 0));
}

#[tokio::test]
async fn a_pod_that_is_told_to_stop_learns_it_with_its_files() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "stop", &["a", "b"]).await;
        queue.fill(&["one".into()], 1).await.unwrap();
        let mut worker = worker(server.server(), &queue, "one");
        let first = worker.claim_after(None, 100, SHORT).await.unwrap();
        assert!(!first.is_told_to_stop);
        queue.stop(&["one".into(), "idle".into()]).await.unwrap();
        let then = worker.claim_after(Some(&first.claims[0].entry), 100, SHORT).await.unwrap();
        assert!(then.is_told_to_stop && then.claims.is_empty());
        let all = worker.held(100).await.unwrap();
        assert_eq!((all.is_told_to_stop, all.claims.len()), (true, 1));
    }
}

/// The user is removed first, so that it writes nothing after its keys are gone.
#[tokio::test]
async fn what_was_said_goes_with_the_run() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "gone", &["a"]).await;
        let user = WorkerUser::generate(&run_id("gone"), "uid-1", Rights::Serve).unwrap();
        user.ensure(&server.connect()).await.unwrap();
        let login = server.server().with_user(&user.name, user.password.clone());
        let mut as_worker = Reporter::new(login, &queue.keys().work);
        let word = [(EntryId::from("1-1".to_owned()), "one started".to_owned())];
        as_worker.report(&word).await.unwrap();
        WorkerUser::remove(&server.connect(), &run_id("gone"), "uid-1").await.unwrap();
        assert_eq!(said(&server, &queue).await, 0);
        assert!(as_worker.report(&word).await.is_err());
        assert_eq!(said(&server, &queue).await, 0);
    }
}
