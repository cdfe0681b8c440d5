//! A worker pod: the claimer, then the filters, then the publisher if there is a sink, all on one shared
//! volume. The pod satisfies Pod Security "restricted" unless the Pipeline asks otherwise, and has no token
//! and no secret value in its spec.

use std::time::Duration;

use crds::v1alpha1::{Bucket, Filter, Mode, Order, PipelineRun, PodOptions, Protocol};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, EmptyDirVolumeSource, EnvVar, EnvVarSource, ObjectFieldSelector,
    PodSecurityContext, PodSpec, PodTemplateSpec, ResourceRequirements, SeccompProfile, SecretKeySelector,
    SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use protocol::container::{CLAIMER, PUBLISHER};
use protocol::secret;
use protocol::{RunId, env};
use serde_json::Value;

use super::owner;
use super::snapshot::{Role, Snapshot};
use super::warm::tools;
use crate::args::WorkerSettings;
use crate::names;

/// The volume that the containers share.
pub const WORKSPACE_VOLUME: &str = "workspace";
/// The mount path of that volume in every container.
pub const WORKSPACE_PATH: &str = "/ws";
/// A filter that is asked to end has nothing to save: its file is tried again from the start.
const GRACE_SECONDS: i64 = 10;

/// The inputs of a worker pod.
pub struct Recipe<'a> {
    /// The run.
    pub run: &'a PipelineRun,
    /// The run's id.
    pub run_id: &'a RunId,
    /// The Pipeline, as the run recorded it.
    pub snapshot: &'a Snapshot,
    /// The operator's settings for workers.
    pub worker: &'a WorkerSettings,
    /// How long a file may stay on a lost node.
    pub pending_timeout: Duration,
}

impl Recipe<'_> {
    /// The template of the pods.
    pub fn template(&self) -> PodTemplateSpec {
        let options = self.snapshot.spec.pod.clone().unwrap_or_default();
        let mut labels = options.labels.clone();
        labels.extend(owner::labels(self.run, self.run_id));
        PodTemplateSpec {
            metadata: Some(ObjectMeta {
                labels: Some(labels),
                annotations: Some(options.annotations.clone()).filter(|annotations| !annotations.is_empty()),
                ..ObjectMeta::default()
            }),
            spec: Some(self.spec(options)),
        }
    }

    fn spec(&self, options: PodOptions) -> PodSpec {
        let ((init_containers, containers), volumes) = match self.snapshot.spec.mode {
            Mode::PodPerFile if self.snapshot.speaks_lines() => (self.containers(), vec![volume(), tools()]),
            Mode::PodPerFile => (self.containers(), vec![volume()]),
            Mode::Warm => (self.warm_containers(), self.warm_volumes()),
        };
        PodSpec {
            init_containers: Some(init_containers),
            containers,
            volumes: Some(volumes),
            restart_policy: Some("Never".to_owned()),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(GRACE_SECONDS),
            security_context: Some(pod_security(options.security_context.as_ref())),
            service_account_name: options.service_account_name,
            image_pull_secrets: Some(options.image_pull_secrets).filter(|secrets| !secrets.is_empty()),
            node_selector: Some(options.node_selector).filter(|selector| !selector.is_empty()),
            tolerations: Some(self.tolerations(options.tolerations)),
            affinity: options.affinity,
            priority_class_name: options.priority_class_name,
            runtime_class_name: options.runtime_class_name,
            ..PodSpec::default()
        }
    }

    /// The containers of a pod that processes one file: first the init containers, which run one after
    /// another, then the main containers.
    fn containers(&self) -> (Vec<Container>, Vec<Container>) {
        let filters = self.snapshot.spec.filters.iter().map(|filter| match filter.protocol {
            Protocol::Exec => self.filter(filter),
            Protocol::Lines => self.filter_behind_shim(filter),
        });
        let mut filters: Vec<Container> = filters.collect();
        let claimer = self.claimer();
        let mut in_turn = vec![if self.snapshot.speaks_lines() { self.with_shim(claimer) } else { claimer }];
        let last = match (&self.snapshot.spec.sink, self.snapshot.spec.order) {
            (Some(sink), _) => {
                in_turn.append(&mut filters);
                vec![self.publisher(&sink.bucket)]
            }
            (None, Order::Sequential) => {
                let last = filters.split_off(filters.len().saturating_sub(1));
                in_turn.append(&mut filters);
                last
            }
            (None, Order::Concurrent) => filters,
        };
        (in_turn, last)
    }

    /// Lets Kubernetes delete a pod on a lost node after `pendingTimeout`, by these tolerations.
    fn tolerations(&self, mut tolerations: Vec<Toleration>) -> Vec<Toleration> {
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            if tolerations.iter().any(|own| own.key.as_deref() == Some(key)) {
                continue;
            }
            // Insert at the front: the first toleration that matches a taint counts, and many Pipelines
            // tolerate every taint.
            let ours = Toleration {
                key: Some(key.to_owned()),
                operator: Some("Exists".to_owned()),
                effect: Some("NoExecute".to_owned()),
                toleration_seconds: i64::try_from(self.pending_timeout.as_secs()).ok(),
                ..Toleration::default()
            };
            tolerations.insert(0, ours);
        }
        tolerations
    }

    fn claimer(&self) -> Container {
        let filters: Vec<&str> =
            self.snapshot.spec.filters.iter().map(|filter| filter.name.as_str()).collect();
        let mut env = self.queue_env();
        env.push(variable(env::FILTERS, filters.join(",")));
        env.extend(self.bucket_env(Role::Source, &self.snapshot.spec.source.bucket));
        self.own_container(CLAIMER, "claim", env)
    }

    fn publisher(&self, sink: &Bucket) -> Container {
        let mut env = self.bucket_env(Role::Source, &self.snapshot.spec.source.bucket);
        env.extend(self.sink_env(sink));
        self.own_container(PUBLISHER, "publish", env)
    }

    /// The variables that publishing needs in addition to those of the source.
    pub fn sink_env(&self, sink: &Bucket) -> Vec<EnvVar> {
        let mut env = self.bucket_env(Role::Sink, sink);
        env.push(variable(env::SINK_FROM, self.snapshot.published_filter().unwrap_or_default()));
        env
    }

    /// A container of the operator's own image.
    pub fn own_container(&self, name: &str, command: &str, env: Vec<EnvVar>) -> Container {
        let quantity = |text: &str| Quantity(text.to_owned());
        let mut security = container_security();
        security.read_only_root_filesystem = Some(true);
        Container {
            name: name.to_owned(),
            image: Some(self.worker.claimer_image.clone()),
            image_pull_policy: Some(self.worker.claimer_image_pull_policy.as_ref().to_owned()),
            args: Some(vec![command.to_owned()]),
            env: Some(env),
            // Memory use does not depend on the size of the file.
            resources: Some(ResourceRequirements {
                requests: Some(
                    [("cpu".to_owned(), quantity("10m")), ("memory".to_owned(), quantity("32Mi"))].into(),
                ),
                limits: Some([("memory".to_owned(), quantity("256Mi"))].into()),
                ..ResourceRequirements::default()
            }),
            security_context: Some(security),
            ..container()
        }
    }

    /// A filter's container, as in a pod that processes one file.
    pub fn filter(&self, filter: &Filter) -> Container {
        let Filter { name, image, command, args, protocol: _, env, resources, image_pull_policy } = filter;
        let mut all = vec![
            variable("SOURCE_PATH", "/ws/input"),
            variable("VIDEO_INPUT_PATH", "/ws/input"),
            variable("OPENFILTER_RUN", self.run_id.as_str()),
            variable("OPENFILTER_FILTER", name),
            variable("OPENFILTER_ATTEMPT_FILE", "/ws/input.attempt"),
        ];
        for own in env.iter().chain(&self.run.spec.env) {
            all.retain(|variable| variable.name != own.name);
            all.push(own.clone());
        }
        Container {
            name: name.clone(),
            image: Some(image.clone()),
            image_pull_policy: image_pull_policy.map(|policy| format!("{policy:?}")),
            command: Some(command.clone()).filter(|command| !command.is_empty()),
            args: Some(args.clone()).filter(|args| !args.is_empty()),
            env: Some(all),
            resources: resources.clone(),
            security_context: Some(container_security()),
            ..container()
        }
    }

    /// The variables that tell a container where to get its files.
    pub fn queue_env(&self) -> Vec<EnvVar> {
        let user = names::queue_secret(&self.run.name_any());
        let mut env = vec![
            variable(env::STREAM, self.run_id.key("work")),
            variable(env::GROUP, self.run_id.group()),
            variable(env::VALKEY_URL, &self.worker.valkey_url),
            from_secret(env::VALKEY_USERNAME, &user, secret::USERNAME),
            from_secret(env::VALKEY_PASSWORD, &user, secret::PASSWORD),
            from_field(env::CONSUMER_NAME, "metadata.name"),
            from_field(env::POD_NAME, "metadata.name"),
            from_field("POD_NAMESPACE", "metadata.namespace"),
        ];
        env.extend(self.worker.valkey_ca.as_ref().map(|ca| variable(env::VALKEY_CA_CERTIFICATE, ca)));
        env
    }

    /// The variables that tell a container how to reach a bucket. The source prefix is the Pipeline's, not
    /// the run's, so a result has the same name in every run.
    pub fn bucket_env(&self, role: Role, bucket: &Bucket) -> Vec<EnvVar> {
        let name = match role {
            Role::Source => env::SOURCE,
            Role::Sink => env::SINK,
        };
        let mut env = vec![
            variable(name.bucket, &bucket.name),
            variable(name.prefix, &bucket.prefix),
            variable(name.endpoint, &bucket.endpoint),
            variable(name.region, &bucket.region),
            variable(name.use_path_style, bucket.use_path_style.to_string()),
            variable(name.insecure_skip_tls_verify, bucket.insecure_skip_tls_verify.to_string()),
        ];
        let secrets = self.snapshot.secrets();
        if let Some(keys) = secrets.iter().find(|secret| secret.role == role) {
            let own = Some(&keys.namespace) == self.run.metadata.namespace.as_ref();
            let copy = names::credentials_copy(&self.run.name_any(), role.as_ref());
            let from = if own { &keys.name } else { &copy };
            env.push(from_secret(name.access_key_id, from, secret::ACCESS_KEY_ID));
            env.push(from_secret(name.secret_access_key, from, secret::SECRET_ACCESS_KEY));
        }
        env
    }
}

/// The volume that the containers share.
pub fn volume() -> Volume {
    Volume {
        name: WORKSPACE_VOLUME.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    }
}

/// The fields that every container has.
fn container() -> Container {
    Container {
        // A filter's last output is the best reason available, unless the filter wrote a better one.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![VolumeMount {
            name: WORKSPACE_VOLUME.to_owned(),
            mount_path: WORKSPACE_PATH.to_owned(),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    }
}

fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
        ..SecurityContext::default()
    }
}

/// The Pipeline's own settings, on top of defaults that satisfy "restricted".
fn pod_security(own: Option<&PodSecurityContext>) -> PodSecurityContext {
    let defaults = PodSecurityContext {
        run_as_non_root: Some(true),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
        ..PodSecurityContext::default()
    };
    let (Ok(mut merged), Ok(Value::Object(own))) =
        (serde_json::to_value(&defaults), serde_json::to_value(own))
    else {
        return defaults;
    };
    for (field, value) in own {
        merged[field] = value;
    }
    serde_json::from_value(merged).unwrap_or(defaults)
}

/// A variable with exactly this value: without the escape, Kubernetes would replace `$(NAME)` with the value
/// of another variable, which may be secret.
pub fn variable(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.into().replace('$', "$$")), value_from: None }
}

fn from_secret(name: &str, secret: &str, key: &str) -> EnvVar {
    let selector = SecretKeySelector { name: secret.to_owned(), key: key.to_owned(), optional: None };
    let source = EnvVarSource { secret_key_ref: Some(selector), ..EnvVarSource::default() };
    EnvVar { name: name.to_owned(), value: None, value_from: Some(source) }
}

fn from_field(name: &str, path: &str) -> EnvVar {
    let selector = ObjectFieldSelector { field_path: path.to_owned(), api_version: None };
    let source = EnvVarSource { field_ref: Some(selector), ..EnvVarSource::default() };
    EnvVar { name: name.to_owned(), value: None, value_from: Some(source) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use super::*;
    use crate::args::PullPolicy;
    use serde_json::json;

    /// The pod of a Pipeline and a run with these changes.
    pub fn template(pipeline: Value, run: Value) -> PodSpec {
        let mut spec = json!({"source": {"bucket": {"name": "bkt", "prefix": "in/", "endpoint": "s3",
            "credentialsSecret": {"name": "keys"}}},
            "filters": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}]});
        spec.as_object_mut().unwrap().extend(pipeline.as_object().unwrap().clone());
        let snapshot = Snapshot {
            namespace: "lib".into(),
            name: "p".into(),
            spec: serde_json::from_value(spec).unwrap(),
        };
        let mut object = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun",
            "metadata": {"name": "r", "namespace": "team", "uid": "u"}, "spec": {"pipelineRef": {"name": "p"}}});
        object["spec"].as_object_mut().unwrap().extend(run.as_object().unwrap().clone());
        let run: PipelineRun = serde_json::from_value(object).unwrap();
        let run_id = RunId::derive("team", "r").unwrap();
        let worker = WorkerSettings {
            claimer_image: "claimer:1".into(),
            claimer_image_pull_policy: PullPolicy::IfNotPresent,
            valkey_url: "redis://valkey:6379".into(),
            valkey_ca: Some("a certificate".into()),
            job_retention: Duration::from_secs(60),
        };
        let pending_timeout = Duration::from_secs(900);
        Recipe { run: &run, run_id: &run_id, snapshot: &snapshot, worker: &worker, pending_timeout }
            .template()
            .spec
            .unwrap()
    }

    fn names(containers: &[Container]) -> Vec<&str> {
        containers.iter().map(|container| container.name.as_str()).collect()
    }

    fn value(container: &Container, name: &str) -> Value {
        let found = container
            .env
            .as_ref()
            .unwrap()
            .iter()
            .filter(|variable| variable.name == name)
            .collect::<Vec<_>>();
        assert_eq!(found.len(), 1, "{name}");
        serde_json::to_value(found[0]).unwrap()
    }

    #[test]
    fn sequential_filters_are_init_containers_but_the_last() {
        let spec = template(json!({}), json!({}));
        assert_eq!(names(spec.init_containers.as_ref().unwrap()), ["claimer", "a"]);
        assert_eq!(names(&spec.containers), ["b"]);
    }

    #[test]
    fn concurrent_filters_are_all_main_containers() {
        let spec = template(json!({"order": "Concurrent"}), json!({}));
        assert_eq!(names(spec.init_containers.as_ref().unwrap()), ["claimer"]);
        assert_eq!(names(&spec.containers), ["a", "b"]);
    }

    #[test]
    fn with_a_sink_the_publisher_comes_after_all_filters() {
        let sink = json!({"bucket": {"name": "out", "prefix": "res/", "endpoint": "s3"}, "from": "a"});
        let spec = template(json!({"sink": sink}), json!({"source": {"prefix": "in/day1/"}}));
        assert_eq!(names(spec.init_containers.as_ref().unwrap()), ["claimer", "a", "b"]);
        assert_eq!(names(&spec.containers), ["publisher"]);
        let publisher = &spec.containers[0];
        assert_eq!(value(publisher, "SINK_FROM")["value"], "a");
        assert_eq!(value(publisher, "SINK_S3_PREFIX")["value"], "res/");
        assert_eq!(value(publisher, "S3_PREFIX")["value"], "in/");
        assert!(
            publisher.env.as_ref().unwrap().iter().all(|variable| variable.name != "SINK_S3_ACCESS_KEY_ID")
        );
    }

    /// The kubelet would replace an unescaped `$(S3_SECRET_ACCESS_KEY)` in a prefix, and a message would show
    /// it.
    #[test]
    fn a_value_is_taken_as_it_is() {
        let prefix = "a$(S3_SECRET_ACCESS_KEY)$$b/";
        let sink = json!({"bucket": {"name": "out", "prefix": prefix, "endpoint": "s3"}});
        let spec = template(json!({"sink": sink}), json!({}));
        let escaped = "a$$(S3_SECRET_ACCESS_KEY)$$$$b/";
        assert_eq!(value(&spec.containers[0], "SINK_S3_PREFIX")["value"], escaped);
    }

    #[test]
    fn every_setting_of_a_bucket_reaches_its_containers() {
        let bucket = json!({"name": "bkt", "prefix": "in/", "endpoint": "s3", "region": "eu-1", "usePathStyle": true,
            "insecureSkipTLSVerify": true});
        let spec = template(json!({"source": {"bucket": bucket}}), json!({}));
        let claimer = &spec.init_containers.as_ref().unwrap()[0];
        for (name, wanted) in [
            ("S3_BUCKET", "bkt"),
            ("S3_PREFIX", "in/"),
            ("S3_ENDPOINT", "s3"),
            ("S3_REGION", "eu-1"),
            ("S3_USE_PATH_STYLE", "true"),
            ("S3_INSECURE_SKIP_TLS_VERIFY", "true"),
            ("VALKEY_URL", "redis://valkey:6379"),
            ("VALKEY_CA_CERTIFICATE", "a certificate"),
        ] {
            assert_eq!(value(claimer, name)["value"], wanted, "{name}");
        }
    }

    #[test]
    fn no_secret_value_is_in_the_pod() {
        let spec = template(json!({}), json!({}));
        let claimer = &spec.init_containers.as_ref().unwrap()[0];
        for name in ["VALKEY_PASSWORD", "VALKEY_USERNAME", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"] {
            assert!(value(claimer, name)["valueFrom"]["secretKeyRef"].is_object(), "{name}");
        }
        assert_eq!(
            value(claimer, "S3_ACCESS_KEY_ID")["valueFrom"]["secretKeyRef"]["name"],
            "r-source",
            "copied: lib is not team"
        );
        let own = json!({"source": {"bucket": {"name": "bkt", "credentialsSecret": {"name": "keys", "namespace": "team"}}}});
        let spec = template(own, json!({}));
        let claimer = &spec.init_containers.as_ref().unwrap()[0];
        assert_eq!(value(claimer, "S3_ACCESS_KEY_ID")["valueFrom"]["secretKeyRef"]["name"], "keys");
    }

    #[test]
    fn the_runs_variables_win_over_the_filters_and_those_over_ours() {
        let filters = json!([{"name": "a", "image": "a:1", "env": [{"name": "SOURCE_PATH", "value": "1"}, {"name": "X", "value": "1"}]}]);
        let spec = template(json!({"filters": filters}), json!({"env": [{"name": "X", "value": "2"}]}));
        assert_eq!(value(&spec.containers[0], "SOURCE_PATH")["value"], "1");
        assert_eq!(value(&spec.containers[0], "X")["value"], "2");
        assert_eq!(value(&spec.containers[0], "OPENFILTER_FILTER")["value"], "a");
    }

    /// Pod Security "restricted", and the settings that a user may change.
    #[test]
    fn pods_are_restricted_unless_the_pipeline_asks_otherwise() {
        let spec = template(json!({}), json!({}));
        assert_eq!(spec.automount_service_account_token, Some(false));
        let security = spec.security_context.unwrap();
        assert_eq!(security.run_as_non_root, Some(true));
        assert_eq!(security.seccomp_profile.unwrap().type_, "RuntimeDefault");
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            let security = container.security_context.as_ref().unwrap();
            assert_eq!(security.allow_privilege_escalation, Some(false));
            assert_eq!(security.capabilities.as_ref().unwrap().drop.as_ref().unwrap(), &["ALL"]);
        }
        let asked =
            template(json!({"pod": {"securityContext": {"runAsUser": 0, "runAsNonRoot": false}}}), json!({}));
        let security = asked.security_context.unwrap();
        assert_eq!((security.run_as_user, security.run_as_non_root), (Some(0), Some(false)));
        assert_eq!(security.seccomp_profile.unwrap().type_, "RuntimeDefault");
    }

    #[test]
    fn a_lost_node_is_tolerated_for_the_pending_timeout() {
        let seconds = |spec: PodSpec| {
            let all = spec.tolerations.unwrap();
            all.iter()
                .map(|one| (one.key.clone().unwrap_or_default(), one.toleration_seconds))
                .collect::<Vec<_>>()
        };
        let both = seconds(template(json!({}), json!({})));
        assert_eq!(both.len(), 2);
        assert!(both.iter().all(|(_, seconds)| *seconds == Some(900)));
        let own =
            json!([{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}]);
        let mixed = seconds(template(json!({"pod": {"tolerations": own}}), json!({})));
        assert_eq!(mixed.len(), 2);
        assert_eq!(mixed[1].1, Some(5), "the user's own stays");
        let all = seconds(template(json!({"pod": {"tolerations": [{"operator": "Exists"}]}}), json!({})));
        assert_eq!(all.len(), 3);
        assert!(
            all[..2].iter().all(|(_, seconds)| *seconds == Some(900)),
            "who tolerates everything still gives up"
        );
    }
}
