//! The manifests for users, without a cluster: they can be built, and everything they name exists.

use std::ffi::OsString;
use std::process::Command;

use serde_json::{Value, json};
use testbed::{KUSTOMIZE, Paths};
use tests::root;

const ENVIRONMENTS: [&str; 3] = ["dev", "staging", "prod"];

fn build(folder: &str) -> String {
    let program = KUSTOMIZE.program(&Paths::find().unwrap()).unwrap();
    let output = Command::new(program).arg("build").arg(root().join(folder)).output().unwrap();
    assert!(output.status.success(), "{folder}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "needs kustomize"]
fn every_environment_of_the_sample_repository_is_admitted_by_the_policies_of_its_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    let validate = |environment: &str, cluster: &str| {
        let objects = write("objects", build(&format!("examples/gitops-repo/environments/{environment}")));
        let policies = write("policies", build(&format!("kustomize/overlays/{cluster}")));
        let mut words = vec!["openfilter", "validate", "-f", &objects];
        // There the environment has none, and a mistyped path must not pass for a folder without policies.
        if cluster != "dev" {
            words.extend(["--policies", &policies]);
        }
        let mut out = Vec::new();
        let code = cli::run(words.iter().map(OsString::from), std::io::empty(), &mut out);
        (code, String::from_utf8(out).unwrap())
    };
    for environment in ["dev", "prod"] {
        assert_eq!(validate(environment, environment), (0, "2 checked, nothing is wrong\n".to_owned()));
    }
    // Staging runs tagged images, and warns about what production will refuse.
    let (code, said) = validate("staging", "staging");
    assert!(
        code == 0 && said.contains("warning: ") && said.contains("[policy image-digests/digest]"),
        "{said}"
    );
    assert_eq!(validate("staging", "prod").0, 1, "what staging warns of, production refuses");
}

#[test]
#[ignore = "needs kustomize"]
fn each_team_has_a_project_and_an_account_for_its_own_namespace_only() {
    for environment in ENVIRONMENTS {
        let objects = |engine: &str| -> Vec<Value> {
            serde_saphyr::from_multiple(&build(&format!("kustomize/gitops/{engine}/{environment}"))).unwrap()
        };
        let of = |objects: &[Value], kind: &str| -> Vec<Value> {
            objects.iter().filter(|object| object["kind"] == kind).cloned().collect()
        };
        let argocd = objects("argocd");
        let set = &of(&argocd, "ApplicationSet")[0]["spec"];
        assert_eq!(set["template"]["spec"]["project"], "{{.team}}");
        assert_eq!(set["template"]["spec"]["destination"]["namespace"], "{{.team}}");
        for team in set["generators"][0]["list"]["elements"].as_array().unwrap() {
            let projects = of(&argocd, "AppProject");
            let project =
                projects.iter().find(|project| project["metadata"]["name"] == team["team"]).unwrap();
            assert_eq!(project["spec"]["destinations"].as_array().unwrap().len(), 1);
            assert_eq!(project["spec"]["destinations"][0]["namespace"], team["team"]);
            assert_eq!(project["spec"]["sourceRepos"], json!([team["repository"]]));
            assert_eq!(project["spec"]["clusterResourceWhitelist"], json!([]));
            let kinds = project["spec"]["namespaceResourceWhitelist"].to_string();
            assert!(!kinds.contains('*') && !kinds.contains("Grant"), "{kinds}");
        }
        let flux = objects("flux");
        let applied = of(&flux, "Kustomization");
        let teams: Vec<&Value> =
            applied.iter().filter(|applied| applied["metadata"]["name"] != "openfilter").collect();
        assert!(!teams.is_empty());
        for team in teams {
            let account = &team["spec"]["serviceAccountName"];
            let bound: Vec<Value> = of(&flux, "RoleBinding")
                .into_iter()
                .filter(|binding| binding["subjects"][0]["name"] == *account)
                .map(|binding| json!([binding["metadata"]["namespace"], binding["roleRef"]["name"]]))
                .collect();
            assert_eq!(bound, [json!([team["metadata"]["name"], "edit"])], "{team}");
        }
        for engine in [&argocd, &flux] {
            let namespaces = of(engine, "Namespace");
            assert!(namespaces.iter().any(|namespace| namespace["metadata"]["name"] == "cameras"));
        }
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
