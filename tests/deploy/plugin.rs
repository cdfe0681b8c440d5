//! `openfilter` as a plugin: kubectl finds it under its other name and runs it.

use std::os::unix::fs::symlink;
use std::process::Command;

use testbed::Testbed;
use tests::program::program;
use tests::root;

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn kubectl_runs_openfilter_as_a_plugin() {
    let testbed = Testbed::with_nodes(2).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    symlink(program("openfilter"), folder.path().join("kubectl-openfilter")).unwrap();
    let mut kubectl = Command::new(testbed.paths().bin("kubectl"));
    kubectl.args(["openfilter", "validate", "-f", "examples/demo"]);
    let output = kubectl.current_dir(root()).env("PATH", folder.path()).output().unwrap();
    let [said, complaint] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    // docs/demo.md shows this output, with both mistakes of the demo.
    assert!(output.status.code() == Some(1) && said.contains("5 checked, 2 mistakes"), "{said}{complaint}");
}
