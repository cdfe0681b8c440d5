//! A run, from its first page to its entry in the ledger.

use std::time::{Duration, Instant};

use queue::{
    Closed, Ending, Error, Failure, Fate, File, Opened, Page, Reporter, ReportsLimit, Retention, RetryPolicy,
    RunQueue, State, Verdict,
};
use tests::valkey::{Flavor, KEEP, Options, TestServer, owner};

use super::{
    AT_ONCE, PLENTY, claim, counts, failed, file, last_page, open, open_as, queue_with, run_id, settlement,
};

#[tokio::test]
async fn a_run_is_executed_once_and_remembered() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let connection = server.connect();
        let run = run_id("once");
        let queue = queue_with(&server, "once", &["a", "b"]).await;
        let (a, b) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
        let rejected = Verdict::Rejected(Failure::new("not an image", Some(3)));
        let settled =
            [settlement(&a.entry, "one", Verdict::Succeeded), settlement(&b.entry, "two", rejected)];
        let fates = queue.settle(&settled, &AT_ONCE).await.unwrap();
        assert_eq!(fates, [Fate::Succeeded, Fate::DeadLettered { file: "b".into(), attempts: 1 }]);
        assert!(queue.stats().await.unwrap().is_finished());
        let letter = queue.dead_letters(None, 10).await.unwrap().remove(0);
        assert_eq!((letter.file.as_str(), letter.reason.as_str()), ("b", "not an image"));
        assert_eq!((letter.exit_code, letter.pod.as_deref()), (Some(3), Some("two")));

        let closed = queue.close(Ending::Finish, "one failed", &KEEP).await.unwrap();
        let Closed::Closed(finished) = closed.clone() else { panic!("{closed:?}") };
        assert_eq!(finished.outcome, "one failed");
        assert_eq!(
            queue.close(Ending::Finish, "one failed", &KEEP).await.unwrap(),
            closed,
            "closing is idempotent"
        );
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.state, stats.succeeded, stats.failed), (State::Closed, 1, 1));
        assert!(matches!(queue.hand_out(&["late".into()]).await, Err(Error::Closed { .. })));

        // Pruned and synced again: a different object, but the same run.
        for owner in ["uid-1", "uid-2"] {
            let opened = open_as(&connection, &run, owner, "spec-1").await;
            assert!(matches!(opened, Opened::Finished(found) if found == finished));
        }
        assert!(matches!(open_as(&connection, &run, "uid-2", "spec-2").await, Opened::Used));

        // Deleting the run removes everything except the record of it.
        RunQueue::delete(&connection, &run, "uid-1").await.unwrap();
        assert_eq!(keys(&server).await, [run.key("ledger")]);
        let opened = open_as(&connection, &run, "uid-2", "spec-1").await;
        assert!(matches!(opened, Opened::Finished(found) if found == finished));
    }
}

async fn keys(server: &TestServer) -> Vec<String> {
    let mut keys = redis::cmd("KEYS");
    let mut keys: Vec<String> = redis::from_redis_value(server.raw(keys.arg("pr:*")).await).unwrap();
    keys.sort();
    keys
}

#[tokio::test]
async fn two_owners_never_share_a_run_id() {
    let server = TestServer::start(Flavor::Valkey).await;
    let connection = server.connect();
    let run = run_id("shared");
    let queue = queue_with(&server, "shared", &["a"]).await;
    let other = open_as(&connection, &run, "uid-2", "spec-1").await;
    assert!(matches!(other, Opened::Taken { owner, .. } if owner == "uid-1"));
    RunQueue::delete(&connection, &run, "uid-2").await.unwrap();
    assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0), "only the owner deletes");

    RunQueue::delete(&connection, &run, "uid-1").await.unwrap();
    assert_eq!(keys(&server).await, [""; 0], "a run that was not finished leaves nothing behind");
    assert!(matches!(open_as(&connection, &run, "uid-2", "spec-2").await, Opened::Created(_)));
}

#[tokio::test]
async fn two_operators_that_open_at_once_hold_the_same_queue() {
    let server = TestServer::start(Flavor::Valkey).await;
    let (one, two) = (server.connect(), server.connect());
    let run = run_id("race");
    let (one, two) = tokio::join!(open(&one, &run), open(&two, &run));
    assert_eq!(one.epoch(), two.epoch());
}

#[tokio::test]
async fn details_expire_and_the_ledger_when_asked_to() {
    let server = TestServer::start(Flavor::Valkey).await;
    for (name, ledger, remembered) in
        [("kept", None, true), ("expiring", Some(Duration::from_millis(50)), false)]
    {
        let queue = queue_with(&server, name, &["a"]).await;
        let reason = Ending::Abort { reason: "Aborted" };
        queue.close(reason, "", &Retention { details: Duration::from_millis(50), ledger }).await.unwrap();
        let expected: Vec<String> = remembered.then(|| run_id(name).key("ledger")).into_iter().collect();
        tests::eventually("the details expire", || async { keys(&server).await == expected }).await;
        let mut flush = redis::cmd("FLUSHALL");
        server.raw(flush.arg("SYNC")).await;
    }
}

#[tokio::test]
async fn failed_files_wait_for_their_back_off_which_doubles_up_to_its_limit() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "backoff", &["a"]).await;
        let policy = RetryPolicy {
            max_attempts: 100,
            max_disruptions: 10,
            backoff_initial: Duration::from_millis(400),
            backoff_max: Duration::from_millis(1_000),
            keep_results: 0,
        };
        for (attempt, longest) in [(1, 400), (2, 800), (3, 1_000), (4, 1_000)] {
            let claimed = claim(&server, &queue, "pod").await;
            assert_eq!(claimed.attempts, attempt - 1);
            let settled = Instant::now();
            let fates =
                queue.settle(&[settlement(&claimed.entry, "pod", failed("boom"))], &policy).await.unwrap();
            let [Fate::Retrying { delay, .. }] = fates[..] else { panic!("{fates:?}") };
            let longest = Duration::from_millis(longest);
            assert!(delay >= longest / 2 && delay <= longest, "attempt {attempt} waits {delay:?}");
            let stats = queue.stats().await.unwrap();
            assert_eq!((stats.queued, stats.delayed, stats.running), (1, 1, 0));
            assert!(stats.next_retry.is_some_and(|next| next <= longest));

            let early = queue.promote().await.unwrap();
            // On a machine that was busy meanwhile, it may already be due.
            let still_early = settled.elapsed() < delay;
            assert!(!still_early || early.moved == 0 && early.next.is_some(), "{early:?}");
            tokio::time::sleep(longest + Duration::from_millis(5)).await;
            let due = queue.promote().await.unwrap();
            assert_eq!((early.moved + due.moved, due.next), (1, None));
            assert_eq!(queue.stats().await.unwrap().delayed, 0);
        }
        assert_eq!(queue.stats().await.unwrap().retried, 4);
    }
}

#[tokio::test]
async fn any_key_goes_in_and_comes_out_exactly() {
    let odd = [
        "with space",
        "new\nline",
        "päth/ünïcode/日本",
        "a+b%20c",
        "/leading",
        "../..",
        "quote\"'\\",
        "tab\t\u{7f}",
        &"x".repeat(1024),
    ];
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("odd")).await;
        let files = odd
            .iter()
            .map(|key| File { key: (*key).into(), size: u64::MAX, etag: "W/\"a b\\\"".into() })
            .collect();
        queue.enqueue(&Page { after: String::new(), next: None, files, skipped: 0 }, PLENTY).await.unwrap();
        let waits = RetryPolicy {
            max_attempts: 2,
            max_disruptions: 10,
            backoff_initial: Duration::from_millis(2),
            backoff_max: Duration::from_millis(2),
            keep_results: 0,
        };
        for round in 0..2 {
            let mut seen = Vec::new();
            for _ in odd {
                let claimed = claim(&server, &queue, "pod").await;
                assert_eq!(
                    (claimed.attempts, claimed.file.size, claimed.file.etag.as_str()),
                    (round, u64::MAX, "W/\"a b\\\"")
                );
                seen.push(claimed.file.key);
                queue.settle(&[settlement(&claimed.entry, "pod", failed("boom"))], &waits).await.unwrap();
            }
            seen.sort();
            let mut expected = odd.map(str::to_owned);
            expected.sort();
            assert_eq!(seen, expected);
            tokio::time::sleep(Duration::from_millis(5)).await;
            queue.promote().await.unwrap();
        }
        assert_eq!(queue.dead_letters(None, 100).await.unwrap().len(), odd.len());
    }
}

#[tokio::test]
async fn a_consumer_and_its_inbox_are_forgotten_with_its_last_entry() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "consumers", &["a", "b"]).await;
        let (a, _) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
        queue.settle(&[settlement(&a.entry, "one", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
        let claims = queue.claims_of(&["one".into(), "two".into()]).await.unwrap();
        assert_eq!(claims.iter().map(|claim| claim.consumer.as_str()).collect::<Vec<_>>(), ["two"]);
        let mut info = redis::cmd("XINFO");
        let consumers: Vec<redis::Value> = redis::from_redis_value(
            server.raw(info.arg("CONSUMERS").arg(&queue.keys().work).arg(&queue.keys().group)).await,
        )
        .unwrap();
        assert_eq!(consumers.len(), 1);
        let all = keys(&server).await;
        let inboxes: Vec<_> = all.iter().filter(|key| key.contains(":inbox:")).collect();
        assert_eq!(inboxes, [&queue.keys().inbox("two")]);
        assert_eq!(queue.hand_out(&["three".into()]).await.unwrap(), [""; 0], "there is no other file");
        queue.close(Ending::Abort { reason: "enough" }, "", &KEEP).await.unwrap();
        assert!(!keys(&server).await.iter().any(|key| key.contains(":inbox:")), "none is left");
    }
}

#[tokio::test]
async fn the_newest_dead_letters_come_first_and_say_when_they_were_written() {
    let server = TestServer::start(Flavor::Valkey).await;
    let before =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let queue = queue_with(&server, "newest", &["a", "b", "c"]).await;
    for _ in 0..3 {
        let claimed = claim(&server, &queue, "pod").await;
        let rejected = Verdict::Rejected(Failure::new("bad", None));
        queue.settle(&[settlement(&claimed.entry, "pod", rejected)], &AT_ONCE).await.unwrap();
    }
    let letters = queue.newest_dead_letters(2).await.unwrap();
    assert_eq!(letters.iter().map(|letter| letter.file.as_str()).collect::<Vec<_>>(), ["c", "b"]);
    assert!(letters.iter().all(|letter| (before..before + 60_000).contains(&letter.time_ms)), "{letters:?}");
    server.raw(&redis::cmd("FLUSHALL")).await;
    assert!(matches!(queue.newest_dead_letters(2).await, Err(Error::Lost { .. })));
}

/// Pods read it to tell a storage outage from a bad object; an operator that starts later needs one, too.
#[tokio::test]
async fn the_file_that_succeeded_last_is_remembered_for_the_next_operator() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let long = format!("a\\b/{}", "k".repeat(1_000));
        let keys = ["a", "fails", "new\nline", &long, "reported", "last"];
        let queue = queue_with(&server, "canary", &keys).await;
        let canary = async || queue.stats().await.unwrap().canary;
        assert_eq!(canary().await, None, "none has succeeded");
        let next = async |verdict| {
            let claimed = claim(&server, &queue, "pod").await;
            queue.settle(&[settlement(&claimed.entry, "pod", verdict)], &AT_ONCE).await.unwrap();
            claimed.file.key
        };
        assert_eq!(next(Verdict::Succeeded).await, "a");
        assert_eq!(canary().await.as_deref(), Some("a"));
        next(Verdict::Rejected(Failure::new("bad", None))).await;
        assert_eq!(next(Verdict::Succeeded).await, "new\nline");
        assert_eq!(canary().await.as_deref(), Some("a"), "it failed, or no variable holds its key as it is");
        next(Verdict::Succeeded).await;
        assert_eq!(canary().await.as_deref(), Some(long.as_str()));

        let reported = claim(&server, &queue, "pod").await;
        let mut reporter = Reporter::new(server.server(), &queue.keys().work);
        reporter.report(&[(reported.entry, "pod succeeded".to_owned())]).await.unwrap();
        let taken = queue.take(ReportsLimit { reports: 10, bytes: 1 << 20 }, &AT_ONCE).await.unwrap();
        assert_eq!(taken.newest.as_deref(), Some("reported"));
        let resumed = open(&server.connect(), &run_id("canary")).await;
        assert_eq!(resumed.stats().await.unwrap().canary.as_deref(), Some("reported"));
    }
}

#[tokio::test]
async fn results_are_kept_when_asked_for_and_trimmed() {
    let server = TestServer::start(Flavor::Valkey).await;
    let names: Vec<String> = (0..600).map(|number| format!("file-{number}")).collect();
    let queue = open(&server.connect(), &run_id("results")).await;
    queue.enqueue(&last_page(names.iter().map(String::as_str)), PLENTY).await.unwrap();
    let policy = RetryPolicy { keep_results: 100, ..AT_ONCE };
    for number in 0..600 {
        let claimed = claim(&server, &queue, "pod").await;
        let verdict =
            if number % 2 == 0 { Verdict::Succeeded } else { Verdict::Rejected(Failure::new("bad", None)) };
        queue.settle(&[settlement(&claimed.entry, "pod", verdict)], &policy).await.unwrap();
    }
    let mut length = redis::cmd("XLEN");
    let kept: u64 = redis::from_redis_value(server.raw(length.arg(&queue.keys().results)).await).unwrap();
    assert!((100..=300).contains(&kept), "{kept} results are kept");
}

#[tokio::test]
async fn a_page_that_cannot_be_resumed_is_refused() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = open(&server.connect(), &run_id("pages")).await;
    let standing = Page { after: "a".into(), next: Some("a".into()), files: vec![file("b")], skipped: 0 };
    let refused = queue.enqueue(&standing, PLENTY).await.unwrap_err();
    assert!(matches!(refused, Error::Page { .. }) && !refused.is_transient(), "{refused:?}");
    assert_eq!(
        refused.to_string(),
        "cannot queue a page of files: the next page begins where this one does, at \"a\""
    );
    let long = Page {
        after: String::new(),
        next: None,
        files: (0..1001).map(|n| file(n.to_string())).collect(),
        skipped: 0,
    };
    let refused = queue.enqueue(&long, PLENTY).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "cannot queue a page of files: it has 1001 files, and a page has at most 1000"
    );
    assert_eq!(counts(&queue).await, (0, 0, 0, 0, 0));
}

/// A run id in braces keeps all keys of the run in one slot, so that every script works on a Valkey Cluster.
#[tokio::test]
async fn a_run_id_in_braces_works_on_a_cluster() {
    for flavor in Flavor::ALL {
        let server = TestServer::start_with(flavor, Options { cluster: true, ..Options::default() }).await;
        let bare = RunQueue::open(&server.connect(), &run_id("slots"), &owner("u"), "s", &KEEP).await;
        assert!(matches!(bare, Err(Error::Server { .. })), "without braces the keys are in different slots");

        let run = "{team-a.slots}".parse().unwrap();
        let queue = open(&server.connect(), &run).await;
        queue.enqueue(&last_page(["a", "b"]), PLENTY).await.unwrap();
        let (a, _b) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
        queue.settle(&[settlement(&a.entry, "one", failed("boom"))], &AT_ONCE).await.unwrap();
        queue.reclaim(Duration::ZERO, &AT_ONCE, |_| Some("PodLost".into())).await.unwrap();
        queue.promote().await.unwrap();
        assert_eq!(counts(&queue).await, (2, 2, 0, 0, 0));
        assert!(matches!(
            queue.close(Ending::Abort { reason: "x" }, "", &KEEP).await.unwrap(),
            Closed::Closed(_)
        ));
        RunQueue::delete(&server.connect(), &run, "uid-1").await.unwrap();
        assert_eq!(keys(&server).await, [run.key("ledger")]);
    }
}

#[tokio::test]
async fn the_first_call_that_ends_a_run_decides_how() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "endings", &["a"]).await;
    let claimed = claim(&server, &queue, "pod").await;
    queue.settle(&[settlement(&claimed.entry, "pod", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
    queue.close(Ending::Finish, "succeeded", &KEEP).await.unwrap();
    let late = queue.close(Ending::Abort { reason: "TimedOut" }, "timed out", &KEEP).await.unwrap();
    assert!(matches!(late, Closed::Closed(end) if end.outcome == "succeeded" && end.counts.failed == 0));

    let queue = queue_with(&server, "abort-first", &["a", "b"]).await.with_batch(1);
    let claimed = claim(&server, &queue, "pod").await;
    let aborted = queue.close(Ending::Abort { reason: "TimedOut" }, "timed out", &KEEP).await.unwrap();
    assert_eq!(aborted, Closed::More { remaining: 1 });
    let late =
        queue.settle(&[settlement(&claimed.entry, "pod", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
    assert_eq!(late, [Fate::Ignored], "it is a dead letter already");

    let queue = queue_with(&server, "two-reasons", &["a", "b"]).await.with_batch(1);
    queue.close(Ending::Abort { reason: "TimedOut" }, "timed out", &KEEP).await.unwrap();
    queue.close(Ending::Abort { reason: "Aborted" }, "aborted", &KEEP).await.unwrap();
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.iter().map(|letter| letter.reason.as_str()).collect::<Vec<_>>(), ["TimedOut"; 2]);

    let queue = queue_with(&server, "abort-then-finish", &["a", "b"]).await.with_batch(1);
    claim(&server, &queue, "first").await;
    let second = claim(&server, &queue, "second").await;
    queue.close(Ending::Abort { reason: "TimedOut" }, "timed out", &KEEP).await.unwrap();
    assert!(queue.hand_out(&["late".into()]).await.unwrap().is_empty(), "an abort starts nothing more");
    queue.settle(&[settlement(&second.entry, "second", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
    let finished = queue.close(Ending::Finish, "succeeded", &KEEP).await.unwrap();
    assert!(matches!(finished, Closed::Closed(end) if end.outcome == "timed out"));
}

#[tokio::test]
async fn an_owner_finds_its_own_finished_run_even_if_its_spec_reads_differently_now() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "reread", &[]).await;
    queue.close(Ending::Finish, "nothing to do", &KEEP).await.unwrap();
    let opened =
        open_as(&server.connect(), &run_id("reread"), "uid-1", "spec-as-hashed-by-a-newer-version").await;
    assert!(matches!(opened, Opened::Finished(end) if end.outcome == "nothing to do"));
}

#[tokio::test]
async fn an_entry_that_was_deleted_by_hand_does_not_stop_the_batch_it_is_settled_in() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "vanished", &["a", "b", "c"]).await;
    let (a, b) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
    let mut delete = redis::cmd("XDEL");
    server.raw(delete.arg(&queue.keys().work).arg(b.entry.as_str())).await;
    let keeping = RetryPolicy { keep_results: 10, ..AT_ONCE };
    let settled =
        [settlement(&b.entry, "two", Verdict::Succeeded), settlement(&a.entry, "one", Verdict::Succeeded)];
    assert_eq!(queue.settle(&settled, &keeping).await.unwrap(), [Fate::Succeeded, Fate::Succeeded]);
    assert_eq!(counts(&queue).await, (3, 1, 0, 2, 0));
}
