//! Proof that the testbed is a real Kubernetes, and that its faults are real faults.

mod common;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::Method;
use k8s_openapi::api::{
    apps::v1::Deployment,
    batch::v1::Job,
    core::v1::{ConfigMap, Node, Pod, Service},
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use serde_json::json;
use testbed::{
    Doing, Fault, FaultyS3, RUN, Rule, Testbed, Up,
    images::{Set, reference},
    network::API_SERVICE_IP,
    services::S3_IP_URL,
};

use tokio::net::TcpStream;

use common::{Valkey, alone, object, restricted, run_pod, shared};

/// Longer than anything takes, even on a machine that is also compiling.
const PATIENCE: Duration = Duration::from_secs(90);

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_job_with_init_containers_completes_and_its_logs_are_read_through_the_api() {
    let (testbed, _guard) = shared().await;
    let namespace = testbed.namespace("job").await.unwrap();
    let container = |name: &str, script: &str| {
        json!({"name": name, "image": reference("busybox"), "command": ["sh", "-c", script],
               "securityContext": restricted(), "volumeMounts": [{"name": "ws", "mountPath": "/ws"}]})
    };
    let job: Job = object(json!({"metadata": {"name": "steps"}, "spec": {"template": {"spec": {
        "restartPolicy": "Never", "volumes": [{"name": "ws", "emptyDir": {}}],
        "initContainers": [container("first", "echo one >/ws/a"), container("second", "echo two >>/ws/a")],
        "containers": [container("last", "cat /ws/a")]}}}}));
    let jobs: Api<Job> = Api::namespaced(testbed.client(), &namespace.name);
    jobs.create(&PostParams::default(), &job).await.unwrap();
    let completed = async || {
        let job = jobs.get("steps").await.doing(|| "read the state of the Job".to_owned())?;
        Ok(job.status.and_then(|status| status.completion_time))
    };
    testbed.eventually("the Job completes", PATIENCE, completed).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(testbed.client(), &namespace.name);
    let pod = pods.list(&ListParams::default()).await.unwrap().items.remove(0).metadata.name.unwrap();
    assert_eq!(testbed.logs(&namespace.name, &pod, "last").await.unwrap(), "one\ntwo\n");
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_pod_reaches_the_api_server_by_its_service_address_and_a_service_by_name() {
    let (testbed, _guard) = shared().await;
    let namespace = testbed.namespace("reach").await.unwrap();
    // On the other node, so that packets cross the bridge.
    let server: Pod = object(json!({"metadata": {"name": "web", "labels": {"app": "web"}}, "spec": {
        "nodeName": "node-2", "containers": [{"name": "web", "image": reference("busybox"),
            "command": ["sh", "-c", "echo hello >/tmp/index.html && exec httpd -f -p 8080 -h /tmp"]}]}}));
    let pods: Api<Pod> = Api::namespaced(testbed.client(), &namespace.name);
    pods.create(&PostParams::default(), &server).await.unwrap();
    let service = json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}});
    let services: Api<Service> = Api::namespaced(testbed.client(), &namespace.name);
    services.create(&PostParams::default(), &object(service)).await.unwrap();
    let script = "until wget -qO- http://web 2>/dev/null; do sleep 0.2; done && wget -qO- http://web.$NAMESPACE.svc.cluster.local";
    let client = json!({"nodeName": "node-1", "containers": [{"name": "main", "image": reference("busybox"),
        "command": ["sh", "-c", script], "env": [{"name": "NAMESPACE", "value": namespace.name}]}]});
    let ended = run_pod(&testbed, &namespace.name, "client", client).await;
    assert_eq!((ended.code, ended.log.as_str()), (0, "hello\nhello\n"));

    testbed.load_images(&[Set::Tests]).unwrap();
    let asks = |url: &str| json!({"containers": [{"name": "main", "image": reference("peer"), "args": ["get", url]}]});
    for (pod, host) in
        [("by-address", API_SERVICE_IP.to_string()), ("by-name", "kubernetes.default.svc".to_owned())]
    {
        let ended = run_pod(&testbed, &namespace.name, pod, asks(&format!("https://{host}/readyz"))).await;
        assert_eq!((ended.code, ended.log.as_str()), (0, "ok"));
    }
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_killed_node_becomes_not_ready_its_pods_are_replaced_elsewhere_and_it_comes_back() {
    let (testbed, _guard) = alone().await;
    let namespace = testbed.namespace("nodes").await.unwrap();
    let prefer = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100,
        "preference": {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]}}]}});
    let deployment: Deployment = object(json!({"metadata": {"name": "stay"}, "spec": {
        "selector": {"matchLabels": {"app": "stay"}}, "template": {"metadata": {"labels": {"app": "stay"}},
        "spec": {"affinity": prefer, "containers": [{"name": "main", "image": reference("busybox"), "command": ["httpd", "-f", "-p", "8080"]}]}}}}));
    let deployments: Api<Deployment> = Api::namespaced(testbed.client(), &namespace.name);
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let service = json!({"metadata": {"name": "stay"}, "spec": {"selector": {"app": "stay"}, "ports": [{"port": 8080}]}});
    let services: Api<Service> = Api::namespaced(testbed.client(), &namespace.name);
    let service = services.create(&PostParams::default(), &object(service)).await.unwrap();
    let address = format!("{}:8080", service.spec.unwrap().cluster_ip.unwrap());
    let pods: Api<Pod> = Api::namespaced(testbed.client(), &namespace.name);
    let runs_on = async |node: &str| {
        let listed = pods.list(&ListParams::default()).await.doing(|| "list pods".to_owned())?;
        let on_node =
            |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.as_deref() == Some(node));
        let runs =
            |pod: &Pod| pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Running"));
        Ok(listed.items.iter().filter(on_node).any(runs).then_some(()))
    };
    testbed.eventually("the pod runs on node-1", PATIENCE, async || runs_on("node-1").await).await.unwrap();

    testbed.kill_node("node-1").unwrap();
    let killed = Instant::now();
    let nodes: Api<Node> = Api::all(testbed.client());
    let not_ready = async || {
        let node = nodes.get("node-1").await.doing(|| "read the state of node-1".to_owned())?;
        let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
        let silent =
            conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status != "True");
        Ok(silent.then_some(()))
    };
    testbed.eventually("node-1 is NotReady", PATIENCE, not_ready).await.unwrap();
    println!("NotReady after {:.1} s", killed.elapsed().as_secs_f32());
    testbed.eventually("the pod runs on node-2", PATIENCE, async || runs_on("node-2").await).await.unwrap();
    println!("replaced after {:.1} s", killed.elapsed().as_secs_f32());
    let reached = async || {
        // Nothing answers a packet to a pod that has just died.
        let connected = tokio::time::timeout(Duration::from_secs(2), TcpStream::connect(&address)).await;
        Ok(connected.is_ok_and(|stream| stream.is_ok()).then_some(()))
    };
    testbed.eventually("the host reaches the pod by its service", PATIENCE, reached).await.unwrap();
    println!("reached after {:.1} s", killed.elapsed().as_secs_f32());

    // An image that is loaded while the node is dead is there when it returns.
    testbed.load_images(&[Set::Filters]).unwrap();
    testbed.restart_node("node-1").await.unwrap();
    let again =
        json!({"nodeName": "node-1", "containers": [{"name": "main", "image": reference("thumbnail")}]});
    let again = run_pod(&testbed, &namespace.name, "again", again).await;
    assert_eq!(again.code, 1, "the node runs pods again, here one without a picture: {}", again.log);
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_validating_webhook_in_a_pod_is_called() {
    let (testbed, _guard) = alone().await;
    testbed.load_images(&[Set::Tests]).unwrap();
    let namespace = testbed.namespace("webhook").await.unwrap();
    let name = &namespace.name;
    let host = format!("denier.{name}.svc");
    let (certificate, key) = testbed.authority().unwrap().issue(&host, None, &[&host], &[]).unwrap();
    let encoded = |text: &str| json!({"tls.crt": certificate, "tls.key": key.serialize_pem()})[text].clone();
    let ca = std::fs::read(testbed.paths().pki().join("ca.crt")).unwrap();
    let ca = serde_json::to_value(k8s_openapi::ByteString(ca)).unwrap();
    let manifests = [
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls", "namespace": name},
            "stringData": {"tls.crt": encoded("tls.crt"), "tls.key": encoded("tls.key")}}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "denier", "namespace": name, "labels": {"app": "denier"}},
            "spec": {"volumes": [{"name": "tls", "secret": {"secretName": "tls"}}], "containers": [{"name": "denier",
                "image": reference("peer"), "args": ["deny"], "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
                "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8443, "scheme": "HTTPS"}, "periodSeconds": 1}}]}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "denier", "namespace": name},
            "spec": {"selector": {"app": "denier"}, "ports": [{"port": 443, "targetPort": 8443}]}}),
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": name},
            "webhooks": [{"name": "denier.testbed.example", "sideEffects": "None", "admissionReviewVersions": ["v1"],
                "clientConfig": {"service": {"name": "denier", "namespace": name}, "caBundle": ca},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE"]}]}]}),
    ];
    testbed.apply(&manifests.map(|manifest| manifest.to_string()).join("\n---\n")).unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(testbed.client(), name);
    let create = async |map: &str, deny: &str| {
        let map = object(json!({"metadata": {"name": map, "labels": {"deny": deny}}}));
        // A dry run also calls the webhook, and can be repeated.
        let dry = PostParams { dry_run: true, ..Default::default() };
        maps.create(&dry, &map).await.doing(|| "create a ConfigMap".to_owned())
    };
    // The API server admits everything until it knows the webhook, and nothing until the pod serves.
    let refused = async || match create("bad", "yes").await {
        Err(error) if error.to_string().contains("the denier refuses") => Ok(Some(())),
        other => other.map(|_| None),
    };
    let refused = testbed.eventually("the webhook refuses", PATIENCE, refused).await;
    let admitted = create("good", "no").await;
    let hooks: Api<k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration> =
        Api::all(testbed.client());
    hooks.delete(name, &Default::default()).await.unwrap();
    refused.unwrap();
    admitted.unwrap();
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn pod_security_restricted_is_enforced_in_a_labelled_namespace() {
    let (testbed, _guard) = shared().await;
    let labels = [("pod-security.kubernetes.io/enforce", "restricted")];
    let namespace = testbed.labelled_namespace("restricted", &labels).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(testbed.client(), &namespace.name);
    let root = json!({"metadata": {"name": "root"}, "spec": {"containers": [{"name": "main", "image": reference("busybox")}]}});
    let refusal = pods.create(&PostParams::default(), &object(root)).await.unwrap_err().to_string();
    assert!(refusal.contains("violates PodSecurity"), "{refusal}");
    let spec = json!({"containers": [{"name": "main", "image": reference("busybox"), "command": ["id", "-u"], "securityContext": restricted()}]});
    let ended = run_pod(&testbed, &namespace.name, "nonroot", spec).await;
    assert_eq!((ended.code, ended.log.as_str()), (0, "65532\n"));
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn sample_filters_do_what_they_say() {
    let (testbed, _guard) = shared().await;
    testbed.load_images(&[Set::Filters, Set::Tests]).unwrap();
    let namespace = testbed.namespace("filters").await.unwrap();
    // One red pixel.
    let png: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0\x90wS\xde\0\0\0\x0cIDAT\x08\xd7c\xf8\xcf\xc0\0\0\x03\x01\x01\0\x18\xdd\x8d\xb0\0\0\0\0IEND\xaeB`\x82";
    let data = json!({"picture": k8s_openapi::ByteString(png.to_vec()), "marked": k8s_openapi::ByteString(b"FAIL-HERE".to_vec()),
                      "attempt": k8s_openapi::ByteString(b"2\n".to_vec())});
    let maps: Api<ConfigMap> = Api::namespaced(testbed.client(), &namespace.name);
    maps.create(&PostParams::default(), &object(json!({"metadata": {"name": "files"}, "binaryData": data})))
        .await
        .unwrap();
    let filter = |image: &str, args: &[&str], input: &str| {
        json!({"volumes": [{"name": "files", "configMap": {"name": "files"}}, {"name": "ws", "emptyDir": {}}],
            "containers": [{"name": "main", "image": reference(image), "args": args, "securityContext": restricted(),
                "resources": {"limits": {"memory": "64Mi"}},
                "env": [{"name": "SOURCE_PATH", "value": format!("/files/{input}")}, {"name": "OPENFILTER_ATTEMPT_FILE", "value": "/files/attempt"}],
                "volumeMounts": [{"name": "files", "mountPath": "/files"}, {"name": "ws", "mountPath": "/ws"}]}]})
    };
    for (pod, image, args, input, code) in [
        ("thumbnail", "thumbnail", &[][..], "picture", 0),
        ("not-a-picture", "thumbnail", &[][..], "marked", 1),
        ("copy", "probe", &["copy"][..], "marked", 0),
        ("marked", "probe", &["fail-on-marker"][..], "marked", 1),
        ("unmarked", "probe", &["fail-on-marker"][..], "picture", 0),
        ("second-of-two", "probe", &["fail-times", "2"][..], "picture", 1),
        ("second-of-one", "probe", &["fail-times", "1"][..], "picture", 0),
        ("sleep", "probe", &["sleep", "0.1"][..], "picture", 0),
        ("exit", "probe", &["exit", "42"][..], "picture", 42),
        ("greedy", "probe", &["eat-memory"][..], "picture", 137),
    ] {
        let ended = run_pod(&testbed, &namespace.name, pod, filter(image, args, input)).await;
        assert_eq!(ended.code, code, "{pod}: {} ({})", ended.reason, ended.log);
        assert_eq!(ended.reason == "OOMKilled", pod == "greedy", "{pod}: {}", ended.reason);
    }
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn valkey_wants_its_password_survives_a_kill_and_forgets_when_wiped() {
    let (testbed, _guard) = alone().await;
    let services = testbed.services().await.unwrap();
    assert!(Valkey::connect("wrong").await.unwrap_err().contains("WRONGPASS"));
    let mut valkey = Valkey::connect(&services.valkey_password).await.unwrap();
    assert_eq!(valkey.ask("SET kept yes").await.unwrap(), "+OK");
    assert_eq!(valkey.ask("SET work:1 open").await.unwrap(), "+OK");
    assert_eq!(valkey.ask("ACL SETUSER worker on >secret ~work:* +get").await.unwrap(), "+OK");
    let mut worker = Valkey::connect("worker secret").await.unwrap();
    assert_eq!(worker.ask("GET work:1").await.unwrap(), "$4 open");
    for refused in ["SET work:1 done", "GET kept", "ACL SETUSER worker +@all"] {
        let answer = worker.ask(refused).await.unwrap();
        assert!(answer.starts_with("-NOPERM"), "{refused}: {answer}");
    }
    services.kill_valkey().await.unwrap();
    assert!(valkey.ask("PING").await.is_err(), "it is dead");
    services.restart_valkey().await.unwrap();
    let mut valkey = Valkey::connect(&services.valkey_password).await.unwrap();
    assert_eq!(valkey.ask("GET kept").await.unwrap(), "$3 yes");
    let forgotten = Valkey::connect("worker secret").await.unwrap_err();
    assert!(forgotten.contains("WRONGPASS"), "a restart forgets users: {forgotten}");
    services.wipe_valkey().await.unwrap();
    let mut valkey = Valkey::connect(&services.valkey_password).await.unwrap();
    assert_eq!(valkey.ask("GET kept").await.unwrap(), "$-1");
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn s3_checks_signatures_and_fails_as_it_is_told() {
    let (testbed, _guard) = alone().await;
    let services = testbed.services().await.unwrap();
    let s3 = services.s3.clone();
    s3.make_bucket("videos").await.unwrap();
    s3.put("videos", "a/clip", "0123456789").await.unwrap();
    assert_eq!(s3.get("videos", "a/clip").await.unwrap(), "0123456789");
    let forger = testbed::S3::new(S3_IP_URL, &s3.access_key, "not the secret");
    let (status, body) = forger.request(Method::GET, "/videos/a/clip", Bytes::new()).await.unwrap();
    assert_eq!(status, 403, "{body:?}");

    let proxy = FaultyS3::start(S3_IP_URL).await.unwrap();
    let faulty = s3.at(&proxy.url);
    assert_eq!(faulty.get("videos", "a/clip").await.unwrap(), "0123456789", "signatures survive the proxy");
    for (fault, answer) in [
        (Fault::InternalError, "InternalError"),
        (Fault::SlowDown, "SlowDown"),
        (Fault::Missing, "NoSuchKey"),
        (Fault::Forbidden, "AccessDenied"),
    ] {
        proxy.inject(Rule::every(fault, "/a/clip").times(1));
        let error = faulty.get("videos", "a/clip").await.unwrap_err().to_string();
        assert!(error.contains(answer), "{error}");
    }
    proxy.inject(Rule::every(Fault::Truncated(4), "/a/clip").times(1));
    assert!(faulty.get("videos", "a/clip").await.is_err(), "a body that ends early is an error");
    let delay = Duration::from_millis(400);
    proxy.inject(Rule::every(Fault::Slow(delay), "/a/clip").times(1));
    let asked = Instant::now();
    faulty.get("videos", "a/clip").await.unwrap();
    assert!(asked.elapsed() >= delay);

    services.kill_s3().await.unwrap();
    let get = s3.get("videos", "a/clip");
    let answered = tokio::time::timeout(Duration::from_secs(2), get).await;
    assert!(!matches!(answered, Ok(Ok(_))), "it is dead");
    services.restart_s3().await.unwrap();
    assert_eq!(s3.get("videos", "a/clip").await.unwrap(), "0123456789", "its folder outlives it");
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn everybody_who_asks_for_the_services_gets_the_same_ones() {
    let (testbed, _guard) = alone().await;
    let (one, two) = tokio::join!(testbed.services(), testbed.services());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(one.valkey_password, two.valkey_password);
    assert_eq!(one.s3.secret_key, two.s3.secret_key);
    Valkey::connect(&one.valkey_password).await.unwrap();
    one.s3.make_bucket("same").await.unwrap();
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn etcd_serves_nobody_without_a_certificate() {
    let (testbed, _guard) = shared().await;
    let (paths, pki) = (testbed.paths(), testbed.paths().pki());
    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.join(name).display());
    let get = |login: &[String]| {
        let mut kubectl = std::process::Command::new(paths.bin("kubectl"));
        kubectl.args(["--kubeconfig=/dev/null", "--server=https://127.0.0.1:12379", "--request-timeout=5s"]);
        kubectl.arg(file("certificate-authority", "ca.crt")).args(login);
        kubectl.args(["get", "--raw", "/version"]).output().unwrap()
    };
    let unknown = get(&[]);
    assert!(!unknown.status.success(), "{unknown:?}");
    let known = get(&[file("client-certificate", "etcd.crt"), file("client-key", "etcd.key")]);
    assert!(String::from_utf8_lossy(&known.stdout).contains("etcdserver"), "{known:?}");
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_paused_api_server_is_silent_until_it_is_resumed() {
    let (testbed, _guard) = alone().await;
    let nodes: Api<Node> = Api::all(testbed.client());
    let paused = testbed.pause_api_server().unwrap();
    let asked = tokio::time::timeout(Duration::from_secs(2), nodes.get("node-1")).await;
    assert!(asked.is_err(), "nothing answers");
    paused.resume();
    let answers =
        async || nodes.get("node-1").await.map(Some).doing(|| "read the state of node-1".to_owned());
    testbed.eventually("the API server answers again", PATIENCE, answers).await.unwrap();
}

#[tokio::test]
#[ignore = "starts a cluster, which needs root: make test"]
async fn a_cluster_that_is_up_is_reused_and_not_changed() {
    let (testbed, _guard) = shared().await;
    let record = || {
        let pids = std::fs::read_dir(format!("{RUN}/pids")).unwrap().map(|entry| entry.unwrap().path());
        let files = pids.chain([format!("{RUN}/cluster.json").into()]);
        // Each record contains a pid and its start time, so equal texts mean the same process.
        files.map(|file| (std::fs::read_to_string(&file).unwrap(), file)).collect::<BTreeSet<_>>()
    };
    let before = record();
    assert!(before.len() > 10, "control plane, two nodes, and the cluster: {before:?}");
    Testbed::start_or_reuse().await.unwrap();
    assert!(matches!(testbed::up(testbed.paths(), 1, 0).await.unwrap(), Up::Already(_)));
    for impossible in [0, 33] {
        assert!(Testbed::with_nodes(impossible).await.unwrap_err().to_string().contains("1 to 32 nodes"));
    }
    assert_eq!(record(), before);
    assert_eq!(testbed::dead(), Vec::<String>::new());
}
