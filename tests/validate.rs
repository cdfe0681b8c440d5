//! `openfilter validate`, as a pull request runs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tests::program::program;
use tests::root;

/// Exit code and output.
fn openfilter(words: &[&str]) -> (u8, String) {
    openfilter_with("", words)
}

/// As [`openfilter`], with this standard input.
fn openfilter_with(input: &str, words: &[&str]) -> (u8, String) {
    let argv = ["openfilter", "validate"].iter().chain(words).map(OsString::from);
    let mut out = Vec::new();
    let code = cli::run(argv, input.as_bytes(), &mut out);
    (code, String::from_utf8(out).unwrap())
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

const COMMIT: &str = r#"apiVersion: v1
kind: Namespace
metadata: { name: team-a, labels: { env: prod } }
---
apiVersion: filter.plainsight.ai/v1alpha1
kind: Pipeline
metadata:
  name: thumbnails
  namespace: team-a
spec:
  source:
    bucket: { name: camera-images, prefix: 2026/, region: eu-central-1 }
  filters:
    - name: resize
      image: ghcr.io/acme/resize:1.4
---
apiVersion: filter.plainsight.ai/v1alpha1
kind: PipelineRun
metadata:
  name: monday
  namespace: team-a
spec:
  pipelineRef: { name: thumbnails }
  source:
    prefix: 2026/11/16/
  execution:
    parallelism: 20
"#;

#[test]
fn a_good_commit_passes_and_other_objects_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "commit.yaml", COMMIT);
    assert_eq!(openfilter(&["-f", &file]), (0, "2 checked, nothing is wrong\n".to_owned()));
    write(
        folder.path(),
        "deep/er/more.yml",
        COMMIT.replace("monday", "tuesday").replace("thumbnails", "others").as_str(),
    );
    write(folder.path(), "notes.txt", "not yaml: [");
    assert_eq!(openfilter(&["-f", folder.path().to_str().unwrap()]).0, 0);
    let other = write(folder.path(), "pod.yaml", "apiVersion: v1\nkind: Pod\n");
    assert!(openfilter(&["-f", &other]).1.contains("no objects"));
}

#[test]
fn standard_input_is_read_as_a_file_is() {
    assert_eq!(openfilter_with(COMMIT, &["-f", "-"]), (0, "2 checked, nothing is wrong\n".to_owned()));
    let (code, text) = openfilter_with(&COMMIT.replace("parallelism: 20", "parallelism: 0"), &["-f", "-"]);
    assert!(code == 1 && text.starts_with("-:27: PipelineRun team-a/monday"), "{text}");
}

#[test]
fn endpoints_that_an_administrator_allows_pass_with_the_flags_of_the_webhook() {
    let local = |endpoint: &str| COMMIT.replace("region: eu-central-1", &format!("endpoint: \"{endpoint}\""));
    for (endpoint, flag, allowed) in [
        ("http://127.0.0.1:9000", "--allow-endpoint-network", "127.0.0.0/8,::1/128"),
        ("http://localhost:9000", "--allow-endpoint-host", "localhost"),
    ] {
        let (code, text) = openfilter_with(&local(endpoint), &["-f", "-"]);
        assert!(code == 1 && text.contains("endpoint"), "{text}");
        let (code, text) = openfilter_with(&local(endpoint), &["-f", "-", flag, allowed]);
        assert_eq!(code, 0, "{text}");
    }
}

/// As in the cluster, which stores a Pipeline with its defaults before its runs.
#[test]
fn policies_about_a_run_see_its_pipeline_with_its_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let policies = r#"apiVersion: filter.plainsight.ai/v1alpha1
kind: PipelinePolicy
metadata: { name: sequential }
spec:
  appliesTo: [PipelineRun]
  rules:
    - { name: order, message: in order, cel: "pipeline.spec.order == 'Sequential' && pipeline.metadata.labels.team == 'a'" }
---
apiVersion: filter.plainsight.ai/v1alpha1
kind: PipelinePolicy
metadata: { name: team }
spec:
  appliesTo: [Pipeline]
  defaults:
    - { field: metadata.labels.team, value: a }
"#;
    let policies = write(folder.path(), "policies.yaml", policies);
    let (code, text) = openfilter_with(COMMIT, &["-f", "-", "--policies", &policies]);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn mistakes_are_shown_with_file_line_and_fix() {
    let folder = tempfile::tempdir().unwrap();
    let bad = COMMIT
        .replace("parallelism: 20", "paralelism: 20")
        .replace("    prefix: 2026/11/16/", "    prefix: 2025/")
        .replace("image: ghcr.io/acme/resize:1.4", "image: ghcr.io/Acme/resize:1.4");
    let file = write(folder.path(), "commit.yaml", &bad);
    let (code, text) = openfilter(&["-f", &file]);
    assert_eq!(code, 1);
    let line = |number: u32, words: &str| {
        let found =
            text.lines().any(|line| line.starts_with(&format!("{file}:{number}: ")) && line.contains(words));
        assert!(found, "no line {number} with {words:?} in\n{text}");
    };
    line(15, "Pipeline team-a/thumbnails: spec.filters[0].image");
    // The run's prefix is checked against the Pipeline of the same commit.
    line(25, "[run-prefix]");
    line(27, "did you mean parallelism?");
    assert!(text.ends_with("2 checked, 3 mistakes\n"), "{text}");
}

#[test]
fn a_pipeline_is_told_what_it_lacks_for_warm_mode() {
    let warm = COMMIT.replace("  filters:", "  mode: Warm\n  warm: { maxPodAge: 30m }\n  filters:");
    let (code, text) = openfilter_with(&warm, &["-f", "-"]);
    assert!(
        code == 1 && text.starts_with("-:16: ") && text.contains("filter \"resize\" has no command"),
        "{text}"
    );
    let complete = warm.replace("    - name: resize", "    - name: resize\n      command: [/usr/bin/resize]");
    assert_eq!(openfilter_with(&complete, &["-f", "-"]).0, 0);
    let (code, text) = openfilter_with(&complete.replace("mode: Warm", "mode: Wram"), &["-f", "-"]);
    assert!(code == 1 && text.contains("did you mean Warm?"), "{text}");
}

#[test]
fn policies_are_enforced_and_warnings_do_not_fail() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "commit.yaml", COMMIT);
    let policy = |action: &str| {
        format!(
            "apiVersion: filter.plainsight.ai/v1alpha1\nkind: PipelinePolicy\nmetadata: {{ name: few }}\nspec:\n  appliesTo: [PipelineRun]\n  action: {action}\n  namespaceSelector: {{ matchLabels: {{ env: prod }} }}\n  rules:\n    - name: few\n      message: at most 10\n      field: spec.execution.parallelism\n      range: {{ max: 10 }}\n"
        )
    };
    let deny = write(folder.path(), "policies/p.yaml", &policy("Deny"));
    let (code, text) = openfilter(&["-f", &file, "--policies", &deny]);
    assert_eq!(code, 1);
    assert!(text.contains(&format!("{file}:27: PipelineRun team-a/monday: spec.execution.parallelism: it is \"20\", above 10; at most 10 [policy few/few]")), "{text}");
    let warn = write(folder.path(), "policies/p.yaml", &policy("Warn"));
    let (code, text) = openfilter(&["-f", &file, "--policies", &warn]);
    assert!(code == 0 && text.contains("warning: "), "{text}");
    // If the commit does not contain the Namespace, its labels can be passed.
    let alone = write(folder.path(), "alone.yaml", COMMIT.split_once("---\n").unwrap().1);
    write(folder.path(), "policies/p.yaml", &policy("Deny"));
    assert_eq!(openfilter(&["-f", &alone, "--policies", &deny]).0, 0);
    assert_eq!(openfilter(&["-f", &alone, "--policies", &deny, "--namespace-label", "env=prod"]).0, 1);
}

#[test]
fn the_ready_made_policies_judge_their_examples_as_their_names_say() {
    for entry in fs::read_dir(root().join("policies")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let file = |name: &str| folder.join(name).display().to_string();
        let judge = |name: &str| openfilter(&["-f", &file(name), "--policies", &file("policy.yaml")]);
        assert_eq!(judge("accept.yaml").0, 0, "{}", judge("accept.yaml").1);
        assert_eq!(judge("reject.yaml").0, 1, "{}", judge("reject.yaml").1);
    }
}

#[test]
fn programs_read_json_and_github_reads_annotations() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "commit.yaml", &COMMIT.replace("parallelism: 20", "parallelism: 0"));
    let (code, text) = openfilter(&["-f", &file, "-o", "json"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &json["objects"]), (1, &serde_json::json!(2)));
    assert_eq!(json["findings"][0]["line"], 27);
    assert_eq!(json["findings"][0]["rule"], "number-range");
    assert_eq!(json["findings"][0]["severity"], "error");
    let (_, text) = openfilter(&["-f", &file, "-o", "github"]);
    assert!(
        text.starts_with(&format!(
            "::error file={file},line=27,title=PipelineRun team-a/monday [number-range]::"
        )),
        "{text}"
    );
}

#[test]
fn mistakes_of_the_call_are_told_from_mistakes_of_the_objects() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(openfilter(&[]).0, 2);
    assert_eq!(openfilter(&["-f", "/no/such/file.yaml"]).0, 2);
    assert_eq!(openfilter(&["-f", folder.path().to_str().unwrap()]).0, 2);
    let file = write(folder.path(), "commit.yaml", COMMIT);
    assert_eq!(openfilter(&["-f", &file, "-o", "xml"]).0, 2);
    // A path without policies is a typo, not a policy that everything satisfies.
    assert_eq!(openfilter(&["-f", &file, "--policies", &file]).0, 2);
    let broken = write(folder.path(), "broken.yaml", "kind: Pipeline\nspec: [1\n");
    let (code, text) = openfilter(&["-f", &broken]);
    assert!(code == 1 && text.contains("not YAML"), "{text}");
    let unknown =
        write(folder.path(), "kind.yaml", &COMMIT.replace("kind: PipelineRun", "kind: PipelineRuns"));
    let (code, text) = openfilter(&["-f", &unknown]);
    assert!(code == 1 && text.contains(":18: ") && text.contains("has no kind \"PipelineRuns\""), "{text}");
}

#[test]
fn two_runs_of_a_commit_do_not_share_a_run_id() {
    let folder = tempfile::tempdir().unwrap();
    let queue = "  queue: { stream: \"pr:same:work\", group: \"cg:same\" }\n  execution:";
    let both = COMMIT.replace("  execution:", queue);
    let twice = format!("{both}---\n{}", both.rsplit_once("---\n").unwrap().1.replace("monday", "tuesday"));
    let (code, text) = openfilter(&["-f", &write(folder.path(), "commit.yaml", &twice)]);
    assert!(code == 1 && text.contains("belongs to PipelineRun team-a/monday already"), "{text}");
}

/// The sample repository's workflow runs this on every pull request.
#[test]
fn the_sample_repository_passes_its_own_pull_requests_and_a_mistake_does_not() {
    let sample = root().join("examples/gitops-repo");
    let workflow = fs::read_to_string(sample.join(".github/workflows/validate.yaml")).unwrap();
    assert!(
        workflow.contains(r#"openfilter validate -f pipelines -f "runs/$environment" -o github"#),
        "{workflow}"
    );
    let copy = tempfile::tempdir().unwrap();
    for environment in ["dev", "staging", "prod"] {
        let folder = |name: &str| sample.join(name).display().to_string();
        let (pipelines, runs) = (folder("pipelines"), folder(&format!("runs/{environment}")));
        let (code, text) = openfilter(&["-f", &pipelines, "-f", &runs, "-o", "github"]);
        assert_eq!(code, 0, "{environment}: {text}");
        let run = fs::read_to_string(Path::new(&runs).join("monday.yaml")).unwrap();
        let bad = write(copy.path(), &format!("{environment}.yaml"), &run.replace("inbox/", "outbox/"));
        let (code, text) = openfilter(&["-f", &pipelines, "-f", &bad, "-o", "github"]);
        assert!(
            code == 1 && text.contains("line=9") && text.contains("[run-prefix]"),
            "{environment}: {text}"
        );
    }
}

/// Users copy these files, including any mistakes.
#[test]
fn the_pipelines_of_the_sample_filters_are_valid() {
    for sample in ["checksum-sh", "file-type-py", "language", "word-count-py"] {
        let pipeline = root().join("examples/filters").join(sample).join("pipeline.yaml");
        let (code, text) = openfilter(&["-f", &pipeline.display().to_string()]);
        assert_eq!(code, 0, "{sample}: {text}");
    }
}

/// kubectl runs the file of this name with the remaining arguments; its users type another name than the
/// file's.
#[test]
fn it_is_a_plugin_of_kubectl() {
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (write(folder.path(), "commit.yaml", COMMIT), program("openfilter"));
    let plugin = folder.path().join("kubectl-openfilter");
    std::os::unix::fs::symlink(&program, &plugin).unwrap();
    let call = |program: &Path, words: &[&str]| {
        let output = Command::new(program).arg("validate").args(words).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(call(&plugin, &["-f", &file]), (Some(0), "2 checked, nothing is wrong\n".to_owned()));
    for (program, usage) in
        [(&plugin, "Usage: kubectl openfilter validate "), (&program, "Usage: openfilter validate ")]
    {
        let (code, help) = call(program, &["--help"]);
        assert!(code == Some(0) && help.contains(usage), "{help}");
    }
}
