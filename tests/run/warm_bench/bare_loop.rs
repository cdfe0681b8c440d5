//! The minimum for the same work: workers that fetch a file, start the same filters and publish the results,
//! one file after the other, with the code of pods and the same S3 server, but without queue and Kubernetes.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use claimer::steps::{self, Client, Destination};
use queue::File;
use storage::Bucket;

pub struct BareLoop {
    /// The folder of the workers' workspaces while it runs.
    pub folder: PathBuf,
    /// The filters' program.
    pub program: PathBuf,
    pub source: Bucket,
    /// Names and arguments of the filters.
    pub filters: Vec<(String, &'static [&'static str])>,
    pub destination: Option<Destination>,
}

impl BareLoop {
    /// Processes files with this many workers; returns how long it takes.
    pub fn run(&self, files: Vec<File>, workers: usize) -> Duration {
        let (files, began) = (Mutex::new(VecDeque::from(files)), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| self.work(&files));
            }
        });
        began.elapsed()
    }

    /// One worker: a thread, as in the worker of a pod.
    fn work(&self, files: &Mutex<VecDeque<File>>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // The sink is a bucket of the same server, with the same keys.
            let client = self.source.client().await;
            loop {
                let Some(file) = files.lock().unwrap().pop_front() else { break };
                self.process(&client, &file).await;
            }
        });
    }

    async fn process(&self, client: &Client, file: &File) {
        let folder = tempfile::tempdir_in(&self.folder).unwrap();
        let (workspace, out) = (folder.path(), folder.path().join("out"));
        steps::fetch(client, &self.source, file, &workspace.join("input")).await.unwrap();
        fs::write(workspace.join("input.source_uri"), self.source.uri(&file.key)).unwrap();
        fs::write(workspace.join("input.attempt"), "1").unwrap();
        for (name, words) in &self.filters {
            self.filter(workspace, &out.join(name), words);
        }
        if let Some(destination) = &self.destination {
            let results = out.join(&destination.from);
            steps::publish(destination, client, &file.key, &results).await.unwrap();
        }
    }

    fn filter(&self, workspace: &Path, results: &Path, words: &[&str]) {
        fs::create_dir_all(results).unwrap();
        let mut command = Command::new(&self.program);
        command.args(words).env("SOURCE_PATH", workspace.join("input")).env("OUTPUT_PATH", results);
        let ended = command.stdin(Stdio::null()).stdout(Stdio::null()).status().unwrap();
        assert!(ended.success(), "{ended}");
    }
}
