//! The ready-made policies: each accepts and rejects its examples as declared, and so does its
//! ValidatingAdmissionPolicy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crds::policy::{Policy, PolicySet, Subject, Usage};
use crds::rules::{self, Context, Kind};
use crds::v1alpha1::{PipelinePolicy, PolicyTarget};
use serde_json::{Value, json};
use tests::root;

/// A folder of `policies/`.
struct Ready {
    folder: PathBuf,
    policy: PipelinePolicy,
}

impl Ready {
    fn all() -> Vec<Self> {
        let mut folders: Vec<PathBuf> =
            fs::read_dir(root().join("policies")).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.retain(|path| path.is_dir());
        folders.sort();
        let ready = |folder: PathBuf| {
            let policy = documents(&folder.join("policy.yaml")).remove(0);
            assert_eq!(rules::check(&policy, &Context::default()), Some(vec![]), "{}", folder.display());
            Self { folder, policy: serde_json::from_value(policy).unwrap() }
        };
        folders.into_iter().map(ready).collect()
    }

    fn name(&self) -> String {
        self.folder.file_name().unwrap().to_str().unwrap().to_owned()
    }

    fn documents(&self, file: &str) -> Vec<Value> {
        documents(&self.folder.join(file))
    }
}

fn documents(path: &PathBuf) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn target(object: &Value) -> Option<PolicyTarget> {
    match Kind::of(object)? {
        Kind::Pipeline => Some(PolicyTarget::Pipeline),
        Kind::PipelineRun => Some(PolicyTarget::PipelineRun),
        Kind::PipelinePolicy | Kind::ReferenceGrant => None,
    }
}

/// The verdicts of the policies on each matching object of a file: its name, and the reasons against it.
fn verdicts(policies: &PolicySet, documents: &[Value]) -> Vec<(String, Vec<String>)> {
    let text = |object: &Value, pointer: &str| {
        object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut verdicts = Vec::new();
    for object in documents {
        let Some(target) = target(object) else { continue };
        let (namespace, name) = (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let labels: BTreeMap<String, String> = documents
            .iter()
            .find(|other| other["kind"] == "Namespace" && text(other, "/metadata/name") == namespace)
            .and_then(|found| serde_json::from_value(found["metadata"]["labels"].clone()).ok())
            .unwrap_or_default();
        if !policies.iter().any(|policy| policy.selects(target, &labels)) {
            continue;
        }
        // As the API server would pass it on: valid, and with defaults.
        assert_eq!(
            rules::check(object, &Context::default()),
            Some(vec![]),
            "{namespace}/{name} is not valid by itself"
        );
        let mut object = rules::default(Kind::of(object).unwrap(), object);
        policies.fill_in(target, &labels, &mut object, None);
        let pipeline = documents.iter().find(|other| {
            other["kind"] == "Pipeline"
                && text(other, "/metadata/name") == text(&object, "/spec/pipelineRef/name")
                && text(other, "/metadata/namespace") == namespace
        });
        let request = json!({ "operation": "CREATE", "namespace": namespace, "name": name });
        let mut about_namespace = json!({ "metadata": { "name": namespace } });
        if !labels.is_empty() {
            about_namespace["metadata"]["labels"] = json!(labels);
        }
        let subject = Subject {
            target,
            object: &object,
            old_object: None,
            request: Some(&request),
            namespace: Some(&about_namespace),
            pipeline,
            usage: Some(Usage::default()),
        };
        let found = policies.judge(&subject, &labels, Instant::now() + Duration::from_secs(5));
        verdicts.push((format!("{namespace}/{name}"), found.iter().map(ToString::to_string).collect()));
    }
    verdicts
}

fn check_examples(ready: &Ready, policies: &PolicySet, who: &str) {
    let accepted = verdicts(policies, &ready.documents("accept.yaml"));
    assert!(!accepted.is_empty(), "{who} accepts nothing");
    for (object, reasons) in accepted {
        assert_eq!(reasons, Vec::<String>::new(), "{who} rejects {object} of accept.yaml");
    }
    let rejected = verdicts(policies, &ready.documents("reject.yaml"));
    assert!(!rejected.is_empty(), "{who} rejects nothing");
    for (object, reasons) in rejected {
        assert!(!reasons.is_empty(), "{who} accepts {object} of reject.yaml");
        // A rule that fails instead of refusing would refuse everything.
        assert!(
            reasons.iter().all(|reason| !reason.contains("could not be evaluated")),
            "{who}: {reasons:?}"
        );
    }
}

#[test]
fn every_policy_accepts_and_rejects_what_its_examples_say() {
    let all = Ready::all();
    assert!(all.len() >= 10);
    for ready in all {
        assert_eq!(
            ready.policy.metadata.name.as_deref(),
            Some(ready.name().as_str()),
            "the folder is the name"
        );
        check_examples(&ready, &[Policy::compile(&ready.policy)].into_iter().collect(), &ready.name());
    }
}

/// A quota limits only additions. A namespace above its quota, for example because the quota was lowered, can
/// still reduce its usage and label finished runs.
#[test]
fn the_quota_of_a_namespace_refuses_no_change_that_uses_no_more() {
    let ready = Ready::all().into_iter().find(|ready| ready.name() == "namespace-quota").unwrap();
    let policies: PolicySet = [Policy::compile(&ready.policy)].into_iter().collect();
    let run = |parallelism: u32| json!({ "metadata": { "name": "a" }, "spec": { "execution": { "parallelism": parallelism } } });
    let admitted = |old: Option<u32>, new: u32| {
        let (object, old) = (run(new), old.map(run));
        let subject = Subject {
            target: PolicyTarget::PipelineRun,
            object: &object,
            old_object: old.as_ref(),
            request: None,
            namespace: None,
            pipeline: None,
            usage: Some(Usage { active_runs: 20, parallelism: 200 }),
        };
        policies.judge(&subject, &BTreeMap::new(), Instant::now() + Duration::from_secs(5)).is_empty()
    };
    assert!(admitted(Some(10), 5) && admitted(Some(10), 10));
    assert!(!admitted(Some(10), 11) && !admitted(None, 1));
}

/// Every rule of a policy is needed: without it, one of the rejected examples would be admitted.
#[test]
fn no_rule_of_a_policy_is_idle() {
    for ready in Ready::all() {
        for rule in &ready.policy.spec.rules {
            let found = verdicts(
                &[Policy::compile(&ready.policy)].into_iter().collect(),
                &[ready.documents("reject.yaml"), ready.documents("accept.yaml")].concat(),
            );
            let mark = format!("/{}]", rule.name);
            let hit = found.iter().any(|(_, reasons)| reasons.iter().any(|reason| reason.contains(&mark)));
            // A guard that the defaults always satisfy has nothing to reject here.
            let guard = !ready.policy.spec.defaults.is_empty() && rule.cel.is_some();
            assert!(hit || guard, "{}: no example breaks the rule {}", ready.name(), rule.name);
        }
    }
}

/// Both forms decide the same: the expressions of `vap.yaml` are put into a policy and judge the same
/// examples.
#[test]
fn the_admission_policies_of_the_api_server_say_the_same() {
    let mut with_vap = 0;
    for ready in Ready::all() {
        if !ready.folder.join("vap.yaml").exists() {
            continue;
        }
        with_vap += 1;
        let documents = ready.documents("vap.yaml");
        let [policy, binding] = documents.as_slice() else { panic!("{} has two documents", ready.name()) };
        assert_eq!(policy["metadata"]["name"], format!("openfilter-{}", ready.name()));
        assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
        let resources = &policy["spec"]["matchConstraints"]["resourceRules"][0]["resources"];
        let kinds: Vec<&str> = resources
            .as_array()
            .unwrap()
            .iter()
            .map(|resource| if resource == "pipelines" { "Pipeline" } else { "PipelineRun" })
            .collect();
        assert_eq!(json!(kinds), json!(ready.policy.spec.applies_to), "{}", ready.name());
        let rule = |(index, validation): (usize, &Value)| json!({ "name": format!("v{index}"), "message": validation["message"], "cel": validation["expression"] });
        let rules: Vec<Value> =
            policy["spec"]["validations"].as_array().unwrap().iter().enumerate().map(rule).collect();
        let same = json!({ "metadata": { "name": "vap" }, "spec": { "appliesTo": kinds, "rules": rules } });
        let compiled = Policy::compile(&serde_json::from_value(same).unwrap());
        assert_eq!(compiled.problems(), [], "{}", ready.name());
        check_examples(&ready, &[compiled].into_iter().collect(), &format!("{}/vap.yaml", ready.name()));
    }
    assert!(with_vap >= 10);
}

#[test]
fn the_table_of_the_readme_names_every_policy() {
    let readme = fs::read_to_string(root().join("policies/README.md")).unwrap();
    for ready in Ready::all() {
        assert!(
            readme.contains(&format!("[{0}]({0}/)", ready.name())),
            "{} is not in policies/README.md",
            ready.name()
        );
    }
}
