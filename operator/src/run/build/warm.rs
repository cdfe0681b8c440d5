//! Containers that the shim runs in. In a pod that processes many files, the worker and all filters run side
//! by side for as long as the pod lives: each filter's container runs the shim, which starts the filter's
//! command once per file, and only the worker has keys. In a pod that processes one file, the shim speaks to
//! filters that use the `Lines` protocol.

use crds::rules::{WarmLimits, parse_duration};
use crds::v1alpha1::{Filter, Order, Protocol};
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, EnvVar, Volume, VolumeMount};
use protocol::container::{INSTALL, WORKER};
use protocol::env;

use super::pod::{Recipe, WORKSPACE_PATH, WORKSPACE_VOLUME, variable, volume};
use super::snapshot::Role;
use crate::names::SHIM;

/// The volume with the shim and the filters' sockets, and its mount path.
const TOOLS_VOLUME: &str = "openfilter";
const TOOLS_PATH: &str = "/.openfilter";
/// Where our own containers mount the whole workspace; filters see one folder of it.
const ROOM: &str = "/room";

impl Recipe<'_> {
    /// The containers of a pod that processes many files: first the init containers, then the main
    /// containers.
    pub fn warm_containers(&self) -> (Vec<Container>, Vec<Container>) {
        let filters = self.snapshot.spec.filters.iter().map(|filter| self.warm_filter(filter));
        let main = std::iter::once(self.worker()).chain(filters).collect();
        (vec![self.install()], main)
    }

    /// The volumes that those containers share.
    pub fn warm_volumes(&self) -> Vec<Volume> {
        vec![volume(), tools()]
    }

    /// A filter that speaks `Lines`, in a pod that processes one file.
    pub fn filter_behind_shim(&self, filter: &Filter) -> Container {
        let mut container = self.filter(filter);
        run_in_shim(&mut container, filter, &["--once".to_owned()]);
        container.volume_mounts.get_or_insert_default().push(shim_mount());
        container
    }

    /// A claimer that also installs the shim where filters can execute it.
    pub fn with_shim(&self, mut claimer: Container) -> Container {
        claimer.env.get_or_insert_default().push(variable(env::INSTALL_TO, TOOLS_PATH));
        claimer.volume_mounts.get_or_insert_default().push(mount(TOOLS_VOLUME, TOOLS_PATH, None));
        claimer
    }

    fn install(&self) -> Container {
        self.with_room(self.own_container(INSTALL, "install", vec![self.filter_names()]))
    }

    fn worker(&self) -> Container {
        let spec = &self.snapshot.spec;
        let mut env = self.queue_env();
        env.push(self.filter_names());
        let order = match spec.order {
            Order::Sequential => "Sequential",
            Order::Concurrent => "Concurrent",
        };
        env.push(variable(env::ORDER, order));
        let WarmLimits { max_files_per_pod, max_pod_age, prefetch_bytes } = spec.warm_limits();
        env.push(variable(env::PREFETCH_BYTES, prefetch_bytes.to_string()));
        env.push(variable(env::MAX_FILES, max_files_per_pod.to_string()));
        env.push(variable(env::MAX_AGE, format!("{}s", max_pod_age.as_secs())));
        let file_timeout = self.run.spec.execution.file_timeout.as_deref().and_then(parse_duration);
        env.extend(file_timeout.map(|limit| variable(env::FILE_TIMEOUT, format!("{}ms", limit.as_millis()))));
        env.extend(self.bucket_env(Role::Source, &spec.source.bucket));
        env.extend(spec.sink.iter().flat_map(|sink| self.sink_env(&sink.bucket)));
        self.with_room(self.own_container(WORKER, "serve", env))
    }

    fn filter_names(&self) -> EnvVar {
        let names: Vec<&str> = self.snapshot.spec.filters.iter().map(|filter| filter.name.as_str()).collect();
        variable(env::FILTERS, names.join(","))
    }

    fn with_room(&self, mut container: Container) -> Container {
        container.env.get_or_insert_default().push(variable(env::WORKSPACE, ROOM));
        container.volume_mounts =
            Some(vec![mount(WORKSPACE_VOLUME, ROOM, None), mount(TOOLS_VOLUME, TOOLS_PATH, None)]);
        container
    }

    fn warm_filter(&self, filter: &Filter) -> Container {
        let mut container = self.filter(filter);
        run_in_shim(&mut container, filter, &["--socket".to_owned(), format!("{}/link/socket", TOOLS_PATH)]);
        let link = format!("link/{}", filter.name);
        container.volume_mounts = Some(vec![
            mount(WORKSPACE_VOLUME, WORKSPACE_PATH, Some("ws")),
            shim_mount(),
            mount(TOOLS_VOLUME, &format!("{}/link", TOOLS_PATH), Some(&link)),
        ]);
        container
    }
}

/// The volume with our tools.
pub fn tools() -> Volume {
    Volume {
        name: TOOLS_VOLUME.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    }
}

/// Makes the container run the shim, which starts the filter's command.
fn run_in_shim(container: &mut Container, filter: &Filter, how: &[String]) {
    let mut shim = vec![SHIM.to_owned(), "--filter".to_owned(), filter.name.clone()];
    shim.extend_from_slice(how);
    if filter.protocol == Protocol::Lines {
        shim.push("--lines".to_owned());
    }
    shim.push("--".to_owned());
    container.command = Some(shim);
    container.args = Some(filter.command.iter().chain(&filter.args).cloned().collect());
}

fn shim_mount() -> VolumeMount {
    let mount = mount(TOOLS_VOLUME, &format!("{}/bin", TOOLS_PATH), Some("bin"));
    VolumeMount { read_only: Some(true), ..mount }
}

fn mount(volume: &str, path: &str, folder: Option<&str>) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        sub_path: folder.map(str::to_owned),
        ..VolumeMount::default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::pod::tests::template;
    use super::*;
    use serde_json::{Value, json};

    fn warm(changes: Value) -> k8s_openapi::api::core::v1::PodSpec {
        let filters = json!([{"name": "a", "image": "a:1", "command": ["/a"], "args": ["-x"]},
            {"name": "b", "image": "b:1", "command": ["/b", "$(HOME)"], "protocol": "Lines"}]);
        let mut pipeline = json!({"mode": "Warm", "filters": filters});
        pipeline.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        template(pipeline, json!({"execution": {"fileTimeout": "1m30s"}}))
    }

    fn names(containers: &[Container]) -> Vec<&str> {
        containers.iter().map(|container| container.name.as_str()).collect()
    }

    fn value<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
        let mut found = container.env.iter().flatten().filter(|variable| variable.name == name);
        found.next().and_then(|variable| variable.value.as_deref())
    }

    #[test]
    fn worker_and_filters_run_side_by_side_after_the_pod_was_made_ready() {
        let spec = warm(json!({}));
        assert_eq!(names(spec.init_containers.as_ref().unwrap()), ["install"]);
        assert_eq!(names(&spec.containers), ["worker", "a", "b"]);
        assert!(crate::pods::is_warm(&spec));
        let worker = &spec.containers[0];
        assert_eq!(worker.args.as_ref().unwrap(), &["serve"]);
        assert_eq!(value(worker, "OPENFILTER_FILTERS"), Some("a,b"));
        assert_eq!(value(worker, "OPENFILTER_FILE_TIMEOUT"), Some("90000ms"));
        assert_eq!(value(worker, "OPENFILTER_PREFETCH_BYTES"), Some("268435456"));
        let limited = warm(json!({"warm": {"maxFilesPerPod": 7, "maxPodAge": "1h30m"}}));
        assert_eq!(value(&limited.containers[0], "OPENFILTER_MAX_FILES"), Some("7"));
        assert_eq!(value(&limited.containers[0], "OPENFILTER_MAX_AGE"), Some("5400s"));
        assert_eq!(value(worker, "SINK_FROM"), None, "there is no sink");
        let sink = json!({"bucket": {"name": "out", "prefix": "res/", "endpoint": "s3"}});
        let with_sink = warm(json!({"sink": sink}));
        assert_eq!(value(&with_sink.containers[0], "SINK_FROM"), Some("b"));
        assert_eq!(value(&with_sink.containers[0], "SINK_S3_PREFIX"), Some("res/"));
        assert_eq!(value(worker, "S3_PREFIX"), Some("in/"), "another file is looked for there");
    }

    #[test]
    fn a_filter_is_started_by_the_shim_and_sees_its_own_part_of_the_volumes() {
        let spec = warm(json!({}));
        let (a, b) = (&spec.containers[1], &spec.containers[2]);
        let shim = ["/.openfilter/bin/shim", "--filter", "a", "--socket", "/.openfilter/link/socket", "--"];
        assert_eq!(a.command.as_ref().unwrap(), &shim);
        assert_eq!(a.args.as_ref().unwrap(), &["/a", "-x"]);
        assert!(b.command.as_ref().unwrap().contains(&"--lines".to_owned()));
        assert_eq!(b.args.as_ref().unwrap(), &["/b", "$(HOME)"], "the kubelet expands it as ever");
        let mounts: Vec<_> = a.volume_mounts.iter().flatten().collect();
        let seen: Vec<_> = mounts
            .iter()
            .map(|mount| (mount.mount_path.as_str(), mount.sub_path.as_deref().unwrap(), mount.read_only))
            .collect();
        let expected = [
            ("/ws", "ws", None),
            ("/.openfilter/bin", "bin", Some(true)),
            ("/.openfilter/link", "link/a", None),
        ];
        assert_eq!(seen, expected);
    }

    /// Only the worker talks to Valkey and to storage.
    #[test]
    fn no_filter_has_credentials() {
        for filter in &warm(json!({})).containers[1..] {
            let secret = |name: &str| name.contains("KEY") || name.contains("VALKEY") || name.contains("S3_");
            assert!(filter.env.iter().flatten().all(|variable| !secret(&variable.name)), "{}", filter.name);
        }
    }

    #[test]
    fn where_a_pod_processes_one_file_only_filters_that_want_lines_have_a_shim() {
        let filters = json!([{"name": "a", "image": "a:1", "command": ["/a"]},
            {"name": "b", "image": "b:1", "command": ["/b"], "protocol": "Lines"}]);
        let spec = template(json!({"filters": filters}), json!({}));
        let init = spec.init_containers.as_ref().unwrap();
        assert_eq!(names(init), ["claimer", "a"]);
        assert_eq!(value(&init[0], "OPENFILTER_INSTALL_TO"), Some("/.openfilter"));
        assert_eq!(init[1].command.as_ref().unwrap(), &["/a"]);
        let shim = ["/.openfilter/bin/shim", "--filter", "b", "--once", "--lines", "--"];
        assert_eq!(spec.containers[0].command.as_ref().unwrap(), &shim);
        assert_eq!(spec.volumes.as_ref().unwrap().len(), 2);
        let without = template(json!({}), json!({}));
        assert_eq!(value(&without.init_containers.unwrap()[0], "OPENFILTER_INSTALL_TO"), None);
        assert_eq!(without.volumes.unwrap().len(), 1);
    }
}
