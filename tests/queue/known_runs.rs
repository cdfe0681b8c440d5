//! The runs that an operator has opened: a run that went while no operator ran is found by this, and what it
//! left is removed.

use queue::{KnownRuns, Opened, Owner, Rights, RunQueue, WorkerUser};
use tests::valkey::{Flavor, TestServer, owner};

use super::{counts, open_as, queue_with, run_id};

async fn keys(server: &TestServer) -> Vec<String> {
    redis::from_redis_value(server.raw(redis::cmd("KEYS").arg("*")).await).unwrap()
}

#[tokio::test]
async fn a_run_that_went_unseen_is_known_to_the_next_operator_and_leaves_nothing() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let (run, owner) = (run_id("vanished"), owner("uid-1"));
        let before = KnownRuns::of(&server.connect(), "here");
        before.add(&run, &owner).await.unwrap();
        before.add(&run, &owner).await.unwrap();
        queue_with(&server, "vanished", &["a", "b"]).await;
        WorkerUser::generate(&run, "uid-1", Rights::Claim).unwrap().ensure(&server.connect()).await.unwrap();

        // Another process, which knows nothing but the server.
        let connection = server.connect();
        let after = KnownRuns::of(&connection, "here");
        let found = after.all().await.unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [("uid-1".to_owned(), (run.clone(), owner))]);
        assert_eq!(KnownRuns::of(&connection, "elsewhere").all().await.unwrap().len(), 0);
        WorkerUser::remove(&connection, &run, "uid-1").await.unwrap();
        RunQueue::delete(&connection, &run, "uid-1").await.unwrap();
        after.remove("uid-1").await.unwrap();
        after.remove("uid-1").await.unwrap();
        assert_eq!(keys(&server).await, Vec::<String>::new());
    }
}

/// Restored from a backup, it has another UID: what is left of the old one is none of the queue.
#[tokio::test]
async fn a_run_that_was_taken_over_keeps_its_queue_when_its_old_uid_is_swept() {
    let server = TestServer::start(Flavor::Valkey).await;
    let (connection, run) = (server.connect(), run_id("restored"));
    queue_with(&server, "restored", &["a", "b"]).await;
    let known = KnownRuns::of(&connection, "here");
    for uid in ["uid-1", "uid-2"] {
        known.add(&run, &owner(uid)).await.unwrap();
    }
    assert!(RunQueue::take_over(&connection, &run, "uid-1", &owner("uid-2")).await.unwrap());
    RunQueue::delete(&connection, &run, "uid-1").await.unwrap();
    known.remove("uid-1").await.unwrap();
    assert_eq!(known.all().await.unwrap().into_keys().collect::<Vec<_>>(), ["uid-2"]);
    let Opened::Resumed(queue) = open_as(&connection, &run, "uid-2", "spec-1").await else {
        panic!("its files are lost")
    };
    assert_eq!(counts(&queue).await, (2, 2, 0, 0, 0));
}

#[tokio::test]
async fn ten_thousand_runs_are_read_back_and_unreadable_entries_ignored() {
    let server = TestServer::start(Flavor::Valkey).await;
    let known = KnownRuns::of(&server.connect(), "here");
    let add = async |number: usize| {
        let name = format!("run-{number}");
        known.add(&run_id(&name), &Owner { name, ..owner(&format!("uid-{number}")) }).await.unwrap();
    };
    futures::future::join_all((0..10_000).map(add)).await;
    let found = known.all().await.unwrap();
    assert_eq!(found.len(), 10_000);
    assert_eq!(found["uid-4711"].1.name, "run-4711");
    // Something else that a person or another version wrote.
    let mut other = redis::cmd("HSET");
    server.raw(other.arg("pr::runs:here").arg("uid-x").arg("nonsense")).await;
    assert_eq!(known.all().await.unwrap().len(), 10_000);
}

#[tokio::test]
async fn a_full_server_remembers_a_new_run_and_forgets_an_old_one() {
    let server = TestServer::start(Flavor::Valkey).await;
    let known = KnownRuns::of(&server.connect(), "here");
    known.add(&run_id("old"), &owner("uid-1")).await.unwrap();
    let mut limit = redis::cmd("CONFIG");
    server.raw(limit.arg("SET").arg("maxmemory").arg("1mb")).await;
    known.add(&run_id("new"), &owner("uid-2")).await.unwrap();
    known.remove("uid-1").await.unwrap();
    let names: Vec<String> = known.all().await.unwrap().into_keys().collect();
    assert_eq!(names, ["uid-2"]);
}
