//! The namespaced mode: the operator works only in its configured namespaces and can read nothing elsewhere.
//! Also the other way to uninstall: without the CRDs, so that every Pipeline and run remains.

use tests::root;

use crate::harness::{Cluster, SYSTEM, pipeline, run};

const FOLDER: &str = "tests/deploy/namespaced";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "starts a cluster, which needs root: make test"]
async fn namespaced_it_works_where_it_was_told_to_and_can_be_taken_away_and_back() {
    let cluster = Cluster::start().await;
    for namespace in ["team-a", "team-b"] {
        cluster.kubectl(&["create", "namespace", namespace]);
        cluster.prepare_user(namespace, 2).await;
    }
    cluster.install(FOLDER);
    for program in ["openfilter-operator", "openfilter-webhook"] {
        let account = format!("--as=system:serviceaccount:{SYSTEM}:{program}");
        let may_read = |namespace: &str| {
            cluster.try_kubectl(&["-n", namespace, "auth", "can-i", "get", "secrets/keys", &account]).is_ok()
        };
        assert!(may_read("team-a") && !may_read("team-b") && !may_read("kube-system"), "{program}");
    }
    let objects =
        ["team-a", "team-b"].map(|namespace| [pipeline(namespace), run(namespace, "first")]).concat();
    cluster.apply(&objects, &[]).unwrap();
    cluster.wait_for("team-a", "first", "condition=Succeeded");
    let status = ["get", "plr", "first", "-o", "jsonpath={.status}{.metadata.finalizers}", "-n"];
    let status = |namespace: &str| cluster.kubectl(&[&status[..], &[namespace]].concat());
    assert_eq!(status("team-b"), "", "nobody works there");
    cluster.assert_nothing_was_forbidden(&["openfilter-operator", "openfilter-webhook"]);

    // Remove the programs. What users wrote remains, and so do their results.
    let (folder, done) = (root().join(FOLDER), status("team-a"));
    let programs = "--selector=app.kubernetes.io/component!=api";
    cluster.kubectl(&["delete", "--kustomize", folder.to_str().unwrap(), programs, "--timeout=180s"]);
    assert!(cluster.try_kubectl(&["get", "namespace", SYSTEM]).is_err());
    assert_eq!(status("team-a"), done);
    // Install again: finished runs do not run again.
    cluster.install(FOLDER);
    cluster.apply(&[run("team-a", "second")], &[]).unwrap();
    cluster.wait_for("team-a", "second", "condition=Succeeded");
    assert_eq!(status("team-a"), done);

    cluster.kubectl(&["delete", "pipelineruns", "--all", "--all-namespaces", "--timeout=120s"]);
    cluster.kubectl(&["delete", "--kustomize", folder.to_str().unwrap(), "--timeout=180s"]);
    cluster.kubectl(&["delete", "namespace", "team-a", "team-b"]);
}
