//! The story of a team's repository, run once with each engine.

use crds::v1alpha1::{Phase, PipelineRun};
use kube::ResourceExt;
use serde_json::json;

use crate::engine::Engine;
use crate::lab::{LONG, Lab};
use crate::{argocd, flux};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the cluster"]
async fn argocd_installs_the_operator_and_applies_what_a_team_commits() {
    let lab = Lab::new().await;
    let engine = argocd::start(&lab).await;
    tell(&lab, &engine).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the cluster"]
async fn flux_installs_the_operator_and_applies_what_a_team_commits() {
    let lab = Lab::new().await;
    let engine = flux::start(&lab).await;
    tell(&lab, &engine).await;
}

/// The application of the operator, and that of the team.
const OPERATOR: &str = "openfilter";
const TEAM: &str = "cameras";
/// A namespace that is not the team's.
const ELSEWHERE: &str = "openfilter-system";

async fn tell(lab: &Lab, engine: &Engine) {
    install_the_operator(lab, engine).await;
    a_commit_brings_pipeline_secret_and_run(lab, engine).await;
    nothing_drifts(lab, engine).await;
    a_bad_run_is_refused_with_our_words(lab, engine).await;
    a_refused_change_leaves_the_run_as_it_is_even_with_force(lab, engine).await;
    a_commit_to_another_namespace_is_refused(lab, engine).await;
    more_parallelism_by_commit_takes_effect_while_it_runs(lab, engine).await;
    a_run_that_is_pruned_and_comes_back_is_not_executed_again(lab, engine).await;
}

async fn install_the_operator(lab: &Lab, engine: &Engine) {
    let something = "namespace: cameras\nsecretGenerator: [{ name: first, literals: [a=b] }]\n";
    lab.team.write("environments/dev/kustomization.yaml", something);
    let commit = lab.team.commit("Something that needs no operator");
    engine.until_healthy(lab, OPERATOR).await;
    for deployment in ["openfilter-operator", "openfilter-webhook"] {
        let words =
            ["rollout", "status", "--timeout=120s", "-n", "openfilter-system", "deployment", deployment];
        lab.kubectl(&words).unwrap();
    }
    engine.until_healthy_at(lab, TEAM, &commit).await;
}

async fn a_commit_brings_pipeline_secret_and_run(lab: &Lab, engine: &Engine) {
    lab.put_images("monday", 3, "copy").await;
    lab.fill_team_repository();
    let commit = lab.team.commit("A pipeline, its keys, and a run");
    engine.until_healthy_at(lab, TEAM, &commit).await;
    let run = lab.run("monday").await.unwrap();
    assert_eq!(phase(&run), Some(Phase::Succeeded), "healthy means done: {:?}", run.status);
    assert_eq!(run.status.unwrap().counts.unwrap().succeeded, 3);
    let pipeline = lab.pipeline("thumbnails").await;
    assert_eq!(pipeline.status.unwrap().conditions[0].status, "True");
}

/// Applied again and again, everything stays the same: no field is fought over, and nothing runs twice.
async fn nothing_drifts(lab: &Lab, engine: &Engine) {
    let before = (engine.versions(lab, OPERATOR).await, engine.versions(lab, TEAM).await);
    assert!(before.0.len() > 20 && before.1.len() == 3, "{before:#?}");
    let job = lab.jobs().await[0].uid();
    for _ in 0..2 {
        engine.apply_again(lab, OPERATOR).await;
        engine.apply_again(lab, TEAM).await;
    }
    assert_eq!(before, (engine.versions(lab, OPERATOR).await, engine.versions(lab, TEAM).await));
    assert_eq!(lab.jobs().await.iter().map(ResourceExt::uid).collect::<Vec<_>>(), [job]);
}

async fn a_bad_run_is_refused_with_our_words(lab: &Lab, engine: &Engine) {
    let good = std::fs::read_to_string(tests::root().join("examples/gitops-repo/runs/dev/monday.yaml"));
    let bad = good.unwrap().replace("monday", "tuesday").replace("inbox/", "outbox/");
    lab.team.write("runs/dev/tuesday.yaml", &bad);
    lab.team.edit("runs/dev/kustomization.yaml", "- monday.yaml\n", "- monday.yaml\n- tuesday.yaml\n");
    lab.team.commit("A run of files that its pipeline does not read");
    engine.refresh(lab, TEAM).await;
    let says_why = |text: &str| {
        text.contains("tuesday") && text.contains("spec.source.prefix") && text.contains("inbox/")
    };
    let report = engine.until(lab, TEAM, "why tuesday is refused", |report| says_why(&report.message)).await;
    println!("{} says of the bad run:\n{}", engine.name, report.message);
    assert!(!report.healthy, "{report:?}");
    assert!(report.message.contains("[run-prefix]"), "the rule is named: {report:?}");
    assert!(lab.run("tuesday").await.is_none());
    let commit = lab.team.revert();
    engine.until_healthy_at(lab, TEAM, &commit).await;
}

/// With force, Flux deletes and creates again what is refused as Invalid; Argo CD deletes whatever the
/// reason, so it has none here.
async fn a_refused_change_leaves_the_run_as_it_is_even_with_force(lab: &Lab, engine: &Engine) {
    let force = |on: bool| {
        if engine.name == "Flux" {
            let spec = json!({ "spec": { "force": on } }).to_string();
            let kind = "kustomizations.kustomize.toolkit.fluxcd.io";
            lab.kubectl(&["patch", kind, TEAM, "-n", "flux-system", "--type=merge", "-p", &spec]).unwrap();
        }
    };
    let before = lab.run("monday").await.unwrap();
    force(true);
    lab.team.edit("runs/dev/monday.yaml", "timeout: 2h", "timeout: 3h");
    lab.team.commit("A change that a run cannot have");
    engine.refresh(lab, TEAM).await;
    let refused =
        engine.until(lab, TEAM, "why monday is refused", |report| report.message.contains("[immutable]"));
    println!("{} says of the change of a run:\n{}", engine.name, refused.await.message);
    force(false);
    let commit = lab.team.revert();
    engine.until_healthy_at(lab, TEAM, &commit).await;
    let after = lab.run("monday").await.unwrap();
    assert_eq!((before.uid(), before.status), (after.uid(), after.status));
}

/// The engine may write everywhere, but a team's changes reach that team's namespace only.
async fn a_commit_to_another_namespace_is_refused(lab: &Lab, engine: &Engine) {
    let pipeline = lab.pipeline("thumbnails").await;
    let planted = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "Pipeline",
        "metadata": {"name": "planted", "namespace": ELSEWHERE}, "spec": pipeline.spec});
    // Beside the team's kustomization, which puts everything into its own namespace.
    lab.team.rename("environments/dev", "environments/own");
    lab.team.write("environments/dev/planted.yaml", &planted.to_string());
    lab.team.write("environments/dev/kustomization.yaml", "resources: [../own, planted.yaml]\n");
    lab.team.commit("A Pipeline for somebody else");
    engine.refresh(lab, TEAM).await;
    let refused = |text: &str| {
        text.contains(ELSEWHERE)
            && (text.contains("is not permitted in project") || text.contains("forbidden"))
    };
    let report = engine.until(lab, TEAM, "why it is refused", |report| refused(&report.message)).await;
    println!("{} says of the commit to another namespace:\n{}", engine.name, report.message);
    assert!(!report.healthy, "{report:?}");
    let planted = ["get", "pipeline", "planted", "-n", ELSEWHERE, "--ignore-not-found", "-o", "name"];
    assert_eq!(lab.kubectl(&planted).unwrap(), "");
    let commit = lab.team.revert();
    engine.until_healthy_at(lab, TEAM, &commit).await;
}

async fn more_parallelism_by_commit_takes_effect_while_it_runs(lab: &Lab, engine: &Engine) {
    lab.put_images("wednesday", 8, "sleep 20").await;
    let run = std::fs::read_to_string(tests::root().join("examples/gitops-repo/runs/dev/monday.yaml"));
    let run = run.unwrap().replace("monday", "wednesday").replace("parallelism: 2", "parallelism: 1");
    lab.team.write("runs/dev/wednesday.yaml", &run);
    lab.team.edit("runs/dev/kustomization.yaml", "- monday.yaml\n", "- monday.yaml\n- wednesday.yaml\n");
    lab.team.commit("A slow run");
    engine.refresh(lab, TEAM).await;
    let running = |run: &PipelineRun| {
        run.status.as_ref().and_then(|status| status.counts).map_or(0, |counts| counts.running)
    };
    lab.until_run("wednesday", "it runs", |run| running(run) > 0).await;
    lab.team.edit("runs/dev/wednesday.yaml", "parallelism: 1", "parallelism: 4");
    let commit = lab.team.commit("Make it faster");
    engine.refresh(lab, TEAM).await;
    lab.until_run("wednesday", "four files at once", |run| running(run) == 4).await;
    let job = lab.jobs().await.into_iter().find(|job| job.name_any() == "wednesday-job").unwrap();
    assert_eq!(job.spec.unwrap().parallelism, Some(4));
    engine.until_healthy_at(lab, TEAM, &commit).await;
    assert_eq!(phase(&lab.run("wednesday").await.unwrap()), Some(Phase::Succeeded));

    // After the end it changes nothing, and nothing waits for anything.
    lab.team.edit("runs/dev/wednesday.yaml", "parallelism: 4", "parallelism: 5");
    let commit = lab.team.commit("Too late");
    engine.until_healthy_at(lab, TEAM, &commit).await;
}

async fn a_run_that_is_pruned_and_comes_back_is_not_executed_again(lab: &Lab, engine: &Engine) {
    let first = lab.run("monday").await.unwrap();
    lab.team.edit("runs/dev/kustomization.yaml", "- monday.yaml\n", "");
    let commit = lab.team.commit("Old runs go");
    engine.until_healthy_at(lab, TEAM, &commit).await;
    let gone = async || Ok(lab.run("monday").await.is_none().then_some(()));
    lab.testbed.eventually("monday is pruned", LONG, gone).await.unwrap();

    let commit = lab.team.revert();
    engine.until_healthy_at(lab, TEAM, &commit).await;
    let second = lab.run("monday").await.unwrap();
    assert_ne!(first.uid(), second.uid());
    let (one, two) = (first.status.unwrap(), second.status.unwrap());
    assert_eq!(
        (one.counts, one.start_time, one.completion_time),
        (two.counts, two.start_time, two.completion_time)
    );
    let jobs: Vec<String> = lab.jobs().await.iter().map(ResourceExt::name_any).collect();
    assert_eq!(jobs, ["wednesday-job"], "no Job was made for it");
    assert!(lab.pods().await.is_empty());
}

fn phase(run: &PipelineRun) -> Option<Phase> {
    run.status.as_ref()?.phase
}
