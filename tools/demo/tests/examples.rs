//! The manifests of the demo are as good, and as bad, as the demo says.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::{ffi::OsString, path::Path};

/// Exit code and output of `openfilter validate`.
fn validate(files: &[&str]) -> (u8, String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/demo");
    let files = files.iter().flat_map(|file| [OsString::from("-f"), folder.join(file).into_os_string()]);
    let words = ["openfilter", "validate"].map(OsString::from).into_iter().chain(files);
    let mut out = Vec::new();
    let code = cli::run(words, std::io::empty(), &mut out);
    (code, String::from_utf8(out).unwrap())
}

#[test]
fn the_pipeline_and_its_run_are_valid() {
    let (code, text) = validate(&["namespace.yaml", "secret.yaml", "pipeline.yaml", "run.yaml"]);
    assert_eq!((code, text.as_str()), (0, "2 checked, nothing is wrong\n"));
}

#[test]
fn the_bad_run_has_two_mistakes_and_nothing_else_has_any() {
    let (code, text) = validate(&["."]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("[run-prefix]") && text.contains("[glob]"), "{text}");
    assert!(text.ends_with("3 checked, 2 mistakes\n"), "{text}");
}
