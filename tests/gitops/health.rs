//! The health checks for Argo CD, run by Argo CD itself, with cases in its own format.

use std::process::Command;

use generator::argocd::{HEALTH, KINDS};
use serde_json::Value;
use testbed::{ARGOCD, Paths};
use tests::root;

#[test]
#[ignore = "needs Argo CD"]
fn argocd_judges_every_case_as_it_says() {
    let program = ARGOCD.program(&Paths::find().unwrap()).unwrap();
    for kind in KINDS {
        let folder = root().join(HEALTH).join(kind);
        let cases = std::fs::read_to_string(folder.join("health_test.yaml")).unwrap();
        let cases: Value = serde_saphyr::from_str(&cases).unwrap();
        for case in cases["tests"].as_array().unwrap() {
            let input = folder.join(case["inputPath"].as_str().unwrap());
            let mut command = Command::new(&program);
            command.env("ARGOCD_BINARY_NAME", "argocd").current_dir(root());
            command.args(["admin", "settings", "resource-overrides", "health"]).arg(&input);
            let output = command
                .args(["--argocd-cm-path", "kustomize/gitops/argocd/argocd-cm.yaml"])
                .output()
                .unwrap();
            let health = &case["healthStatus"];
            let text = |name: &str| health[name].as_str().unwrap();
            let wanted = format!("STATUS: {}\nMESSAGE: {}\n", text("status"), text("message"));
            let said = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(said, wanted, "{}: {errors}", input.display());
        }
        let files = std::fs::read_dir(folder.join("testdata")).unwrap().count();
        assert_eq!(files, cases["tests"].as_array().unwrap().len(), "{kind}: a file without a case");
    }
}
