//! A laboratory: a namespace, a bucket, an operator for this namespace only, and a witness of everything that
//! happens.

#[path = "witness.rs"]
mod witness;

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt};
use protocol::RunId;
use protocol::secret::{PASSWORD, USERNAME};
use queue::{DeadLetter, RunQueue, Server};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::images::{Set, reference};
use testbed::services::{S3_IP_URL, Services, VALKEY_IP};
use testbed::{Doing, FaultyS3, Namespace, Testbed};
use tests::program::mortal;
use tokio::process::{Child, Command};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};
use witness::Witness;

/// Tests that break something of the cluster run alone, the others concurrently.
static CLUSTER: RwLock<()> = RwLock::const_new(());
static PREPARED: OnceCell<()> = OnceCell::const_new();

/// Held for as long as the test runs.
pub enum Turn {
    Shared { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
}

/// How long a run may take on a busy machine.
pub const LONG: Duration = Duration::from_secs(600);
/// How long a tool of the tests waits for Valkey.
const CONNECTED_WITHIN: Duration = Duration::from_secs(60);
/// The number of failed files that a status shows.
const FAILURES_SHOWN: usize = 10;
/// Concurrent requests when filling a bucket.
const PUTS_AT_ONCE: usize = 8;

/// Whether to use the large sizes and long times of `make soak`. CI uses smaller ones.
pub fn is_soak() -> bool {
    std::env::var_os("SOAK").is_some()
}

/// How soon a run reports what it depends on and lacks, and goes on at full speed once that is back: 15 s,
/// and as much again where other tests keep the machine busy.
pub fn soon() -> Duration {
    Duration::from_secs(if is_soak() { 15 } else { 30 })
}

/// How many files a pod processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    PodPerFile,
    Warm,
}

impl Mode {
    /// The name of a laboratory in this mode.
    fn named(self, name: &str) -> String {
        match self {
            Self::PodPerFile => name.to_owned(),
            Self::Warm => format!("{name}-warm"),
        }
    }
}

pub struct Lab {
    mode: Mode,
    pub testbed: Testbed,
    pub services: Services,
    pub namespace: Namespace,
    pub bucket: String,
    operators: Vec<Child>,
    log_at_start: usize,
    settings: BTreeMap<String, String>,
    pub witness: Witness,
    _turn: Arc<Turn>,
}

impl Lab {
    /// A laboratory that does not disturb others.
    pub async fn new(name: &str) -> Self {
        Self::with(name, Arc::new(Turn::Shared { _guard: CLUSTER.read().await })).await
    }

    /// Whether pods process many files.
    pub fn is_warm(&self) -> bool {
        self.mode == Mode::Warm
    }

    /// The same, with a Pipeline in this mode.
    pub async fn in_mode(name: &str, mode: Mode) -> Self {
        let mut lab = Self::new(&mode.named(name)).await;
        lab.mode = mode;
        lab
    }

    /// A laboratory for a test that breaks things others use.
    pub async fn alone(name: &str) -> Self {
        Self::with(name, Arc::new(Turn::Alone { _guard: CLUSTER.write().await })).await
    }

    /// The same, with a Pipeline in this mode.
    pub async fn alone_in_mode(name: &str, mode: Mode) -> Self {
        let mut lab = Self::alone(&mode.named(name)).await;
        lab.mode = mode;
        lab
    }

    /// One laboratory of each mode, alone together: a slow fault is injected for both at once.
    pub async fn alone_in_both_modes(name: &str) -> [Self; 2] {
        let turn = Arc::new(Turn::Alone { _guard: CLUSTER.write().await });
        let in_mode = async |mode: Mode| {
            let mut lab = Self::with(&mode.named(name), Arc::clone(&turn)).await;
            lab.mode = mode;
            lab
        };
        [in_mode(Mode::PodPerFile).await, in_mode(Mode::Warm).await]
    }

    async fn with(name: &str, turn: Arc<Turn>) -> Self {
        let testbed = Testbed::with_nodes(2).await.unwrap();
        let services = testbed.services().await.unwrap();
        PREPARED.get_or_init(|| prepare(&testbed)).await;
        let restricted = [("pod-security.kubernetes.io/enforce", "restricted")];
        let namespace = testbed.labelled_namespace(name, &restricted).await.unwrap();
        let bucket = namespace.name.clone();
        services.s3.make_bucket(&bucket).await.unwrap();
        let witness = Witness::of(&testbed, &namespace);
        let settings = BTreeMap::from([
            ("KUBECONFIG", testbed.paths().kubeconfig().display().to_string()),
            ("VALKEY_URL", format!("redis://{VALKEY_IP}:6379")),
            ("VALKEY_PASSWORD", services.valkey_password.clone()),
            ("CLAIMER_IMAGE", reference("claimer")),
            ("NAMESPACES", namespace.name.clone()),
            ("POD_NAMESPACE", namespace.name.clone()),
            ("LEADER_ELECTION", "false".to_owned()),
            ("LISTEN", "127.0.0.1:0".to_owned()),
            ("LOG", "info,operator=debug".to_owned()),
        ]);
        let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let mut lab = Self {
            mode: Mode::PodPerFile,
            testbed,
            services,
            namespace,
            bucket,
            operators: Vec::new(),
            log_at_start: 0,
            settings,
            witness,
            _turn: turn,
        };
        lab.secret("keys").await;
        lab.start_operator();
        lab
    }

    /// Changes a setting of operators that start from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.settings.insert(name.to_owned(), value.to_owned());
    }

    /// Starts an operator beside those that already run.
    pub fn start_operator(&mut self) {
        let folder = self.testbed.paths().logs();
        let log = folder.join(format!("operator-{}.log", self.namespace.name));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        self.log_at_start = log.metadata().unwrap().len() as usize;
        let mut command = Command::from(mortal(env!("CARGO_BIN_EXE_operator")));
        command.env_clear().envs(&self.settings).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.operators.push(command.spawn().unwrap());
    }

    /// Ends all operators as a power cut would.
    pub async fn kill_operators(&mut self) {
        for mut operator in self.operators.drain(..) {
            operator.kill().await.unwrap();
        }
    }

    /// Replaces all operators with one that has another setting.
    pub async fn restart_with(&mut self, name: &str, value: &str) {
        self.kill_operators().await;
        self.set(name, value);
        self.start_operator();
    }

    /// Sends a signal to one of the operators, in the order of their start.
    pub fn signal_operator(&self, number: usize, signal: &str) {
        let pid = self.operators[number].id().unwrap().to_string();
        let sent = std::process::Command::new("kill").args([&format!("-{signal}"), &pid]).status();
        assert!(sent.unwrap().success(), "{signal} to {pid}");
    }

    /// Waits until one of the operators has ended, and returns how.
    pub async fn operator_ended(&mut self, number: usize) -> std::process::ExitStatus {
        tokio::time::timeout(LONG, self.operators[number].wait()).await.expect("it ends").unwrap()
    }

    /// Waits until the operator that was started last has seen all objects.
    pub async fn operator_works(&self) {
        let works = async || {
            let log = self.operator_log();
            Ok(log.get(self.log_at_start..).is_some_and(|log| log.contains("watching")).then_some(()))
        };
        self.eventually("the operator works", works).await;
    }

    /// Ends all operators as a node drain would.
    pub async fn stop_operators(&mut self) {
        self.operator_works().await;
        for mut operator in self.operators.drain(..) {
            let pid = operator.id().unwrap().to_string();
            std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
            let status = tokio::time::timeout(Duration::from_secs(15), operator.wait()).await;
            assert!(status.expect("the operator ends when it is told to").unwrap().success());
        }
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.testbed.client(), &self.namespace.name)
    }

    /// Creates an object of any kind in the namespace.
    pub async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + std::fmt::Debug
            + serde::Serialize,
    {
        let mut object = object;
        object["apiVersion"] = json!(K::api_version(&()));
        object["kind"] = json!(K::kind(&()));
        let typed: K = serde_json::from_value(object).unwrap();
        self.api::<K>().create(&PostParams::default(), &typed).await.unwrap()
    }

    /// A Secret with the keys of the S3 server.
    pub async fn secret(&self, name: &str) {
        let (id, secret) = self.services.s3.keys();
        let data = json!({"accessKeyId": id, "secretAccessKey": secret});
        self.create::<Secret>(json!({"metadata": {"name": name}, "stringData": data})).await;
    }

    /// Stores an object whose content tells `probe obey` what to do.
    pub async fn put(&self, key: &str, content: &str) {
        self.services.s3.put(&self.bucket, key, content.to_owned()).await.unwrap();
    }

    /// Stores many objects: `<prefix><number>`, each with the content that `content` returns for its number.
    pub async fn put_many(&self, prefix: &str, count: usize, content: impl Fn(usize) -> String) {
        let put = |number: usize| {
            let (lab, key, content) = (self, format!("{prefix}{number:04}"), content(number));
            async move { lab.put(&key, &content).await }
        };
        futures::stream::iter(0..count).for_each_concurrent(PUTS_AT_ONCE, put).await;
    }

    /// The bucket of the laboratory, as a Pipeline names it.
    pub fn bucket(&self) -> Value {
        json!({"name": self.bucket, "endpoint": S3_IP_URL, "usePathStyle": true, "credentialsSecret": {"name": "keys"}})
    }

    /// The same, behind a proxy.
    pub fn bucket_behind(&self, proxy: &FaultyS3) -> Value {
        let mut bucket = self.bucket();
        bucket["endpoint"] = json!(proxy.url);
        bucket
    }

    /// A Pipeline `p` with the filter `probe obey` and the given changes.
    pub async fn pipeline(&self, changes: Value) -> Pipeline {
        let mut spec = json!({"source": {"bucket": self.bucket()}, "filters": [filter("main", &["obey"])]});
        merge(&mut spec, changes);
        self.set_mode(&mut spec);
        self.create(json!({"metadata": {"name": "p"}, "spec": spec})).await
    }

    /// Sets the laboratory's mode in the spec of a Pipeline.
    pub fn set_mode(&self, spec: &mut Value) {
        if self.mode == Mode::Warm {
            spec["mode"] = json!("Warm");
            for filter in spec["filters"].as_array_mut().unwrap() {
                filter.as_object_mut().unwrap().entry("command").or_insert(json!(["/probe"]));
            }
        }
    }

    /// A PipelineRun of `p`.
    pub async fn run(&self, name: &str, changes: Value) -> PipelineRun {
        let mut spec = json!({"pipelineRef": {"name": "p"}, "execution": {"retryBackoff": {"initial": "100ms", "max": "1s"}}});
        merge(&mut spec, changes);
        self.create(json!({"metadata": {"name": name}, "spec": spec})).await
    }

    pub async fn get(&self, run: &str) -> PipelineRun {
        self.api::<PipelineRun>().get(run).await.unwrap()
    }

    /// Waits until a run satisfies the condition.
    pub async fn until(
        &self,
        run: &str,
        what: &str,
        condition: impl Fn(&PipelineRun) -> bool,
    ) -> PipelineRun {
        self.until_within(LONG, run, what, condition).await
    }

    /// Does the same with a time limit.
    pub async fn until_within(
        &self,
        limit: Duration,
        run: &str,
        what: &str,
        condition: impl Fn(&PipelineRun) -> bool,
    ) -> PipelineRun {
        let api = self.api::<PipelineRun>();
        let probe = async || {
            let found = api.get(run).await.doing(|| format!("look at the run {run}"))?;
            Ok(condition(&found).then_some(found))
        };
        match self.testbed.eventually(&format!("{run}: {what}"), limit, probe).await {
            Ok(found) => found,
            Err(error) => {
                let last = api.get(run).await.ok().and_then(|run| run.status);
                panic!("{error}; its status: {}", serde_json::to_string_pretty(&last).unwrap())
            }
        }
    }

    /// Waits until a run has ended.
    pub async fn finished(&self, run: &str) -> PipelineRun {
        self.until(run, "it ends", |run| {
            phase(run).is_some_and(|phase| matches!(phase, Phase::Succeeded | Phase::Failed))
        })
        .await
    }

    /// Waits until something is true.
    pub async fn eventually<T>(
        &self,
        what: &str,
        probe: impl AsyncFnMut() -> testbed::Result<Option<T>>,
    ) -> T {
        self.testbed.eventually(what, LONG, probe).await.unwrap()
    }

    pub async fn patch(&self, run: &str, patch: Value) {
        let patch = Patch::Merge(patch);
        self.api::<PipelineRun>().patch(run, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Deletes a run and waits until it is gone.
    pub async fn delete(&self, run: &str) {
        let api = self.api::<PipelineRun>();
        let uid = api.get(run).await.unwrap().uid();
        api.delete(run, &DeleteParams::default()).await.unwrap();
        let gone = async || {
            let found = api.get_opt(run).await.doing(|| format!("look at the run {run}"))?;
            Ok((found.and_then(|found| found.uid()) != uid).then_some(()))
        };
        self.eventually(&format!("{run} is gone"), gone).await;
    }

    /// All objects of a kind in the namespace.
    pub async fn list<K>(&self) -> Vec<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        self.api::<K>().list(&ListParams::default()).await.unwrap().items
    }

    pub async fn pods(&self) -> Vec<Pod> {
        self.list().await
    }

    pub async fn jobs(&self) -> Vec<Job> {
        self.list().await
    }

    /// Waits for a pod that satisfies the condition; returns the pod as it was then.
    pub async fn pod_that(&self, what: &str, says: impl Fn(&Pod) -> Option<()>) -> Pod {
        let api = self.api::<Pod>();
        let probe = async || {
            let pods = api.list(&ListParams::default()).await.doing(|| "list the pods".to_owned())?;
            Ok(pods.items.into_iter().find(|pod| says(pod).is_some()))
        };
        self.eventually(&format!("a pod: {what}"), probe).await
    }

    /// Waits until the filters of exactly `count` pods work on files of a run; returns the pods as they were
    /// then. Files are handed out earlier, when a pod gets its node. Pods that stay up run before they work.
    pub async fn filters_work(&self, run: &str, count: usize) -> Vec<Pod> {
        let working = async || {
            let mut pods = self.pods().await;
            pods.retain(|pod| is_in_phase(pod, "Running"));
            let all_work = self.mode == Mode::PodPerFile || self.reports(run, "started").await == count;
            Ok((pods.len() == count && all_work).then_some(pods))
        };
        self.eventually(&format!("{count} filters work"), working).await
    }

    /// Waits, within the limit, until this many files of a run are processed at once. Pods that process many
    /// files also hold files that wait for their turn, which do not count.
    pub async fn processes_at_once(&self, run: &str, count: usize, limit: Duration) {
        let processed = async || {
            let files = match self.mode {
                Mode::PodPerFile => running(&self.get(run).await) as usize,
                Mode::Warm => self.reports(run, "started").await,
            };
            Ok((files >= count).then_some(()))
        };
        let what = format!("{run}: {count} files are processed at once");
        self.testbed.eventually(&what, limit, processed).await.unwrap();
    }

    /// The files of a run that its pods currently report in this state, in Warm mode.
    pub async fn reports(&self, run: &str, said: &str) -> usize {
        self.reporters(run, said).await.len()
    }

    /// The pods that say this of a file now, in Warm mode.
    pub async fn reporters(&self, run: &str, said: &str) -> Vec<String> {
        let states = self.run_id(run).key("states");
        let reports: Vec<String> =
            redis::cmd("HVALS").arg(states).query_async(&mut self.raw().await).await.unwrap();
        let reports = reports.iter().filter_map(|report| report.split_once(' '));
        reports.filter(|(_, state)| *state == said).map(|(pod, _)| pod.to_owned()).collect()
    }

    /// The node that runs a Deployment of one pod.
    pub async fn node_of(&self, namespace: &str, app: &str) -> String {
        let pods: Api<Pod> = Api::namespaced(self.testbed.client(), namespace);
        let listed = pods.list(&ListParams::default().labels(&format!("app={app}"))).await.unwrap();
        listed.items[0].spec.as_ref().unwrap().node_name.clone().unwrap()
    }

    /// A node other than this one.
    pub async fn other_node(&self, node: &str) -> String {
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.testbed.client());
        let listed = nodes.list(&ListParams::default()).await.unwrap();
        // Nodes of KWOK run nothing.
        let is_real =
            |node: &&k8s_openapi::api::core::v1::Node| !node.labels().contains_key(testbed::KWOK_MARK);
        listed.items.iter().filter(is_real).map(ResourceExt::name_any).find(|name| name != node).unwrap()
    }

    /// A value that the queue keeps about a run, if it exists.
    pub async fn meta(&self, run: &str, field: &str) -> Option<String> {
        let meta = self.run_id(run).key("meta");
        redis::cmd("HGET").arg(meta).arg(field).query_async(&mut self.raw().await).await.unwrap()
    }

    /// A number that the queue keeps about a run.
    pub async fn tally(&self, run: &str, field: &str) -> u64 {
        self.meta(run, field).await.unwrap().parse().unwrap()
    }

    /// Waits until there are at least `count` events about a run for this reason, and returns all of them:
    /// the operator does not wait for events to be written.
    pub async fn events(&self, run: &str, reason: &str, least: usize) -> Vec<Event> {
        let told = async || {
            let mut events = self.list::<Event>().await;
            events.retain(|event| {
                let about = &event.involved_object;
                about.kind.as_deref() == Some("PipelineRun")
                    && about.name.as_deref() == Some(run)
                    && event.reason.as_deref() == Some(reason)
            });
            Ok((events.len() >= least).then_some(events))
        };
        self.eventually(&format!("{run} has {least} events {reason}"), told).await
    }

    /// All objects of the bucket below a prefix, in order, as the server writes them.
    pub async fn keys_below(&self, prefix: &str) -> Vec<String> {
        let path = format!("/{}?list-type=2&prefix={}", self.bucket, prefix.replace('/', "%2F"));
        let (status, body) =
            self.services.s3.request(http::Method::GET, &path, Default::default()).await.unwrap();
        let text = String::from_utf8_lossy(&body).into_owned();
        assert!(status.is_success(), "{text}");
        let keys =
            text.split("<Key>").skip(1).filter_map(|rest| Some(rest.split_once("</Key>")?.0.to_owned()));
        keys.collect()
    }

    pub fn kubectl(&self, words: &[&str]) -> Result<String, String> {
        let words = [&["-n", &self.namespace.name], words].concat();
        self.testbed.kubectl(&words, "")
    }

    /// The process of the first operator.
    #[allow(dead_code, reason = "only the bench asks")]
    pub fn operator_pid(&self) -> u32 {
        self.operators[0].id().unwrap()
    }

    /// The operator's peak memory, in bytes.
    #[allow(dead_code, reason = "only the bench asks")]
    pub fn operator_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.operator_pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1_024
    }

    pub fn operator_log(&self) -> String {
        let log = self.testbed.paths().logs().join(format!("operator-{}.log", self.namespace.name));
        std::fs::read_to_string(log).unwrap_or_default()
    }

    /// The Valkey of the operators.
    pub fn server(&self) -> Server {
        let mut server = Server::at(self.settings["VALKEY_URL"].clone());
        server.password = Some(self.settings["VALKEY_PASSWORD"].clone().into());
        server
    }

    pub fn valkey(&self) -> queue::Connection {
        Server { timeout: Duration::from_secs(20), ..self.server() }.connect().unwrap()
    }

    pub fn run_id(&self, run: &str) -> RunId {
        RunId::derive(&self.namespace.name, run).unwrap()
    }

    /// A plain connection to Valkey, for data that the queue does not show. It retries for a while: when
    /// nodes come and go, the host's route to a service may be interrupted for a moment.
    pub async fn raw(&self) -> redis::aio::MultiplexedConnection {
        let connect = async || match self.raw_as("default", &self.settings["VALKEY_PASSWORD"]).await {
            Err(error) if error.is_io_error() => Ok(None),
            connected => Ok(Some(connected.unwrap())),
        };
        self.testbed.eventually("Valkey answers", CONNECTED_WITHIN, connect).await.unwrap()
    }

    /// The same for any user.
    pub async fn raw_as(
        &self,
        user: &str,
        password: &str,
    ) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
        let info =
            redis::IntoConnectionInfo::into_connection_info(self.settings["VALKEY_URL"].as_str()).unwrap();
        let login = info.redis_settings().clone().set_username(user).set_password(password);
        let client = redis::Client::open(info.set_redis_settings(login)).unwrap();
        client.get_multiplexed_async_connection_with_config(&tests::valkey::patient()).await
    }

    /// User and password of a run's workers.
    pub async fn workers_login(&self, run: &str) -> (String, String) {
        let secret = self.api::<Secret>().get(&format!("{run}-queue")).await.unwrap();
        let data = secret.data.unwrap();
        let text = |key: &str| String::from_utf8(data[key].0.clone()).unwrap();
        (text(USERNAME), text(PASSWORD))
    }

    /// Valkey's keys and users that belong to runs of this namespace.
    pub async fn traces(&self) -> Vec<String> {
        let mut connection = self.raw().await;
        let pattern = format!("pr:{}.*", self.namespace.name);
        let mut keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut connection).await.unwrap();
        let users: Vec<String> = redis::cmd("ACL").arg("USERS").query_async(&mut connection).await.unwrap();
        keys.extend(users.into_iter().filter(|user| user.contains(&format!(":{}.", self.namespace.name))));
        keys.sort();
        keys
    }

    /// The queue of a run, as the operator opens it.
    pub async fn queue(&self, run: &str) -> RunQueue {
        let epoch = self.meta(run, "epoch").await.unwrap();
        RunQueue::of_epoch(&self.valkey(), &self.run_id(run), &epoch)
    }

    /// The dead letters of a run that has ended.
    pub async fn dead_letters(&self, run: &str) -> Vec<DeadLetter> {
        self.queue(run).await.dead_letters(None, 1_000).await.unwrap()
    }

    /// Checks that the status of a run that has ended shows the newest dead letters, newest first.
    pub async fn check_failures_shown(&self, run: &PipelineRun) {
        let queue = self.queue(&run.name_any()).await;
        let letters = queue.newest_dead_letters(FAILURES_SHOWN).await.unwrap();
        let written = letters.iter().map(|letter| (&letter.file, i64::from(letter.attempts), &letter.reason));
        let shown = run.status.as_ref().unwrap().recent_failures.iter();
        let shown = shown.map(|failed| (&failed.file, i64::from(failed.attempts), &failed.reason));
        assert_eq!(shown.collect::<Vec<_>>(), written.collect::<Vec<_>>(), "the newest dead letters");
        let groups = &run.status.as_ref().unwrap().failures;
        let grouped: i64 = groups.iter().map(|group| group.count).sum();
        assert_eq!(grouped, counts(run).2, "every failed file is in one group: {groups:?}");
    }

    /// Checks that no pod is left, and that the Job and the run agree.
    pub async fn check_left_nothing(&self, run: &PipelineRun) {
        assert_eq!(names(self.pods().await), Vec::<String>::new());
        let traces = self.traces().await;
        assert!(
            !traces.iter().any(|trace| trace.ends_with(":work") || trace.starts_with("openfilter:")),
            "{traces:?}"
        );
        let jobs = self.jobs().await;
        let job = jobs
            .iter()
            .find(|job| Some(job.name_any()) == run.status.as_ref().unwrap().job_name)
            .expect("the Job");
        let wanted = if phase(run) == Some(Phase::Succeeded) { "Complete" } else { "Failed" };
        let status = job.status.as_ref().unwrap();
        let conditions = status.conditions.clone().unwrap_or_default();
        let ended =
            conditions.iter().find(|condition| condition.type_ == wanted && condition.status == "True");
        let ended = ended.unwrap_or_else(|| panic!("{conditions:?}"));
        let (total, succeeded, failed) = counts(run);
        let told = format!("{succeeded} of {total} files succeeded, {failed} failed");
        let message = ended.message.as_deref().unwrap_or_default();
        assert!(message.starts_with(&told), "{message}");
        // They may be higher only after a loss of data: the API server lets a Job's counts only grow.
        let of_job = |count: Option<i32>| i64::from(count.unwrap_or_default());
        assert!(of_job(status.succeeded) >= succeeded && of_job(status.failed) >= failed, "{status:?}");
        assert_eq!(of_job(status.active), 0);
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let kubectl = |words: &[&str]| self.kubectl(words).unwrap_or_else(|error| error);
        if std::thread::panicking() {
            eprintln!("{}", kubectl(&["get", "plr,jobs,pods", "-o", "wide"]));
            let text = self.operator_log();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!(
                "--- the operator's last lines ---\n{}",
                lines[lines.len().saturating_sub(40)..].join("\n")
            );
        }
        // Objects left behind would block the deletion of the namespace, because nothing would remove their
        // finalizers. On a run that is not being deleted, the operator would put them back.
        kubectl(&["delete", "plr", "--all", "--wait=false"]);
        for object in kubectl(&["get", "plr,pods", "-o", "name"]).lines() {
            kubectl(&["patch", object, "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#]);
        }
        if !std::thread::panicking() {
            self.witness.check_all_statuses();
        }
    }
}

/// Loads images and CRDs once.
async fn prepare(testbed: &Testbed) {
    testbed.load_images(&[Set::Worker, Set::Tests]).unwrap();
    tests::crds_on_cluster::install(testbed).await;
}

/// A filter that runs the probe.
pub fn filter(name: &str, args: &[&str]) -> Value {
    json!({"name": name, "image": reference("probe"), "args": args, "imagePullPolicy": "Never"})
}

pub fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (name, change) in changes {
                merge(into.entry(name).or_insert(Value::Null), change);
            }
        }
        (into, changes) => *into = changes,
    }
}

/// For messages: whole objects are long, and Secrets are secret.
pub fn names<K: Resource>(objects: Vec<K>) -> Vec<String> {
    objects.iter().map(ResourceExt::name_any).collect()
}

pub fn is_in_phase(pod: &Pod, phase: &str) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase)
}

/// Files that are being processed.
pub fn running(run: &PipelineRun) -> i64 {
    run.status.as_ref().and_then(|status| status.counts).map_or(0, |counts| counts.running)
}

pub fn phase(run: &PipelineRun) -> Option<Phase> {
    run.status.as_ref()?.phase
}

/// `(total, succeeded, failed)`.
pub fn counts(run: &PipelineRun) -> (i64, i64, i64) {
    let counts = run.status.as_ref().unwrap().counts.unwrap_or_default();
    (counts.total_files, counts.succeeded, counts.failed)
}

/// Status and reason of a condition.
pub fn condition(run: &PipelineRun, type_: &str) -> (String, String) {
    let conditions = run.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let found = conditions.into_iter().find(|condition| condition.type_ == type_);
    found.map(|found| (found.status, found.reason)).unwrap_or_default()
}

pub fn message(run: &PipelineRun, type_: &str) -> String {
    let conditions = run.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    conditions
        .into_iter()
        .find(|condition| condition.type_ == type_)
        .map(|found| found.message)
        .unwrap_or_default()
}

/// Whether the run is blocked for this reason.
pub fn is_degraded_by(run: &PipelineRun, reason: &str) -> bool {
    condition(run, "Degraded") == ("True".to_owned(), reason.to_owned())
}
