//! The demo's manifests are as valid, and as invalid, as the demo says.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use crds::v1alpha1::{Filter, Mode, Pipeline};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/demo").join(name)
}

fn pipeline(name: &str) -> Pipeline {
    serde_saphyr::from_str(&std::fs::read_to_string(example(name)).unwrap()).unwrap()
}

/// Exit code and output of `openfilter validate`.
fn validate(files: &[&str]) -> (u8, String) {
    let files = files.iter().flat_map(|file| [OsString::from("-f"), example(file).into_os_string()]);
    let words = ["openfilter", "validate"].map(OsString::from).into_iter().chain(files);
    let mut out = Vec::new();
    let code = cli::run(words, std::io::empty(), &mut out);
    (code, String::from_utf8(out).unwrap())
}

#[test]
fn the_pipelines_and_their_runs_are_valid() {
    let setup = ["namespace.yaml", "secret.yaml"];
    for [pipeline, run] in [["pipeline.yaml", "run.yaml"], ["warm-pipeline.yaml", "warm-run.yaml"]] {
        let (code, text) = validate(&[&setup[..], &[pipeline, run]].concat());
        assert_eq!((code, text.as_str()), (0, "2 checked, nothing is wrong\n"), "{pipeline}");
    }
}

#[test]
fn the_warm_pipeline_has_the_same_filters_with_the_entrypoints_of_their_images() {
    let (slow, warm) = (pipeline("pipeline.yaml").spec, pipeline("warm-pipeline.yaml").spec);
    assert_eq!((slow.mode, warm.mode), (Mode::PodPerFile, Mode::Warm));
    for filter in &warm.filters {
        let image = testbed::images::RECIPES.iter().find(|recipe| recipe.name == filter.name).unwrap();
        assert_eq!(filter.command, [image.program]);
    }
    let without = |filter: &Filter| Filter { command: Vec::new(), ..filter.clone() };
    assert_eq!(warm.filters.iter().map(without).collect::<Vec<_>>(), slow.filters);
}

#[test]
fn the_bad_run_has_two_mistakes_and_nothing_else_has_any() {
    let (code, text) = validate(&["."]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("[run-prefix]") && text.contains("[glob]"), "{text}");
    assert!(text.ends_with("5 checked, 2 mistakes\n"), "{text}");
}
