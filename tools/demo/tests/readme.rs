//! README.md, docs/demo.md and CONTRIBUTING.md as a new user follows them: the test clones the project into
//! an empty folder and types every command there. README's first Pipeline is in `getting_started.rs`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

mod page;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use page::{Block, blocks};
use serde_json::Value;
use testbed::{Found, Paths, Whose, checkout};

/// The pages, in the order in which they are followed.
const PAGES: [&str; 3] = ["README.md", "docs/demo.md", "CONTRIBUTING.md"];

/// What to do with a command of a page.
enum Here {
    /// It succeeds and prints this.
    Prints(&'static str),
    /// It fails, as the page shows, and prints this.
    Fails(&'static str),
    /// It fails, and prints exactly what the page shows.
    FailsAsShown,
    /// It never ends: it runs for some seconds and prints this.
    Watches(&'static str),
    /// It is not typed here, for this reason.
    Not(&'static str),
}
use Here::{Fails, FailsAsShown, Not, Prints, Watches};

/// Every command of the pages in order, by its beginning. A command without a row here is untested.
const COMMANDS: &[(&str, Here)] = &[
    ("make demo", Prints("times as fast as a pod per file")),
    ("make test", Not("this is a part of it")),
    ("R=", Not("the test of what is pushed does")),
    ("for i in operator webhook claimer", Not("the test of what is pushed does")),
    ("sed -i", Not("the test of what is pushed does")),
    ("kubectl create namespace openfilter-system", Not("the demo has made it")),
    ("kubectl create secret generic openfilter-valkey", Not("the demo has made it")),
    (
        "kubectl apply --server-side -k examples/install",
        Not("nobody pulls from there; tests/deploy tries it"),
    ),
    ("kubectl apply -f first.yaml", Not("getting_started.rs does")),
    ("kubectl wait plr/first", Not("getting_started.rs does")),
    ("kubectl get plr first", Not("getting_started.rs does")),
    ("kubectl apply --server-side --field-manager openfilter", Not("tests/gitops does, with an Argo CD")),
    ("kubectl apply --server-side -k kustomize/gitops/argocd/dev", Not("tests/gitops does, with an Argo CD")),
    ("kubectl apply --server-side -k kustomize/gitops/flux/dev", Not("tests/gitops does, with a Flux")),
    ("kubectl apply -f examples/demo/bad-run.yaml", FailsAsShown),
    ("kubectl create -f examples/demo/run.yaml", Prints("created")),
    ("kubectl get plr -n openfilter-demo -w", Watches("thumbnails   Succeeded   37/37       36          1")),
    ("kubectl wait -n openfilter-demo plr/", Prints("condition met")),
    ("kubectl get events -n openfilter-demo", Prints("36 of 37 files succeeded, 1 failed")),
    (
        "kubectl get plr -n openfilter-demo",
        Prints("camera/north/IMG_2019.jpg\t2\tthumbnail exited with code 1"),
    ),
    ("kubectl apply -f policies/max-parallelism/policy.yaml", Prints("max-parallelism created")),
    ("sed 's/parallelism: 6/parallelism: 500/'", Fails("[policy max-parallelism/parallelism]")),
    ("openfilter validate -f examples/demo", FailsAsShown),
    ("docker build --target operator", Not("this machine has no Docker")),
    ("make demo DEMO_CLUSTER=current", Not("demo.rs does")),
    ("make help", Prints("make demo")),
    ("make test-fast", Not("a part of `make test`")),
    ("make fuzz", Not("a smaller one is part of `make test`")),
    ("make soak", Not("it takes very long")),
    ("make bench", Not("it takes very long")),
    ("make cluster-up", Prints("the cluster is already up, nothing changed")),
    ("make cluster-down", Prints("is down")),
];

const UNTIL_REFUSED: &str = "sed 's/parallelism: 6/parallelism: 500/' examples/demo/run.yaml > ../big-run.yaml; \
    for try in $(seq 100); do kubectl create --dry-run=server -f ../big-run.yaml 2>&1 | grep -q max-parallelism/ && exit; sleep 1; done; \
    exit 1";

/// Whether this is the output of `make demo`, whose commands the demo shows and the user does not type.
fn is_the_demo(block: &Block) -> bool {
    block.text.starts_with("$ make demo\n")
}

/// The blocks of all pages in a checkout.
fn all_blocks(root: &Path) -> Vec<Block> {
    PAGES.iter().flat_map(|page| blocks(&fs::read_to_string(root.join(page)).unwrap())).collect()
}

/// The result of a command.
struct Printed {
    worked: bool,
    text: String,
}

/// A person's shell in the clone, with `openfilter` installed.
struct Shell {
    /// The clone. Files that belong to it are beside it.
    clone: PathBuf,
    /// What the demo says to type before looking around.
    exports: String,
}

impl Shell {
    fn clone() -> Self {
        let paths = Paths::find().unwrap();
        let shell = Self { clone: paths.readme_clone(), exports: String::new() };
        // A killed test left it, and perhaps a cluster.
        take_down(&shell.clone);
        if shell.folder().exists() {
            fs::remove_dir_all(shell.folder()).unwrap();
        }
        fs::create_dir_all(shell.folder()).unwrap();
        // So that the clone is removed once this checkout is gone.
        fs::write(shell.folder().join("checkout"), paths.root.display().to_string()).unwrap();
        let clone = shell.clone.display().to_string();
        let git = |words: &[&str]| {
            let output = checkout::git(&paths).unwrap().args(words).output().unwrap();
            assert!(output.status.success(), "git {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        };
        git(&["clone", "--quiet", ".", &clone]);
        // Uncommitted changes are tested too.
        let changes = format!("{clone}.diff");
        git(&["diff", "--binary", &format!("--output={changes}"), "HEAD"]);
        git(&["-C", &clone, "apply", "--allow-empty", &changes]);
        // `cargo install` would compile everything again, for release.
        let install = "make room && cargo build --quiet --workspace --locked --bin openfilter --test demo";
        assert!(shell.type_in(install).worked);
        shell
    }

    fn type_in(&self, line: &str) -> Printed {
        println!("$ {line}");
        let target = self.folder().join("target");
        let path = format!("{}:{}", target.join("debug").display(), std::env::var("PATH").unwrap());
        let mut bash = Command::new("bash");
        bash.args(["-c", &format!("exec 2>&1; {}{line}", self.exports)]).current_dir(&self.clone);
        // As if started directly, not by make.
        bash.env_remove("MAKEFLAGS")
            .env_remove("MAKELEVEL")
            .env_remove("MFLAGS")
            .env("CARGO_TARGET_DIR", target);
        let output = bash.env("PATH", path).env_remove("KUBECONFIG").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{printed}");
        Printed { worked: output.status.success(), text: printed }
    }

    /// On the same disk as the other builds, whose compiled parts it reuses.
    fn folder(&self) -> &Path {
        self.clone.parent().unwrap()
    }
}

/// Takes down the cluster that is up, if it belongs to this checkout.
fn take_down(root: &Path) {
    let (Found::Up(record) | Found::Stale(Some(record))) = testbed::find() else { return };
    if record.root == root {
        testbed::down(&Paths { root: record.root }, Whose::Ours).unwrap();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Not `make cluster-down`, which takes down any cluster that is up.
        self.type_in("make demo DOWN=1");
        let _ = fs::remove_dir_all(self.folder());
    }
}

/// Cheap, so that a command without a row is found long before the clone is built.
#[test]
fn every_command_of_the_pages_has_a_row_here() {
    let typed = all_blocks(&Paths::find().unwrap().root).into_iter().filter(|block| !is_the_demo(block));
    let commands: Vec<String> = typed.flat_map(|block| block.commands).map(|command| command.line).collect();
    for (command, (begin, _)) in commands.iter().zip(COMMANDS) {
        assert!(command.starts_with(begin), "a page has {command:?}, this test {begin:?}");
    }
    assert_eq!(commands.len(), COMMANDS.len(), "the pages and this test do not have the same commands");
}

/// README's Install without a registry: its own `docker` only notes what it is asked to do.
#[test]
fn what_the_install_commands_push_is_what_they_install() {
    const MANIFEST: &str = "examples/install/kustomization.yaml";
    let (root, folder) = (Paths::find().unwrap().root, tempfile::tempdir().unwrap());
    let copy = folder.path().join(MANIFEST);
    fs::create_dir_all(copy.parent().unwrap()).unwrap();
    fs::copy(root.join(MANIFEST), &copy).unwrap();
    let readme = blocks(&fs::read_to_string(root.join("README.md")).unwrap());
    let install = readme.into_iter().find(|block| block.text.contains("docker build")).unwrap();
    let commands = install.commands.into_iter().map(|command| command.line);
    let mut script = vec!["set -eu; docker() { echo \"$*\" >>asked; }".to_owned()];
    script.extend(commands.take_while(|command| !command.starts_with("kubectl")));
    let status = Command::new("bash").args(["-c", &script.join("\n")]).current_dir(folder.path()).status();
    assert!(status.unwrap().success());

    let asked = fs::read_to_string(folder.path().join("asked")).unwrap();
    let pushed: Vec<String> =
        asked.lines().filter_map(|line| line.strip_prefix("push ")).map(str::to_owned).collect();
    let manifest: Value = serde_saphyr::from_str(&fs::read_to_string(copy).unwrap()).unwrap();
    let images = manifest["images"].as_array().unwrap();
    let built = images.iter().filter(|image| image["name"] != "openfilter/valkey");
    let text = |image: &Value, field: &str| image[field].as_str().unwrap().to_owned();
    let installed: Vec<String> =
        built.map(|image| format!("{}:{}", text(image, "newName"), text(image, "newTag"))).collect();
    assert_eq!(pushed, installed);
    let dockerfile = fs::read_to_string(root.join("Dockerfile")).unwrap();
    for image in &pushed {
        let target = image.rsplit(['/', ':']).nth(1).unwrap();
        assert!(asked.contains(&format!("build --target {target} -t {image} .\n")), "{asked}");
        assert!(dockerfile.contains(&format!(" AS {target}\n")), "{target}");
    }
}

#[test]
#[ignore = "builds a clone and starts its cluster"]
fn every_command_of_the_pages_works_in_a_clone() {
    let mut shell = Shell::clone();
    let mut table = COMMANDS.iter();
    let (mut demo, mut names) = (String::new(), Vec::new());
    for block in all_blocks(&shell.clone) {
        if is_the_demo(&block) {
            for command in block.text.lines().skip(1).filter_map(|line| line.strip_prefix("$ ")) {
                let command = renamed(command, &names);
                assert!(demo.contains(&format!("$ {command}\n")), "the demo does not show {command:?}");
            }
            continue;
        }
        for command in &block.commands {
            let (begin, here) = table.next().unwrap();
            let shown = command.shown.join("\n");
            let command = renamed(&command.line, &names);
            let (expected, printed, worked) = match here {
                Not(why) => {
                    println!("({command} is left out: {why})");
                    continue;
                }
                Prints(expected) => (*expected, shell.type_in(&command), true),
                Fails(expected) => (*expected, shell.type_in(&command), false),
                FailsAsShown => (shown.as_str(), shell.type_in(&command), false),
                Watches(expected) => (*expected, shell.type_in(&format!("timeout 20 {command}")), false),
            };
            assert!(printed.text.contains(expected), "{command} does not print {expected:?}");
            assert_eq!(printed.worked, worked, "{command}");
            match *begin {
                "make demo" => {
                    (names, demo) = (run_names(&printed.text), printed.text.clone());
                    let exports = demo.lines().filter(|line| line.starts_with("export "));
                    shell.exports = exports.map(|line| format!("{line}; ")).collect();
                }
                "kubectl create -f examples/demo/run.yaml" => names = run_names(&printed.text),
                "kubectl apply -f policies/max-parallelism/policy.yaml" => {
                    // Every replica learns of the policy a moment later, which is shorter than a person needs
                    // to type a line.
                    assert!(shell.type_in(UNTIL_REFUSED).worked);
                }
                _ => {}
            }
            if matches!(here, FailsAsShown) {
                assert_eq!(printed.text.trim_end(), expected, "the page shows something else");
            }
        }
    }
}

/// The names of the runs that a text reports as created.
fn run_names(text: &str) -> Vec<String> {
    let runs = text.split("pipelinerun.filter.plainsight.ai/").skip(1);
    runs.filter_map(|rest| rest.split_whitespace().next()).map(str::to_owned).collect()
}

/// How many characters the API server appends to a `generateName`.
const SUFFIX: usize = 5;

/// A command with these run names instead of those on the page.
fn renamed(command: &str, names: &[String]) -> String {
    names.iter().fold(command.to_owned(), |command, name| {
        let (prefix, _) = name.split_at(name.len() - SUFFIX);
        let is_suffix = |rest: &str| rest.split(|end: char| !end.is_alphanumeric()).next().map(str::len);
        match command.split_once(prefix) {
            Some((before, rest)) if is_suffix(rest) == Some(SUFFIX) => {
                format!("{before}{name}{}", &rest[SUFFIX..])
            }
            _ => command,
        }
    })
}

#[test]
fn commands_are_about_the_runs_that_the_demo_created() {
    let created = |name: &str| format!("$ kubectl create\npipelinerun.filter.plainsight.ai/{name} created\n");
    let names = run_names(&[created("demo-aaaaa"), created("warm-bbbbb")].concat());
    let get = "kubectl get pipelinerun -n openfilter-demo ";
    assert_eq!(renamed(&format!("{get}demo-rktmw"), &names), format!("{get}demo-aaaaa"));
    assert_eq!(renamed(&format!("{get}warm-x7k2p -o yaml"), &names), format!("{get}warm-bbbbb -o yaml"));
    let create = "kubectl create -f examples/demo/warm-run.yaml";
    assert_eq!(renamed(create, &names), create);
}
