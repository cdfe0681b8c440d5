//! Claiming: which file, how patiently, and how failures end.

use std::time::{Duration, Instant};

use queue::{Failure, RetryPolicy, Settlement, Verdict, Worker};
use tests::eventually;
use tests::valkey::Options;

use crate::harness::Bench;

pub const AT_ONCE: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    max_disruptions: 10,
    backoff_initial: Duration::ZERO,
    backoff_max: Duration::ZERO,
    keep_results: 0,
};

/// A reply that was lost, or a container that was restarted, must not claim a second file.
#[tokio::test]
async fn a_restarted_claimer_gets_its_own_pending_file_again() {
    let bench = Bench::start().await;
    let files = vec![bench.store("first", b"1").await, bench.store("second", b"2").await];
    bench.enqueue(files).await;
    bench.hand_out("pod-1").await.unwrap();
    let mut lost = Worker::new(bench.valkey.server(), &bench.queue.keys().work, "pod-1");
    assert_eq!(lost.claim(Duration::from_millis(50)).await.unwrap().unwrap().file.key, "first");
    for _ in 0..2 {
        bench.claim().await.assert_ok();
        assert_eq!(bench.input(), b"1");
    }
    let stats = bench.queue.stats().await.unwrap();
    assert_eq!((stats.running, stats.queued), (1, 1), "one file is held, and nothing was acknowledged");
}

#[tokio::test]
async fn the_attempt_is_counted_from_one() {
    let bench = Bench::start().await;
    bench.offer("a", b"x").await;
    let attempt = || std::fs::read_to_string(bench.workspace().join("input.attempt")).unwrap();
    bench.claim().await.assert_ok();
    assert_eq!(attempt(), "1");
    let held = bench.queue.claims_of(&["pod-1".to_owned()]).await.unwrap();
    let verdict = Verdict::Failed(Failure::new("bad luck", Some(1)));
    let settlement = Settlement { entry: held[0].entry.clone(), consumer: "pod-1".into(), verdict };
    bench.queue.settle(&[settlement], &AT_ONCE).await.unwrap();
    bench.queue.promote().await.unwrap();
    bench.claim().await.assert_ok();
    assert_eq!(attempt(), "2");
}

#[tokio::test]
async fn a_claimer_waits_for_a_file() {
    let bench = Bench::start().await;
    let mut command = bench.command();
    let run = bench.run(&mut command);
    let offer = async {
        bench.claimer_waits().await;
        bench.offer("late", b"x").await;
    };
    let (ended, ()) = tokio::join!(run, offer);
    ended.assert_ok();
}

/// A restarted Valkey has forgotten the users; the operator restores them.
#[tokio::test]
async fn a_user_that_is_missing_is_waited_for() {
    let mut bench = Bench::start_with(Options { persistent: true, ..Options::default() }).await;
    bench.offer("a", b"x").await;
    bench.valkey.restart().await;
    let mut command = bench.command();
    let run = bench.run(&mut command);
    let restore = async {
        eventually("the claimer is refused", || async {
            let mut log = redis::cmd("ACL");
            let value = bench.valkey.raw(log.arg("LOG")).await;
            format!("{value:?}").contains(&bench.user.name)
        })
        .await;
        bench.user.ensure(&bench.valkey.connect()).await.unwrap();
    };
    let (ended, ()) = tokio::join!(run, restore);
    ended.assert_ok();
    assert!(ended.stderr.contains("AuthenticationFailed"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_user_that_stays_missing_is_given_up() {
    let mut bench = Bench::start().await;
    bench.set("VALKEY_PASSWORD", "wrong-hunter3").set("QUEUE_DENIED_TIMEOUT", "1s");
    let ended = bench.claim().await;
    ended.assert_failed(12, &["QueueDenied", "AuthenticationFailed"]);
    assert!(!ended.stderr.contains("hunter3"));
    bench.assert_no_input();
}

#[tokio::test]
async fn valkey_may_be_away_for_a_while() {
    let mut bench = Bench::start_with(Options { persistent: true, ..Options::default() }).await;
    bench.offer("a", b"x").await;
    bench.hand_out("pod-1").await.unwrap();
    bench.valkey.kill();
    let mut command = bench.command();
    let child = command.spawn().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    bench.valkey.restart().await;
    bench.user.ensure(&bench.valkey.connect()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(bench.input(), b"x");
}

#[tokio::test]
async fn valkey_that_stays_away_is_given_up() {
    let mut bench = Bench::start().await;
    bench.valkey.kill();
    bench.set("QUEUE_TIMEOUT", "1s");
    bench.claim().await.assert_failed(11, &["QueueUnreachable", "for 1s"]);
    bench.assert_no_input();
}

#[tokio::test]
async fn an_entry_or_an_inbox_of_another_version_is_called_so() {
    let bench = Bench::start().await;
    let work = &bench.queue.keys().work;
    bench.valkey.raw(redis::cmd("XADD").arg(work).arg("*").arg("path").arg("a")).await;
    bench.claim().await.assert_failed(22, &["QueueBroken", "no field file"]);
    bench.assert_no_input();
    bench.valkey.raw(redis::cmd("SET").arg(bench.queue.keys().inbox("pod-1")).arg("a list of files")).await;
    bench.claim().await.assert_failed(22, &["QueueBroken", "WRONGTYPE"]);
    bench.assert_no_input();
}

#[tokio::test]
async fn valkey_with_tls_is_verified_by_its_ca() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut bench = Bench::start_with(Options { tls: true, ..Options::default() }).await;
    bench.offer("a", b"x").await;
    bench.claim().await.assert_ok();
    bench.env.remove("VALKEY_CA_CERTIFICATE");
    bench.set("QUEUE_TIMEOUT", "0s");
    bench.claim().await.assert_failed(11, &["QueueUnreachable", "certificate"]);
}

#[tokio::test]
async fn sigterm_ends_it_at_once() {
    let bench = Bench::start().await;
    let mut command = bench.command();
    let mut child = command.spawn().unwrap();
    let pid = child.id().unwrap().to_string();
    bench.claimer_waits().await;
    let start = Instant::now();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let status = child.wait().await.unwrap();
    assert_eq!(status.code(), Some(143));
    // Much sooner than the wait for a file ends.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn unusable_settings_are_named() {
    let mut bench = Bench::start().await;
    for (name, value, word) in [
        ("STREAM", "", "STREAM"),
        ("VALKEY_URL", "nonsense", "Valkey settings"),
        ("S3_BUCKET", "", "S3_BUCKET"),
        ("S3_ENDPOINT", "https://me:hunter4@s3", "S3_ENDPOINT"),
        ("S3_SECRET_ACCESS_KEY", "", "S3_SECRET_ACCESS_KEY"),
        ("S3_USE_PATH_STYLE", "perhaps", "path-style"),
        ("OPENFILTER_FILTERS", "ok,../up", "OPENFILTER_FILTERS"),
        ("QUEUE_TIMEOUT", "soon", "queue-timeout"),
    ] {
        let good = bench.env.get(name).cloned();
        bench.set(name, value);
        let ended = bench.claim().await;
        ended.assert_failed(10, &["BadSettings", word]);
        assert!(!ended.stderr.contains("hunter4"));
        match good {
            Some(good) => bench.set(name, good),
            None => {
                bench.env.remove(name);
                &mut bench
            }
        };
    }
}

#[tokio::test]
async fn help_shows_every_setting_and_no_secret() {
    let bench = Bench::start().await;
    let ended = bench.run(bench.command().args(["claim", "--help"])).await;
    assert_eq!(ended.code, 0);
    for name in
        ["STREAM", "VALKEY_PASSWORD", "S3_SECRET_ACCESS_KEY", "QUEUE_DENIED_TIMEOUT", "OPENFILTER_FILTERS"]
    {
        assert!(ended.stderr.contains(&format!("[env: {name}")), "{name}");
    }
}
