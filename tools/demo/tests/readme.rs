//! README.md as a new user follows it: the test clones the project into an empty folder and types every
//! command there.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says why by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use testbed::{Found, Paths, Whose, checkout};

/// What to do with a command of README.md.
enum Here {
    /// It succeeds and prints this.
    Prints(&'static str),
    /// It fails, as README.md shows, and prints this.
    Fails(&'static str),
    /// It never ends: it runs for some seconds and prints this.
    Watches(&'static str),
    /// It is not typed here, for this reason.
    Not(&'static str),
}
use Here::{Fails, Not, Prints, Watches};

/// Every command of README.md in order, by its beginning. A command without a row here is untested.
const COMMANDS: &[(&str, Here)] = &[
    ("make demo", Prints("times as fast as a pod per file")),
    ("make test", Not("this is a part of it")),
    ("kubectl create namespace openfilter-system", Not("the demo has made it")),
    ("kubectl create secret generic openfilter-valkey", Not("the demo has made it")),
    (
        "kubectl apply --server-side -k examples/install",
        Not("nobody pulls from there; tests/deploy tries it"),
    ),
    ("kubectl apply --server-side -k kustomize/gitops/argocd/dev", Not("tests/gitops does, with an Argo CD")),
    ("kubectl apply --server-side -k kustomize/gitops/flux/dev", Not("tests/gitops does, with a Flux")),
    ("openfilter validate -f examples/demo", Fails("5 checked, 2 mistakes")),
    ("kubectl apply -f policies/max-parallelism/policy.yaml", Prints("max-parallelism created")),
    ("sed 's/parallelism: 6/parallelism: 500/'", Fails("[policy max-parallelism/parallelism]")),
    ("kubectl create -f examples/demo/run.yaml", Prints("created")),
    ("kubectl get plr -n openfilter-demo -w", Watches("thumbnails   Succeeded   37/37       36          1")),
    ("kubectl wait -n openfilter-demo plr/", Prints("condition met")),
    ("kubectl get events -n openfilter-demo", Prints("36 of 37 files succeeded, 1 failed")),
    (
        "kubectl get plr -n openfilter-demo",
        Prints("camera/north/IMG_2019.jpg\t2\tthumbnail exited with code 1"),
    ),
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

/// A block of README.md: the commands, and all that is shown.
struct Block {
    commands: Vec<String>,
    shown: String,
}

impl Block {
    /// Whether this is the output of `make demo`, whose commands the demo shows and the user does not type.
    fn is_the_demo(&self) -> bool {
        self.shown.starts_with("$ make demo\n")
    }
}

fn blocks(readme: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (language, text) in readme.split("```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'))
    {
        let typed = |line: &str| match language {
            "" => Some(line.split(" #").next().unwrap_or_default().trim().to_owned()),
            "console" => line.strip_prefix("$ ").map(str::to_owned),
            _ => None,
        };
        let commands: Vec<String> = text.lines().filter_map(typed).filter(|line| !line.is_empty()).collect();
        if !commands.is_empty() {
            blocks.push(Block { commands, shown: text.to_owned() });
        }
    }
    blocks
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
fn every_command_of_the_readme_has_a_row_here() {
    let readme = fs::read_to_string(Paths::find().unwrap().root.join("README.md")).unwrap();
    let typed = blocks(&readme).into_iter().filter(|block| !block.is_the_demo());
    let commands: Vec<String> = typed.flat_map(|block| block.commands).collect();
    for (command, (begin, _)) in commands.iter().zip(COMMANDS) {
        assert!(command.starts_with(begin), "README.md has {command:?}, this test {begin:?}");
    }
    assert_eq!(commands.len(), COMMANDS.len(), "README.md and this test do not have the same commands");
}

#[test]
#[ignore = "builds a clone and starts its cluster"]
fn every_command_of_the_readme_works_in_a_clone() {
    let mut shell = Shell::clone();
    let readme = fs::read_to_string(shell.clone.join("README.md")).unwrap();
    let mut table = COMMANDS.iter();
    let (mut demo, mut names) = (String::new(), Vec::new());
    for block in blocks(&readme) {
        if block.is_the_demo() {
            for command in &block.commands[1..] {
                let command = renamed(command, &names);
                assert!(demo.contains(&format!("$ {command}\n")), "the demo does not show {command:?}");
            }
            continue;
        }
        for command in &block.commands {
            let (begin, here) = table.next().unwrap();
            let command = renamed(command, &names);
            let (expected, printed, worked) = match here {
                Not(why) => {
                    println!("({command} is left out: {why})");
                    continue;
                }
                Prints(expected) => (expected, shell.type_in(&command), true),
                Fails(expected) => (expected, shell.type_in(&command), false),
                Watches(expected) => (expected, shell.type_in(&format!("timeout 20 {command}")), false),
            };
            assert!(printed.text.contains(expected), "{command} does not print {expected:?}");
            assert_eq!(printed.worked, worked, "{command}");
            match *begin {
                "make demo" => {
                    (names, demo) = (run_names(&printed.text), printed.text);
                    let exports = demo.lines().filter(|line| line.starts_with("export "));
                    shell.exports = exports.map(|line| format!("{line}; ")).collect();
                }
                "kubectl create -f examples/demo/run.yaml" => names = run_names(&printed.text),
                "kubectl apply -f policies/max-parallelism/policy.yaml" => {
                    // Every replica learns of the policy a moment later, which is shorter than a person needs
                    // to type a line.
                    assert!(shell.type_in(UNTIL_REFUSED).worked);
                }
                "openfilter validate -f examples/demo" => {
                    assert_eq!(
                        printed.text,
                        block.shown.split_once('\n').unwrap().1,
                        "README.md shows something else"
                    )
                }
                _ => {}
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

/// A command with these run names instead of those in README.md.
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
