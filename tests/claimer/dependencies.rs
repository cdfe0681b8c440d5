//! The claimer's dependencies: every node pulls it and every pod starts it, so they must be few.

use std::process::Command;

use tests::root;

#[test]
fn the_claimer_compiles_neither_the_policy_engine_nor_kubernetes() {
    let tree = ["tree", "--offline", "--locked", "-p", "claimer", "-e", "normal", "--prefix", "none"];
    let output = Command::new(env!("CARGO")).args(tree).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = printed.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"protocol") && names.contains(&"queue"), "{printed}");
    for kept_out in ["cel", "crds", "jsonschema", "k8s-openapi", "kube", "kube-cel", "operator"] {
        assert!(!names.contains(&kept_out), "the claimer compiles {kept_out}");
    }
}
