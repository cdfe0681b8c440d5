//! Crashes, lost replies, dead pods and lost data: the defects that queue-based designs usually have, and
//! that the protocol rules out.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use queue::{Closed, Ending, Enqueued, Error, Fate, Finished, Listing, Opened, Page, RunQueue, Verdict};
use tests::valkey::{Flavor, KEEP, Options, TestServer};

use super::{
    AT_ONCE, PLENTY, SHORT, claim, counts, disrupted, failed, file, last_page, open, open_as, queue_with,
    run_id, settlement, worker,
};

/// A crash in the middle of the listing loses files.
#[tokio::test]
async fn partial_listing_resumes_from_the_cursor_and_loses_nothing() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let run = run_id("listing");
        let first = Page {
            after: String::new(),
            next: Some("b".into()),
            files: vec![file("a"), file("b")],
            skipped: 1,
        };
        let second = Page { after: "b".into(), next: None, files: vec![file("c")], skipped: 0 };

        let queue = open(&server.connect(), &run).await;
        assert_eq!(queue.enqueue(&first, PLENTY).await.unwrap(), Enqueued::Added { total: 2 });
        drop(queue); // The operator dies here, before it has learned anything.

        let queue = open(&server.connect(), &run).await;
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.total, stats.listing.clone()), (2, Listing::UpTo("b".into())));
        assert!(!stats.is_finished());
        let premature = queue.close(Ending::Finish, "", &KEEP).await.unwrap();
        assert_eq!(
            premature,
            Closed::Unfinished { remaining: 2 },
            "a run that is not listed must not succeed"
        );

        assert_eq!(
            queue.enqueue(&first, PLENTY).await.unwrap(),
            Enqueued::Superseded(Listing::UpTo("b".into()))
        );
        assert_eq!(queue.enqueue(&second, PLENTY).await.unwrap(), Enqueued::Added { total: 3 });
        assert_eq!(queue.enqueue(&second, PLENTY).await.unwrap(), Enqueued::Superseded(Listing::Complete));
        assert_eq!(counts(&queue).await, (3, 3, 0, 0, 0));
        assert_eq!(queue.stats().await.unwrap().skipped, 1, "a page that is sent twice skips its files once");
    }
}

/// An empty listing after a lost stream must not count as "added".
#[tokio::test]
async fn a_page_is_not_added_to_a_stream_that_is_gone() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = open(&server.connect(), &run_id("gone")).await;
    let mut delete = redis::cmd("DEL");
    server.raw(delete.arg(&queue.keys().work)).await;
    assert!(matches!(queue.enqueue(&last_page(["a"]), PLENTY).await, Err(Error::Lost { .. })));
}

/// Retrying with two commands loses or doubles the file if a crash falls between them. Here every state that
/// a crash can leave is one before or after the script, and running it again changes nothing.
#[tokio::test]
async fn settling_twice_counts_once_and_a_retry_is_never_lost_or_doubled() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "retry", &["a"]).await;
        for attempt in 1..=3 {
            let claimed = claim(&server, &queue, "pod").await;
            assert_eq!((claimed.file.key.as_str(), claimed.attempts), ("a", attempt - 1));
            let settle = [settlement(&claimed.entry, "pod", failed("boom"))];
            let fate = queue.settle(&settle, &AT_ONCE).await.unwrap();
            let again = queue.settle(&settle, &AT_ONCE).await.unwrap();
            assert_eq!(again, [Fate::Ignored], "a reply that was lost is asked for again");
            if attempt < 3 {
                assert_eq!(
                    fate,
                    [Fate::Retrying { file: "a".into(), attempts: attempt, delay: Duration::ZERO }]
                );
                assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0));
            } else {
                assert_eq!(fate, [Fate::DeadLettered { file: "a".into(), attempts: 3 }]);
                assert_eq!(counts(&queue).await, (1, 0, 0, 0, 1));
            }
        }
    }
}

/// With Valkey down, nothing may look like zero, and so nothing may look like success.
#[tokio::test]
async fn a_dead_server_is_an_error_and_never_a_count() {
    for flavor in Flavor::ALL {
        let mut server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "down", &["a"]).await;
        server.kill();
        assert!(matches!(queue.stats().await, Err(Error::Unavailable { .. })));
        assert!(matches!(queue.for_each_pending(SHORT, |_| {}).await, Err(Error::Unavailable { .. })));
        let closed = queue.close(Ending::Finish, "", &KEEP).await;
        assert!(matches!(closed, Err(Error::Unavailable { .. })));
    }
}

/// A server that comes back empty has lost the run; this is not a finished run either.
#[tokio::test]
async fn a_server_that_lost_its_data_is_noticed_by_every_call() {
    let server = TestServer::start(Flavor::Valkey).await;
    let connection = server.connect();
    let run = run_id("wiped");
    let queue = queue_with(&server, "wiped", &["a"]).await;
    server.raw(&redis::cmd("FLUSHALL")).await;

    assert!(matches!(queue.stats().await, Err(Error::Lost { .. })));
    assert!(matches!(queue.enqueue(&last_page(["a"]), PLENTY).await, Err(Error::Lost { .. })));
    assert!(matches!(queue.promote().await, Err(Error::Lost { .. })));
    assert!(matches!(queue.settle(&[], &AT_ONCE).await, Ok(fates) if fates.is_empty()), "nothing was asked");
    let unknown = settlement(&"1-1".to_owned().into(), "pod", Verdict::Succeeded);
    assert!(matches!(queue.settle(&[unknown], &AT_ONCE).await, Err(Error::Lost { .. })));
    assert!(matches!(queue.dead_letters(None, 10).await, Err(Error::Lost { .. })));
    let claims = queue.claims_of(&["pod".into()]).await;
    assert!(matches!(claims, Err(Error::Lost { .. })), "{claims:?}");
    assert!(matches!(queue.for_each_pending(SHORT, |_| {}).await, Err(Error::Lost { .. })));
    assert!(matches!(queue.reclaim(SHORT, &AT_ONCE, |_| None).await, Err(Error::Lost { .. })));
    assert!(matches!(queue.close(Ending::Finish, "", &KEEP).await, Err(Error::Lost { .. })));

    let opened = open(&connection, &run).await;
    assert_ne!(opened.epoch(), queue.epoch(), "a new epoch means that data was lost");
    assert_eq!(counts(&opened).await, (0, 0, 0, 0, 0));
    let stale = RunQueue::of_epoch(&connection, &run, queue.epoch());
    assert!(
        matches!(stale.stats().await, Err(Error::Lost { .. })),
        "an operator of the old epoch changes nothing"
    );
}

/// If any single key vanishes (evicted, or deleted by hand), the sum is wrong, and a wrong sum is no count.
#[tokio::test]
async fn losing_one_key_is_noticed() {
    for victim in ["work", "retry", "meta", "dlq"] {
        let server = TestServer::start(Flavor::Valkey).await;
        let queue = queue_with(&server, "partial", &["a", "b", "c"]).await;
        let (waits, dies) = (claim(&server, &queue, "one").await, claim(&server, &queue, "two").await);
        let minute = Duration::from_secs(60);
        let waiting = queue::RetryPolicy { backoff_initial: minute, backoff_max: minute, ..AT_ONCE };
        let rejected = Verdict::Rejected(queue::Failure::new("bad", None));
        let settled =
            [settlement(&waits.entry, "one", failed("boom")), settlement(&dies.entry, "two", rejected)];
        queue.settle(&settled, &waiting).await.unwrap();
        assert_eq!(counts(&queue).await, (3, 2, 0, 0, 1));

        let mut delete = redis::cmd("DEL");
        server.raw(delete.arg(run_id("partial").key(victim))).await;
        assert!(matches!(queue.stats().await, Err(Error::Lost { .. })), "losing {victim} goes unnoticed");
        for ending in [Ending::Finish, Ending::Abort { reason: "Aborted" }] {
            let closed = queue.close(ending, "", &KEEP).await;
            assert!(matches!(closed, Err(Error::Lost { .. })), "without {victim} it ended: {closed:?}");
        }
        if matches!(victim, "work" | "meta") {
            let settled = queue.settle(&settled, &AT_ONCE).await;
            assert!(matches!(settled, Err(Error::Lost { .. })), "settling goes on without {victim}");
        }
        let opened = open_as(&server.connect(), &run_id("partial"), "uid-1", "spec-1").await;
        let Opened::Created(opened) = opened else { panic!("without {victim} it did not start again") };
        assert_ne!(opened.epoch(), queue.epoch());
        assert_eq!(counts(&opened).await, (0, 0, 0, 0, 0));
    }
}

/// Dead letters are for people: removing some after dealing with them is no loss of data.
#[tokio::test]
async fn a_dead_letter_that_was_removed_by_hand_is_no_loss() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "removed", &["a", "b"]).await;
        let claimed = claim(&server, &queue, "pod").await;
        let rejected = Verdict::Rejected(queue::Failure::new("bad", None));
        queue.settle(&[settlement(&claimed.entry, "pod", rejected)], &AT_ONCE).await.unwrap();
        let mut trim = redis::cmd("XTRIM");
        server.raw(trim.arg(run_id("removed").key("dlq")).arg("MAXLEN").arg(0)).await;
        assert_eq!(counts(&queue).await, (2, 1, 0, 0, 1));
        let opened = open_as(&server.connect(), &run_id("removed"), "uid-1", "spec-1").await;
        assert!(matches!(opened, Opened::Resumed(_)), "the queue started again");
    }
}

/// After deletions the group's `lag` is null, and looks like an empty queue. No count depends on it.
#[tokio::test]
async fn counts_are_exact_although_the_lag_of_the_group_is_unknown() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("lag")).await;
        let page = |after: &str, next: Option<&str>| Page {
            after: after.into(),
            next: next.map(str::to_owned),
            files: (0..750).map(|number| file(format!("{after}-{number}"))).collect(),
            skipped: 0,
        };
        queue.enqueue(&page("", Some("1")), PLENTY).await.unwrap();
        queue.enqueue(&page("1", None), PLENTY).await.unwrap();
        claim(&server, &queue, "pod").await;
        let closed = queue.close(Ending::Abort { reason: "Aborted" }, "", &KEEP).await.unwrap();
        assert_eq!(closed, Closed::More { remaining: 500 });

        let mut info = redis::cmd("XINFO");
        let groups: Vec<HashMap<String, redis::Value>> =
            redis::from_redis_value(server.raw(info.arg("GROUPS").arg(&queue.keys().work)).await).unwrap();
        assert_ne!(
            groups[0]["lag"],
            redis::Value::Int(500),
            "the server knows the lag, so this test shows nothing"
        );
        assert_eq!(counts(&queue).await, (1500, 500, 0, 0, 1000));
    }
}

/// The reply to a claim is lost, and the worker asks again.
#[tokio::test]
async fn a_worker_whose_reply_was_lost_gets_the_same_file_again() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "lost-reply", &["a", "b"]).await;
        let first = claim(&server, &queue, "pod").await;
        let second = claim(&server, &queue, "pod").await; // A restarted container: same pod, new connection.
        assert_eq!(first, second);
        assert_eq!(counts(&queue).await, (2, 1, 1, 0, 0), "one pod holds one file");
        assert_ne!(claim(&server, &queue, "other").await.file, first.file);
    }
}

/// An aborted run dead-letters all unsettled files, and no others.
#[tokio::test]
async fn aborting_dead_letters_exactly_what_was_not_settled() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "abort", &["done", "waiting", "running", "never"]).await;
        let waits = queue::RetryPolicy {
            backoff_initial: Duration::from_secs(60),
            backoff_max: Duration::from_secs(60),
            ..AT_ONCE
        };
        let done = claim(&server, &queue, "one").await;
        let waiting = claim(&server, &queue, "two").await;
        let running = claim(&server, &queue, "three").await;
        let settled = [
            settlement(&done.entry, "one", Verdict::Succeeded),
            settlement(&waiting.entry, "two", failed("boom")),
        ];
        queue.settle(&settled, &waits).await.unwrap();
        assert_eq!(counts(&queue).await, (4, 2, 1, 1, 0));

        let closed = queue.close(Ending::Abort { reason: "TimedOut" }, "failed", &KEEP).await.unwrap();
        let Closed::Closed(Finished { counts, .. }) = closed else { panic!("{closed:?}") };
        assert_eq!((counts.total, counts.succeeded, counts.failed), (4, 1, 3));
        let letters = queue.dead_letters(None, 10).await.unwrap();
        let dead: BTreeSet<_> =
            letters.iter().map(|letter| (letter.file.as_str(), letter.attempts)).collect();
        assert_eq!(dead, BTreeSet::from([("waiting", 1), ("running", 0), ("never", 0)]));
        assert!(letters.iter().all(|letter| letter.reason == "TimedOut" && letter.run == "team-a.abort"));

        let late =
            queue.settle(&[settlement(&running.entry, "three", Verdict::Succeeded)], &AT_ONCE).await.unwrap();
        assert_eq!(late, [Fate::Ignored], "a result after the end changes nothing");
    }
}

/// Aborting a large run continues where it stopped, and nothing is queued meanwhile.
#[tokio::test]
async fn an_abort_takes_as_many_calls_as_it_needs() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = open(&server.connect(), &run_id("large-abort")).await;
    for page in 0..2 {
        let files = (0..1000).map(|number| file(format!("{page}-{number}"))).collect();
        let after = if page == 0 { String::new() } else { page.to_string() };
        queue
            .enqueue(&Page { after, next: Some((page + 1).to_string()), files, skipped: 0 }, PLENTY)
            .await
            .unwrap();
    }
    let abort = || queue.close(Ending::Abort { reason: "Aborted" }, "", &KEEP);
    assert_eq!(abort().await.unwrap(), Closed::More { remaining: 1000 });
    assert_eq!(counts(&queue).await, (2000, 1000, 0, 0, 1000));
    let more = Page { after: "2".into(), next: None, files: vec![file("late")], skipped: 0 };
    assert_eq!(queue.enqueue(&more, PLENTY).await.unwrap(), Enqueued::Superseded(Listing::Complete));
    assert!(matches!(abort().await.unwrap(), Closed::Closed(end) if end.counts.failed == 2000));
    assert!(
        matches!(abort().await.unwrap(), Closed::Closed(end) if end.counts.failed == 2000),
        "closing again says so again"
    );
}

/// A reclaimer that reads only the first page is blind to entries behind 1,000 living pods.
#[tokio::test]
async fn a_dead_pod_behind_thousands_of_living_ones_is_found() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = open(&server.connect(), &run_id("many")).await;
        for page in 0..3 {
            let files = (0..900).map(|number| file(format!("{page}-{number:04}"))).collect();
            let after = if page == 0 { String::new() } else { page.to_string() };
            queue
                .enqueue(
                    &Page { after, next: (page < 2).then(|| (page + 1).to_string()), files, skipped: 0 },
                    PLENTY,
                )
                .await
                .unwrap();
        }
        let mut client = server.raw_connection().await;
        let mut claims = redis::pipe();
        for number in 0..2700 {
            let pod = if number == 2650 { "dead".to_owned() } else { format!("alive-{number}") };
            let command = claims.cmd("XREADGROUP").arg("GROUP").arg(&queue.keys().group).arg(pod);
            command.arg("COUNT").arg(1).arg("STREAMS").arg(&queue.keys().work).arg(">").ignore();
        }
        claims.query_async::<()>(&mut client).await.unwrap();

        let mut asked = 0;
        let reclaimed = queue
            .reclaim(Duration::ZERO, &AT_ONCE, |pending| {
                asked += 1;
                (pending.consumer == "dead").then(|| "PodLost".to_owned())
            })
            .await
            .unwrap();
        assert_eq!(asked, 2700);
        assert_eq!(reclaimed.fates, [Fate::Disrupted { file: "2-0850".into(), disruptions: 1 }]);
        assert_eq!(counts(&queue).await, (2700, 1, 2699, 0, 0));
        assert_eq!(queue.stats().await.unwrap().reclaimed, 1);
    }
}

/// Entries that are not idle long enough, or have another holder by now, are left alone.
#[tokio::test]
async fn an_entry_is_reclaimed_only_when_it_was_idle_long_enough() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "idle", &["a"]).await;
        claim(&server, &queue, "pod").await;
        let dead = |_: &queue::Pending| Some("PodLost".to_owned());
        assert_eq!(queue.reclaim(Duration::from_secs(60), &AT_ONCE, dead).await.unwrap().fates, []);
        assert_eq!(counts(&queue).await, (1, 0, 1, 0, 0));
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(queue.reclaim(Duration::from_millis(20), &AT_ONCE, dead).await.unwrap().fates.len(), 1);
        assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0));
    }
}

/// A restarted server has forgotten the workers' user. It refuses the worker, the operator restores the user,
/// and the worker continues with the file it had.
#[tokio::test]
async fn a_restarted_server_forgets_the_workers_user_and_the_operator_restores_it() {
    for flavor in Flavor::ALL {
        let options = Options { password: Some("admin"), persistent: true, ..Options::default() };
        let mut server = TestServer::start_with(flavor, options).await;
        let queue = queue_with(&server, "restart", &["a", "b"]).await;
        let user = queue::WorkerUser::generate(&run_id("restart"), "uid-1", queue::Rights::Claim).unwrap();
        let connection = server.connect();
        assert_eq!(user.ensure(&connection).await.unwrap(), queue::Ensured::Restored);
        let mut pod = worker(server.server().with_user(&user.name, user.password.clone()), &queue, "pod");
        queue.hand_out(&["pod".into()]).await.unwrap();
        let before = pod.claim(SHORT).await.unwrap().expect("a file");

        server.restart().await;
        tests::eventually("the worker is refused", || {
            let mut pod = worker(server.server().with_user(&user.name, user.password.clone()), &queue, "pod");
            async move {
                let refused = pod.claim(SHORT).await;
                matches!(&refused, Err(error @ Error::Denied { .. }) if error.is_transient())
            }
        })
        .await;
        tests::eventually("the operator restores the user", || async {
            matches!(user.ensure(&connection).await, Ok(queue::Ensured::Restored | queue::Ensured::Present))
        })
        .await;
        let mut after = pod.claim(SHORT).await;
        if after.is_err() {
            after = pod.claim(SHORT).await; // The first answer belonged to the connection that died.
        }
        assert_eq!(after.unwrap(), Some(before));
        tests::eventually("the operator counts again", || async { queue.stats().await.is_ok() }).await;
        assert_eq!(counts(&queue).await, (2, 1, 1, 0, 0));
    }
}

/// One run's workers cannot touch another run's queue.
#[tokio::test]
async fn a_workers_user_reads_no_other_run() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let (own, other) =
            (queue_with(&server, "own", &["a"]).await, queue_with(&server, "other", &["b"]).await);
        let user = queue::WorkerUser::generate(&run_id("own"), "uid-1", queue::Rights::Claim).unwrap();
        user.ensure(&server.connect()).await.unwrap();
        let login = server.server().with_user(&user.name, user.password.clone());
        for queue in [&own, &other] {
            queue.hand_out(&["pod".into()]).await.unwrap();
        }
        assert_eq!(worker(login.clone(), &own, "pod").claim(SHORT).await.unwrap().unwrap().file.key, "a");
        assert!(matches!(worker(login, &other, "pod").claim(SHORT).await, Err(Error::Denied { .. })));
    }
}

/// A claimer of an older version fetches files itself, and may be served twice. The pod processes the first
/// of the two; the other is released, and counts neither as done nor as an attempt.
#[tokio::test]
async fn a_pod_that_was_served_twice_processes_the_first_and_the_other_is_released() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "twice", &["first", "second"]).await;
        for _ in 0..2 {
            let mut ask = redis::cmd("XREADGROUP");
            ask.arg("GROUP").arg(&queue.keys().group).arg("pod").arg("COUNT").arg(1);
            server.raw(ask.arg("STREAMS").arg(&queue.keys().work).arg(">")).await;
        }
        let claimed = claim(&server, &queue, "pod").await;
        assert_eq!(claimed.file.key, "first");
        assert_eq!(claim(&server, &queue, "pod").await, claimed, "asking again gives the same answer");
        let held = queue.claims_of(&["pod".into()]).await.unwrap();
        assert_eq!((held.len(), &held[0].entry), (2, &claimed.entry));
        let settled = [
            settlement(&held[0].entry, "pod", Verdict::Succeeded),
            settlement(&held[1].entry, "pod", Verdict::Released),
        ];
        assert_eq!(queue.settle(&settled, &AT_ONCE).await.unwrap(), [Fate::Succeeded, Fate::Released]);
        assert_eq!(counts(&queue).await, (2, 1, 0, 1, 0));
        let second = claim(&server, &queue, "other").await;
        assert_eq!((second.file.key.as_str(), second.attempts), ("second", 0));
    }
}

/// A pod's inbox always shows what the pod holds, whatever was left there.
#[tokio::test]
async fn an_inbox_that_was_lost_or_left_behind_is_filled_again() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "inbox", &["a", "b"]).await;
        let first = claim(&server, &queue, "pod").await;
        let inbox = queue.keys().inbox("pod");
        for break_it in [vec!["DEL", &inbox], vec!["XADD", &inbox, "0-1", "file", "of another queue"]] {
            server.raw(redis::cmd("DEL").arg(&inbox)).await;
            let mut command = redis::cmd(break_it[0]);
            server.raw(command.arg(&break_it[1..])).await;
            assert_eq!(claim(&server, &queue, "pod").await, first);
        }
        assert_eq!(counts(&queue).await, (2, 1, 1, 0, 0));
        let mut left = redis::cmd("PTTL");
        let left: i64 = redis::from_redis_value(server.raw(left.arg(&inbox)).await).unwrap();
        assert!(left > 0, "it goes by itself in the end");
    }
}

/// A claimer of an older version may read its run's stream, and no access rule keeps it from using NOACK.
/// Files that it takes in this way are found and queued again.
#[tokio::test]
async fn a_file_that_was_taken_without_a_trace_is_found_and_queued_again() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "noack", &["a", "b", "c"]).await;
        claim(&server, &queue, "honest").await;
        let mut steal = redis::cmd("XREADGROUP");
        steal.arg("GROUP").arg(&queue.keys().group).arg("thief").arg("COUNT").arg(1).arg("NOACK");
        server.raw(steal.arg("STREAMS").arg(&queue.keys().work).arg(">")).await;
        assert_eq!(counts(&queue).await, (3, 2, 1, 0, 0));

        let reclaimed =
            queue.clone().with_batch(1).reclaim(Duration::ZERO, &AT_ONCE, |_| None).await.unwrap();
        assert_eq!((reclaimed.fates.len(), reclaimed.held_by_nobody), (0, 1));
        assert_eq!(queue.reclaim(Duration::ZERO, &AT_ONCE, |_| None).await.unwrap().held_by_nobody, 0);
        assert_eq!(counts(&queue).await, (3, 2, 1, 0, 0));
        let rest =
            [claim(&server, &queue, "one").await.file.key, claim(&server, &queue, "two").await.file.key];
        assert_eq!(rest, ["c", "b"]);
    }
}

/// Between looking and acting, the worker may have returned, or another one may hold the file.
#[tokio::test]
async fn an_entry_that_changed_hands_or_woke_up_after_it_was_judged_is_not_reclaimed() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        for (name, words) in [
            (
                "woke-up",
                vec!["XREADGROUP", "GROUP", "{group}", "pod", "COUNT", "1", "STREAMS", "{work}", "0"],
            ),
            ("changed-hands", vec!["XCLAIM", "{work}", "{group}", "other", "0", "{id}"]),
        ] {
            let queue = queue_with(&server, name, &["a"]).await;
            let claimed = claim(&server, &queue, "pod").await;
            // As if the pod had been silent for an hour.
            let mut silent = redis::cmd("XCLAIM");
            silent
                .arg(&queue.keys().work)
                .arg(&queue.keys().group)
                .arg("pod")
                .arg(0)
                .arg(claimed.entry.as_str());
            server.raw(silent.arg("IDLE").arg(3_600_000)).await;
            let url = server.server().url;
            let meanwhile = |pending: &queue::Pending| {
                let mut client = redis::Client::open(url.as_str()).unwrap().get_connection().unwrap();
                let mut command = redis::cmd(words[0]);
                for word in &words[1..] {
                    let keys = queue.keys();
                    command.arg(
                        word.replace("{work}", &keys.work)
                            .replace("{group}", &keys.group)
                            .replace("{id}", pending.entry.as_str()),
                    );
                }
                command.query::<redis::Value>(&mut client).unwrap();
                Some("PodLost".to_owned())
            };
            let reclaimed = queue.reclaim(Duration::from_secs(1_800), &AT_ONCE, meanwhile).await.unwrap();
            assert_eq!(reclaimed.fates, [Fate::Ignored], "{name}");
            assert_eq!(counts(&queue).await, (1, 0, 1, 0, 0), "{name}");
        }
    }
}

/// A file is charged only for its own processing, however often its node fails.
#[tokio::test]
async fn a_disrupted_file_is_queued_again_without_an_attempt() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "outage", &["a", "b"]).await;
        for disruptions in 0..20 {
            let claimed = claim(&server, &queue, "pod").await;
            let key = if disruptions % 2 == 0 { "a" } else { "b" };
            assert_eq!(claimed.file.key, key, "a disrupted file goes to the end of the queue");
            assert_eq!((claimed.attempts, claimed.disruptions), (0, 0));
            let verdict = disrupted("StorageUnavailable", false);
            let fates = queue.settle(&[settlement(&claimed.entry, "pod", verdict)], &AT_ONCE).await.unwrap();
            assert_eq!(fates, [Fate::Disrupted { file: key.into(), disruptions: 0 }]);
        }
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.disrupted, stats.retried, stats.queued), (20, 0, 2));
    }
}

/// A file that takes its node down every time would otherwise never end.
#[tokio::test]
async fn a_file_that_is_disrupted_too_often_in_a_row_is_charged_an_attempt() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "killer", &["a"]).await;
        let policy = queue::RetryPolicy { max_attempts: 2, ..AT_ONCE };
        let settle = async |verdict: Verdict| {
            let claimed = claim(&server, &queue, "pod").await;
            queue.settle(&[settlement(&claimed.entry, "pod", verdict)], &policy).await.unwrap().remove(0)
        };
        let again = |disruptions| Fate::Disrupted { file: "a".into(), disruptions };
        let long = format!("NodeLost{}", "ä".repeat(400));
        for disruptions in [1, 2] {
            assert_eq!(settle(disrupted(&long, true)).await, again(disruptions));
        }
        assert_eq!(
            settle(disrupted("StorageUnavailable", false)).await,
            again(2),
            "what does not count never charges"
        );
        let charged = Fate::Retrying { file: "a".into(), attempts: 1, delay: Duration::ZERO };
        assert_eq!(settle(disrupted(&long, true)).await, charged);
        for disruptions in [1, 2] {
            assert_eq!(settle(disrupted(&long, true)).await, again(disruptions), "the row starts again");
        }
        assert_eq!(
            settle(disrupted(&long, true)).await,
            Fate::DeadLettered { file: "a".into(), attempts: 2 }
        );
        let letter = queue.newest_dead_letters(1).await.unwrap().remove(0);
        let said = "disrupted 3 times in a row, the last time: NodeLostä";
        assert!(
            letter.reason.starts_with(said) && letter.reason.len() <= queue::REASON_BYTES_MAX,
            "{letter:?}"
        );
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.disrupted, stats.retried, stats.failed), (5, 1, 1));
    }
}

#[tokio::test]
async fn a_failure_of_its_own_ends_the_row_of_disruptions_also_over_a_back_off() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "row", &["a"]).await;
        let short = Duration::from_millis(2);
        let policy = queue::RetryPolicy { backoff_initial: short, backoff_max: short, ..AT_ONCE };
        for (verdict, attempts, disruptions) in
            [(disrupted("NodeLost", true), 0, 1), (failed("boom"), 1, 0), (Verdict::Released, 1, 0)]
        {
            let claimed = claim(&server, &queue, "pod").await;
            queue.settle(&[settlement(&claimed.entry, "pod", verdict)], &policy).await.unwrap();
            tokio::time::sleep(short * 2).await;
            queue.promote().await.unwrap();
            let next = claim(&server, &queue, "pod").await;
            assert_eq!((next.attempts, next.disruptions), (attempts, disruptions));
            queue.settle(&[settlement(&next.entry, "pod", Verdict::Released)], &policy).await.unwrap();
        }
    }
}

/// Losing the pod is not the file's fault, but it is counted, because it may be.
#[tokio::test]
async fn a_reclaimed_file_is_disrupted_and_not_charged() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "reclaimed", &["a"]).await;
        let once = queue::RetryPolicy { max_attempts: 1, ..AT_ONCE };
        for disruptions in 1..=2 {
            claim(&server, &queue, "pod").await;
            let reclaimed = queue.reclaim(Duration::ZERO, &once, |_| Some("PodLost".into())).await.unwrap();
            assert_eq!(reclaimed.fates, [Fate::Disrupted { file: "a".into(), disruptions }]);
        }
        claim(&server, &queue, "pod").await;
        let reclaimed = queue.reclaim(Duration::ZERO, &once, |_| Some("PodLost".into())).await.unwrap();
        assert_eq!(reclaimed.fates, [Fate::DeadLettered { file: "a".into(), attempts: 1 }]);
        let letter = queue.newest_dead_letters(1).await.unwrap().remove(0);
        assert_eq!(letter.reason, "disrupted 3 times in a row, the last time: PodLost");
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.reclaimed, stats.disrupted, stats.failed), (3, 2, 1));
    }
}

/// A pod that was cut off may report its result after its file went to another pod, and the report may say
/// anything.
#[tokio::test]
async fn only_the_pod_that_holds_an_entry_can_settle_it() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "holder", &["a", "b", "c"]).await;
        let claimed = claim(&server, &queue, "pod").await;
        let mut second = redis::cmd("XREADGROUP");
        second.arg("GROUP").arg(&queue.keys().group).arg("pod").arg("COUNT").arg(1);
        server.raw(second.arg("STREAMS").arg(&queue.keys().work).arg(">")).await;
        let other = claim(&server, &queue, "other").await;
        let settle = async |entry: &queue::EntryId, pod: &str| {
            queue.settle(&[settlement(entry, pod, Verdict::Succeeded)], &AT_ONCE).await.unwrap().remove(0)
        };
        assert_eq!(settle(&claimed.entry, "other").await, Fate::Ignored);
        assert_eq!(settle(&claimed.entry, "stranger").await, Fate::Ignored);
        assert_eq!(settle(&other.entry, "pod").await, Fate::Ignored);
        let time = claimed.entry.as_str().split('-').next().unwrap();
        for nonsense in ["", "-", "+", "nonsense", "0-0", time] {
            assert_eq!(settle(&nonsense.to_owned().into(), "pod").await, Fate::Ignored, "{nonsense:?}");
        }
        assert_eq!(counts(&queue).await, (3, 0, 3, 0, 0));
        assert_eq!(settle(&claimed.entry, "pod").await, Fate::Succeeded);
        assert_eq!(settle(&other.entry, "other").await, Fate::Succeeded);
        assert_eq!(counts(&queue).await, (3, 0, 1, 2, 0));
    }
}
