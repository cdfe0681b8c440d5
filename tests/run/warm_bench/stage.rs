//! A laboratory with files, and the ways of processing them to compare.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use claimer::steps::Destination;
use crds::v1alpha1::{Phase, Pipeline, PipelineRun};
use futures::StreamExt;
use queue::{File, Pending, RunQueue};
use serde_json::{Value, json};
use storage::{AccessKeys, Bucket, Lister, Selection, parse_endpoint};
use testbed::programs::{self, Profile};
use testbed::services::S3_IP_URL;

use super::bare_loop::BareLoop;
use super::processes::{Sampler, Usage};
use crate::figures::{Writes, api_writes};
use crate::harness::{Lab, Mode, counts, filter, phase};

/// Concurrent pods in both modes, and workers of the bare loop.
pub const PODS: usize = 4;
/// The folder of the files that a pod per file processes. Other pods process these too.
pub const FEW: &str = "few/";
/// Concurrent requests that store files: enough to keep the S3 server busy.
const PUTS_AT_A_TIME: usize = 32;
/// Files per folder.
const FOLDER_FILES: usize = 1_000;
/// A hundred thousand files take several minutes.
const TOO_LONG: Duration = Duration::from_secs(3_600);
/// How often to check a run for its first and its last file, and to sample processes.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// The cluster is calm when it makes at most this many writes in this time.
const CALM: (f64, Duration) = (3.0, Duration::from_secs(3));

/// Files, and the work on each of them.
#[derive(Clone, Copy)]
pub struct Case {
    pub what: &'static str,
    /// The size of a file in bytes.
    pub bytes: usize,
    /// The probe's arguments, for each filter.
    pub filters: &'static [&'static [&'static str]],
    pub has_sink: bool,
    /// The number of files for a pod per file, out of all.
    pub few: usize,
    /// All files.
    pub many: usize,
}

pub struct Stage {
    pub lab: Lab,
    case: Case,
}

/// The measurements of a run that has ended.
pub struct Processed {
    /// From the first claim to the last settled file.
    pub took: Duration,
    /// How it began.
    pub start_up: StartUp,
    /// From the creation of the run to its end.
    pub whole: Duration,
    /// What the processors did between first and last.
    pub usage: Usage,
}

/// How a run begins. All times count from the first claim, that is, when the operator hands out the first
/// file.
#[derive(Default)]
pub struct StartUp {
    /// When the first file was settled.
    pub first_settled: Option<Duration>,
    /// When every pod had got files, and how many files were settled by then.
    pub all_served: Option<(Duration, u64)>,
    served: HashSet<String>,
}

impl StartUp {
    async fn look(&mut self, queue: &RunQueue, elapsed: Duration, settled: u64) {
        if settled > 0 {
            self.first_settled.get_or_insert(elapsed);
        }
        if self.all_served.is_some() {
            return;
        }
        let served = &mut self.served;
        let visit = |claim: &Pending| {
            served.insert(claim.consumer.clone());
        };
        // A closed queue has no claims.
        let _ = queue.for_each_pending(Duration::ZERO, visit).await;
        if self.served.len() >= PODS {
            self.all_served = Some((elapsed, settled));
        }
    }
}

impl Stage {
    /// An operator with its default log, and a bucket with files.
    pub async fn new(case: Case) -> Self {
        let mut lab = Lab::alone("files").await;
        lab.restart_with("LOG", "info").await;
        let stage = Self { lab, case };
        stage.lab.services.s3.make_bucket(&stage.sink().name).await.unwrap();
        stage.put_files().await;
        stage.calm().await;
        stage
    }

    /// The bucket, as pods reach it.
    fn source(&self) -> Bucket {
        let (id, secret) = self.lab.services.s3.keys();
        Bucket {
            name: self.lab.bucket.clone(),
            endpoint: Some(parse_endpoint(S3_IP_URL).unwrap()),
            region: None,
            path_style: true,
            skip_tls_verify: false,
            keys: Some(AccessKeys { id: id.to_owned().into(), secret: secret.to_owned().into() }),
            timeout: Duration::from_secs(30),
            max_attempts: 4,
            etag_is_md5: true,
            addresses: None,
        }
    }

    fn sink(&self) -> Bucket {
        Bucket { name: format!("{}-results", self.lab.bucket), ..self.source() }
    }

    async fn put_files(&self) {
        let (began, Case { bytes, few, many, .. }) = (Instant::now(), self.case);
        let bucket = self.source();
        let (client, content) = (bucket.client().await, vec![b'x'; bytes]);
        let put = |number: usize| {
            let folder = if number < few { FEW } else { "rest/" };
            // The S3 server reads a whole folder for each page of a listing.
            let key = format!("{folder}{:03}/{number:06}", number / FOLDER_FILES);
            let request = client.put_object().bucket(&bucket.name).key(key);
            let request = request.body(content.clone().into());
            async move { drop(request.send().await.unwrap()) }
        };
        futures::stream::iter(0..many).map(put).buffer_unordered(PUTS_AT_A_TIME).collect::<Vec<()>>().await;
        eprintln!("{many} files of {bytes} bytes stored in {:.0?}", began.elapsed());
    }

    /// Waits until nothing is being removed or written any more, because that costs as much as the measured
    /// work.
    pub async fn calm(&self) {
        let writes = || {
            let writes = api_writes(&self.lab);
            writes.iter().filter(|write| is_of_work(write)).map(|write| write.count).sum::<f64>()
        };
        let (most, time) = CALM;
        let calm = async || {
            let before = writes();
            tokio::time::sleep(time).await;
            Ok((self.lab.pods().await.is_empty() && writes() - before <= most).then_some(()))
        };
        self.lab.eventually("the cluster is calm", calm).await;
    }

    /// Measures a run over the files of this mode.
    pub async fn run(&self, mode: Mode) -> Processed {
        let (name, files, prefix) = match mode {
            Mode::PodPerFile => ("pod-per-file", self.case.few, FEW),
            Mode::Warm => ("warm", self.case.many, ""),
        };
        let created = Instant::now();
        self.create_run(name, mode, prefix).await;
        let queue = self.queue(name).await;
        let (mut first, mut start_up) = (None, StartUp::default());
        let last = loop {
            assert!(created.elapsed() < TOO_LONG, "{name} takes too long");
            let stats = queue.stats().await;
            let (running, succeeded) = stats.map_or((0, 0), |stats| (stats.running, stats.succeeded));
            if first.is_none() && running + succeeded > 0 {
                first = Some((Instant::now(), Sampler::start(SAMPLE_EVERY)));
            }
            if let Some((first, _)) = &first {
                start_up.look(&queue, first.elapsed(), succeeded).await;
            }
            if succeeded >= files as u64 {
                break Instant::now();
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let (first, sampler) = first.unwrap();
        let usage = sampler.finish().await;
        self.ended(name, files).await;
        Processed { took: last.duration_since(first), start_up, whole: created.elapsed(), usage }
    }

    /// A Pipeline and a run of it.
    pub async fn create_run(&self, name: &str, mode: Mode, prefix: &str) {
        let filters: Vec<Value> = self.filter_names().zip(self.case.filters).map(probe).collect();
        let mut spec = json!({"source": {"bucket": self.lab.bucket()}, "filters": filters});
        spec["mode"] = json!(format!("{mode:?}"));
        if self.case.has_sink {
            let mut sink = self.lab.bucket();
            sink["name"] = json!(self.sink().name);
            sink["prefix"] = json!(format!("{name}/"));
            spec["sink"] = json!({"bucket": sink});
        }
        self.lab.create::<Pipeline>(json!({"metadata": {"name": name}, "spec": spec})).await;
        let mut run = json!({"pipelineRef": {"name": name}, "execution": {"parallelism": PODS}});
        if !prefix.is_empty() {
            run["source"] = json!({"prefix": prefix});
        }
        self.lab.create::<PipelineRun>(json!({"metadata": {"name": name}, "spec": run})).await;
    }

    /// Waits until a run has ended, with success for all of its files.
    pub async fn ended(&self, run: &str, files: usize) {
        let ended = async || {
            let found = self.lab.get(run).await;
            Ok(matches!(phase(&found), Some(Phase::Succeeded | Phase::Failed)).then_some(found))
        };
        let ended = self.lab.testbed.eventually(&format!("{run} ends"), TOO_LONG, ended).await.unwrap();
        assert_eq!(
            (counts(&ended), phase(&ended)),
            ((files as i64, files as i64, 0), Some(Phase::Succeeded))
        );
    }

    async fn queue(&self, run: &str) -> RunQueue {
        let epoch = async || Ok(self.lab.meta(run, "epoch").await);
        let epoch = self.lab.eventually("the queue is open", epoch).await;
        RunQueue::of_epoch(&self.lab.valkey(), &self.lab.run_id(run), &epoch)
    }

    fn filter_names(&self) -> impl Iterator<Item = String> {
        (0..self.case.filters.len()).map(|number| format!("filter-{number}"))
    }

    /// The same work on all files without queue and Kubernetes; returns how long it takes. Its results have
    /// their own names, so that none is overwritten, which would change the amount of work.
    pub async fn bare_loop(&self, name: &str) -> Duration {
        let paths = self.lab.testbed.paths();
        let programs = programs::build(paths, &["probe"], Profile::own()).unwrap();
        let from = self.filter_names().last().unwrap();
        let destination =
            Destination { sink: self.sink(), prefix: format!("{name}/"), from, source_prefix: String::new() };
        let bare_loop = BareLoop {
            // On the same disk as pods.
            folder: paths.state(),
            program: programs["probe"].clone(),
            source: self.source(),
            filters: self.filter_names().zip(self.case.filters.iter().copied()).collect(),
            destination: self.case.has_sink.then_some(destination),
        };
        let files = self.listed().await;
        assert_eq!(files.len(), self.case.many);
        tokio::task::spawn_blocking(move || bare_loop.run(files, PODS)).await.unwrap()
    }

    /// All files, as the operator lists them.
    async fn listed(&self) -> Vec<File> {
        let lister = Lister::new(&self.source(), "", Selection::new("", &[], &[]).unwrap()).await;
        let (mut files, mut after) = (Vec::new(), String::new());
        loop {
            let page = lister.page(&after).await.unwrap();
            files.extend(page.files.into_iter().map(|file| File {
                key: file.key,
                size: file.size,
                etag: file.etag,
            }));
            match page.next {
                Some(next) => after = next,
                None => return files,
            }
        }
    }
}

/// Whether a write belongs to the measured work: nodes and controllers renew leases and statuses all the
/// time, and a review writes nothing.
pub fn is_of_work(write: &Writes) -> bool {
    !matches!(write.resource.as_str(), "leases" | "nodes") && !write.resource.ends_with("reviews")
}

fn probe((name, words): (String, &&[&str])) -> Value {
    let mut filter = filter(&name, words);
    filter["command"] = json!(["/probe"]);
    filter
}
