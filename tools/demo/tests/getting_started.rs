//! docs/getting-started.md and README's first Pipeline as a reader follows them: the test saves their YAML
//! under the names that they say, types their commands into one shell, and compares what is printed with what
//! they show. The cluster has an S3 service in the place of the reader's MinIO: it has its own keys, and
//! knows path-style requests only.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on says why by panicking")]

mod page;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use page::{Block, blocks};
use tempfile::TempDir;
use testbed::{
    Paths, Testbed,
    image::{Content, Image},
    images::Set,
};

/// The reader's keys, in the place of the words in angle brackets.
const KEYS: [(&str, &str); 2] = [("<access key>", "reader"), ("<secret key>", "chosen-by-the-reader")];
/// The image of the pages, as it is in its registry: it names no user. The machine's busybox is inside.
const IMAGE: &str = "docker.io/library/busybox:1.37";
/// The namespace in which README's first Pipeline is applied, which names none.
const README_NAMESPACE: &str = "readme";
/// Namespaces that the test, or the reader whom it plays, creates.
const NAMESPACES: [&str; 3] = ["team-a", README_NAMESPACE, "minio"];
const OVERLAY: &str = "kustomize/overlays/dev";
/// How long one command may take on a busy machine; `kubectl wait` of the pages would wait longer.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
const LONG: Duration = Duration::from_secs(240);

/// The reader's MinIO, as far as the cluster is concerned.
const MINIO: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: minio}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: minio, namespace: minio}
spec:
  selector: {matchLabels: {app: minio}}
  template:
    metadata: {labels: {app: minio}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {fsGroup: 65532}
      containers:
      - name: minio
        image: localhost/openfilter/s3:testbed
        args: [--port, ":9000", --health, /health, --quiet, --keep-alive, posix, /data]
        env: [{name: ROOT_ACCESS_KEY_ID, value: "<access key>"}, {name: ROOT_SECRET_ACCESS_KEY, value: "<secret key>"}]
        readinessProbe: {httpGet: {path: /health, port: 9000}, periodSeconds: 1, timeoutSeconds: 5, failureThreshold: 10}
        volumeMounts: [{name: data, mountPath: /data}]
      volumes: [{name: data, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: minio, namespace: minio}
spec: {selector: {app: minio}, ports: [{port: 9000}]}
"#;

fn filled(text: &str) -> String {
    KEYS.iter().fold(text.to_owned(), |text, (word, key)| text.replace(word, key))
}

/// The name under which the reader saves a block of YAML.
fn file_name(block: &Block) -> Option<&str> {
    let (_, rest) = block.before.rsplit_once("ave this as `")?;
    Some(rest.split_once('`')?.0)
}

/// The blocks of docs/getting-started.md.
fn guide(root: &Path) -> Vec<Block> {
    blocks(&fs::read_to_string(root.join("docs/getting-started.md")).unwrap())
}

/// The blocks of README's first Pipeline.
fn first_pipeline(root: &Path) -> Vec<Block> {
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let section = readme.split("\n## ").find(|section| section.starts_with("Your first Pipeline\n"));
    blocks(section.unwrap())
}

/// What must be equal in two lines: their words, except ages.
fn words(line: &str) -> Vec<&str> {
    let is_age = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_digit())
            && word.ends_with(['s', 'm', 'h'])
            && word.chars().all(|one| one.is_ascii_digit() || "smh".contains(one))
    };
    line.split_whitespace().map(|word| if is_age(word) { "(age)" } else { word }).collect()
}

/// Whether a command has printed what the page shows.
fn is_as_shown(shown: &[String], printed: &str) -> bool {
    printed.lines().map(words).eq(shown.iter().map(|line| words(line)))
}

/// The reader's shell, which remembers variables, functions and programs in the background.
struct Shell {
    bash: Child,
    lines: Receiver<String>,
    folder: TempDir,
}

/// The line after the output of a command; its exit code follows.
const END: &str = "(the command ended) ";

impl Shell {
    fn open(testbed: &Testbed) -> Self {
        let (paths, folder) = (testbed.paths(), tempfile::tempdir().unwrap());
        // A copy, because the test chooses another namespace in it.
        let config = folder.path().join(".kubeconfig");
        fs::copy(paths.kubeconfig(), &config).unwrap();
        let path = format!("{}:{}", paths.state().join("bin").display(), std::env::var("PATH").unwrap());
        let mut bash = Command::new("bash");
        bash.arg("--norc").current_dir(folder.path()).env("KUBECONFIG", config).env("PATH", path);
        // A group of its own, so that nothing is left in the background.
        let mut bash = bash.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(bash.stdout.take().unwrap());
        let (send, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        writeln!(bash.stdin.as_mut().unwrap(), "exec 2>&1").unwrap();
        Self { bash, lines, folder }
    }

    /// Types a command; returns its exit code and what it printed.
    fn type_in(&mut self, line: &str) -> (i32, String) {
        println!("$ {line}");
        let typed = format!("{{ {line}\n}} </dev/null; printf '\\n{END}%s\\n' $?");
        writeln!(self.bash.stdin.as_mut().unwrap(), "{typed}").unwrap();
        let (deadline, mut printed) = (Instant::now() + COMMAND_TIMEOUT, Vec::new());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(next) = self.lines.recv_timeout(left) else {
                panic!("{line} has not ended; it printed:\n{}", printed.join("\n"))
            };
            match next.strip_prefix(END) {
                Some(code) => {
                    let printed = printed.join("\n");
                    println!("{printed}");
                    return (code.parse().unwrap(), printed.trim_end_matches('\n').to_owned());
                }
                None => printed.push(next),
            }
        }
    }

    /// Types a command that must succeed.
    fn must(&mut self, line: &str) -> String {
        let (code, printed) = self.type_in(line);
        assert_eq!(code, 0, "{line}");
        printed
    }

    /// Does everything that the blocks say.
    fn follow(&mut self, blocks: &[Block]) {
        for block in blocks {
            if let Some(file) = file_name(block).filter(|_| block.language == "yaml") {
                fs::write(self.folder.path().join(file), filled(&block.text)).unwrap();
            }
            for command in &block.commands {
                let line = filled(&command.line);
                if line.ends_with(" -w") {
                    // Until the reader has seen enough.
                    assert_eq!(self.type_in(&format!("timeout 3 {line}")).0, 124, "{line}");
                    continue;
                }
                let printed = self.must(&line);
                assert!(
                    command.shown.is_empty() || is_as_shown(&command.shown, &printed),
                    "the page shows something else:\n{}",
                    command.shown.join("\n")
                );
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let group = format!("-{}", self.bash.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.bash.wait();
    }
}

/// OpenFilter Pipelines, installed, and the reader's MinIO.
struct Cluster {
    testbed: Testbed,
}

impl Cluster {
    async fn start() -> Self {
        let testbed = Testbed::start_or_reuse().await.unwrap();
        testbed.load_images(&[Set::Services, Set::Worker, Set::Product]).unwrap();
        testbed.load_image(&busybox(testbed.paths())).unwrap();
        let cluster = Self { testbed };
        cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "-k", &cluster.overlay()]);
        // After the installation, because the operator ends runs that a killed test left.
        cluster.remove_namespaces();
        cluster.testbed.apply(&filled(MINIO)).unwrap();
        cluster.kubectl(&["create", "namespace", README_NAMESPACE]);
        for (namespace, what) in [
            ("openfilter-system", "statefulset/openfilter-valkey"),
            ("openfilter-system", "deployment/openfilter-operator"),
            ("openfilter-system", "deployment/openfilter-webhook"),
            ("minio", "deployment/minio"),
        ] {
            cluster.kubectl(&["-n", namespace, "rollout", "status", what, "--timeout=240s"]);
        }
        // The API server reaches a webhook only some time after it is ready.
        let empty =
            "{apiVersion: filter.plainsight.ai/v1alpha1, kind: Pipeline, metadata: {name: x}, spec: {}}";
        let asked = async || {
            let answer = cluster.testbed.kubectl(&["create", "--dry-run=server", "-f", "-"], empty);
            Ok(answer.err().filter(|error| error.contains("denied the request")).map(|_| ()))
        };
        cluster.testbed.eventually("the webhook answers", LONG, asked).await.unwrap();
        cluster
    }

    fn kubectl(&self, words: &[&str]) -> String {
        let printed = self.testbed.kubectl(words, "");
        printed.unwrap_or_else(|error| panic!("kubectl {}: {error}", words.join(" ")))
    }

    fn overlay(&self) -> String {
        self.testbed.paths().root.join(OVERLAY).display().to_string()
    }

    fn remove_namespaces(&self) {
        let gone = ["delete", "namespace", "--ignore-not-found", "--timeout=180s"];
        self.kubectl(&[&gone[..], &NAMESPACES].concat());
    }

    /// Describes the cluster after a failure.
    fn describe(&self) {
        for words in [
            &["get", "pipelines,plr,pods,jobs", "-A", "-o", "wide"][..],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
            &["logs", "-n", "openfilter-system", "deployment/openfilter-operator", "--tail=60"],
        ] {
            println!("{}", self.testbed.kubectl(words, "").unwrap_or_else(|error| error));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            self.describe();
        }
        // The next suite deploys its own. Runs go first, while the operator is there.
        let delete = ["delete", "--ignore-not-found", "--timeout=180s"];
        let overlay = self.overlay();
        for what in [&[&["namespace"][..], &NAMESPACES].concat()[..], &["-k", &overlay]] {
            if let Err(error) = self.testbed.kubectl(&[&delete[..], what].concat(), "") {
                println!("{error}");
            }
        }
    }
}

/// The archive of the pages' image.
fn busybox(paths: &Paths) -> PathBuf {
    let program = Path::new("/bin/busybox");
    let mut image = Image {
        name: IMAGE.to_owned(),
        entrypoint: vec!["sh".to_owned()],
        env: vec!["PATH=/bin".to_owned()],
        ..Image::default()
    };
    image.add_program(program, Content::Copy(program.to_owned()), "/bin/busybox");
    for tool in ["sh", "sha256sum"] {
        image.files.insert(format!("/bin/{tool}").into(), Content::Link("busybox".into()));
    }
    let archive = paths.images().join("getting-started-busybox.tar");
    image.write(&archive).unwrap();
    archive
}

/// The mistakes in the last table of docs/getting-started.md: name, edit of the Pipeline, reason, message.
const MISTAKES: [(&str, &str, &str, &str); 3] = [
    ("no-path-style", "/usePathStyle/d", "ListingFailed", "failed to perform DNS lookup"),
    ("no-scheme", "s|http://||", "ListingFailed", "TLS handshake failed"),
    ("no-user", "/^  pod:/,$d", "ContainerStartFailed", "run as root"),
];

/// Makes all mistakes, and then reads what their runs say, because a listing takes its time to fail.
fn make_the_first_mistakes(shell: &mut Shell) {
    for (name, mistake, ..) in MISTAKES {
        let rename = format!("s/name: checksums/name: {name}/");
        shell.must(&format!("sed '{mistake}; {rename}' pipeline.yaml | kubectl apply -f -"));
        shell.must(&format!("sed '{rename}; s/name: first/name: {name}/' run.yaml | kubectl apply -f -"));
    }
    for (name, _, reason, message) in MISTAKES {
        shell.must(&format!("kubectl -n team-a wait plr/{name} --for=condition=Degraded --timeout=150s"));
        let get = "get -o jsonpath='{.status.conditions[?(@.type==\"Degraded\")]}'";
        let said = shell.must(&format!("kubectl -n team-a {get} plr/{name}"));
        assert!(
            said.contains(reason) && said.contains(message),
            "{reason} and {message:?} are not in {said}"
        );
    }
}

#[tokio::test]
#[ignore = "needs the cluster"]
async fn the_pages_work_to_the_letter_with_a_plain_s3_service() {
    let cluster = Cluster::start().await;
    let root = cluster.testbed.paths().root.clone();
    let started = Instant::now();
    let mut shell = Shell::open(&cluster.testbed);
    let guide = guide(&root);
    let (clean_up, steps) = guide.split_last().unwrap();
    shell.follow(steps);
    println!("docs/getting-started.md took {:?}", started.elapsed());
    make_the_first_mistakes(&mut shell);

    // README's reader has a bucket with two text files.
    let result = "$S3/first/checksums/hello.txt/sha256.txt";
    shell.must(&format!("s3 -X DELETE $S3/first/incoming/empty.txt && s3 -X DELETE {result}"));
    shell.must(&format!("kubectl config set-context --current --namespace={README_NAMESPACE}"));
    shell.follow(&first_pipeline(&root));
    shell.must(&format!("s3 {result}"));
    shell.follow(std::slice::from_ref(clean_up));
    println!("with README's first Pipeline it took {:?}", started.elapsed());
}

#[test]
fn every_manifest_of_the_pages_has_a_file_name_and_the_last_block_cleans_up() {
    let root = Paths::find().unwrap().root;
    let names = |blocks: &[Block]| -> Vec<String> {
        let manifests = blocks.iter().filter(|block| block.language == "yaml");
        manifests.map(|block| file_name(block).unwrap().to_owned()).collect()
    };
    let guide = guide(&root);
    assert_eq!(names(&guide), ["pipeline.yaml", "run.yaml"]);
    assert_eq!(names(&first_pipeline(&root)), ["first.yaml"]);
    assert!(guide.last().unwrap().commands[0].line.starts_with("kubectl delete namespace"));
}

#[test]
fn ages_and_widths_may_differ_and_nothing_else() {
    let shown = ["NAME    PHASE       AGE", "first   Succeeded   14s"].map(str::to_owned);
    assert!(is_as_shown(&shown, "NAME   PHASE   AGE\nfirst   Succeeded   1m3s"));
    assert!(!is_as_shown(&shown, "NAME   PHASE   AGE\nfirst   Failed   14s"));
    assert!(!is_as_shown(&shown, "NAME   PHASE   AGE"));
}
