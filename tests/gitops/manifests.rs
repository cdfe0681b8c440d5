//! The manifests for users, as far as no cluster is needed: they can be built, and what they name is there.

use std::ffi::OsString;
use std::process::Command;

use testbed::{KUSTOMIZE, Paths};
use tests::generated::root;

const ENVIRONMENTS: [&str; 3] = ["dev", "staging", "prod"];

fn build(folder: &str) -> String {
    let program = KUSTOMIZE.program(&Paths::find().unwrap()).unwrap();
    let output = Command::new(program).arg("build").arg(root().join(folder)).output().unwrap();
    assert!(output.status.success(), "{folder}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "needs kustomize"]
fn every_environment_of_the_sample_repository_is_valid_after_its_patches() {
    for environment in ENVIRONMENTS {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("all.yaml");
        std::fs::write(&file, build(&format!("examples/gitops-repo/environments/{environment}"))).unwrap();
        let mut out = Vec::new();
        let words = ["openfilter", "validate", "-f", file.to_str().unwrap()].map(OsString::from);
        let code = cli::run(words, std::io::empty(), &mut out);
        assert_eq!((code, String::from_utf8_lossy(&out).as_ref()), (0, "2 checked, nothing is wrong\n"));
    }
}

#[test]
#[ignore = "needs kustomize"]
fn every_folder_that_engines_are_pointed_at_exists() {
    for environment in ENVIRONMENTS {
        for engine in ["argocd", "flux"] {
            let text = build(&format!("kustomize/gitops/{engine}/{environment}"));
            let paths = text.lines().filter_map(|line| line.trim().strip_prefix("path: "));
            let paths: Vec<&str> = paths.map(|path| path.trim_start_matches("./")).collect();
            assert_eq!(paths.len(), 2, "{engine}/{environment}: {paths:?}");
            for path in paths {
                let place = if path.starts_with("environments") { "examples/gitops-repo" } else { "" };
                assert!(path.ends_with(environment), "{engine}/{environment} is pointed at {path}");
                assert!(root().join(place).join(path).join("kustomization.yaml").is_file(), "{path}");
            }
        }
    }
}
