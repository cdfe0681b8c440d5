//! The sample filters with real processes. Those that speak `Lines` run in a pod that processes many files,
//! and in a pod for each file; scripts that are started per file need the shim only in the first.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use shim::wire::Ending;

use crate::harness::{Container, Running};

/// A sample filter that speaks `Lines`, and its results.
struct Sample {
    program: PathBuf,
    /// Its command, if the program is `/srv/sample`.
    command: &'static [&'static str],
    good: &'static str,
    /// The file that it writes for a good input, and its content.
    result: (&'static str, &'static str),
    /// An input that it can never process, and its reason.
    bad: (&'static str, &'static str),
}

fn samples() -> [Sample; 2] {
    let language = Sample {
        program: built("language"),
        command: &["/srv/sample"],
        good: "Der Hund und die Katze sind in dem Haus.",
        result: ("language.json", r#""language":"de""#),
        bad: ("0 1 1 2 3 5 8", "the text is in no language that the filter knows"),
    };
    let file_type = Sample {
        program: root().join("examples/filters/file-type-py/filter.py"),
        command: &["python3", "/srv/sample"],
        good: "%PDF-1.7",
        result: ("type.json", r#""type": "application/pdf""#),
        bad: ("plain text", "the file is of no known type"),
    };
    [language, file_type]
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A program of another package, which cargo does not build for this suite. It uses the features of the whole
/// workspace, so that most of it is already compiled.
fn built(name: &str) -> PathBuf {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--locked", "--workspace", "--bin", name]);
    assert!(build.current_dir(root()).status().unwrap().success(), "{name} cannot be built");
    Path::new(env!("CARGO_BIN_EXE_shim")).with_file_name(name)
}

impl Sample {
    fn container(&self) -> Container {
        let container = Container::new(self.command).option("--lines");
        fs::copy(&self.program, container.path("sample")).unwrap();
        container
    }

    /// Processes one file in a pod of its own; also returns the exit code.
    fn run_once(&self, container: Container, input: &str) -> (Running, i32) {
        fs::write(container.path("ws/input"), input).unwrap();
        let mut running = container.option("--once").start();
        let (status, log) = running.wait();
        (running, status.code().unwrap_or_else(|| panic!("{log}")))
    }
}

/// Makes the workspace behave as if it were not writable.
fn break_results(of: &Path) {
    fs::remove_dir(of).unwrap();
    fs::write(of, "").unwrap();
}

#[test]
fn ten_files_go_through_one_process_that_loads_its_model_once() {
    for sample in samples() {
        let mut worker = sample.container().serve();
        let result = worker.running.path("ws/out/detect").join(sample.result.0);
        for _ in 0..5 {
            assert_eq!(worker.process(sample.good).ending, Ending::Accepted, "{}", worker.running.log());
            let text = fs::read_to_string(&result).unwrap();
            assert!(text.contains(sample.result.1) && text.contains("s3://videos/day 1.mp4"), "{text}");
            fs::remove_file(&result).unwrap();
            let refused = worker.process(sample.bad.0);
            assert_eq!(
                (refused.ending, refused.text.as_str()),
                (Ending::Refused { retry: false }, sample.bad.1)
            );
            assert!(!result.exists());
        }
        let (_, log) = worker.leave();
        assert_eq!(log.matches("loaded ").count(), 1, "{log}");
    }
}

#[test]
fn a_failure_that_may_pass_asks_for_another_attempt() {
    for sample in samples() {
        let mut worker = sample.container().serve();
        let results = worker.running.path("ws/out/detect");
        break_results(&results);
        let refused = worker.process(sample.good);
        assert_eq!(refused.ending, Ending::Refused { retry: true });
        assert!(refused.text.contains("Not a directory"), "{}", refused.text);
        fs::remove_file(&results).unwrap();
        fs::create_dir(&results).unwrap();
        assert_eq!(worker.process(sample.good).ending, Ending::Accepted, "{}", worker.running.log());
    }
}

#[test]
fn in_a_pod_of_its_own_a_file_ends_with_an_exit_code() {
    for sample in samples() {
        let (running, code) = sample.run_once(sample.container(), sample.good);
        let result = fs::read_to_string(running.path("ws/out/detect").join(sample.result.0)).unwrap();
        assert!(code == 0 && result.contains(sample.result.1), "{code}: {result}");

        let (running, code) = sample.run_once(sample.container(), sample.bad.0);
        assert_eq!((code, fs::read_to_string(running.path("log")).unwrap().as_str()), (65, sample.bad.1));

        let container = sample.container();
        break_results(&container.path("ws/out/detect"));
        let (running, code) = sample.run_once(container, sample.good);
        let reason = fs::read_to_string(running.path("log")).unwrap();
        assert!(code == 1 && reason.contains("Not a directory"), "{code}: {reason}");
    }
}

#[test]
fn a_script_that_is_started_per_file_answers_with_its_exit_code() {
    let checksum = ("sh", "checksum-sh/filter.sh", "sha256.txt", "5891b5b522d5df08");
    let word_count = ("python3", "word-count-py/filter.py", "words.json", r#"{"words": 1}"#);
    for ((interpreter, script, result, content), bad, reason) in [
        (checksum, b"".as_slice(), "the file is empty"),
        (word_count, b"\xff\xd8\xff", "the file is not UTF-8 text"),
    ] {
        let container = Container::new(&[interpreter, "/srv/sample"])
            .env("SOURCE_PATH", "/srv/ws/input")
            .env("OUTPUT_PATH", "/srv/ws/out/detect");
        fs::copy(root().join("examples/filters").join(script), container.path("sample")).unwrap();
        let mut worker = container.serve();
        let result = worker.running.path("ws/out/detect").join(result);
        for _ in 0..2 {
            assert_eq!(worker.process("hello\n").ending, Ending::Exited(0), "{}", worker.running.log());
            let text = fs::read_to_string(&result).unwrap();
            assert!(text.contains(content), "{script}: {text}");
            fs::remove_file(&result).unwrap();
            let refused = worker.process(bad);
            assert_eq!((refused.ending, refused.text.as_str()), (Ending::Exited(3), reason));
            assert!(!result.exists());
        }
        break_results(result.parent().unwrap());
        let failed = worker.process("hello\n");
        assert!(matches!(failed.ending, Ending::Exited(code) if ![0, 3].contains(&code)), "{failed:?}");
    }
}
