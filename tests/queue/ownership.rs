//! The owner of a runId: an id is bound to a namespace, taken over by the same run, and remembered while the
//! run exists.

use std::time::Duration;

use queue::{Ending, Opened, Owner, Retention, RunQueue, Verdict};
use tests::valkey::{Flavor, KEEP, TestServer, owner};

use super::{AT_ONCE, PLENTY, claim, counts, last_page, open, open_as, queue_with, run_id, settlement};

async fn finish(server: &TestServer, name: &str, retention: &Retention) {
    let queue = queue_with(server, name, &["a"]).await;
    let claimed = claim(server, &queue, "pod").await;
    queue.settle(&[settlement(&claimed.entry, "pod", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
    queue.close(Ending::Finish, "done", retention).await.unwrap();
}

async fn expires_in(server: &TestServer, name: &str) -> i64 {
    let mut left = redis::cmd("PTTL");
    redis::from_redis_value(server.raw(left.arg(run_id(name).key("ledger"))).await).unwrap()
}

#[tokio::test]
async fn a_finished_run_is_not_replayed_to_another_namespace() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        finish(&server, "bound", &KEEP).await;
        let run = run_id("bound");
        let stranger = Owner { namespace: "team-b".into(), ..owner("uid-2") };
        let opened = RunQueue::open(&server.connect(), &run, &stranger, "spec-1", &KEEP).await.unwrap();
        assert!(matches!(opened, Opened::Used));
        let own = open_as(&server.connect(), &run, "uid-2", "spec-1").await;
        assert!(matches!(own, Opened::Finished(end) if end.outcome == "done"));
    }
}

#[tokio::test]
async fn a_run_that_was_created_again_takes_its_own_queue_back() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let (connection, run) = (server.connect(), run_id("restored"));
        let queue = queue_with(&server, "restored", &["a", "b"]).await;
        let restored = owner("uid-2");
        let opened = open_as(&connection, &run, "uid-2", "spec-1").await;
        let Opened::Taken { owner: old, namespace, name } = opened else { panic!("it is not taken") };
        assert_eq!(
            (old.as_str(), namespace.as_deref(), name.as_deref()),
            ("uid-1", Some("team-a"), Some("run"))
        );

        let take_over = |old: &'static str, owner: Owner| {
            let (connection, run) = (&connection, &run);
            async move { RunQueue::take_over(connection, run, old, &owner).await.unwrap() }
        };
        assert!(!take_over("uid-0", restored.clone()).await, "it belongs to another by now");
        let elsewhere = Owner { namespace: "team-b".into(), ..restored.clone() };
        assert!(!take_over("uid-1", elsewhere).await, "another namespace took it over");
        let renamed = Owner { name: "other".into(), ..restored.clone() };
        assert!(!take_over("uid-1", renamed).await, "another run took it over");
        assert_eq!(counts(&queue).await, (2, 2, 0, 0, 0));

        assert!(take_over("uid-1", restored.clone()).await);
        assert!(take_over("uid-1", restored).await, "a reply that was lost is asked for again");
        assert!(matches!(open_as(&connection, &run, "uid-1", "spec-1").await, Opened::Taken { .. }));
        let Opened::Resumed(again) = open_as(&connection, &run, "uid-2", "spec-1").await else {
            panic!("its files are lost")
        };
        assert_eq!((again.epoch(), counts(&again).await), (queue.epoch(), (2, 2, 0, 0, 0)));
    }
}

#[tokio::test]
async fn a_run_that_was_created_again_with_another_spec_starts_again() {
    let server = TestServer::start(Flavor::Valkey).await;
    let (connection, run) = (server.connect(), run_id("changed"));
    let queue = queue_with(&server, "changed", &["a"]).await;
    assert!(RunQueue::take_over(&connection, &run, "uid-1", &owner("uid-2")).await.unwrap());
    let opened = open_as(&connection, &run, "uid-2", "spec-2").await;
    let Opened::Created(started) = opened else { panic!("files of another spec are processed") };
    assert_ne!(started.epoch(), queue.epoch());
    assert_eq!(counts(&started).await, (0, 0, 0, 0, 0));
}

/// Its details may outlive its entry in the ledger.
#[tokio::test]
async fn the_outcome_of_a_run_with_another_spec_is_not_taken_over() {
    let server = TestServer::start(Flavor::Valkey).await;
    let (connection, run) = (server.connect(), run_id("other-spec"));
    finish(&server, "other-spec", &KEEP).await;
    let mut forget = redis::cmd("DEL");
    server.raw(forget.arg(run.key("ledger"))).await;
    assert!(RunQueue::take_over(&connection, &run, "uid-1", &owner("uid-2")).await.unwrap());
    assert!(matches!(open_as(&connection, &run, "uid-2", "spec-2").await, Opened::Created(_)));
}

#[tokio::test]
async fn the_ledger_forgets_a_run_only_so_long_after_it_was_last_seen() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let connection = server.connect();
        let keep = |seconds| Retention { ledger: Some(Duration::from_secs(seconds)), ..KEEP };
        finish(&server, "seen", &keep(100)).await;
        assert!((1..=100_000).contains(&expires_in(&server, "seen").await));
        let ids = [run_id("seen"), run_id("never-finished")];
        RunQueue::seen(&connection, &ids, &keep(1_000)).await.unwrap();
        assert!((100_001..=1_000_000).contains(&expires_in(&server, "seen").await));
        assert_eq!(expires_in(&server, "never-finished").await, -2, "seeing a run makes no entry");

        let opened =
            RunQueue::open(&connection, &run_id("seen"), &owner("uid-2"), "spec-1", &keep(9_000)).await;
        assert!(matches!(opened.unwrap(), Opened::Finished(_)));
        assert!((1_000_001..=9_000_000).contains(&expires_in(&server, "seen").await));
        RunQueue::seen(&connection, &ids, &KEEP).await.unwrap();
        assert_eq!(expires_in(&server, "seen").await, -1, "without a limit it stays");
    }
}

/// What version 0.1 wrote, before namespaces, disruptions and pauses existed.
#[tokio::test]
async fn queues_and_ledgers_of_older_versions_keep_working() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let connection = server.connect();
        let (run, past) = (run_id("old"), run_id("past"));
        let hash = |key: String, fields: &[&str]| {
            let mut command = redis::cmd("HSET");
            command.arg(key).arg(fields);
            command
        };
        let counters = ["total", "2", "succeeded", "0", "failed", "0", "retried", "0", "reclaimed", "0"];
        let state =
            ["owner", "uid-1", "epoch", "e", "spec", "s", "state", "open", "cursor", "", "listed", "1"];
        server.raw(&hash(run.key("meta"), &[&state[..], &counters[..]].concat())).await;
        let mut group = redis::cmd("XGROUP");
        server.raw(group.arg("CREATE").arg(run.key("work")).arg(run.group()).arg(&["0", "MKSTREAM"])).await;
        let mut add = redis::cmd("XADD");
        add.arg(run.key("work")).arg("*").arg(&["run", "r", "file", "a", "attempts", "1", "size", "7"]);
        server.raw(add.arg(&["etag", "e"])).await;
        let mut wait = redis::cmd("ZADD");
        server.raw(wait.arg(run.key("retry")).arg(1).arg(r#"["1-1","b",1,"7","e"]"#)).await;
        let ended = ["owner", "uid-1", "spec", "spec-1", "outcome", "done"];
        server.raw(&hash(past.key("ledger"), &[&ended[..], &counters[..]].concat())).await;

        let Opened::Taken { owner: old, namespace, name } = open_as(&connection, &run, "uid-2", "s").await
        else {
            panic!("it is not taken")
        };
        assert_eq!((old.as_str(), namespace, name), ("uid-1", None, None));
        assert!(!RunQueue::take_over(&connection, &run, "uid-1", &owner("uid-2")).await.unwrap());
        let Opened::Resumed(queue) = open_as(&connection, &run, "uid-1", "s").await else {
            panic!("it is lost")
        };
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.started, stats.paused, stats.disrupted), (true, None, 0));
        queue.promote().await.unwrap();
        for name in ["a", "b"] {
            let claimed = claim(&server, &queue, "pod").await;
            assert_eq!((claimed.file.key.as_str(), claimed.attempts, claimed.disruptions), (name, 1, 0));
            let settled = [settlement(&claimed.entry, "pod", super::disrupted("NodeLost", true))];
            queue.settle(&settled, &AT_ONCE).await.unwrap();
        }
        for _ in ["a", "b"] {
            let claimed = claim(&server, &queue, "pod").await;
            assert_eq!((claimed.attempts, claimed.disruptions), (1, 1));
            let done = [settlement(&claimed.entry, "pod", Verdict::Succeeded)];
            queue.settle(&done, &AT_ONCE).await.unwrap();
        }
        queue.close(Ending::Finish, "done", &KEEP).await.unwrap();
        let other = Owner { namespace: "team-b".into(), ..owner("uid-9") };
        for owner in [&owner("uid-1"), &other] {
            let opened = RunQueue::open(&connection, &past, owner, "spec-1", &KEEP).await.unwrap();
            assert!(matches!(opened, Opened::Finished(end) if end.listed && end.cursor.is_empty()));
        }
    }
}

#[tokio::test]
async fn an_open_run_is_not_in_the_ledger_yet() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = open(&server.connect(), &run_id("open")).await;
    queue.enqueue(&last_page(["a"]), PLENTY).await.unwrap();
    RunQueue::seen(&server.connect(), &[run_id("open")], &KEEP).await.unwrap();
    assert_eq!(expires_in(&server, "open").await, -2);
}
