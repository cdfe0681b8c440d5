//! A run when nothing is broken except some of its files.

use std::collections::BTreeSet;

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use http::Method;
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Secret};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testbed::images::{Set, reference};
use testbed::{Fault, FaultyS3, Rule};
use tests::s3::escape;
use tokio::sync::OnceCell;

use crate::harness::{Lab, Mode, condition, counts, filter, is_degraded_by, message, phase, running};
use crate::warm::{Process, processes};

in_both_modes! {
    a_hundred_files_are_exactly_accounted_for
    results_are_published_once_also_after_a_retry
    concurrent_filters_run_side_by_side
    sample_filters_answer_for_each_file
    any_key_is_a_file
    files_of_any_size_arrive_whole_and_so_do_their_results
    a_prefix_that_names_a_secret_variable_is_a_prefix_and_shows_no_secret
    people_are_told_what_happened_and_no_secret
}

/// Of a hundred files, five fail permanently and five fail once: the counts and the dead letters are exact,
/// tools can wait for the end, and no pod is left. Finished pods do not accumulate meanwhile. With a pod per
/// file, forty files show the same.
async fn a_hundred_files_are_exactly_accounted_for(mode: Mode) {
    let (files, pods) = if mode == Mode::Warm { (100, 20) } else { (40, 10) };
    let lab = Lab::in_mode("hundred", mode).await;
    lab.put_many("in/", files, |number| match number % 20 {
        0 => "fail-on-marker\nFAIL-HERE".to_owned(),
        1 => "fail-times 1".to_owned(),
        _ => "copy".to_owned(),
    })
    .await;
    lab.put("in/folder/", "").await;
    lab.pipeline(json!({"source": {"bucket": {"prefix": "in/"}}})).await;
    lab.run("r", json!({"execution": {"parallelism": pods}})).await;
    lab.kubectl(&["wait", "--for=condition=Ready=false", "plr/r", "--timeout=600s"]).unwrap();
    let run = lab.finished("r").await;
    let bad = files / 20;
    assert_eq!(counts(&run), (files as i64, (files - bad) as i64, bad as i64));
    assert_eq!(phase(&run), Some(Phase::Failed));
    assert_eq!(condition(&run, "Succeeded"), ("False".into(), "FilesFailed".into()));
    assert_eq!(condition(&run, "Stalled").0, "True");
    let dead: BTreeSet<String> = lab.dead_letters("r").await.into_iter().map(|letter| letter.file).collect();
    assert_eq!(dead, (0..bad).map(|number| format!("in/{:04}", number * 20)).collect());
    let status = run.status.as_ref().unwrap();
    assert_eq!(status.recent_failures.len(), bad);
    assert!(
        status
            .recent_failures
            .iter()
            .all(|failure| failure.attempts == 3 && failure.reason.contains("marked to fail"))
    );
    assert_eq!(status.progress, Some(format!("{files}/{files}")));
    assert_ne!(status.duration.as_deref(), Some("0s"));
    lab.check_left_nothing(&run).await;
    lab.witness.check_monotonic();
    assert!(
        lab.witness.most_pods() <= pods,
        "more pods than parallelism: {} at once",
        lab.witness.most_pods()
    );
    // Five failed pods are kept; all working pods may end together, of which a pass removes sixteen.
    let ended = lab.witness.most_ended_pods();
    assert!(ended <= 5 + pods + 16, "{ended} pods had ended");
}

/// The sink has exactly the expected objects, including those of files that needed a second attempt.
async fn results_are_published_once_also_after_a_retry(mode: Mode) {
    let lab = Lab::in_mode("sink", mode).await;
    for (key, content) in
        [("in/a", "copy"), ("in/b", "fail-times 1"), ("in/sub/c", "copy"), ("out-of-prefix", "copy")]
    {
        lab.put(key, content).await;
    }
    // One attempt fails in its filter, and another one in the publisher.
    let proxy = FaultyS3::start(testbed::services::S3_IP_URL).await.unwrap();
    proxy.inject(Rule::every(Fault::Forbidden, "/results/a/").method(Method::PUT).times(1));
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    sink["endpoint"] = json!(proxy.url);
    let source = json!({"bucket": {"prefix": "in/"}});
    lab.pipeline(json!({"source": source, "sink": {"bucket": sink}})).await;
    lab.run("r", json!({})).await;
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), phase(&run)), ((3, 3, 0), Some(Phase::Succeeded)));
    // Only the filter's failure is charged to the file.
    assert_eq!((lab.tally("r", "retried").await, lab.tally("r", "disrupted").await), (1, 1));
    let results = lab.keys_below("results/").await;
    assert_eq!(results, ["results/a/copy", "results/b/copy", "results/sub/c/copy"]);
    for (key, content) in [("a", "copy"), ("b", "fail-times 1"), ("sub/c", "copy")] {
        let stored = lab.services.s3.get(&lab.bucket, &format!("results/{key}/copy")).await.unwrap();
        assert_eq!(stored, content.as_bytes(), "{key}");
    }
    lab.check_left_nothing(&run).await;
}

/// Kubernetes replaces such words with variables, including secret ones, and `$$` with `$`.
async fn a_prefix_that_names_a_secret_variable_is_a_prefix_and_shows_no_secret(mode: Mode) {
    let lab = Lab::in_mode("dollars", mode).await;
    let odd = "$(S3_SECRET_ACCESS_KEY)/$$/";
    for (key, content) in [("good", "copy"), ("bad", "exit 1")] {
        lab.put(&escape(&format!("in/{odd}{key}")), content).await;
    }
    let mut sink = lab.bucket();
    sink["prefix"] = json!(format!("out/{odd}"));
    let source = json!({"bucket": {"prefix": format!("in/{odd}")}});
    lab.pipeline(json!({"source": source, "sink": {"bucket": sink}})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 1, 1), "{:?}", run.status.unwrap().recent_failures);
    assert_eq!(lab.keys_below("out/").await, [format!("out/{odd}good/copy")]);
    let letters = lab.dead_letters("r").await;
    assert_eq!(letters[0].file, format!("in/{odd}bad"));
    lab.events("r", "FileFailed", 1).await;
    let told = serde_json::to_string(&(lab.list::<Event>().await, run)).unwrap();
    let everything = format!("{letters:?} {told}");
    assert!(!everything.contains(lab.services.s3.keys().1), "a secret is shown");
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn an_empty_bucket_is_told_and_starts_nothing() {
    let lab = Lab::new("empty").await;
    lab.put("folder/", "").await;
    lab.pipeline(json!({})).await;
    lab.run("r", json!({})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (0, 0, 0));
    assert_eq!(condition(&run, "Degraded"), ("True".into(), "NoFilesFound".into()));
    assert!(lab.jobs().await.is_empty());
}

/// Keys that look like paths or contain any character, and empty files.
async fn any_key_is_a_file(mode: Mode) {
    let lab = Lab::in_mode("keys", mode).await;
    let keys = [
        "with space",
        "new\nline",
        "ünï/cödé 文件",
        "plus+percent%41",
        "dots/../up",
        "empty",
        &"l".repeat(1_000),
    ];
    for key in keys {
        let content = if key == "empty" { "" } else { "copy" };
        let path = format!("/{}/{}", lab.bucket, escape(key));
        let (status, _) = lab.services.s3.request(Method::PUT, &path, content.into()).await.unwrap();
        // Some servers on a file system refuse some keys, which therefore cannot be listed.
        if !status.is_success() {
            eprintln!("the S3 server does not take {key:?}: {status}");
        }
    }
    let stored = lab.keys_below("").await.len() as i64;
    assert!(stored >= 5, "{stored}");
    lab.pipeline(json!({})).await;
    lab.run("r", json!({})).await;
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (stored, stored, 0), "{:?}", run.status.unwrap().recent_failures);
}

/// None, one byte, and what is just not and just transferred in parts, of which four are under way at a time.
async fn files_of_any_size_arrive_whole_and_so_do_their_results(mode: Mode) {
    const PART: usize = 8 << 20;
    let lab = Lab::in_mode("sizes", mode).await;
    let sizes = [0, 1, PART, PART + 1, 5 * PART + 3];
    // No two parts are the same, so that none can take the place of another.
    let content = |size: usize| -> Vec<u8> {
        (0..size as u32).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    };
    for size in sizes {
        lab.services.s3.put(&lab.bucket, &format!("in/{size}"), content(size)).await.unwrap();
    }
    let mut sink = lab.bucket();
    sink["prefix"] = json!("results/");
    let source = json!({"bucket": {"prefix": "in/"}});
    lab.pipeline(json!({"source": source, "filters": [filter("main", &["copy"])], "sink": {"bucket": sink}}))
        .await;
    lab.run("r", json!({"execution": {"maxAttempts": 1}})).await;
    let (run, files) = (lab.finished("r").await, sizes.len() as i64);
    assert_eq!(counts(&run), (files, files, 0), "{:?}", run.status.unwrap().recent_failures);
    for size in sizes {
        let stored = lab.services.s3.get(&lab.bucket, &format!("results/{size}/copy")).await.unwrap();
        assert!(stored == content(size), "{size} bytes became {}, or others", stored.len());
    }
}

/// `order: Sequential`: a filter starts after the previous one has ended, and sees its results.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn sequential_filters_run_one_after_the_other() {
    let lab = Lab::new("order").await;
    // Two files, one after the other: while the second is processed, the failed pod of the first is kept.
    lab.put_many("", 2, |_| "copy".to_owned()).await;
    let env = json!([{"name": "SOURCE_PATH", "value": "/ws/out/first/copy"}]);
    let mut second = filter("second", &["sleep", "1"]);
    second["env"] = env.clone();
    let mut third = filter("third", &["exit", "7"]);
    third["env"] = env;
    lab.pipeline(json!({"filters": [filter("first", &["sleep", "1"]), second, third]})).await;
    lab.run("r", json!({"execution": {"maxAttempts": 1, "parallelism": 1}})).await;
    let pod = lab
        .pod_that("its last filter has ended", |pod| {
            let ended =
                pod.status.as_ref()?.container_statuses.as_ref()?.iter().all(|container| {
                    container.state.as_ref().is_some_and(|state| state.terminated.is_some())
                });
            ended.then_some(())
        })
        .await;
    let status = pod.status.unwrap();
    let ended = |name: &str| {
        let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
        all.clone()
            .find(|container| container.name == name)
            .and_then(|container| container.state.clone()?.terminated)
            .unwrap()
    };
    for (before, after) in [("claimer", "first"), ("first", "second"), ("second", "third")] {
        assert!(ended(before).finished_at <= ended(after).started_at, "{before} before {after}");
    }
    assert_eq!(ended("second").exit_code, 0, "it read what the first wrote");
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 0, 2));
    assert_eq!(run.status.unwrap().recent_failures[0].exit_code, Some(7));
}

/// `order: Concurrent`: all filters run at the same time, on the same file.
async fn concurrent_filters_run_side_by_side(mode: Mode) {
    let lab = Lab::in_mode("beside", mode).await;
    lab.put("a", "sleep 5").await;
    let filters = [filter("first", &["obey"]), filter("second", &["obey"])];
    lab.pipeline(json!({"order": "Concurrent", "filters": filters})).await;
    lab.run("r", json!({})).await;
    match mode {
        Mode::PodPerFile => {
            lab.pod_that("both filters run", |pod| {
                let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
                let running = |container: &ContainerStatus| container.state.as_ref()?.running.clone();
                (containers.iter().filter_map(running).count() == 2).then_some(())
            })
            .await;
        }
        // Containers always run; what runs per file is a process.
        Mode::Warm => {
            let both = async || Ok((processes(&lab, "r", Process::Filter).len() == 2).then_some(()));
            lab.eventually("both filters run", both).await;
        }
    }
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (1, 1, 0));
    lab.check_left_nothing(&run).await;
}

/// A template of docs/write-a-filter.md, and its results.
struct Sample {
    /// The name of its run.
    name: &'static str,
    /// The Pipeline with its filters, which users copy.
    pipeline: &'static str,
    good: &'static [u8],
    /// Its result for a good file, and a part of the content.
    result: (&'static str, &'static str),
    /// A file that it can never process, and its reason.
    bad: (&'static [u8], &'static str),
    /// Whether it says that another attempt at the bad file would not help: by its answer if it speaks
    /// `Lines`, otherwise by exit code 3.
    is_final: bool,
}

const SAMPLES: [Sample; 5] = [
    Sample {
        name: "checksum-sh",
        pipeline: "examples/filters/checksum-sh/pipeline.yaml",
        good: b"hello\n",
        result: ("sha256.txt", "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03\n"),
        bad: (b"", "the file is empty"),
        is_final: true,
    },
    Sample {
        name: "word-count-py",
        pipeline: "examples/filters/word-count-py/pipeline.yaml",
        good: "drei kleine Wörter".as_bytes(),
        result: ("words.json", r#"{"words": 3}"#),
        bad: (b"\xff\xd8\xff", "the file is not UTF-8 text"),
        is_final: true,
    },
    Sample {
        name: "file-type-py",
        pipeline: "examples/filters/file-type-py/pipeline.yaml",
        good: b"%PDF-1.7",
        result: ("type.json", r#""type": "application/pdf""#),
        bad: (b"plain text", "the file is of no known type"),
        is_final: true,
    },
    Sample {
        name: "language",
        pipeline: "examples/filters/language/pipeline.yaml",
        good: b"Der Hund und die Katze sind in dem Haus.",
        result: ("language.json", r#""language":"de""#),
        bad: (b"0 1 1 2 3 5 8", "the text is in no language that the filter knows"),
        is_final: true,
    },
    // Two filters, of which the second reads what the first wrote.
    Sample {
        name: "thumbnail",
        pipeline: "examples/demo/warm-pipeline.yaml",
        good: GREY_DOT,
        result: ("annotated.png", "PNG"),
        bad: (b"plain text", "/ws/input is not a picture"),
        is_final: false,
    },
];

/// A PNG of one grey pixel.
const GREY_DOT: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0\x3a\x7e\x9b\x55\
    \0\0\0\x0aIDAT\x78\xda\x63\x68\0\0\0\x82\0\x81\xda\x45\x08\x3b\0\0\0\0IEND\xae\x42\x60\x82";

/// The filters of a Pipeline that users copy, with the testbed's images.
fn filters_of(pipeline: &str) -> Value {
    let text = std::fs::read_to_string(tests::root().join(pipeline)).unwrap();
    let mut pipeline: Value = serde_saphyr::from_str(&text).unwrap();
    let mut filters = pipeline["spec"]["filters"].take();
    for filter in filters.as_array_mut().unwrap() {
        let image = filter["image"].as_str().unwrap().rsplit('/').next().unwrap();
        filter["image"] = json!(reference(image.split(':').next().unwrap()));
        filter["imagePullPolicy"] = json!("Never");
    }
    filters
}

/// The templates in shell, Python and Rust, with the filters of the Pipelines that users copy. A bad file is
/// a dead letter, after its first attempt if the filter says so.
async fn sample_filters_answer_for_each_file(mode: Mode) {
    static LOADED: OnceCell<()> = OnceCell::const_new();
    let lab = Lab::in_mode("samples", mode).await;
    let load = || async { lab.testbed.load_images(&[Set::Filters, Set::Scripts]).unwrap() };
    LOADED.get_or_init(load).await;
    for Sample { name, pipeline, good, result, bad, is_final } in SAMPLES {
        let put = async |file: &str, content: &'static [u8]| {
            lab.services.s3.put(&lab.bucket, &format!("{name}/{file}"), content).await.unwrap();
        };
        put("bad", bad.0).await;
        put("good", good).await;
        let mut sink = lab.bucket();
        sink["prefix"] = json!("results/");
        lab.pipeline(json!({"filters": filters_of(pipeline), "sink": {"bucket": sink}})).await;
        let attempts = if is_final { 1 } else { 2 };
        // In Warm mode, the pod that has refused a file continues with the next one.
        let (parallelism, pods) = if mode == Mode::Warm { (1, 1) } else { (2, 1 + attempts) };
        let execution = json!({"parallelism": parallelism, "maxAttempts": 2, "nonRetryableExitCodes": [3]});
        let source = json!({"prefix": format!("{name}/")});
        lab.run(name, json!({"source": source, "execution": execution})).await;
        let run = lab.finished(name).await;
        assert_eq!(counts(&run), (2, 1, 1), "{name}: {:?}", run.status.unwrap().recent_failures);
        let letters = lab.dead_letters(name).await;
        assert_eq!((letters[0].file.clone(), letters[0].attempts), (format!("{name}/bad"), attempts));
        assert!(letters[0].reason.contains(bad.1), "{}", letters[0].reason);
        let key = format!("results/{name}/good/{}", result.0);
        assert_eq!(lab.keys_below(&format!("results/{name}/")).await, [key.as_str()]);
        let stored = lab.services.s3.get(&lab.bucket, &key).await.unwrap();
        let stored = String::from_utf8_lossy(&stored);
        assert!(stored.contains(result.1), "{stored}");
        assert_eq!(lab.witness.pods_ever(name), pods as usize, "{name}: no pod is replaced");
        lab.api::<Pipeline>().delete("p", &Default::default()).await.unwrap();
    }
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_waits_for_its_pipeline_and_its_secret_and_goes_on() {
    let lab = Lab::new("waits").await;
    lab.put("a", "copy").await;
    // New runs cannot use a Pipeline that is being deleted and is kept only by a finalizer.
    lab.pipeline(json!({})).await;
    let pipelines = lab.api::<Pipeline>();
    let hold = |finalizers: Value| Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
    let params = PatchParams::default();
    pipelines.patch("p", &params, &hold(json!(["example.com/held"]))).await.unwrap();
    pipelines.delete("p", &Default::default()).await.unwrap();
    lab.run("r", json!({})).await;
    let waiting = lab.until("r", "it is told", |run| is_degraded_by(run, "PipelineNotFound")).await;
    assert!(message(&waiting, "Degraded").contains("is being deleted"), "{}", message(&waiting, "Degraded"));
    pipelines.patch("p", &params, &hold(json!([]))).await.unwrap();
    let gone = |run: &PipelineRun| message(run, "Degraded").contains("there is no Pipeline");
    let waiting = lab.until("r", "it misses its Pipeline", gone).await;
    assert_eq!(
        (condition(&waiting, "Reconciling").0, condition(&waiting, "Stalled").0),
        ("True".into(), "False".into())
    );
    let mut bucket = lab.bucket();
    bucket["credentialsSecret"] = json!({"name": "late"});
    lab.pipeline(json!({"source": {"bucket": bucket}})).await;
    let waiting =
        lab.until("r", "it misses its Secret", |run| is_degraded_by(run, "CredentialsMissing")).await;
    assert!(
        message(&waiting, "Degraded").contains("/late\" does not exist"),
        "{}",
        message(&waiting, "Degraded")
    );
    lab.create::<Secret>(json!({"metadata": {"name": "late"}, "stringData": {"accessKeyId": "x"}})).await;
    lab.until("r", "the Secret lacks a key", |run| is_degraded_by(run, "CredentialsInvalid")).await;
    lab.api::<Secret>().delete("late", &Default::default()).await.unwrap();
    lab.secret("late").await;
    let run = lab.finished("r").await;
    assert_eq!((counts(&run), condition(&run, "Degraded").0), ((1, 1, 0), "False".into()));
}

/// A run is a snapshot: later changes of the Pipeline do not affect it, even if another operator continues
/// it. Its own source narrows the Pipeline's.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_uses_the_pipeline_as_it_was_and_its_own_part_of_the_files() {
    let mut lab = Lab::new("snapshot").await;
    for key in ["in/day1/a.txt", "in/day1/b.txt", "in/day1/c.jpg", "in/day2/d.txt"] {
        lab.put(key, "sleep 2").await;
    }
    lab.pipeline(json!({"source": {"bucket": {"prefix": "in/"}, "include": ["**/*.jpg"]}})).await;
    let source = json!({"prefix": "in/day1/", "include": ["*.txt"]});
    lab.run("r", json!({"source": source, "execution": {"parallelism": 1}})).await;
    lab.until("r", "a file is processed", |run| running(run) > 0).await;
    lab.api::<Pipeline>().delete("p", &Default::default()).await.unwrap();
    // Another operator remembers nothing, and needs the snapshot for the waiting file.
    lab.kill_operators().await;
    lab.start_operator();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (2, 2, 0));
    lab.check_left_nothing(&run).await;
}

/// Object names and label values at their limits.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn a_run_with_the_longest_name_works() {
    let lab = Lab::new("names").await;
    lab.put("a", "copy").await;
    lab.pipeline(json!({})).await;
    let name = format!("{}abc", "long.".repeat(50));
    assert_eq!(name.len(), 253);
    lab.run(&name, json!({})).await;
    let run = lab.finished(&name).await;
    assert_eq!(counts(&run), (1, 1, 0));
    assert!(run.status.as_ref().unwrap().job_name.as_ref().unwrap().len() <= 63);
    lab.check_left_nothing(&run).await;
}

/// What people see: few events, each informative, and none containing a secret.
async fn people_are_told_what_happened_and_no_secret(mode: Mode) {
    let mut lab = Lab::in_mode("told", mode).await;
    lab.set("KEEP_RESULTS", "1000");
    let log_before = lab.operator_log().len();
    lab.restart_with("LOG_FORMAT", "json").await;
    lab.put_many("", 14, |_| "exit 3".to_owned()).await;
    lab.pipeline(json!({})).await;
    let pods = if mode == Mode::Warm { 2 } else { 10 };
    lab.run("r", json!({"execution": {"maxAttempts": 1, "parallelism": pods}})).await;
    let pod = lab.pod_that("it is there", |_| Some(())).await;
    let workers = lab.api::<Secret>().get("r-queue").await.unwrap();
    let run = lab.finished("r").await;
    assert_eq!(counts(&run), (14, 0, 14));
    assert_eq!(run.status.as_ref().unwrap().recent_failures.len(), 10, "the status shows the newest ten");
    for reason in ["Listed", "JobCreated", "FilesFailed"] {
        lab.events("r", reason, 1).await;
    }
    // One for each of the first ten that failed, by name.
    let failed = lab.events("r", "FileFailed", 10).await;
    let notes = failed.iter().filter_map(|event| event.message.as_deref());
    let files: BTreeSet<&str> = notes.filter_map(|note| Some(note.split_once(": ")?.0)).collect();
    assert_eq!((failed.len(), files.len()), (10, 10), "{files:?}");
    let events = lab.list::<Event>().await;
    let about_the_run =
        events.iter().filter(|event| event.involved_object.kind.as_deref() == Some("PipelineRun")).count();
    assert!(about_the_run <= 16, "{about_the_run} events for one run");
    let (_, key) = lab.services.s3.keys();
    let everything =
        serde_json::to_string(&(&events, &run, pod, lab.jobs().await)).unwrap() + &lab.operator_log();
    let of_workers = String::from_utf8(workers.data.unwrap()["password"].0.clone()).unwrap();
    let secrets = [key, &lab.services.valkey_password, &of_workers];
    assert!(secrets.iter().all(|secret| !everything.contains(*secret)), "a secret is shown");
    // Programs read it, too.
    let log = lab.operator_log();
    let lines: Vec<Value> =
        log[log_before..].lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let settled = lines.iter().filter(|line| line["message"] == "settled");
    assert_eq!(settled.filter(|line| line["run"] == "r").count(), 14, "{}", lines.len());
    // What is kept, and for how long: results, dead letters (168h) and the Job (24h).
    let key = |part: &str| lab.run_id("r").key(part);
    let mut valkey = lab.raw().await;
    let results: u64 = redis::cmd("XLEN").arg(key("results")).query_async(&mut valkey).await.unwrap();
    let left: u64 = redis::cmd("TTL").arg(key("dlq")).query_async(&mut valkey).await.unwrap();
    assert_eq!(results, 14);
    assert!((160 * 3_600..=168 * 3_600).contains(&left), "{left} s");
    assert_eq!(lab.jobs().await[0].spec.as_ref().unwrap().ttl_seconds_after_finished, Some(24 * 3_600));
}
