//! An upgrade in the middle of a run: what this commit deploys replaces what the previous commit deployed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use testbed::{Paths, checkout, images};
use tests::root;

use crate::harness::{Cluster, SYSTEM, pipeline, run};

/// The programs that are replaced.
const PROGRAMS: [&str; 3] = ["operator", "webhook", "claimer"];
const TAG: &str = "previous";
/// Two are processed at a time, and each takes several seconds including its pod: several times as long as an
/// upgrade.
const FILES: usize = 30;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn an_upgrade_from_the_commit_before_loses_no_file_of_a_run() {
    let cluster = Cluster::start().await;
    let previous = Previous::build();
    for program in PROGRAMS {
        let archive = images::build_of(cluster.testbed.paths(), program, &previous.program(program), TAG);
        cluster.testbed.load_image(archive.as_ref().unwrap()).unwrap();
        // Otherwise every cluster of this checkout would load it.
        fs::remove_file(archive.unwrap()).unwrap();
    }
    cluster.install(previous.overlay().to_str().unwrap());
    let of_operator = ["-n", SYSTEM, "get", "deployment/openfilter-operator", "-o"];
    let image = || {
        let path = "jsonpath={.spec.template.spec.containers[0].image}";
        cluster.kubectl(&[&of_operator[..], &[path]].concat())
    };
    assert!(image().ends_with(":previous"), "{}", image());

    let user = cluster.testbed.namespace("upgrade").await.unwrap();
    cluster.prepare_user(&user.name, 0).await;
    for number in 0..FILES {
        let key = format!("in/{number:02}");
        cluster.services.s3.put(&user.name, &key, "sleep 2").await.unwrap();
    }
    cluster.apply(&[pipeline(&user.name)], &[]).unwrap();
    cluster.apply(&[run(&user.name, "r")], &[]).unwrap();
    let counts = || -> Value {
        let shown =
            cluster.kubectl(&["-n", &user.name, "get", "plr", "r", "-o", "jsonpath={.status.counts}"]);
        serde_json::from_str(&shown).unwrap_or_default()
    };
    cluster.eventually("some files are done", || counts()["succeeded"].as_u64() >= Some(5)).await;

    cluster.install("kustomize/overlays/dev");
    assert!(image().ends_with(":testbed"), "{}", image());
    let when_upgraded = counts();
    assert!(
        when_upgraded["succeeded"].as_u64().is_some_and(|done| done < FILES as u64),
        "the run was over before the upgrade was: {when_upgraded}"
    );
    // The rest may run faster: the run had to outlast the upgrade, and has.
    let faster = r#"{"spec":{"execution":{"parallelism":6}}}"#;
    cluster.kubectl(&["-n", &user.name, "patch", "plr", "r", "--type=merge", "--patch", faster]);
    cluster.wait_for(&user.name, "r", "condition=Succeeded");
    let end = counts();
    assert_eq!(
        (&end["totalFiles"], &end["succeeded"], &end["failed"]),
        (&json!(FILES), &json!(FILES), &json!(0))
    );
    for number in 0..FILES {
        let key = format!("out/{number:02}/copy");
        cluster.services.s3.get(&user.name, &key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    cluster.assert_nothing_was_forbidden(&["openfilter-operator", "openfilter-webhook"]);
    cluster.kubectl(&["delete", "pipelineruns", "--all", "--all-namespaces", "--timeout=120s"]);
    let dev = root().join("kustomize/overlays/dev");
    cluster.kubectl(&["delete", "--kustomize", dev.to_str().unwrap(), "--timeout=180s"]);
}

/// The previous commit, built.
struct Previous {
    source: PathBuf,
}

impl Previous {
    /// Without a previous commit, builds this one instead: then only the replacement of the programs is
    /// tested.
    fn build() -> Self {
        let paths = Paths::find().unwrap();
        let git = |words: &[&str]| output(checkout::git(&paths).unwrap().args(words));
        // With uncommitted changes, HEAD is the previous commit.
        let before = if git(&["diff", "--quiet", "HEAD"]).is_ok() { "HEAD~1" } else { "HEAD" };
        let parse = |commit: &str| git(&["rev-parse", "--verify", commit]);
        let commit = parse(before).or_else(|_| {
            let shallow = git(&["rev-parse", "--is-shallow-repository"]).unwrap();
            assert_ne!(
                shallow, "true",
                "the commit before is not in this shallow clone: git fetch --unshallow"
            );
            parse("HEAD")
        });
        let commit = commit.unwrap();
        let folder = target_folder().join(TAG);
        let source = folder.join(&commit);
        if !source.exists() {
            // Builds of other commits are no longer needed.
            let _ = fs::remove_dir_all(&folder);
            let half = folder.join("half");
            fs::create_dir_all(&half).unwrap();
            let archive = half.join("archive.tar").display().to_string();
            git(&["archive", "--output", &archive, &commit]).unwrap();
            output(Command::new("tar").args(["--extract", "--file", &archive]).current_dir(&half)).unwrap();
            fs::rename(&half, &source).unwrap();
        }
        let target = source.join("target");
        let mut seed = Command::new(root().join("tools/room.sh"));
        output(seed.arg(testbed::cache()).arg(&target).current_dir(&source)).unwrap();
        let mut build = Command::new("cargo");
        build.args(["build", "--quiet", "--locked", "--workspace", "--test", "down"]);
        build.args(PROGRAMS.iter().flat_map(|program| ["--bin", program]));
        output(build.env("CARGO_TARGET_DIR", &target).current_dir(&source)).unwrap();
        Self { source }
    }

    fn program(&self, name: &str) -> PathBuf {
        self.source.join("target/debug").join(name)
    }

    /// Its overlay for development, with its images.
    fn overlay(&self) -> PathBuf {
        let folder = self.source.join("kustomize/overlays/previous");
        let image = |name: &str| json!({"name": format!("localhost/openfilter/{name}"), "newTag": TAG});
        let kustomization = json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": ["../dev"], "configurations": ["image-fields.yaml"],
            "images": PROGRAMS.map(image)});
        fs::create_dir_all(&folder).unwrap();
        // kustomize reads this file only from its own folder.
        fs::copy(folder.join("../dev/image-fields.yaml"), folder.join("image-fields.yaml")).unwrap();
        fs::write(folder.join("kustomization.yaml"), kustomization.to_string()).unwrap();
        folder
    }
}

fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Runs a command; returns its output, or why it failed.
fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{command:?}: {}", text(&output.stderr))),
    }
}
