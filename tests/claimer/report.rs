//! The termination message: which entry, which attempt, how it ended and when. The operator settles the file
//! from it.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protocol::{Exit, Report};
use queue::{EntryId, Failure, Settlement, Verdict};
use testbed::{Fault, Rule};
use tests::eventually;

use crate::claim::AT_ONCE;
use crate::faults::faulty;
use crate::harness::Bench;
use crate::publish::with_results;

/// The entry that the pod holds.
async fn held(bench: &Bench) -> EntryId {
    bench.queue.claims_of(&["pod-1".to_owned()]).await.unwrap().remove(0).entry
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

#[tokio::test]
async fn a_success_names_entry_attempt_times_and_key() {
    let bench = Bench::start().await;
    bench.offer("in/a b.mp4", b"x").await;
    let before = now_ms();
    let report = bench.claim().await.report();
    let after = now_ms();
    assert_eq!(report.entry.as_deref(), Some(held(&bench).await.as_str()));
    assert_eq!((report.attempt, report.outcome, report.canary), (1, Ok(()), None));
    assert_eq!(report.key(), Some("in/a b.mp4"));
    let times = [before, report.started_ms, report.ended_ms, after];
    assert!(times.is_sorted(), "{times:?}");
}

#[tokio::test]
async fn a_key_with_a_newline_stays_on_the_line_and_is_not_given_as_exact() {
    let bench = Bench::start().await;
    bench.offer("new\nline", b"x").await;
    let report = bench.claim().await.report();
    assert_eq!((report.text.as_str(), report.key()), ("new\\nline", None));
}

#[tokio::test]
async fn a_failure_after_the_claim_names_the_entry_and_the_attempt() {
    let (bench, proxy) = faulty().await;
    bench.offer("a", b"x").await;
    proxy.inject(Rule::every(Fault::Missing, "/a"));
    let first = bench.claim().await;
    let report = first.report();
    let entry = held(&bench).await;
    assert_eq!(report.entry.as_deref(), Some(entry.as_str()));
    assert_eq!((report.attempt, report.outcome), (1, Err(Exit::ObjectGone)));
    // People read the same text without the numbers.
    let said = first.stderr.lines().last().unwrap();
    assert_eq!(said, report.reason().unwrap());
    assert!(said.starts_with("ObjectGone: cannot fetch the file: s3://videos/a: not found: 404"), "{said}");

    let verdict = Verdict::Failed(Failure::new("gone", Some(15)));
    let settlement = Settlement { entry, consumer: "pod-1".into(), verdict };
    bench.queue.settle(&[settlement], &AT_ONCE).await.unwrap();
    bench.queue.promote().await.unwrap();
    let report = bench.claim().await.report();
    assert_eq!(report.entry.as_deref(), Some(held(&bench).await.as_str()));
    assert_eq!(report.attempt, 2);
}

#[tokio::test]
async fn a_failure_before_the_claim_names_none() {
    let mut bench = Bench::start().await;
    bench.valkey.kill();
    let unreachable = bench.set("QUEUE_TIMEOUT", "0s").claim().await.report();
    assert_eq!((unreachable.entry, unreachable.attempt), (None, 0));
    assert_eq!(unreachable.outcome, Err(Exit::QueueUnreachable));
    let unusable = bench.set("S3_BUCKET", "").claim().await.report();
    assert_eq!((unusable.entry, unusable.outcome), (None, Err(Exit::BadSettings)));
    assert!(unusable.started_ms > 0 && unusable.started_ms <= unusable.ended_ms);
}

/// Waiting for a file does not count towards the file's time.
#[tokio::test]
async fn the_time_starts_with_the_claim() {
    let bench = Bench::start().await;
    let mut command = bench.command();
    let run = bench.run(&mut command);
    let offer = async {
        bench.claimer_waits().await;
        let offered = now_ms();
        bench.offer("late", b"x").await;
        offered
    };
    let (ended, offered) = tokio::join!(run, offer);
    assert!(ended.report().started_ms >= offered, "{} before {offered}", ended.message);
}

#[tokio::test]
async fn a_claimer_that_is_told_to_stop_says_which_file_it_has() {
    let (bench, proxy) = faulty().await;
    bench.offer("a", b"x").await;
    proxy.inject(Rule::every(Fault::Slow(Duration::from_secs(60)), "/a"));
    bench.hand_out("pod-1").await.unwrap();
    let mut child = bench.command().spawn().unwrap();
    eventually("the object is asked for", || async { !proxy.seen().is_empty() }).await;
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().await.unwrap().code(), Some(143));
    let message = fs::read_to_string(bench.folder.path().join("termination-log")).unwrap();
    let report = Report::parse(&message).unwrap();
    assert_eq!(report.entry.as_deref(), Some(held(&bench).await.as_str()));
    assert_eq!((report.attempt, report.outcome), (1, Err(Exit::Terminated)));
}

#[tokio::test]
async fn a_publisher_names_the_attempt_and_its_last_result() {
    let bench = with_results(&[("a", b"1"), ("b/c", b"2")]).await;
    fs::write(bench.workspace().join("input.source_uri"), "s3://videos/in/x.mp4").unwrap();
    fs::write(bench.workspace().join("input.attempt"), "3").unwrap();
    let report = bench.publish().await.report();
    assert_eq!((report.entry.as_deref(), report.attempt, report.outcome), (None, 3, Ok(())));
    assert_eq!(report.key(), Some("out/x.mp4/b/c"));
    fs::remove_dir_all(bench.workspace().join("out/detect")).unwrap();
    let report = bench.publish().await.report();
    assert_eq!((report.attempt, report.outcome), (3, Err(Exit::NothingToPublish)));
}
