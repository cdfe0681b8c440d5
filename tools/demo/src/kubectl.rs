//! The demo works on a cluster through kubectl, and prints its commands first, so that a reader can repeat
//! them.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::Result;

/// A kubectl, and the cluster that it accesses.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    /// If absent, the user's own (KUBECONFIG).
    kubeconfig: Option<PathBuf>,
    /// The working directory, to which paths in the commands are relative.
    root: PathBuf,
}

impl Kubectl {
    /// The testbed's kubectl, for the testbed's cluster.
    pub fn of_testbed(paths: &testbed::Paths) -> Self {
        Self { program: paths.bin("kubectl"), kubeconfig: Some(paths.kubeconfig()), root: paths.root.clone() }
    }

    /// The user's kubectl, for the user's cluster.
    pub fn of_user(root: &Path) -> Result<Self> {
        let program = PathBuf::from("kubectl");
        match Command::new(&program).args(["version", "--client"]).output() {
            Ok(_) => Ok(Self { program, kubeconfig: None, root: root.to_owned() }),
            Err(error) => Err(format!("DEMO_CLUSTER=current needs kubectl in the PATH: {error}").into()),
        }
    }

    /// Another program, in another folder.
    #[cfg(test)]
    pub fn fake(program: PathBuf, root: &Path) -> Self {
        Self { program, kubeconfig: None, root: root.to_owned() }
    }

    /// Prints a command, runs it, and prints its output.
    pub fn show(&self, words: &[&str]) -> Result<String> {
        self.show_with("", words)
    }

    /// As [`Self::show`], with standard input, which is not printed.
    pub fn show_with(&self, input: &str, words: &[&str]) -> Result<String> {
        println!("$ kubectl {}", words.join(" "));
        let output = self.run(input, words)?;
        let printed = text(&output.stdout);
        print!("{printed}");
        eprint!("{}", text(&output.stderr));
        succeeded(words, &output)?;
        Ok(printed)
    }

    /// Prints a command that is expected to be refused, runs it, and prints the refusal.
    pub fn show_refused(&self, words: &[&str]) -> Result<()> {
        println!("$ kubectl {}", words.join(" "));
        let output = self.run("", words)?;
        print!("{}{}", text(&output.stdout), text(&output.stderr));
        if output.status.success() {
            return Err(format!("`kubectl {}` should have been refused, but was not", words.join(" ")).into());
        }
        Ok(())
    }

    /// Runs a command without printing it; returns its output.
    pub fn ask(&self, words: &[&str]) -> Result<String> {
        self.ask_with("", words)
    }

    /// As [`Self::ask`], with standard input.
    pub fn ask_with(&self, input: &str, words: &[&str]) -> Result<String> {
        let output = self.run(input, words)?;
        succeeded(words, &output)?;
        Ok(text(&output.stdout))
    }

    fn run(&self, input: &str, words: &[&str]) -> Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(words).current_dir(&self.root);
        if let Some(file) = &self.kubeconfig {
            command.env("KUBECONFIG", file);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let doing = |error: std::io::Error| format!("run {}: {error}", self.program.display());
        let mut child = command.spawn().map_err(doing)?;
        if let Some(mut stdin) = child.stdin.take() {
            // Commands that do not read their input are fine.
            let _ = stdin.write_all(input.as_bytes());
        }
        Ok(child.wait_with_output().map_err(doing)?)
    }
}

fn succeeded(words: &[&str], output: &Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let why = text(&output.stderr);
    Err(format!("`kubectl {}` ended with {}: {}", words.join(" "), output.status, why.trim_end()).into())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
