//! A pod that processes many files: the worker and the shim as processes, and an operator that settles their
//! reports.

use std::fs;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use http::Method;
use protocol::{Exit, RunId};
use queue::{
    Disruption, Failure, ReportsLimit, RetryPolicy, Rights, RunQueue, Settlement, Stats, Verdict, WorkerUser,
};
use testbed::{Fault, FaultyS3, Rule};

use super::harness::{BUCKET, Bench, Ended, listed, noise, program};

const KIB: usize = 1024;
const POLICY: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    max_disruptions: 9,
    backoff_initial: Duration::ZERO,
    backoff_max: Duration::ZERO,
    keep_results: 0,
};
const LIMIT: ReportsLimit = ReportsLimit { reports: 1_000, bytes: 1 << 20 };

/// The sequence in a pod: it is prepared, a shim for each filter starts the filter's command, and the worker
/// is the first process. The command knows its filter by `$0`.
const POD: &str = r#""$0" install --shim "$SHIM" && {
    for name in $(echo "$OPENFILTER_FILTERS" | tr , ' '); do
        "$SHIM" --filter "$name" --socket "$OPENFILTER_LINKS/link/$name/socket" --workspace "$WORKSPACE/ws" \
            --termination-log /dev/null $SHIM_OPTIONS -- sh -c "$FILTER" "$name" &
    done
    exec "$0" serve
}"#;

fn shim() -> String {
    static SHIM: OnceLock<String> = OnceLock::new();
    SHIM.get_or_init(|| tests::program::program("shim").display().to_string()).clone()
}

/// A pod whose filter is this script.
async fn pod(filter: &str) -> Bench {
    let mut bench = Bench::start().await;
    let run = RunId::derive("team-a", "monday").unwrap();
    bench.user = WorkerUser::generate(&run, "uid-1", Rights::Serve).unwrap();
    bench.user.ensure(&bench.valkey.connect()).await.unwrap();
    let (name, password) = (bench.user.name.clone(), bench.user.password.reveal().to_owned());
    let links = bench.folder.path().join("links").display().to_string();
    bench.set("VALKEY_USERNAME", name).set("VALKEY_PASSWORD", password).set("OPENFILTER_LINKS", links);
    bench.set("OPENFILTER_FILTERS", "detect").set("SHIM", shim()).set("FILTER", filter);
    bench.set("SHIM_OPTIONS", "");
    bench.env.remove("SINK_FROM");
    bench
}

/// A pod with the filters `detect` and `describe`, which run this script.
async fn pod_of_two(order: &str, filter: &str) -> Bench {
    let mut bench = pod(filter).await;
    bench.set("OPENFILTER_FILTERS", "detect,describe").set("OPENFILTER_ORDER", order);
    bench
}

/// A part of a script that waits until this command succeeds, for a minute at most.
fn until(command: &str) -> String {
    format!("for _ in $(seq 600); do {command} && break; sleep 0.1; done")
}

/// Runs the pod with these files until it ends by itself. What it reported beside successes, with how many
/// there were before.
async fn serve(bench: &Bench, files: &[(&str, usize)], disk: Option<&str>) -> (Ended, Vec<(u64, String)>) {
    let mut stored = Vec::new();
    for (key, size) in files {
        stored.push(bench.store(key, &noise(*size)).await);
    }
    bench.enqueue(stored).await;
    serve_queue(bench, disk).await
}

async fn serve_queue(bench: &Bench, disk: Option<&str>) -> (Ended, Vec<(u64, String)>) {
    bench.queue.fill(&["pod-1".to_owned()], 16).await.unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let operator = tokio::spawn(settle(bench.queue.clone(), Arc::clone(&said)));
    let ended = match disk {
        None => bench.run(&mut bench.wrapped(&["sh", "-c", POD])).await,
        Some(size) => {
            let workspace = bench.workspace();
            let mount = format!("mount -t tmpfs -o size={size} tmpfs {} && {POD}", workspace.display());
            let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", &mount];
            bench.run(&mut bench.wrapped(&wrapper)).await
        }
    };
    operator.abort();
    let said = said.lock().unwrap().clone();
    (ended, said)
}

async fn settle(queue: RunQueue, said: Arc<Mutex<Vec<(u64, String)>>>) {
    let mut succeeded = 0;
    loop {
        let taken = queue.take(LIMIT, &POLICY).await.unwrap();
        succeeded += taken.succeeded;
        for reported in taken.reports {
            let (consumer, words) = reported.report.split_once(' ').unwrap();
            said.lock().unwrap().push((succeeded, words.to_owned()));
            let failure = Failure::new(words, None);
            let verdict = match words {
                "released" => Verdict::Released,
                _ => Verdict::Disrupted(Disruption { failure, counts: true }),
            };
            let settlement = Settlement { entry: reported.entry, consumer: consumer.to_owned(), verdict };
            queue.settle(&[settlement], &POLICY).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The reports about the files that the pod holds, without the pod's name, in alphabetical order.
async fn states(bench: &Bench) -> Vec<String> {
    let mut all = redis::cmd("HVALS");
    let states = bench.valkey.raw(all.arg(&bench.queue.keys().states)).await;
    let states: Vec<String> = redis::from_redis_value(states).unwrap();
    let word = |state: &String| {
        let (_, said) = state.split_once(' ')?;
        Some(if said.starts_with("started") { said } else { said.split(' ').next()? }.to_owned())
    };
    let mut words: Vec<String> = states.iter().filter_map(word).collect();
    words.sort();
    words
}

/// Queued, being processed, succeeded and disrupted.
async fn counts(bench: &Bench) -> (u64, u64, u64, u64) {
    let Stats { queued, running, succeeded, disrupted, .. } = bench.queue.stats().await.unwrap();
    (queued, running, succeeded, disrupted)
}

const SMALL: [(&str, usize); 4] = [("a", 9), ("b", 9), ("c", 9), ("d", 9)];

#[tokio::test]
async fn a_pod_that_has_processed_as_many_files_as_it_may_releases_the_others_and_ends_well() {
    let mut bench = pod("sleep 0.1").await;
    bench.set("OPENFILTER_MAX_FILES", "2");
    let (ended, said) = serve(&bench, &SMALL, None).await;
    ended.assert_ok();
    assert_eq!(counts(&bench).await, (2, 0, 2, 0), "{said:?}");
    assert!(ended.stderr.contains("its maximum number of files"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_pod_that_has_reached_its_age_finishes_its_file_releases_the_others_and_ends_well() {
    let mut bench = pod("sleep 12").await;
    bench.set("OPENFILTER_MAX_AGE", "6s");
    let (ended, said) = serve(&bench, &SMALL, None).await;
    ended.assert_ok();
    assert_eq!(counts(&bench).await, (3, 0, 1, 0), "{said:?}");
}

#[tokio::test]
async fn an_idle_pod_ends_at_its_age_too() {
    let mut bench = pod("true").await;
    bench.set("OPENFILTER_MAX_AGE", "1s");
    let (ended, _) = serve(&bench, &[], None).await;
    ended.assert_ok();
    assert!(ended.took >= Duration::from_secs(1) && ended.took < Duration::from_secs(20), "{:?}", ended.took);
}

#[tokio::test]
async fn a_pod_whose_disk_is_full_says_so_and_ends_well() {
    let bench = pod("sleep 0.1").await;
    let (ended, said) = serve(&bench, &[("large", 2 * KIB * KIB), ("small", 9)], Some("1m")).await;
    ended.assert_ok();
    let full: Vec<_> = said.iter().filter(|(_, words)| words.starts_with("fetch DiskFull")).collect();
    assert_eq!(full.len(), 1, "{said:?}");
    let (queued, running, succeeded, disrupted) = counts(&bench).await;
    assert_eq!((queued + succeeded, running, disrupted), (2, 0, 1), "{said:?}");
}

/// The filter fails, its file is charged, and what it wrote is removed: the next file has the disk to itself.
#[tokio::test]
async fn results_that_fill_the_disk_leave_the_next_file_its_room() {
    let next_is_fetched = until(r#"[ -s "$WORKSPACE/slots/2/input" ]"#);
    // Of a disk of one MiB: more than all of it, and then a large part.
    let filter = format!(
        r#"size=600k
        grep -q '/a$' "$WORKSPACE/ws/input.source_uri" && {{ size=2m; {next_is_fetched}; }}
        head -c "$size" /dev/zero >"$WORKSPACE/ws/out/detect/result""#
    );
    let mut bench = pod(&filter).await;
    bench.set("OPENFILTER_MAX_FILES", "2");
    let (ended, said) = serve(&bench, &SMALL[..2], Some("1m")).await;
    ended.assert_ok();
    assert!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    let words: Vec<&str> = said.iter().map(|(_, words)| words.as_str()).collect();
    assert!(matches!(words[..], [only] if only.starts_with("filter detect exit:1 ")), "{said:?}");
    assert_eq!(counts(&bench).await, (1, 0, 1, 1), "{said:?}");
}

/// The results stay until they are published. A file that finds no room meanwhile is left to another pod.
#[tokio::test]
async fn a_pod_whose_disk_is_full_of_results_publishes_them_and_ends_well() {
    let filter = r#"head -c 2m /dev/zero >"$WORKSPACE/ws/out/detect/result"; true"#;
    let mut bench = pod(filter).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_FROM", "detect").set("SINK_S3_PREFIX", "out/").set("SINK_S3_ENDPOINT", &proxy.url);
    // No file is fetched before its turn.
    bench.set("OPENFILTER_PREFETCH_BYTES", KIB.to_string());
    proxy.inject(Rule::every(Fault::Stuck, "/out/").method(Method::PUT));
    // Built before any wait begins.
    program();
    let published_late = async {
        let is_full = || async { counts(&bench).await.3 == 1 };
        tests::eventually("the next file finds no room", is_full).await;
        proxy.heal();
    };
    let files = [("a", 9), ("b", 64 * KIB), ("c", 9)];
    let ((ended, said), ()) = tokio::join!(serve(&bench, &files, Some("1m")), published_late);
    ended.assert_ok();
    assert!(ended.stderr.contains("this pod ends: its disk is full"), "{}", ended.stderr);
    let full: Vec<_> = said.iter().filter(|(_, words)| *words != "released").collect();
    assert!(matches!(full[..], [(0, words)] if words.starts_with("fetch DiskFull")), "{said:?}");
    assert_eq!(counts(&bench).await, (2, 0, 1, 1), "{said:?}");
    let published = bench.s3.client.get(BUCKET, "out/a/result").await.unwrap();
    assert!(published.len() > 512 * KIB, "{} bytes are published", published.len());
}

/// Two files fit beside each other, and three do not.
#[tokio::test]
async fn no_file_is_fetched_ahead_that_would_fill_the_disk() {
    let mut bench = pod("sleep 0.1").await;
    bench.set("OPENFILTER_MAX_FILES", "4");
    let files = SMALL.map(|(key, _)| (key, 400 * KIB));
    let (ended, said) = serve(&bench, &files, Some("1m")).await;
    ended.assert_ok();
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 4, 0), 0), "{said:?}");
}

/// How many files are in the workspace while the filter works, for each of three that one pod processes. They
/// are counted once this command has ended.
async fn files_in_the_workspace(prefetch_bytes: usize, wait: &str) -> Vec<usize> {
    let count = r#"count() { find "$WORKSPACE" -type f -size +500k | wc -l; }"#;
    let mut bench = pod(&format!(r#"{count}; {wait}; count >>"$SEEN""#)).await;
    let seen = bench.folder.path().join("seen");
    bench.set("SEEN", seen.display().to_string()).set("OPENFILTER_MAX_FILES", "3");
    bench.set("OPENFILTER_PREFETCH_BYTES", prefetch_bytes.to_string());
    let (ended, said) = serve(&bench, &["a", "b", "c"].map(|key| (key, 600 * KIB)), None).await;
    ended.assert_ok();
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 3, 0), 0), "{said:?}");
    fs::read_to_string(seen).unwrap().lines().map(|files| files.parse().unwrap()).collect()
}

#[tokio::test]
async fn no_more_bytes_are_fetched_ahead_than_allowed() {
    // The file that is being processed counts, and a second one does not fit beside it.
    assert_eq!(files_in_the_workspace(KIB * KIB, "sleep 1").await, [1, 1, 1]);
    // For the first file only: the last one never has another beside it.
    let several = until(r#"{ [ -s "$SEEN" ] || [ "$(count)" -gt 1 ]; }"#);
    let many = files_in_the_workspace(10 * KIB * KIB, &several).await;
    assert!(many[0] > 1, "{many:?}");
}

#[tokio::test]
async fn the_filters_of_a_file_share_its_time() {
    let mut bench = pod_of_two("Sequential", "sleep 8").await;
    bench.set("OPENFILTER_FILE_TIMEOUT", "13s").set("OPENFILTER_MAX_FILES", "1");
    let (ended, said) = serve(&bench, &SMALL[..1], None).await;
    ended.assert_ok();
    let words: Vec<&str> = said.iter().map(|(_, words)| words.as_str()).collect();
    assert!(matches!(words[..], [only] if only.starts_with("filter describe timeout ")), "{said:?}");
    assert_eq!(counts(&bench).await, (1, 0, 0, 1), "{said:?}");
}

#[tokio::test]
async fn a_file_that_cannot_be_fetched_is_reported_at_once_and_not_in_its_turn() {
    let mut bench = pod("sleep 5").await;
    bench.set("OPENFILTER_MAX_FILES", "1");
    let here = bench.store("a", b"here").await;
    bench.enqueue(vec![here, listed("b", b"not here")]).await;
    let (ended, said) = serve_queue(&bench, None).await;
    ended.assert_ok();
    let (before, words) = said.first().expect("it is reported");
    assert!(words.starts_with("fetch ObjectGone") && *before == 0, "{said:?}");
    assert_eq!(counts(&bench).await, (1, 0, 1, 1), "{said:?}");
}

/// If the filters die now, only one of the two files is to blame.
#[tokio::test]
async fn a_file_that_is_being_published_is_told_from_the_one_that_the_filters_have() {
    let filter =
        r#"echo 1 >"$WORKSPACE/ws/out/detect/result"; grep -q '/a$' "$WORKSPACE/ws/input.source_uri" || "#;
    let mut bench = pod(&(filter.to_owned() + &until(r#"[ -e "$SEEN" ]"#))).await;
    let seen = bench.folder.path().join("seen");
    bench.set("SEEN", seen.display().to_string());
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_FROM", "detect").set("SINK_S3_PREFIX", "out/").set("SINK_S3_ENDPOINT", &proxy.url);
    bench.set("OPENFILTER_MAX_FILES", "2");
    proxy.inject(Rule::every(Fault::Stuck, "/out/").method(Method::PUT));
    // Built before any wait begins.
    program();
    let both = async {
        let said = || async { states(&bench).await == ["started", "started publishing"] };
        tests::eventually("one is published while filters work on the other", said).await;
        fs::write(seen, "").unwrap();
        proxy.heal();
    };
    let ((ended, said), ()) = tokio::join!(serve(&bench, &SMALL[..2], None), both);
    ended.assert_ok();
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 2, 0), 0), "{said:?}");
}

/// A filter that stays running is still in the folder of its last results while these are published. Four of
/// them are sent at a time; it replaces the fifth by a link.
#[tokio::test]
async fn a_result_that_becomes_a_link_while_others_are_published_is_not_followed() {
    let swap_is_due = until(r#"[ -e "$SWAP" ]"#);
    let filter = format!(
        r#"while read -r file; do
            case "$file" in
                *'/a"'*) cd "$WORKSPACE/ws/out/detect" && for name in 1 2 3 4 5; do echo "$name" >"$name"; done ;;
                *) {swap_is_due}; ln -sf "$OUTSIDE" 5; echo fine >"$WORKSPACE/ws/out/detect/1" ;;
            esac
            echo '::openfilter::{{"ok":true}}'
        done"#
    );
    let mut bench = pod(&filter).await;
    let [swap, outside] = ["swap", "outside"].map(|name| bench.folder.path().join(name));
    fs::write(&outside, "secret").unwrap();
    bench.set("SWAP", swap.display().to_string()).set("OUTSIDE", outside.display().to_string());
    bench.set("SHIM_OPTIONS", "--lines").set("OPENFILTER_MAX_FILES", "2");
    let proxy = FaultyS3::listen("127.0.0.1:0", &bench.s3.url).await.unwrap();
    bench.set("SINK_FROM", "detect").set("SINK_S3_PREFIX", "out/").set("SINK_S3_ENDPOINT", &proxy.url);
    proxy.inject(Rule::every(Fault::Stuck, "/out/").method(Method::PUT));
    // Built before any wait begins.
    program();
    let puts = |key: &str| {
        let wanted = format!("PUT /{BUCKET}/out/{key}");
        proxy.seen().iter().filter(|request| request.starts_with(&wanted)).count()
    };
    let swapped = async {
        tests::eventually("four results are being sent", || async { puts("a/") == 4 }).await;
        fs::write(swap, "").unwrap();
        tests::eventually("the next file is published", || async { puts("b/1") == 1 }).await;
        proxy.heal();
    };
    let ((ended, said), ()) = tokio::join!(serve(&bench, &SMALL[..2], None), swapped);
    ended.assert_ok();
    let words: Vec<&str> = said.iter().map(|(_, words)| words.as_str()).collect();
    let is_refused =
        |words: &str| words.starts_with("publish PublishIncomplete") && words.contains("was replaced");
    assert!(matches!(words[..], [only] if is_refused(only)), "{said:?}");
    assert_eq!(counts(&bench).await, (1, 0, 1, 1), "{said:?}");
    assert_eq!(puts("a/5"), 0, "what the link leads to is not sent");
    assert_eq!(bench.s3.client.get(BUCKET, "out/b/1").await.unwrap(), "fine\n");
}

#[tokio::test]
async fn concurrent_filters_work_at_the_same_time() {
    let both_have_begun = until(r#"[ "$(grep -c begins "$STEPS")" = 2 ]"#);
    let filter = format!(r#"echo begins >>"$STEPS"; {both_have_begun}; echo ends >>"$STEPS""#);
    let mut bench = pod_of_two("Concurrent", &filter).await;
    let steps = bench.folder.path().join("steps");
    bench.set("STEPS", steps.display().to_string()).set("OPENFILTER_MAX_FILES", "1");
    let (ended, said) = serve(&bench, &SMALL[..1], None).await;
    ended.assert_ok();
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 1, 0), 0), "{said:?}");
    assert_eq!(fs::read_to_string(steps).unwrap(), "begins\nbegins\nends\nends\n");
}

#[tokio::test]
async fn a_concurrent_filter_that_fails_stops_the_others_and_the_pod_goes_on() {
    let filter = r#"grep -q /good "$WORKSPACE/ws/input.source_uri" && exit
        touch "$BEGUN"
        [ "$0" = detect ] && exit 1
        sleep 600"#;
    let mut bench = pod_of_two("Concurrent", filter).await;
    let begun = bench.folder.path().join("begun");
    bench.set("BEGUN", begun.display().to_string()).set("OPENFILTER_MAX_FILES", "2");
    // Built before any wait begins.
    program();
    let settled_after = async {
        tests::eventually("the filters work", || async { begun.exists() }).await;
        let begun = Instant::now();
        tests::eventually("the failure is settled", || async { counts(&bench).await.3 == 1 }).await;
        begun.elapsed()
    };
    let ((ended, said), settled_after) =
        tokio::join!(serve(&bench, &[("bad", 9), ("good", 9)], None), settled_after);
    ended.assert_ok();
    assert!(settled_after < Duration::from_secs(60), "{settled_after:?}");
    let words: Vec<&str> = said.iter().map(|(_, words)| words.as_str()).collect();
    assert!(matches!(words[..], [only] if only.starts_with("filter detect exit:1 ")), "{said:?}");
    assert_eq!(counts(&bench).await, (1, 0, 1, 1), "{said:?}");
}

#[tokio::test]
async fn a_file_that_fails_after_its_shim_was_told_to_end_says_so() {
    // The first file fails by itself. The second one signals the shim, which is the parent of its filter.
    let filter = r#"grep -q '/a$' "$WORKSPACE/ws/input.source_uri" || kill -TERM "$PPID"; exit 1"#;
    let mut bench = pod(filter).await;
    bench.set("OPENFILTER_MAX_FILES", "2");
    let (ended, said) = serve(&bench, &SMALL[..2], None).await;
    ended.assert_ok();
    let words: Vec<&str> = said.iter().map(|(_, words)| words.trim_end()).collect();
    assert_eq!(words, ["filter detect exit:1 oom=0 term=0", "filter detect exit:1 oom=0 term=1"]);
}

/// As if it hung in the kernel: nothing that the shim would do about its filter happens.
#[tokio::test]
async fn a_shim_that_does_not_answer_is_lost_and_its_file_is_left_to_the_operator() {
    // The worker is the parent of the shim. When it is gone the shim goes on, and ends too.
    let worker_is_gone = until("! kill -0 $worker");
    let mut bench = pod(&format!(
        "shim=$PPID; worker=$(ps -o ppid= $shim); kill -STOP $shim; {worker_is_gone}; kill -CONT $shim"
    ))
    .await;
    bench.set("OPENFILTER_FILE_TIMEOUT", "1s");
    let (ended, said) = serve(&bench, &SMALL[..1], None).await;
    ended.assert_failed(Exit::FilterLost.code(), &["detect", "has not answered"]);
    // Its second, and the 10 s that the shim gives the filter before it kills it, and again after that.
    assert!(ended.took >= Duration::from_secs(21), "{:?}", ended.took);
    assert_eq!((states(&bench).await, said.len()), (vec!["started".to_owned()], 0), "{said:?}");
}

#[tokio::test]
async fn what_a_full_valkey_does_not_take_is_reported_when_it_has_room_again() {
    let mut bench = pod(&format!(r#"touch "$BEGUN"; {}"#, until(r#"[ -e "$FULL" ]"#))).await;
    let [begun, full] = ["begun", "full"].map(|name| bench.folder.path().join(name));
    bench.set("BEGUN", begun.display().to_string()).set("FULL", full.display().to_string());
    bench.set("OPENFILTER_MAX_FILES", "1");
    // Built before anything is waited for.
    program();
    let limit_memory = async |bytes: u64| {
        let mut config = redis::cmd("CONFIG");
        bench.valkey.raw(config.arg("SET").arg("maxmemory").arg(bytes)).await;
    };
    let refused = || async {
        let mut info = redis::cmd("INFO");
        let stats = bench.valkey.raw(info.arg("commandstats")).await;
        let stats: String = redis::from_redis_value(stats).unwrap();
        let said = stats.lines().find(|line| line.starts_with("cmdstat_hset:"));
        said.is_some_and(|said| !said.contains("rejected_calls=0"))
    };
    let full_until_it_refuses = async {
        tests::eventually("the filter works", || async { begun.exists() }).await;
        // Less than it already uses.
        limit_memory(1).await;
        fs::write(full, "").unwrap();
        tests::eventually("the report is refused", refused).await;
        limit_memory(0).await;
    };
    let ((ended, said), ()) = tokio::join!(serve(&bench, &SMALL[..1], None), full_until_it_refuses);
    ended.assert_ok();
    assert!(ended.stderr.contains("OOM"), "it was full: {}", ended.stderr);
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 1, 0), 0), "{said:?}");
}

#[tokio::test]
async fn what_the_last_of_two_filters_makes_of_the_firsts_result_is_published() {
    let filter = r#"cd "$WORKSPACE/ws/out" || exit
        case "$0" in
            detect) wc -c <../input >detect/size ;;
            describe) echo "$(cat detect/size) bytes" >describe/text ;;
        esac"#;
    let mut bench = pod_of_two("Sequential", filter).await;
    bench.s3.client.make_bucket("results").await.unwrap();
    bench.set("S3_PREFIX", "in/").set("SINK_FROM", "describe");
    bench.set("SINK_S3_BUCKET", "results").set("SINK_S3_PREFIX", "out/").set("OPENFILTER_MAX_FILES", "1");
    let (ended, said) = serve(&bench, &[("in/a", 9)], None).await;
    ended.assert_ok();
    assert_eq!((counts(&bench).await, said.len()), ((0, 0, 1, 0), 0), "{said:?}");
    assert_eq!(bench.s3.client.get("results", "out/a/text").await.unwrap(), "9 bytes\n");
    assert!(bench.s3.client.get("results", "out/a/size").await.is_err(), "only the last filter's results");
}
