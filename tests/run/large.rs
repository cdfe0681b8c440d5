//! Buckets that exceed the queue's limit: the listing pauses, files are processed meanwhile, and the run
//! ends. Also, limits that end a run without pods, many runs of one namespace, and a hundred Warm pods
//! without an operator. The pods are played, so that thousands of them fit into a minute.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Api, ResourceExt};
use protocol::{FileState, State};
use queue::{EntryId, Pending, RunQueue};
use serde_json::{Value, json};
use testbed::{Doing, Fault, FaultyS3, Namespace, Rule};
use tests::fake::{Fake, parameter};
use tests::listing::{Folder, serve};
use tests::valkey::{Flavor, Options, TestServer};

use crate::harness::{
    Lab, Mode, condition, counts, filter, is_degraded_by, is_soak, message, phase, running,
};
use crate::player::{Player, Playing};
use crate::storms::of;

/// The lowest high water that the operator accepts.
const HIGH_WATER: usize = 100;
/// Keys per page: less than the high water, so that the listing pauses more than once.
const PAGE: usize = 20;
/// Files of a bucket for which the listing pauses more than once.
const FILES: usize = 250;

/// Warm pods that are left without an operator, and the files of their run: enough that all pods are busy
/// when the last of them is up.
const WARM_PODS: usize = 100;
const WARM_FILES: usize = 3_000;
const WARM_WORK: Duration = Duration::from_millis(500);
/// The most files that a Warm pod holds.
const HELD_MAX: usize = 16;
/// Memory that does not grow may still differ by this much between two measurements.
const MEMORY_SPREAD_MAX: f64 = 1.05;

/// A laboratory with a bucket of these folders, an operator with these settings, and pods that no node
/// accepts.
async fn stage(name: &str, settings: &[(&str, &str)], bucket: &Fake) -> Lab {
    stage_in(Mode::PodPerFile, name, settings, bucket).await
}

/// The same, with a Pipeline in this mode.
async fn stage_in(mode: Mode, name: &str, settings: &[(&str, &str)], bucket: &Fake) -> Lab {
    let mut lab = Lab::in_mode(name, mode).await;
    for (name, value) in settings {
        lab.set(name, value);
    }
    lab.restart_with("ALLOWED_ENDPOINT_NETWORKS", "127.0.0.0/8").await;
    let nowhere = json!({"nodeSelector": {"played-by": "suite"}});
    let source = json!({"bucket": {"endpoint": format!("http://{}", bucket.address)}});
    lab.pipeline(json!({"pod": nowhere, "source": source, "filters": [filter("main", &["copy"])]})).await;
    lab
}

/// Makes the laboratory's pods end with this code.
fn play(lab: &Lab, exit_code: i32) -> Playing {
    Player::start(lab.api(), lab.server(), Duration::ZERO, exit_code)
}

/// A run over one folder.
async fn run(lab: &Lab, name: &str, folder: &str, execution: Value) {
    lab.run(name, json!({"source": {"prefix": folder}, "execution": execution})).await;
}

/// Waits until the listing of a run has paused.
async fn paused(lab: &Lab, run: &str) {
    let paused = async || Ok(lab.meta(run, "paused").await);
    lab.eventually(&format!("the listing of {run} pauses"), paused).await;
}

/// A Valkey that no other run uses, and its address. Its password is `p`.
async fn own_valkey() -> (TestServer, String) {
    let options = Options { password: Some("p"), ..Options::default() };
    let valkey = TestServer::start_with(Flavor::Valkey, options).await;
    let url = format!("redis://127.0.0.1:{}", valkey.port());
    (valkey, url)
}

fn is_complete(job: &Job) -> bool {
    let mut conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Complete" && condition.status == "True")
}

fn says_that_files_were_not_listed(run: &PipelineRun) -> bool {
    message(run, "Succeeded").contains("files that were not listed are not counted")
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn an_operator_restarted_while_listing_is_paused_goes_on_where_it_was() {
    let bucket = serve(vec![Folder::new("f/", FILES)], PAGE).await;
    let mut lab = stage("restarted", &[("QUEUE_HIGH_WATER", &HIGH_WATER.to_string())], &bucket).await;
    run(&lab, "r", "f/", json!({"parallelism": 20})).await;
    paused(&lab, "r").await;
    let created = async || Ok(lab.jobs().await.pop());
    let job = lab.eventually("the Job is created", created).await;
    let completions = |job: &Job| job.spec.as_ref().unwrap().completions;
    assert_eq!(completions(&job), None, "the number of files is not known yet");
    // Both before the first file is processed and after some files are.
    let mut restarts = Vec::new();
    let mut playing = None;
    for done in [0, 20] {
        lab.until("r", "so many are done", |run| of(run, |counts| counts.succeeded) >= done).await;
        lab.kill_operators().await;
        assert!(lab.meta("r", "paused").await.is_some(), "the listing is paused");
        restarts.push((bucket.requests().len(), lab.meta("r", "cursor").await.unwrap()));
        lab.start_operator();
        playing.get_or_insert_with(|| play(&lab, 0));
    }
    let ended = lab.finished("r").await;
    assert_eq!(counts(&ended), (FILES as i64, FILES as i64, 0));
    for (asked, cursor) in restarts {
        let next = parameter(&bucket.requests()[asked], "start-after");
        assert_eq!(next, cursor, "the listing goes on where it was");
    }
    let claimed = playing.unwrap().player.claimed();
    assert!(claimed.len() == FILES && claimed.values().all(|times| *times == 1), "each file once");
    let more = |run: &PipelineRun| {
        let progress = run.status.as_ref().and_then(|status| status.progress.as_deref());
        progress.is_some_and(|progress| progress.ends_with('+'))
    };
    assert!(lab.witness.was_ever(more), "progress says that more files are being listed");
    lab.check_left_nothing(&ended).await;
    let last = lab.api::<Job>().get(&job.name_any()).await.unwrap();
    assert_eq!((last.uid(), completions(&last)), (job.uid(), None), "it is still the same Job");
    assert!(is_complete(&last), "{:?}", last.status);
    lab.witness.check_monotonic();
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_that_is_stopped_while_listing_says_that_unlisted_files_are_not_counted() {
    let bucket = serve(vec![Folder::new("f/", FILES)], PAGE).await;
    let lab = stage("unlisted", &[("QUEUE_HIGH_WATER", &HIGH_WATER.to_string())], &bucket).await;
    let few = json!({"parallelism": 10, "maxAttempts": 1, "maxFailedFiles": 5});
    run(&lab, "stopped", "f/", few).await;
    run(&lab, "deleted", "f/", json!({"parallelism": 1})).await;
    paused(&lab, "stopped").await;
    paused(&lab, "deleted").await;
    lab.delete("deleted").await;
    let of_deleted = |trace: &String| trace.contains("deleted");
    assert!(!lab.traces().await.iter().any(of_deleted), "nothing of it is left in Valkey");
    let _playing = play(&lab, 1);
    let ended = lab.finished("stopped").await;
    assert_eq!(condition(&ended, "Succeeded").1, "TooManyFailures");
    let (total, _, failed) = counts(&ended);
    assert!(total < FILES as i64 && failed == total, "{total} files, {failed} failed");
    assert!(says_that_files_were_not_listed(&ended), "{}", message(&ended, "Succeeded"));
    // A listing that waits for room checks again after at most five seconds.
    let asked = bucket.requests().len();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(bucket.requests().len(), asked, "neither bucket is listed any longer");
}

/// No pod wakes a run that is being listed or is suspended, and yet it ends at its limits.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_ends_at_its_limits_while_it_is_listed_and_while_it_is_suspended() {
    const MOST: usize = 50;
    let bucket = serve(vec![Folder::new("f/", FILES), Folder::new("small/", 5)], PAGE).await;
    let lab = stage("limits", &[("MAX_FILES", &MOST.to_string())], &bucket).await;
    let proxy = FaultyS3::listen("127.0.0.1:0", &format!("http://{}", bucket.address)).await.unwrap();
    proxy.inject(Rule::every(Fault::Stuck, "list-type=2"));
    let pipeline = lab.api::<Pipeline>().get("p").await.unwrap();
    let mut spec = serde_json::to_value(pipeline.spec).unwrap();
    spec["source"]["bucket"]["endpoint"] = json!(proxy.url);
    lab.create::<Pipeline>(json!({"metadata": {"name": "stuck"}, "spec": spec})).await;

    // Long enough for the small bucket to be listed beside the others.
    let soon_over = json!({"timeout": "25s"});
    let stuck = json!({"pipelineRef": {"name": "stuck"}, "source": {"prefix": "f/"}, "execution": soon_over});
    lab.run("stuck", stuck).await;
    lab.run("suspended", json!({"suspend": true, "source": {"prefix": "small/"}, "execution": soon_over}))
        .await;
    run(&lab, "many", "f/", json!({})).await;

    let many = lab.finished("many").await;
    assert_eq!(condition(&many, "Succeeded"), ("False".into(), "TooManyFiles".into()));
    let listed = MOST.next_multiple_of(PAGE) as i64;
    assert_eq!(counts(&many), (listed, 0, listed), "no page is listed after the one too many");
    let words = message(&many, "Succeeded");
    assert!(
        words.contains(&format!("{listed} files were listed")) && words.contains("--max-files"),
        "{words}"
    );
    let suspended = lab.finished("suspended").await;
    assert_eq!(condition(&suspended, "Succeeded"), ("False".into(), "TimedOut".into()));
    assert_eq!(counts(&suspended), (5, 0, 5));
    let stuck = lab.finished("stuck").await;
    assert_eq!(condition(&stuck, "Succeeded"), ("False".into(), "TimedOut".into()));
    assert!(counts(&stuck) == (0, 0, 0) && says_that_files_were_not_listed(&stuck), "{stuck:?}");
    let asked = bucket.requests().len();
    proxy.heal();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bucket.requests().len(), asked, "the bucket is listed no longer");
    for (name, waits) in [("stuck", Phase::Listing), ("suspended", Phase::Suspended)] {
        let waited = |run: &PipelineRun| run.name_any() == name && phase(run) == Some(waits);
        assert!(lab.witness.was_ever(waited), "{name} was never {waits:?}");
    }
    for run in ["many", "suspended", "stuck"] {
        assert_eq!(lab.witness.pods_ever(run), 0, "{run}");
    }
}

/// Runs of one namespace, and their files.
const BUSY_RUNS: usize = 60;
const BUSY_FILES: usize = 3;

/// Another namespace with the keys and the Pipeline of a laboratory, whose pods are played.
struct Quiet {
    namespace: Namespace,
    _playing: Playing,
}

impl Quiet {
    async fn beside(lab: &Lab) -> Self {
        let namespace = lab.testbed.namespace("quiet").await.unwrap();
        let (client, name) = (lab.testbed.client(), namespace.name.as_str());
        let keys = lab.api::<Secret>().get("keys").await.unwrap();
        let metadata = ObjectMeta { name: Some("keys".to_owned()), ..ObjectMeta::default() };
        let keys = Secret { metadata, ..keys };
        Api::namespaced(client.clone(), name).create(&PostParams::default(), &keys).await.unwrap();
        let pipeline = Pipeline::new("p", lab.api::<Pipeline>().get("p").await.unwrap().spec);
        Api::namespaced(client.clone(), name).create(&PostParams::default(), &pipeline).await.unwrap();
        let playing = Player::start(Api::namespaced(client, name), lab.server(), Duration::ZERO, 0);
        Self { namespace, _playing: playing }
    }

    fn runs(&self, lab: &Lab) -> Api<PipelineRun> {
        Api::namespaced(lab.testbed.client(), &self.namespace.name)
    }
}

fn has_succeeded(run: &PipelineRun) -> bool {
    phase(run) == Some(Phase::Succeeded)
}

/// One pass and one listing at a time, and sixty runs that want them: in the order of their requests, the run
/// that came last would end last.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_ends_before_half_of_the_sixty_that_another_namespace_created_before_it() {
    let bucket = serve(vec![Folder::new("f/", BUSY_FILES)], PAGE).await;
    let mut lab = stage("busy", &[("CONCURRENCY", "1"), ("MAX_LISTINGS", "1")], &bucket).await;
    let quiet = Quiet::beside(&lab).await;
    let both = format!("{},{}", lab.namespace.name, quiet.namespace.name);
    lab.restart_with("NAMESPACES", &both).await;
    lab.operator_works().await;
    let _playing = play(&lab, 0);
    let create = |number: usize| {
        let lab = &lab;
        async move { run(lab, &format!("r{number}"), "f/", json!({"parallelism": 1})).await }
    };
    futures::stream::iter(0..BUSY_RUNS).map(create).buffer_unordered(16).collect::<Vec<()>>().await;
    let runs = quiet.runs(&lab);
    let spec =
        json!({"pipelineRef": {"name": "p"}, "source": {"prefix": "f/"}, "execution": {"parallelism": 1}});
    let only = PipelineRun::new("only", serde_json::from_value(spec).unwrap());
    runs.create(&PostParams::default(), &only).await.unwrap();
    let ended = async || {
        let found = runs.get("only").await.doing(|| "look at the run".to_owned())?;
        Ok(has_succeeded(&found).then_some(()))
    };
    lab.eventually("the quiet run ends", ended).await;
    let busy = lab.list::<PipelineRun>().await;
    let ended = busy.iter().filter(|run| has_succeeded(run)).count();
    println!("{ended} of {BUSY_RUNS} runs ended before the one that was created after them");
    assert!(busy.len() == BUSY_RUNS && ended < BUSY_RUNS / 2, "{ended} of {} have ended", busy.len());

    // Nothing would remove the finalizers later.
    for runs in [lab.api::<PipelineRun>(), runs] {
        runs.delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
        let gone = async || {
            let left = runs.list_metadata(&ListParams::default().limit(1)).await;
            Ok(left.doing(|| "list the runs".to_owned())?.items.is_empty().then_some(()))
        };
        lab.eventually("all runs are gone", gone).await;
    }
}

/// A broken filter fails every file of a bucket of any size. `make soak` uses the sizes of production.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_large_bucket_of_which_every_file_fails_ends_with_the_reason() {
    let (files, page, high_water, dead_letters, pods) =
        if is_soak() { (200_000, 1_000, 100_000, 5_000, 100) } else { (1_000, PAGE, HIGH_WATER, 50, 20) };
    let bucket = serve(vec![Folder::new("f/", files)], page).await;
    let settings =
        [("QUEUE_HIGH_WATER", high_water.to_string()), ("MAX_DEAD_LETTERS", dead_letters.to_string())];
    let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
    let lab = stage("failing", &settings, &bucket).await;
    let playing = play(&lab, 1);
    run(&lab, "r", "f/", json!({"parallelism": pods, "maxAttempts": 1})).await;
    let ended = lab.finished("r").await;
    assert_eq!(condition(&ended, "Succeeded").1, "TooManyFailures");
    assert!(says_that_files_were_not_listed(&ended), "{}", message(&ended, "Succeeded"));
    let (total, succeeded, failed) = counts(&ended);
    assert!(succeeded == 0 && failed == total && total < files as i64, "{failed} of {total} failed");
    let tried = playing.player.claimed().len();
    assert!((dead_letters + 1..=dead_letters + 3 * pods).contains(&tried), "{tried} files were tried");
    lab.check_left_nothing(&ended).await;
}

/// Valkey's information about its memory.
struct MemoryInfo(String);

impl MemoryInfo {
    async fn read(valkey: &TestServer) -> Self {
        let info = valkey.raw(redis::cmd("INFO").arg("memory")).await;
        Self(redis::from_redis_value(info).unwrap())
    }

    fn bytes(&self, name: &str) -> usize {
        let value = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap().trim().parse().unwrap()
    }
}

/// The bytes that Valkey uses.
async fn memory_used(valkey: &TestServer) -> usize {
    MemoryInfo::read(valkey).await.bytes("used_memory")
}

/// The bytes that Valkey uses for its data. Clients' buffers shrink and grow by themselves, and a reply in
/// transit takes memory too, so the lowest of several measurements counts.
async fn memory_stored(valkey: &TestServer) -> usize {
    let mut least = usize::MAX;
    for _ in 0..5 {
        let info = MemoryInfo::read(valkey).await;
        least = least.min(info.bytes("used_memory") - info.bytes("mem_clients_normal"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    least
}

/// Measures what Valkey stores again and again, and keeps the most.
async fn watch_memory(valkey: &TestServer, most: &Cell<usize>) -> Infallible {
    loop {
        most.set(most.get().max(memory_stored(valkey).await));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_bucket_ten_times_larger_than_valkey_is_processed_while_a_small_run_starts_and_ends() {
    // Keys of nearly a kilobyte, so that few files fill the memory.
    let (large, small) = (Folder::new(&format!("{}/", "l".repeat(900)), 1_000), Folder::new("small/", 5));
    let bucket = serve(vec![large.clone(), small.clone()], PAGE).await;
    let (valkey, url) = own_valkey().await;
    let lab = stage("squeezed", &[("VALKEY_URL", &url), ("VALKEY_PASSWORD", "p")], &bucket).await;
    let _playing = play(&lab, 0);
    // An idle server already has its scripts and connections.
    run(&lab, "first", &small.prefix, json!({"parallelism": 4})).await;
    lab.finished("first").await;
    let room = large.files * large.key(0).len() / 10;
    let limit = memory_used(&valkey).await + room;
    valkey.raw(redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(limit)).await;
    let most = Cell::new(0);
    let processed = async {
        run(&lab, "large", &large.prefix, json!({"parallelism": 8})).await;
        lab.until("large", "it is processed", |run| of(run, |counts| counts.succeeded) >= 10).await;
        run(&lab, "small", &small.prefix, json!({"parallelism": 4})).await;
        assert_eq!(counts(&lab.finished("small").await), (5, 5, 0));
        let meanwhile = lab.get("large").await;
        assert_eq!(condition(&meanwhile, "Succeeded").0, "Unknown", "the large run is still under way");
        lab.finished("large").await
    };
    let ended = tokio::select! {
        ended = processed => ended,
        never = watch_memory(&valkey, &most) => match never {},
    };
    assert_eq!(counts(&ended), (large.files as i64, large.files as i64, 0));
    // Outcomes may exceed the limit by a little. The whole bucket would exceed it by nine times the room.
    println!("limit {limit}, room for files {room}, stored at most {}", most.get());
    assert!(most.get() <= limit + room, "{} bytes are stored, where {limit} are allowed", most.get());
    assert!(
        lab.witness.was_ever(|run| is_degraded_by(run, "QueueFull")),
        "no status says that Valkey is full"
    );
    lab.check_left_nothing(&ended).await;
}

/// The files that each pod holds.
async fn held(queue: &RunQueue) -> BTreeMap<String, Vec<EntryId>> {
    let mut held: BTreeMap<String, Vec<EntryId>> = BTreeMap::new();
    let visit = |claim: &Pending| held.entry(claim.consumer.clone()).or_default().push(claim.entry.clone());
    queue.for_each_pending(Duration::ZERO, visit).await.unwrap();
    held
}

/// The number of files that all pods hold, if they have succeeded with all of them.
async fn held_and_done(queue: &RunQueue) -> Option<usize> {
    let held: Vec<EntryId> = held(queue).await.into_values().flatten().collect();
    let reports = queue.reports_of(&held).await.unwrap();
    let is_done = |report: &Option<String>| {
        let said = report.as_deref().and_then(FileState::parse);
        said.is_some_and(|said| said.state == State::Succeeded)
    };
    reports.iter().all(is_done).then_some(held.len())
}

/// Without an operator nothing is settled or handed out: pods finish the files they hold, repeat their
/// reports, and wait. In `make soak` that lasts ten minutes.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn without_an_operator_a_hundred_warm_pods_wait_and_valkey_does_not_grow() {
    let bucket = serve(vec![Folder::new("f/", WARM_FILES)], 1_000).await;
    let (valkey, url) = own_valkey().await;
    let settings = [("VALKEY_URL", url.as_str()), ("VALKEY_PASSWORD", "p")];
    let mut lab = stage_in(Mode::Warm, "down", &settings, &bucket).await;
    let playing = Player::start(lab.api(), lab.server(), WARM_WORK, 0);
    run(&lab, "r", "f/", json!({"parallelism": WARM_PODS})).await;
    lab.until("r", "files are processed", |run| running(run) > 0).await;
    let queue = lab.queue("r").await;
    let all_work = async || Ok((held(&queue).await.len() == WARM_PODS).then_some(()));
    lab.eventually("all pods have files", all_work).await;
    lab.kill_operators().await;
    let all_wait = async || Ok(held_and_done(&queue).await);
    let waiting = lab.eventually("all pods wait", all_wait).await;

    let begun = playing.player.claimed();
    let pause = Duration::from_secs(if is_soak() { 600 } else { 30 });
    let (began, mut memory, mut reports_most) = (Instant::now(), Vec::new(), 0_usize);
    while began.elapsed() < pause {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let states = lab.run_id("r").key("states");
        let reports: usize = redis::cmd("HLEN").arg(states).query_async(&mut lab.raw().await).await.unwrap();
        reports_most = reports_most.max(reports);
        if began.elapsed() >= pause / 3 {
            memory.push(memory_stored(&valkey).await);
        }
    }
    // A measurement may coincide with replies in transit: the lowest of several shows the stored data.
    let (first, last) = memory.split_at(memory.len() / 2);
    let (before, after) = (first.iter().min().unwrap(), last.iter().min().unwrap());
    println!("{waiting} files held, {reports_most} reports, from {before} to {after} bytes");
    assert_eq!(held_and_done(&queue).await, Some(waiting), "nothing is settled or handed out");
    assert!(playing.player.claimed() == begun, "no pod works");
    let bound = WARM_PODS * HELD_MAX;
    assert!((WARM_PODS..=bound).contains(&waiting) && reports_most <= bound, "{waiting}, {reports_most}");
    assert!(*after as f64 <= *before as f64 * MEMORY_SPREAD_MAX, "from {before} to {after} bytes");

    lab.start_operator();
    let ended = lab.finished("r").await;
    assert_eq!(counts(&ended), (WARM_FILES as i64, WARM_FILES as i64, 0));
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (0, 0));
    let claimed = playing.player.claimed();
    assert!(claimed.len() == WARM_FILES && claimed.values().all(|times| *times == 1), "each file once");
    assert_eq!(lab.witness.pods_ever("r"), WARM_PODS, "no pod is replaced");
    lab.check_left_nothing(&ended).await;
    lab.witness.check_monotonic();
}
