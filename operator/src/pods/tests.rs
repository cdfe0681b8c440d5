use super::*;
use crate::names::CONTAINERS_ANNOTATION;
use protocol::container::INSTALL;
use serde_json::{Value, json};

fn read(status: Value) -> WorkerPod {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap();
    WorkerPod::read(&pod, None, Instant::now())
}

fn container(name: &str, state: Value) -> Value {
    json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state})
}

fn ended(code: i32) -> Value {
    json!({"terminated": {"exitCode": code, "reason": "Error", "message": "said"}})
}

#[test]
fn a_pod_has_a_file_once_its_claimer_ended_well() {
    let running = container(CLAIMER, json!({"running": {}}));
    assert_eq!(read(json!({"phase": "Pending", "initContainerStatuses": [running]})).stage, Stage::Claiming);
    let claimed = container(CLAIMER, ended(0));
    assert_eq!(read(json!({"phase": "Pending", "initContainerStatuses": [claimed]})).stage, Stage::Working);
}

#[test]
fn one_failed_container_is_the_end_also_while_others_run() {
    let pod = read(json!({"phase": "Running", "initContainerStatuses": [container(CLAIMER, ended(0))],
        "containerStatuses": [container("a", json!({"running": {}})), container("b", ended(3))]}));
    assert!(pod.running && !pod.stopped, "the others are to be ended");
    let Stage::Failed(failed) = pod.stage else { panic!("{pod:?}") };
    assert_eq!((failed.container.as_deref(), failed.exit_code), (Some("b"), Some(3)));
    // The kubelet reports a pod this way until it is done with it.
    let pod = read(json!({"phase": "Running", "initContainerStatuses": [container(CLAIMER, ended(0))],
        "containerStatuses": [container("a", ended(0)), container("b", ended(3))]}));
    assert!(matches!(pod.stage, Stage::Failed(_)) && !pod.running && !pod.stopped);
}

#[test]
fn a_sidecar_that_is_started_again_is_no_end() {
    let sidecar = |policy: Value, state: Value| {
        let spec = json!({"containers": [], "initContainers": [{"name": "mesh", "restartPolicy": policy}]});
        let claimed = [container("mesh", state), container(CLAIMER, ended(0))];
        let pod = json!({"metadata": {"name": "p"}, "spec": spec,
            "status": {"phase": "Running", "initContainerStatuses": claimed}});
        WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now()).stage
    };
    let pulling = json!({"waiting": {"reason": "ErrImagePull"}});
    assert_eq!(sidecar(json!("Always"), ended(1)), Stage::Working);
    assert_eq!(sidecar(json!("Always"), pulling.clone()), Stage::Working);
    assert!(matches!(sidecar(Value::Null, ended(1)), Stage::Failed(_)));
    assert!(matches!(sidecar(Value::Null, pulling), Stage::Stuck(_)));
}

#[test]
fn a_container_that_does_not_start_is_seen() {
    let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}});
    let pod = read(json!({"phase": "Pending", "containerStatuses": [container("a", waiting)]}));
    assert!(matches!(pod.stage, Stage::Stuck(Stuck { ref reason, .. }) if reason == "ImagePullBackOff"));
    let creating = json!({"waiting": {"reason": "ContainerCreating"}});
    let pod = read(json!({"phase": "Pending", "containerStatuses": [container("a", creating)]}));
    assert_eq!(pod.stage, Stage::Starting);
}

/// A long download and long filters count as one attempt.
#[test]
fn the_time_of_an_attempt_goes_on_when_the_filters_start() {
    let pod = |state: Value| -> Pod {
        let status = json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    };
    let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
    let starting = WorkerPod::read(&pod(json!({"waiting": {"reason": "PodInitializing"}})), None, start);
    assert_eq!((&starting.stage, starting.claiming), (&Stage::Starting, None));
    let fetching = WorkerPod::read(&pod(json!({"running": {}})), Some(&starting), start);
    let working = WorkerPod::read(&pod(ended(0)), Some(&fetching), later);
    assert_eq!((&working.stage, working.since, working.claiming), (&Stage::Working, later, Some(start)));
}

#[test]
fn a_pod_without_a_file_is_no_file_that_failed() {
    let died = |name: &str, code| {
        read(json!({"phase": "Failed", "initContainerStatuses": [container(name, ended(code))]}))
            .died_without_a_file()
    };
    assert!(died(CLAIMER, 11) && died(CLAIMER, 12), "no claim was made");
    assert!(!died(CLAIMER, 137) && !died(CLAIMER, 101), "what killed or crashed it may be the file");
    assert!(died(CLAIMER, 1) && died(CLAIMER, 127), "another program, or none");
    assert!(died(CLAIMER, 18) && died(CLAIMER, 19), "its workspace is full, or not its own");
    assert!(!died(CLAIMER, 15), "the object of a claimed file is gone");
    assert!(!died("resize", 12), "a filter's exit code is its own business");
    assert!(
        read(json!({"phase": "Failed", "reason": "OutOfcpu"})).died_without_a_file(),
        "the node did not take it"
    );
}

/// A pod is given a file before its claimer starts. If the pod ends before the claimer has read the file, the
/// file is not to blame.
#[test]
fn a_file_was_tried_only_if_the_claimer_may_have_read_it() {
    let tried = |status: Value| read(status).may_have_claimed();
    let claimer =
        |state: Value| json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]});
    assert!(!tried(json!({"phase": "Pending"})), "it has not started");
    assert!(!tried(claimer(json!({"waiting": {"reason": "ImagePullBackOff"}}))));
    assert!(!tried(claimer(json!({"terminated": {"exitCode": 128, "reason": "StartError"}}))));
    assert!(!tried(json!({"phase": "Failed", "reason": "Evicted"})), "evicted before it started");
    assert!(tried(claimer(runs())), "it may have read it by now");
    assert!(tried(claimer(ended(0))));
    let said = |entry: &str| json!({"terminated": {"exitCode": 19, "message": format!("{entry} 1 LocalIo 5-9 why")}});
    assert!(tried(claimer(said("7-1"))) && !tried(claimer(said("-"))), "it says so itself");
}

#[test]
fn a_file_is_given_to_pods_that_have_a_node_and_whose_claimer_has_not_ended() {
    let awaits = |node: Value, status: Value, deleted: Value| {
        let metadata = json!({"name": "p", "deletionTimestamp": deleted});
        let pod =
            json!({"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": status});
        let now = Instant::now();
        WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, now).awaits_file(now)
    };
    let pending = json!({"phase": "Pending"});
    let claimer =
        |state: Value| json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]});
    assert!(!awaits(Value::Null, pending.clone(), Value::Null), "it has no node");
    assert!(awaits(json!("n"), pending.clone(), Value::Null));
    assert!(awaits(json!("n"), claimer(runs()), Value::Null));
    assert!(!awaits(json!("n"), claimer(ended(0)), Value::Null), "it has had its file");
    assert!(!awaits(json!("n"), claimer(json!({"waiting": {"reason": "ErrImagePull"}})), Value::Null));
    assert!(!awaits(json!("n"), pending, json!("2026-01-01T00:00:00Z")), "it is being deleted");
}

#[test]
fn a_pod_whose_claimer_does_not_start_is_late_until_it_does() {
    let (start, half) = (Instant::now(), STARTS_WITHIN / 2);
    let placed = |node: Value, before: Option<&WorkerPod>, now: Instant| {
        let spec = json!({"nodeName": node, "containers": []});
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Pending"}});
        WorkerPod::read(&serde_json::from_value(pod).unwrap(), before, now)
    };
    let waiting = placed(Value::Null, None, start);
    assert!(!waiting.is_late(start + STARTS_WITHIN), "it was given no file");
    let starting = placed(json!("n"), Some(&waiting), start + half);
    let (soon, late) = (start + STARTS_WITHIN, start + half + STARTS_WITHIN);
    assert!(starting.awaits_file(soon) && !starting.is_late(soon), "its node counts, not its creation");
    assert!(!starting.awaits_file(late) && starting.is_late(late));
    let claimer = |state: Value| {
        read(json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]}))
    };
    let stuck = claimer(json!({"waiting": {"reason": "ErrImagePull"}}));
    assert!(stuck.is_late(stuck.since), "another pod may have the image");
    let claiming = claimer(runs());
    assert!(!claiming.is_late(late) && claiming.awaits_file(late));
}

#[test]
fn only_a_finalizer_holds_a_pod_whose_time_is_over() {
    let held = |metadata: Value| is_held(&serde_json::from_value(metadata).unwrap());
    let (now, finalizers) = ("2026-01-01T00:00:00Z", ["example.com/hold"]);
    let over = json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 0, "finalizers": finalizers});
    assert!(held(over));
    let ending =
        json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 30, "finalizers": finalizers});
    assert!(!held(ending), "its containers may still run");
    assert!(!held(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 0})), "it goes at once");
    assert!(!held(json!({"finalizers": finalizers})));
}

#[test]
fn time_goes_on_while_the_same_container_is_stuck() {
    let pod = |reason: &str| -> Pod {
        let waiting = json!({"waiting": {"reason": reason}});
        let status = json!({"phase": "Pending", "containerStatuses": [container("a", waiting)]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    };
    let start = Instant::now();
    let first = WorkerPod::read(&pod("ErrImagePull"), None, start);
    let second = WorkerPod::read(&pod("ImagePullBackOff"), Some(&first), start + Duration::from_secs(9));
    assert_eq!(second.since, start);
}

/// A pod of the operator, with a filter, to which a mesh has added containers.
fn in_mesh(phase: &str, init: &[Value], main: &[Value]) -> WorkerPod {
    let annotations = json!({ CONTAINERS_ANNOTATION: "claimer,resize" });
    let spec = json!({
        "initContainers": [{"name": "mesh-init"}, {"name": "mesh", "restartPolicy": "Always"}, {"name": CLAIMER}],
        "containers": [{"name": "resize"}, {"name": "proxy"}],
    });
    let status = json!({"phase": phase, "initContainerStatuses": init, "containerStatuses": main});
    let pod = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": spec, "status": status});
    WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now())
}

fn runs() -> Value {
    json!({"running": {}})
}

#[test]
fn an_added_container_neither_keeps_a_finished_pod_running_nor_fails_it() {
    let claimed = [container("mesh", runs()), container(CLAIMER, ended(0))];
    let done = container("resize", ended(0));
    for (phase, proxy) in
        [("Running", runs()), ("Running", ended(1)), ("Failed", ended(1)), ("Failed", ended(137))]
    {
        let pod = in_mesh(phase, &claimed, &[done.clone(), container("proxy", proxy)]);
        assert_eq!(pod.stage, Stage::Succeeded, "{phase}");
        assert!(pod.is_finished() && !pod.running && !pod.is_alive());
    }
    let works = |proxy: Value| {
        let pod = in_mesh("Running", &claimed, &[container("resize", runs()), container("proxy", proxy)]);
        (pod.stage, pod.running)
    };
    assert_eq!(works(ended(1)), (Stage::Working, true), "ours still runs");
    let pulling = json!({"waiting": {"reason": "ImagePullBackOff"}});
    assert_eq!(works(pulling), (Stage::Working, true), "ours needs no proxy");
    let failed = in_mesh("Running", &claimed, &[container("resize", ended(3)), container("proxy", runs())]);
    assert!(matches!(failed.stage, Stage::Failed(Failed { added: false, exit_code: Some(3), .. })));
    assert!(!failed.running, "only the proxy does");
}

#[test]
fn an_added_container_that_ends_a_pod_is_named_and_blamed() {
    let pod = in_mesh("Failed", &[container("mesh-init", ended(1))], &[]);
    let Stage::Failed(failed) = &pod.stage else { panic!("{pod:?}") };
    assert_eq!((failed.container.as_deref(), failed.added), (Some("mesh-init"), true));
    assert!(pod.died_without_a_file(), "the claimer never started");
    let claimed = [container(CLAIMER, ended(0))];
    let pod = in_mesh("Failed", &claimed, &[container("proxy", ended(1))]);
    assert!(matches!(pod.stage, Stage::Failed(Failed { added: true, .. })), "{pod:?}");
    assert!(!pod.died_without_a_file(), "a filter may not have started, but there is a file");
}

#[test]
fn a_pod_that_is_evicted_after_all_containers_succeeded_has_succeeded() {
    let spec = json!({"initContainers": [{"name": CLAIMER}], "containers": [{"name": "resize"}]});
    let pod = |resize: Value| {
        let status = json!({"phase": "Failed", "reason": "Evicted", "initContainerStatuses":
            [container(CLAIMER, ended(0))], "containerStatuses": [container("resize", resize)]});
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": status});
        WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now())
    };
    assert_eq!(pod(ended(0)).stage, Stage::Succeeded);
    assert!(matches!(pod(ended(137)).stage, Stage::Failed(Failed { container: None, .. })));
}

/// A container that was killed only because another one failed is not to blame.
#[test]
fn of_several_failed_containers_the_first_one_counts() {
    let at = |code: i32, time: Value| json!({"terminated": {"exitCode": code, "finishedAt": time}});
    let first = |one: Value, two: Value| {
        let main = [container("a", one), container("b", two)];
        let pod = read(json!({"phase": "Failed", "containerStatuses": main}));
        let Stage::Failed(failed) = pod.stage else { panic!("{pod:?}") };
        failed.container.unwrap()
    };
    let (early, late) = (json!("2026-01-01T00:00:01Z"), json!("2026-01-01T00:00:02Z"));
    assert_eq!(first(at(137, late.clone()), at(3, early.clone())), "b");
    assert_eq!(first(at(137, early), at(3, late.clone())), "a");
    assert_eq!(first(at(137, Value::Null), at(3, late)), "b", "the other one was lost");
}

#[test]
fn a_memory_limit_is_read_from_the_container_or_the_pod() {
    let limited = |resources: Value, of_pod: Value| {
        let spec = json!({"resources": of_pod, "containers": [{"name": "a", "resources": resources}, {"name": "b"}]});
        let status = json!({"phase": "Failed", "containerStatuses": [container("a", ended(137))]});
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": status});
        let pod = WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now());
        matches!(pod.stage, Stage::Failed(Failed { memory_limit: true, .. }))
    };
    let memory = json!({"limits": {"memory": "1Gi"}});
    assert!(limited(memory.clone(), Value::Null));
    assert!(limited(json!({}), memory));
    assert!(!limited(json!({"limits": {"cpu": "1"}, "requests": {"memory": "1Gi"}}), Value::Null));
}

#[test]
fn an_exit_code_is_the_shims_only_where_the_shim_is_the_command() {
    let of_shim = |command: &str, code: u8| {
        let spec = json!({"containers": [{"name": "a", "command": [command, "--once"]}]});
        let status = json!({"phase": "Failed", "containerStatuses": [container("a", ended(code.into()))]});
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": status});
        let pod = WorkerPod::read(&serde_json::from_value(pod).unwrap(), None, Instant::now());
        let Stage::Failed(failed) = pod.stage else { panic!("{:?}", pod.stage) };
        failed.of_shim()
    };
    assert_eq!(of_shim(crate::names::SHIM, shim::UNUSABLE), Some(shim::UNUSABLE));
    assert_eq!(of_shim(crate::names::SHIM, 3), None);
    assert_eq!(of_shim("/detect", shim::UNUSABLE), None);
}

#[test]
fn a_huge_grace_period_is_clamped() {
    let now = Instant::now();
    let grace = |seconds: i64| {
        let metadata = json!({"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": seconds});
        let pod: Pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        WorkerPod::read(&pod, None, now).deleting.unwrap().grace
    };
    assert_eq!(grace(30), Duration::from_secs(30));
    assert_eq!(grace(i64::MAX), GRACE_MAX);
    assert!(now.checked_add(grace(i64::MAX)).is_some());
    assert_eq!(grace(-1), Duration::ZERO);
}

fn with_condition(kind: &str, status: &str, main: Value) -> Pod {
    let conditions =
        [json!({"type": kind, "status": status, "reason": "PreemptionByScheduler", "message": "m"})];
    let status = json!({"phase": "Pending", "conditions": conditions, "initContainerStatuses": main});
    serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n1", "containers": []},
        "status": status}))
    .unwrap()
}

#[test]
fn a_node_that_pulls_an_image_has_prepared_the_pod() {
    let creating = json!([container(CLAIMER, json!({"waiting": {"reason": "ContainerCreating"}}))]);
    let ready = |status: &str| with_condition("PodReadyToStartContainers", status, creating.clone());
    let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
    let first = WorkerPod::read(&ready("False"), None, start);
    assert_eq!((first.unprepared, first.node.as_deref()), (Some(start), Some("n1")));
    let second = WorkerPod::read(&ready("False"), Some(&first), later);
    assert_eq!(second.unprepared, Some(start), "time goes on");
    let pulling = WorkerPod::read(&ready("True"), Some(&second), later);
    assert_eq!((pulling.stage, pulling.unprepared), (Stage::Starting, None));
    let failed = with_condition("PodReadyToStartContainers", "False", json!([container(CLAIMER, ended(15))]));
    assert_eq!(
        WorkerPod::read(&failed, None, start).unprepared,
        None,
        "it has ended, and its sandbox with it"
    );
    assert_eq!(read(json!({"phase": "Pending"})).unprepared, None, "its node does not say");
}

#[test]
fn an_announced_end_is_read_with_its_reason() {
    let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
    let doomed = |status: &str, before: Option<&WorkerPod>, now| {
        WorkerPod::read(&with_condition("DisruptionTarget", status, json!([])), before, now)
    };
    assert_eq!(doomed("False", None, start).doomed, None);
    let first = doomed("True", None, start);
    let second = doomed("True", Some(&first), later).doomed.unwrap();
    assert_eq!((second.reason.as_str(), second.message.as_str()), ("PreemptionByScheduler", "m"));
    assert_eq!(second.since, start);
}

#[test]
fn steps_are_witnessed_only_if_the_pod_was_seen_before_them() {
    let spec = json!({"initContainers": [{"name": CLAIMER}, {"name": "resize"}], "containers": [{"name": PUBLISHER}]});
    let pod = |claimer: Value, resize: Value, publisher: Value| -> Pod {
        let status = json!({"phase": "Running", "initContainerStatuses": [container(CLAIMER, claimer),
            container("resize", resize)], "containerStatuses": [container(PUBLISHER, publisher)]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec, "status": status})).unwrap()
    };
    let waits = || json!({"waiting": {"reason": "PodInitializing"}});
    let now = Instant::now();
    let claiming = WorkerPod::read(&pod(runs(), waits(), waits()), None, now);
    let started = |pod: &WorkerPod| pod.started.map(|started| (started.containers, started.last.witnessed));
    assert_eq!((claiming.fetched, started(&claiming)), (None, Some((1, false))));
    let working = WorkerPod::read(&pod(ended(0), runs(), waits()), Some(&claiming), now);
    let witnessed = Some(Milestone { at: now, witnessed: true });
    assert_eq!((working.fetched, started(&working), working.publishing), (witnessed, Some((2, true)), None));
    let publishing = WorkerPod::read(&pod(ended(0), ended(0), runs()), Some(&working), now);
    assert_eq!(
        (started(&publishing), publishing.publishing, publishing.published),
        (Some((3, true)), witnessed, None)
    );
    let published = WorkerPod::read(&pod(ended(0), ended(0), ended(0)), Some(&publishing), now);
    assert_eq!(published.published, witnessed);
    let found = WorkerPod::read(&pod(ended(0), ended(0), ended(0)), None, now);
    assert_eq!(found.published, Some(Milestone { at: now, witnessed: false }), "by a restarted operator");
    let not_started = json!({"terminated": {"exitCode": 128, "reason": "StartError"}});
    let failed = WorkerPod::read(&pod(ended(0), ended(0), not_started), Some(&working), now);
    assert_eq!(started(&failed), Some((2, true)), "the third was never started");
}

#[test]
fn reports_are_read_from_termination_messages() {
    let says = |exit_code: i32, message: &str| {
        let state = json!({"terminated": {"exitCode": exit_code, "message": message}});
        read(json!({"phase": "Pending", "initContainerStatuses": [container(CLAIMER, state)]})).claimer
    };
    let report = Report {
        entry: Some("7-1".to_owned()),
        attempt: 2,
        outcome: Ok(()),
        canary: None,
        started_ms: 5,
        ended_ms: 9,
        text: "in/a b.jpg".to_owned(),
    };
    assert_eq!(says(0, &report.to_string()), Some(report));
    assert_eq!(says(15, "ObjectGone: 404"), None, "an older claimer");
}

#[test]
fn people_read_the_reason_of_a_report_and_the_words_of_a_filter() {
    let message = |name: &str, said: &str| {
        let state = json!({"terminated": {"exitCode": 15, "reason": "Error", "message": said}});
        let stage = read(json!({"phase": "Failed", "initContainerStatuses": [container(name, state)]})).stage;
        let Stage::Failed(failed) = stage else { panic!("{stage:?}") };
        failed.message
    };
    let report = "7-1 1 ObjectGone 5-9 fetch the file: s3://b/a: not found";
    assert_eq!(message(CLAIMER, report), "ObjectGone: fetch the file: s3://b/a: not found");
    assert_eq!(message(PUBLISHER, report), "ObjectGone: fetch the file: s3://b/a: not found");
    assert_eq!(message("resize", report), report);
    assert_eq!(message(CLAIMER, "ObjectGone: of an older claimer"), "ObjectGone: of an older claimer");
}

#[test]
fn a_pod_that_had_a_file_did_not_die_without_one() {
    let claimed = container(CLAIMER, ended(0));
    let evicted = read(json!({"phase": "Failed", "reason": "Evicted", "initContainerStatuses": [claimed]}));
    assert!(!evicted.died_without_a_file(), "also when an earlier operator has settled its file");
    let report = "7-1 1 DiskFull 5-9 s3://bkt/a: no space";
    let full = json!({"terminated": {"exitCode": 18, "message": report}});
    let full = read(json!({"phase": "Failed", "initContainerStatuses": [container(CLAIMER, full)]}));
    assert!(!full.died_without_a_file());
}

#[test]
fn only_what_a_pass_acts_on_is_news() {
    let creating = json!([container(CLAIMER, json!({"waiting": {"reason": "ContainerCreating"}}))]);
    let now = Instant::now();
    let first =
        WorkerPod::read(&with_condition("PodReadyToStartContainers", "False", creating.clone()), None, now);
    let second =
        WorkerPod::read(&with_condition("PodReadyToStartContainers", "True", creating), Some(&first), now);
    assert!(first.is_news(None) && first != second && !second.is_news(Some(&first)));
    let claiming = with_condition("PodReadyToStartContainers", "True", json!([container(CLAIMER, runs())]));
    assert!(WorkerPod::read(&claiming, Some(&second), now).is_news(Some(&second)));
}

/// A pod of the operator that processes many files, with a filter, to which a mesh has added a container.
fn warm(phase: &str, init: &[Value], main: &[Value]) -> Pod {
    let annotations = json!({ CONTAINERS_ANNOTATION: "install,worker,detect" });
    let main_containers = [json!({"name": WORKER}), json!({"name": "detect"}), json!({"name": "proxy"})];
    let spec = json!({"initContainers": [{"name": INSTALL}], "containers": main_containers});
    let status = json!({"phase": phase, "initContainerStatuses": init, "containerStatuses": main});
    let pod = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": spec, "status": status});
    serde_json::from_value(pod).unwrap()
}

/// The same pod once it is prepared, with its worker and its filter in these states.
fn serving(worker: Value, detect: Value) -> Pod {
    let main = [container(WORKER, worker), container("detect", detect), container("proxy", runs())];
    warm("Running", &[container(INSTALL, ended(0))], &main)
}

fn waits(reason: &str) -> Value {
    json!({"waiting": {"reason": reason, "message": "m"}})
}

#[test]
fn a_warm_pod_works_once_its_worker_and_all_of_its_filters_run() {
    let read = |pod: Pod| WorkerPod::read(&pod, None, Instant::now());
    let installing = read(warm("Pending", &[container(INSTALL, runs())], &[]));
    assert_eq!((&installing.stage, installing.can_serve()), (&Stage::Starting, false));
    let creating = read(serving(runs(), waits("ContainerCreating")));
    assert_eq!((&creating.stage, creating.can_serve()), (&Stage::Starting, false), "its filter is missing");
    let without_worker = read(serving(waits("ContainerCreating"), runs()));
    assert_eq!(without_worker.stage, Stage::Starting);
    let working = read(serving(runs(), runs()));
    assert_eq!((&working.stage, working.can_serve()), (&Stage::Working, true));
    let ours = [container(WORKER, runs()), container("detect", runs())];
    let stuck_proxy = [&ours[..], &[container("proxy", waits("ImagePullBackOff"))]].concat();
    let working = read(warm("Pending", &[container(INSTALL, ended(0))], &stuck_proxy));
    assert_eq!(working.stage, Stage::Working, "ours need no proxy");
    let ended_well = read(serving(ended(0), ended(0)));
    assert_eq!(ended_well.stage, Stage::Succeeded, "only the proxy still runs");
}

#[test]
fn a_warm_pod_with_a_container_that_does_not_start_is_stuck_and_serves_nothing() {
    let stuck = |pod: Pod| {
        let pod = WorkerPod::read(&pod, None, Instant::now());
        assert!(!pod.can_serve() && !pod.awaits_file(Instant::now()), "{pod:?}");
        let Stage::Stuck(stuck) = pod.stage else { panic!("{pod:?}") };
        (stuck.container.clone(), stuck.has_image())
    };
    let pulling = stuck(serving(runs(), waits("ImagePullBackOff")));
    assert_eq!(pulling, ("detect".to_owned(), false));
    let config = stuck(serving(runs(), waits("CreateContainerConfigError")));
    assert_eq!(config, ("detect".to_owned(), true));
    let of_install = stuck(warm("Pending", &[container(INSTALL, waits("ErrImageNeverPull"))], &[]));
    assert_eq!(of_install, (INSTALL.to_owned(), false));
    let mut nowhere = warm("Pending", &[], &[]);
    let unschedulable =
        json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}]);
    nowhere.status.as_mut().unwrap().conditions = serde_json::from_value(unschedulable).unwrap();
    let nowhere = WorkerPod::read(&nowhere, None, Instant::now());
    assert_eq!(nowhere.stage, Stage::Unschedulable("m".to_owned()));
}

/// A worker ends because of its filter: what it says about the filter decides which of them explains the end,
/// whichever ended first.
#[test]
fn a_worker_explains_a_filter_that_cannot_be_executed_and_a_lost_filter_explains_its_worker() {
    let at = |code: i32, second: u32| {
        let time = format!("2026-01-01T00:00:0{second}Z");
        json!({"terminated": {"exitCode": code, "finishedAt": time}})
    };
    let blamed = |worker: Value, detect: Value| {
        let pod = WorkerPod::read(&serving(worker, detect), None, Instant::now());
        let Stage::Failed(failed) = pod.stage else { panic!("{pod:?}") };
        failed.container.unwrap()
    };
    let (unusable, lost) = (Exit::FilterUnusable.code(), Exit::FilterLost.code());
    assert_eq!(blamed(at(unusable, 2), at(1, 1)), WORKER, "it knows what was wrong");
    assert_eq!(blamed(at(lost, 1), at(137, 2)), "detect", "it knows only that the filter is gone");
    assert_eq!(blamed(at(lost, 1), runs()), WORKER, "nothing else has failed");
    let other = Exit::LocalIo.code();
    assert_eq!(blamed(at(other, 1), at(137, 2)), WORKER);
    assert_eq!(blamed(at(other, 2), at(137, 1)), "detect", "the first one counts");
}

/// Its worker reports the results that it has before the pod is judged.
#[test]
fn a_warm_pod_of_which_one_container_failed_is_over_when_the_others_have_ended_or_take_too_long() {
    let now = Instant::now();
    let ending = WorkerPod::read(&serving(runs(), ended(137)), None, now);
    assert!(ending.is_finished() && !ending.is_alive() && !ending.can_serve());
    let last = now + LAST_WORDS_WITHIN;
    let before = last - Duration::from_millis(1);
    assert!(ending.is_ending(before) && !ending.is_over(before));
    assert!(!ending.is_ending(last) && ending.is_over(last));
    let ended_too = WorkerPod::read(&serving(ended(26), ended(1)), None, now);
    assert!(!ended_too.is_ending(now) && ended_too.is_over(now));
    let killed = WorkerPod::read(&serving(ended(26), ended(137)), Some(&ending), now);
    assert!(killed.is_ending(now), "its kubelet may have killed it, and says so with the pod's last status");
    assert!(killed.is_over(now + LAST_STATUS_WITHIN));
    let of_one_file = in_mesh("Running", &[container(CLAIMER, ended(0))], &[container("resize", ended(3))]);
    assert!(of_one_file.is_over(of_one_file.since), "it has only this file");
    let main = [container("resize", ended(3)), container("proxy", runs())];
    let beside_others = in_mesh("Running", &[container(CLAIMER, ended(0))], &main);
    assert!(beside_others.is_over(beside_others.since));
}
