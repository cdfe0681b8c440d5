//! What kustomize builds: complete, restricted, and consistent with the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Command, CommandFactory};
use crds::rights::Right;
use crds::rules::{self, Context, Kind};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};
use testbed::Testbed;
use tests::root;

use crate::harness::{build, text};

const OVERLAYS: [&str; 3] = ["dev", "staging", "prod"];

/// The folder that README.md offers users as a starting point.
pub const INSTALL: &str = "examples/install";

pub fn overlay(name: &str) -> PathBuf {
    root().join("kustomize/overlays").join(name)
}

async fn overlays() -> BTreeMap<&'static str, Vec<Value>> {
    let testbed = Testbed::with_nodes(2).await.unwrap();
    OVERLAYS.iter().map(|name| (*name, build(&testbed, &overlay(name)))).collect()
}

fn workloads(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter(|object| matches!(text(object, "/kind"), "Deployment" | "StatefulSet"))
}

fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn every_component_builds_by_itself_and_every_overlay_is_checked() {
    let testbed = Testbed::with_nodes(2).await.unwrap();
    let folders = |below: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(root().join("kustomize").join(below)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(folders("overlays"), OVERLAYS.map(str::to_owned).into());
    for component in folders("components") {
        // kustomize needs paths relative to its file.
        let folder = testbed.paths().state().join(format!("component-{component}"));
        fs::create_dir_all(&folder).unwrap();
        let wanted = json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": ["../../kustomize/base"], "components": [format!("../../kustomize/components/{component}")]});
        fs::write(folder.join("kustomization.yaml"), wanted.to_string()).unwrap();
        assert!(!build(&testbed, &folder).is_empty());
        fs::remove_dir_all(&folder).unwrap();
    }
}

/// tests/generated.rs compares the files with the code; this test compares what is deployed.
#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn every_overlay_carries_the_generated_api_and_rights() {
    for (name, objects) in overlays().await {
        for crd in crds::definitions::all() {
            let wanted = crd.metadata.name.clone().unwrap();
            let same_name = |object: &&Value| text(object, "/metadata/name") == wanted;
            let found = objects.iter().find(same_name).unwrap_or_else(|| panic!("{name} has no {wanted}"));
            // Compared as a type, because YAML does not distinguish 1 from 1.0.
            let found: CustomResourceDefinition = serde_json::from_value(found.clone()).unwrap();
            assert!(found.spec == crd.spec, "{name}: {wanted} is not what the types make of it");
        }
        // kustomize also renames in roles wherever it takes a name for a reference to something that it
        // renamed.
        for role in operator::rights::ROLES.iter().chain(webhook::rights::ROLES).chain(crds::rights::PEOPLE) {
            let same = |object: &&Value| {
                text(object, "/kind").ends_with("Role") && text(object, "/metadata/name") == role.name
            };
            match objects.iter().find(same) {
                Some(found) => {
                    let rules: Vec<Value> = role.rights.iter().map(rule).collect();
                    assert_eq!(list(found, "/rules"), rules, "{name}: {}", role.name);
                }
                // With certificates of cert-manager these roles are removed.
                None => {
                    assert!(name == "prod" && role.account == "openfilter-webhook", "{name}: {}", role.name)
                }
            }
        }
    }
}

/// A right in RBAC's notation.
fn rule(right: &Right) -> Value {
    let Right { group, resource, names, verbs, why: _ } = right;
    let mut rule = json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    rule
}

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn images_are_set_in_one_place_by_tag_or_by_digest() {
    for (name, objects) in overlays().await {
        let mut images: Vec<&str> = Vec::new();
        for workload in workloads(&objects) {
            for container in list(workload, "/spec/template/spec/containers") {
                images.push(text(container, "/image"));
                let settings = list(container, "/env").iter();
                images.extend(
                    settings.filter(|set| set["name"] == "CLAIMER_IMAGE").map(|set| text(set, "/value")),
                );
            }
        }
        assert_eq!(images.len(), if name == "prod" { 3 } else { 4 }, "{name}: {images:?}");
        let good = |image: &&&str| match name {
            "dev" => image.starts_with("localhost/openfilter/") && image.ends_with(":testbed"),
            "staging" => {
                image.starts_with("registry.example/") && !image.contains("latest") && image.contains(':')
            }
            _ => image.starts_with("registry.example/") && image.contains("@sha256:"),
        };
        assert_eq!(images.iter().filter(good).count(), images.len(), "{name}: {images:?}");
    }
    let folders = OVERLAYS.map(overlay).into_iter().chain([root().join(INSTALL)]);
    let fields: Vec<String> =
        folders.map(|folder| fs::read_to_string(folder.join("image-fields.yaml")).unwrap()).collect();
    assert!(fields.iter().all(|text| *text == fields[0]), "the overlays must know the same fields as images");
}

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn pods_are_restricted_have_probes_and_ask_for_resources() {
    for (name, objects) in overlays().await {
        for workload in workloads(&objects) {
            let title = format!("{name}: {}", text(workload, "/metadata/name"));
            let pod = &workload["spec"]["template"]["spec"];
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{title}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{title}");
            for container in list(pod, "/containers") {
                let security = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]}});
                assert_eq!(container["securityContext"], security, "{title}");
                for field in ["livenessProbe", "readinessProbe"] {
                    assert!(container[field].is_object(), "{title} has no {field}");
                }
                for field in
                    ["/resources/requests/cpu", "/resources/requests/memory", "/resources/limits/memory"]
                {
                    assert!(!text(container, field).is_empty(), "{title} has no {field}");
                }
            }
        }
        let namespace = objects.iter().find(|object| object["kind"] == "Namespace").unwrap();
        assert_eq!(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "restricted");
        for kind in ["PodDisruptionBudget", "NetworkPolicy"] {
            let found = objects.iter().filter(|object| object["kind"] == kind).count();
            assert!(found >= 2, "{name} has {found} of {kind}");
        }
    }
}

fn valkey_file(name: &str) -> String {
    fs::read_to_string(root().join("kustomize/components/valkey").join(name)).unwrap()
}

/// tests/queue/limits.rs shows what these limits prevent.
#[test]
fn every_limit_of_valkey_is_set_and_fits_the_memory_of_its_container() {
    let config = valkey_file("valkey.conf");
    let settings: Vec<Vec<&str>> = config
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let megabytes = |name: &[&str]| -> u64 {
        let found = settings.iter().find_map(|words| words.strip_prefix(name));
        let value = found.unwrap_or_else(|| panic!("{name:?} is not set"))[0];
        value.strip_suffix("mb").unwrap_or_else(|| panic!("{name:?} is {value}")).parse().unwrap()
    };
    let (memory, clients) = (megabytes(&["maxmemory"]), megabytes(&["maxmemory-clients"]));
    let limit = valkey_file("valkey.yaml");
    let limit = limit.lines().find_map(|line| line.trim().strip_prefix("limits: {memory: ")).unwrap();
    let limit: u64 = limit.strip_suffix("Mi}").unwrap().parse().unwrap();
    assert!(memory * 4 <= limit * 3, "a quarter of {limit} MiB is for what the server does not count");
    assert!(clients * 5 < memory, "the last fifth is for settling, not for connections");
    assert_eq!((megabytes(&["proto-max-bulk-len"]), megabytes(&["client-query-buffer-limit"])), (1, 1));
    for class in ["normal", "pubsub"] {
        assert!(megabytes(&["client-output-buffer-limit", class]) < clients, "{class}");
    }
    for words in [["maxmemory-policy", "noeviction"], ["appendonly", "yes"], ["appendfsync", "always"]] {
        assert!(settings.iter().any(|setting| *setting == words), "{words:?}");
    }
}

/// The testbed's network does not enforce policies, so this checks their contents, not their effect.
#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn traffic_is_denied_but_for_what_each_program_needs() {
    for (name, objects) in overlays().await {
        let policies: Vec<&Value> =
            objects.iter().filter(|object| object["kind"] == "NetworkPolicy").collect();
        let deny = policies.iter().find(|policy| policy["spec"]["podSelector"] == json!({})).unwrap();
        assert_eq!(deny["spec"]["policyTypes"], json!(["Ingress", "Egress"]), "{name}");
        assert!(deny.pointer("/spec/ingress").is_none() && deny.pointer("/spec/egress").is_none(), "{name}");
        for workload in workloads(&objects) {
            let program = text(workload, "/metadata/name");
            let labels = &workload["spec"]["template"]["metadata"]["labels"];
            let of_this = |policy: &&&Value| {
                let wanted = policy["spec"]["podSelector"]["matchLabels"].as_object();
                wanted.is_some_and(|wanted| wanted.iter().all(|(key, value)| labels[key] == *value))
            };
            let of_this: Vec<_> = policies.iter().filter(of_this).collect();
            assert!(!of_this.is_empty(), "{name}: {program}");
            for rule in of_this.iter().flat_map(|policy| list(policy, "/spec/egress")) {
                let ports = list(rule, "/ports");
                // The metadata service of a cloud listens at port 80.
                if !ports.is_empty() && ports.iter().all(|port| port["port"].is_u64() && port["port"] != 80) {
                    continue;
                }
                assert!(!list(rule, "/to").is_empty(), "{name}: {program}: {rule}");
                for block in list(rule, "/to").iter().filter_map(|to| to.get("ipBlock")) {
                    let is_v6 = text(block, "/cidr").contains(':');
                    let services = rules::METADATA.iter().map(ToString::to_string);
                    let services: BTreeSet<String> =
                        services.filter(|network| network.contains(':') == is_v6).collect();
                    let except = list(block, "/except").iter().filter_map(Value::as_str);
                    let except: BTreeSet<String> = except.map(str::to_owned).collect();
                    assert_eq!(except, services, "{name}: {program}");
                }
            }
            for policy in &of_this {
                let who = |rule: &Value| rule.get("from").map(Value::to_string).unwrap_or_default();
                let everybody = |rule: &&Value| !who(rule).contains("podSelector");
                let open: Vec<&Value> = list(policy, "/spec/ingress").iter().filter(everybody).collect();
                let ports: Vec<&str> = open
                    .iter()
                    .flat_map(|rule| list(rule, "/ports"))
                    .map(|port| text(port, "/port"))
                    .collect();
                // No selector matches the API server.
                let allowed: &[&str] = if program == "openfilter-webhook" { &["https"] } else { &[] };
                assert_eq!(ports, allowed, "{name}: whoever is in the cluster reaches {program}");
            }
        }
    }
}

/// The tables list the rights that are needed; this test checks for rights that they must never contain.
#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn no_right_is_a_wildcard_and_secrets_are_read_by_name_only() {
    for (name, objects) in overlays().await {
        let mut rules = 0;
        for role in objects.iter().filter(|object| matches!(text(object, "/kind"), "Role" | "ClusterRole")) {
            for rule in list(role, "/rules") {
                rules += 1;
                let title = format!("{name}: {}: {rule}", text(role, "/metadata/name"));
                assert!(!rule.to_string().contains('*'), "{title}");
                let secrets = list(rule, "/resources").contains(&json!("secrets"));
                let broad = ["list", "watch", "deletecollection"];
                let broad = list(rule, "/verbs").iter().any(|verb| broad.contains(&verb.as_str().unwrap()));
                assert!(!(secrets && broad), "{title}");
            }
        }
        assert!(rules > 20, "{name} has {rules} rules");
    }
}

/// No program would read a misspelled setting.
#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn the_programs_know_and_take_every_setting() {
    for (name, objects) in overlays().await {
        for (program, command) in
            [("operator", operator::Args::command()), ("webhook", webhook::args::Args::command())]
        {
            let prefix = format!("openfilter-{program}-");
            let ours = |object: &&Value| {
                object["kind"] == "ConfigMap" && text(object, "/metadata/name").starts_with(&prefix)
            };
            let settings = objects.iter().find(ours).unwrap()["data"].as_object().unwrap();
            let mut words: Vec<String> =
                settings.iter().map(|(env, value)| flag(&command, env, value)).collect();
            words.insert(0, program.to_owned());
            if program == "operator" {
                // The Deployment itself sets this.
                words.push("--claimer-image=x".to_owned());
            }
            command.clone().try_get_matches_from(&words).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// The flag that corresponds to an environment variable.
fn flag(command: &Command, env: &str, value: &Value) -> String {
    let known = command.get_arguments().find(|known| known.get_env().is_some_and(|known| known == env));
    let known = known.unwrap_or_else(|| panic!("no setting of {} is called {env}", command.get_name()));
    let long = known.get_long().unwrap();
    match known.get_action() {
        // Such a flag takes no value, but its variable does.
        ArgAction::SetTrue => {
            assert!(matches!(value.as_str(), Some("true" | "false")), "{env}={value}");
            format!("--{long}")
        }
        _ => format!("--{long}={}", value.as_str().unwrap()),
    }
}

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn alerts_are_about_metrics_that_exist() {
    let mut known: BTreeSet<String> =
        operator::metrics::Metrics::new().described().iter().map(|metric| metric.name.to_string()).collect();
    // A metric without a value is not printed.
    let metrics = webhook::metrics::Metrics::default();
    metrics.answered(Kind::Pipeline, "validate", webhook::metrics::ReviewOutcome::Allowed, Duration::ZERO);
    metrics.policies_known(0, 0);
    let printed = metrics.text();
    let described = printed.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    known.extend(described.filter_map(|line| Some(line.split_once(' ')?.0.to_owned())));
    let all = overlays().await;
    let alerts = all["prod"].iter().find(|object| object["kind"] == "PrometheusRule").unwrap();
    let mut used = 0;
    for rule in list(alerts, "/spec/groups").iter().flat_map(|group| list(group, "/rules")) {
        let expression = text(rule, "/expr");
        let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        for metric in words.filter(|word| word.starts_with("openfilter_")) {
            let bare = metric.trim_end_matches("_bucket").trim_end_matches("_total");
            let exists = [metric, bare].iter().any(|name| known.contains(*name));
            assert!(exists, "{}: there is no metric {metric}", text(rule, "/alert"));
            used += 1;
        }
    }
    assert!(used >= 10, "{used}");
    let page = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    for rule in list(alerts, "/spec/groups").iter().flat_map(|group| list(group, "/rules")) {
        assert!(
            page.contains(text(rule, "/alert")),
            "docs/operations.md says nothing of {}",
            text(rule, "/alert")
        );
    }
}

/// Prometheus finds the Services and may connect; the webhook finds its certificate, which covers its name.
#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn monitors_and_certificates_fit_what_they_are_for() {
    let all = overlays().await;
    let of = |kind: &'static str| all["prod"].iter().filter(move |object| object["kind"] == kind);
    let ports = |service: &Value| -> BTreeSet<String> {
        list(service, "/spec/ports").iter().map(|port| text(port, "/name").to_owned()).collect()
    };
    let mut watched = BTreeSet::new();
    for monitor in of("ServiceMonitor") {
        let selector = monitor["spec"]["selector"]["matchLabels"].as_object().unwrap();
        let selects = |service: &&Value| {
            selector.iter().all(|(name, value)| service["metadata"]["labels"][name] == *value)
        };
        let services: Vec<&Value> = of("Service").filter(selects).collect();
        assert_eq!(services.len(), 1, "{monitor}");
        let port = text(monitor, "/spec/endpoints/0/port");
        assert!(ports(services[0]).contains(port), "{monitor}");
        watched.insert(text(services[0], "/spec/selector/app.kubernetes.io~1name"));
    }
    let open =
        of("NetworkPolicy").find(|policy| text(policy, "/metadata/name") == "openfilter-metrics").unwrap();
    let open = list(open, "/spec/podSelector/matchExpressions/0/values").iter().filter_map(Value::as_str);
    assert_eq!(open.collect::<BTreeSet<_>>(), watched);

    let webhook = of("Deployment").find(|object| text(object, "/metadata/name") == "openfilter-webhook");
    let secret = text(webhook.unwrap(), "/spec/template/spec/volumes/0/secret/secretName");
    let serves = |certificate: &&Value| text(certificate, "/spec/secretName") == secret;
    let certificate = of("Certificate").find(serves).unwrap();
    for configuration in of("ValidatingWebhookConfiguration").chain(of("MutatingWebhookConfiguration")) {
        let named = text(configuration, "/metadata/annotations/cert-manager.io~1inject-ca-from");
        let own = |field: &str| text(certificate, &format!("/metadata/{field}"));
        assert_eq!(named, format!("{}/{}", own("namespace"), own("name")));
        for webhook in list(configuration, "/webhooks") {
            let service = |field: &str| text(webhook, &format!("/clientConfig/service/{field}"));
            let host = format!("{}.{}.svc", service("name"), service("namespace"));
            assert!(list(certificate, "/spec/dnsNames").contains(&json!(host)), "{host}");
        }
    }
    let issuers: BTreeSet<&str> = of("Issuer").map(|issuer| text(issuer, "/metadata/name")).collect();
    for certificate in of("Certificate") {
        assert!(issuers.contains(text(certificate, "/spec/issuerRef/name")), "{certificate}");
    }
}

#[tokio::test]
#[ignore = "needs the testbed's kubectl: make test"]
async fn environments_differ_where_they_should() {
    let all = overlays().await;
    let find = |overlay: &str, kind: &str, name: &str| {
        all[overlay]
            .iter()
            .find(|object| object["kind"] == kind && text(object, "/metadata/name").starts_with(name))
    };
    let valkey = |overlay: &str| {
        let settings = find(overlay, "ConfigMap", "openfilter-operator-").unwrap();
        text(settings, "/data/VALKEY_URL").to_owned()
    };
    // Production: Valkey outside the cluster and over TLS, and no password in Git.
    assert!(valkey("prod").starts_with("rediss://") && find("prod", "StatefulSet", "").is_none());
    assert!(find("prod", "Secret", "").is_none() && find("staging", "Secret", "").is_none());
    let claims =
        |overlay: &str| list(find(overlay, "StatefulSet", "").unwrap(), "/spec/volumeClaimTemplates").len();
    assert_eq!((claims("dev"), claims("staging")), (0, 1));
    // Valkey's limits are the tested ones.
    for overlay in ["dev", "staging"] {
        let settings = find(overlay, "ConfigMap", "openfilter-valkey-settings").unwrap();
        assert_eq!(text(settings, "/data/valkey.conf"), valkey_file("valkey.conf"), "{overlay}");
    }
    // With certificates of cert-manager the webhook has no right to create its own, and no field has two
    // writers.
    assert!(find("prod", "ClusterRole", "openfilter-webhook-trust").is_none());
    assert!(find("dev", "ClusterRole", "openfilter-webhook-trust").is_some());
    let replicas = |overlay: &str, name: &str| {
        find(overlay, "Deployment", name).unwrap().pointer("/spec/replicas").and_then(Value::as_u64)
    };
    assert_eq!(replicas("dev", "openfilter-operator"), Some(1));
    assert_eq!(replicas("prod", "openfilter-operator"), Some(2));
    assert_eq!(replicas("dev", "openfilter-webhook"), Some(2));
    assert_eq!(replicas("prod", "openfilter-webhook"), None, "the autoscaler's");
    let policies = |overlay: &str| -> BTreeSet<String> {
        let policies = all[overlay].iter().filter(|object| object["kind"] == "PipelinePolicy");
        policies.map(|policy| text(policy, "/metadata/name").to_owned()).collect()
    };
    assert_eq!(policies("staging"), policies("prod"), "staging warns of what production refuses");
    for overlay in OVERLAYS {
        let policies: Vec<&Value> =
            all[overlay].iter().filter(|object| object["kind"] == "PipelinePolicy").collect();
        assert_eq!(policies.is_empty(), overlay == "dev");
        for policy in policies {
            let action = if overlay == "staging" { "Warn" } else { "" };
            assert_eq!(text(policy, "/spec/action"), action, "{overlay}: {policy}");
            assert_eq!(rules::check(policy, &Context::default()), Some(vec![]), "{overlay}: {policy}");
        }
    }
}
