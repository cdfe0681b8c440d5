//! The seconds of suites: recorded while they run, and shown at the end with a mark on a failed one.

use std::fs;
use std::process::Command;

use tests::root;

/// The output of a `cargo test` of three suites; the last one fails.
const CARGO_TEST: &str = r#"
echo "     Running queue/main.rs (/cache/target/debug/deps/queue-0123abcd)" >&2
echo "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 75.31s"
echo "     Running unittests src/lib.rs (/cache/target/debug/deps/crds-89abcdef)" >&2
echo "test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.21s"
echo "     Running unittests src/lib.rs (/cache/target/debug/deps/two_words-01234567)" >&2
echo "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.02s"
exit 101
"#;

/// The output of a script that runs suites below `suite.sh --all`, and its exit code.
fn all(suites: &str) -> (String, i32) {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("suites.sh");
    fs::write(&inner, format!("set -e\n{suites}\n")).unwrap();
    let output = Command::new(root().join("tools/suite.sh"))
        .args(["--all", "bash", inner.to_str().unwrap()])
        .env("CARGO_TARGET_DIR", folder.path())
        .env("SUITE", root().join("tools/suite.sh"))
        .env("CARGO_TEST", CARGO_TEST)
        .output()
        .unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code().unwrap())
}

/// The rows of the printed table: seconds and names.
fn table(printed: &str) -> Vec<(u64, &str)> {
    let table = printed.split("seconds per suite\n").nth(1).unwrap_or_else(|| panic!("no table: {printed}"));
    table
        .lines()
        .map(|row| row.trim_start().split_once("  ").unwrap())
        .map(|(seconds, name)| (seconds.parse().unwrap(), name))
        .collect()
}

#[test]
fn suites_are_listed_with_their_seconds() {
    let (printed, code) = all("$SUITE fmt true\n$SUITE 'start of the cluster' sleep 2");
    assert_eq!(code, 0, "{printed}");
    let rows = table(&printed);
    let names: Vec<&str> = rows.iter().map(|(_, name)| *name).collect();
    assert_eq!(names, ["fmt", "start of the cluster", "total, including the time between suites"]);
    assert!(rows[1].0 >= 2 && rows[2].0 >= rows[1].0, "{printed}");
}

#[test]
fn the_suite_that_failed_is_marked_and_its_code_kept() {
    let suites = "$SUITE fmt true\n$SUITE --each machine bash -c \"$CARGO_TEST\"\n$SUITE late true";
    let (printed, code) = all(suites);
    assert_eq!(code, 101, "{printed}");
    assert!(printed.starts_with("     Running queue/main.rs"), "what it printed is there too: {printed}");
    let rows = table(&printed);
    let names: Vec<&str> = rows.iter().map(|(_, name)| *name).collect();
    // Nothing after the failed suite, and no suite that took no time.
    let expected = ["fmt", "machine  FAILED", "- queue", "- two_words (unit)  FAILED"];
    assert_eq!(names, [&expected[..], &["total, including the time between suites"]].concat());
    assert_eq!(rows[2].0, 75, "{printed}");
}

/// A target folder that exists counts as built, and gets no dependencies of another checkout.
#[test]
fn the_target_folder_is_not_made_before_the_first_suite() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    let check = format!("test ! -e {}", target.display());
    let output = Command::new(root().join("tools/suite.sh"))
        .args(["--all", "bash", "-c", &format!("{check} && tools/suite.sh fmt true")])
        .env("CARGO_TARGET_DIR", &target)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read_to_string(target.join("suites")).unwrap().ends_with(" ok fmt\n"));
}

#[test]
fn a_suite_alone_is_only_run() {
    let output = Command::new(root().join("tools/suite.sh"))
        .args(["--each", "queue", "bash", "-c", "echo ran; exit 7"])
        .env_remove("SUITES")
        .output()
        .unwrap();
    assert_eq!((output.stdout.as_slice(), output.status.code()), (b"ran\n".as_slice(), Some(7)));
}
