//! The workers' user: it has exactly the rights it needs, and is repaired if they differ.

use protocol::RunId;
use queue::{Ensured, QueueKeys, Rights, WorkerUser};
use tests::valkey::{Flavor, TestServer, patient};

use super::{SHORT, queue_with, run_id, worker};

#[tokio::test]
async fn a_workers_user_may_read_inboxes_and_ping_and_nothing_else() {
    check_what_it_may_do(Rights::Claim).await;
}

#[tokio::test]
async fn the_user_of_workers_that_process_many_files_may_also_say_what_became_of_them() {
    check_what_it_may_do(Rights::Serve).await;
}

async fn check_what_it_may_do(rights: Rights) {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "acl", &["a"]).await;
        let user = WorkerUser::generate(&run_id("acl"), "uid-1", rights).unwrap();
        user.ensure(&server.connect()).await.unwrap();
        let login = server.server().with_user(&user.name, user.password.clone());
        queue.hand_out(&["pod".into()]).await.unwrap();
        let claimed = worker(login, &queue, "pod").claim(SHORT).await.unwrap().unwrap();

        let url = server.server().url.replace(
            "redis://",
            &format!("redis://{}:{}@", user.name.replace(':', "%3A"), user.password.reveal()),
        );
        let client = redis::Client::open(url).unwrap();
        let mut client = client.get_multiplexed_async_connection_with_config(&patient()).await.unwrap();
        redis::cmd("PING").query_async::<String>(&mut client).await.unwrap();
        let (work, group, entry) =
            (queue.keys().work.as_str(), queue.keys().group.as_str(), claimed.entry.as_str());
        let inbox = &queue.keys().inbox("pod");
        let (states, meta) = (queue.keys().states.as_str(), queue.keys().meta.as_str());
        let another = QueueKeys::of(&run_id("another"));
        let (inbox_of_another_run, states_of_another_run) = (&another.inbox("pod"), &another.states);
        let say = redis::cmd("HSET").arg(&[states, entry, "pod started"]).clone();
        let said = say.query_async::<redis::Value>(&mut client).await;
        assert_eq!(said.is_ok(), rights == Rights::Serve, "{said:?}");
        for words in [
            vec!["HGET", states, entry],
            vec!["HGETALL", states],
            vec!["HDEL", states, entry],
            vec!["DEL", states],
            vec!["HSET", states_of_another_run, "x", "y"],
            vec!["XREAD", "STREAMS", inbox_of_another_run, "0"],
            vec!["HSET", meta, "succeeded", "1000"],
            vec!["XREADGROUP", "GROUP", group, "pod", "STREAMS", work, ">"],
            vec!["XREADGROUP", "GROUP", group, "pod", "STREAMS", inbox, ">"],
            vec!["XADD", inbox, "*", "file", "x"],
            vec!["XDEL", inbox, entry],
            vec!["XACK", work, group, entry],
            vec!["XADD", work, "*", "file", "x"],
            vec!["XDEL", work, entry],
            vec!["XLEN", work],
            vec!["XRANGE", work, "-", "+"],
            vec!["XREAD", "STREAMS", work, "0"],
            vec!["XGROUP", "DESTROY", work, group],
            vec!["XCLAIM", work, group, "me", "0", entry],
            vec!["KEYS", "*"],
            vec!["SCAN", "0"],
            vec!["HGETALL", &queue.keys().meta],
            vec!["GET", "anything"],
            vec!["DEL", work],
            vec!["EVAL", "return 1", "0"],
            vec!["ACL", "WHOAMI"],
            vec!["ACL", "LIST"],
            vec!["CONFIG", "GET", "*"],
            vec!["INFO"],
            vec!["PUBLISH", "c", "m"],
            vec!["FLUSHALL"],
            vec!["SHUTDOWN", "NOSAVE"],
        ] {
            let mut command = redis::cmd(words[0]);
            command.arg(&words[1..]);
            let refused = command.query_async::<redis::Value>(&mut client).await.unwrap_err();
            assert_eq!(refused.code(), Some("NOPERM"), "{words:?}: {refused}");
        }
    }
}

#[tokio::test]
async fn a_user_that_was_tampered_with_is_put_right() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        for (run, rights) in [("claims", Rights::Claim), ("serves", Rights::Serve)] {
            check_that_it_is_put_right(&server, &run_id(run), rights).await;
        }
    }
}

async fn check_that_it_is_put_right(server: &TestServer, run: &RunId, rights: Rights) {
    let connection = server.connect();
    let user = WorkerUser::generate(run, "uid-1", rights).unwrap();
    let read_states = format!("%R~{}", QueueKeys::of(run).states);
    assert!(!user.is_present(&connection).await.unwrap());
    assert_eq!(user.ensure(&connection).await.unwrap(), Ensured::Restored);
    assert_eq!(user.ensure(&connection).await.unwrap(), Ensured::Present);
    for change in [
        &["+@all"][..],
        &["allkeys"],
        &["nopass"],
        &[">another"],
        &["off"],
        &["~pr:other:work"],
        &["&*"],
        &["(+get ~x)"],
        &[read_states.as_str()],
        &["resetkeys"],
    ] {
        let mut command = redis::cmd("ACL");
        server.raw(command.arg("SETUSER").arg(&user.name).arg(change)).await;
        assert!(!user.is_present(&connection).await.unwrap(), "{change:?} goes unnoticed");
        assert_eq!(user.ensure(&connection).await.unwrap(), Ensured::Restored, "{change:?}");
        assert!(user.is_present(&connection).await.unwrap(), "{change:?} is not undone");
    }
    let other = WorkerUser::generate(run, "uid-1", rights).unwrap();
    assert!(!other.is_present(&connection).await.unwrap(), "another password is another user");
}

#[tokio::test]
async fn a_removed_user_gets_in_no_more_and_removing_it_again_is_fine() {
    let server = TestServer::start(Flavor::Valkey).await;
    let connection = server.connect();
    let queue = queue_with(&server, "removed", &["a"]).await;
    let user = WorkerUser::generate(&run_id("removed"), "uid-1", Rights::Claim).unwrap();
    user.ensure(&connection).await.unwrap();
    let login = server.server().with_user(&user.name, user.password.clone());
    let mut pod = worker(login, &queue, "pod");
    assert_eq!(pod.claim(SHORT).await.unwrap(), None, "it may ask, and was given nothing");
    WorkerUser::remove(&connection, &run_id("removed"), "uid-1").await.unwrap();
    WorkerUser::remove(&connection, &run_id("removed"), "uid-1").await.unwrap();
    assert!(pod.claim(SHORT).await.is_err(), "the open connection was ended");
    assert!(matches!(pod.claim(SHORT).await, Err(queue::Error::Denied { .. })));
}

#[tokio::test]
async fn passwords_show_nowhere() {
    let server = TestServer::start(Flavor::Valkey).await;
    let user = WorkerUser::generate(&run_id("secret"), "uid-1", Rights::Claim).unwrap();
    let mut slow = redis::cmd("CONFIG");
    server.raw(slow.arg("SET").arg("slowlog-log-slower-than").arg(0)).await;
    user.ensure(&server.connect()).await.unwrap();
    let mut log = redis::cmd("SLOWLOG");
    let logged = format!("{:?}", server.raw(log.arg("GET").arg(100)).await);
    assert!(logged.contains("SETUSER"), "{logged}");
    assert!(!logged.contains(user.password.reveal()));
    assert!(
        !format!("{user:?} {:?}", server.server().with_user("u", user.password.clone()))
            .contains(user.password.reveal())
    );
}
