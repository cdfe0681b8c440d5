//! The folder that worker and filters share, as this filter sees it.

use std::{
    ffi::OsStr,
    fs::{self, DirEntry, OpenOptions},
    io::Read,
    path::{Path, PathBuf},
};

use crate::{files::read_small, results::share, text::beginning, wire::TEXT_BYTES_MAX};

pub(crate) struct Workspace {
    root: PathBuf,
    /// The file, and the worker's information about it.
    input: PathBuf,
    source: PathBuf,
    attempt: PathBuf,
    results: PathBuf,
    termination_log: PathBuf,
}

impl Workspace {
    pub(crate) fn new(root: PathBuf, filter: &OsStr, termination_log: PathBuf) -> Self {
        Self {
            input: root.join("input"),
            source: root.join("input.source_uri"),
            attempt: root.join("input.attempt"),
            results: root.join("out").join(filter),
            root,
            termination_log,
        }
    }

    /// The origin of the current file; empty if it cannot be read.
    pub(crate) fn source(&self) -> String {
        read_small(&self.source).unwrap_or_default()
    }

    /// The line that tells a `Lines` filter about the current file.
    pub(crate) fn file_line(&self, source: &str) -> String {
        let attempt = read_small(&self.attempt).ok();
        let attempt: u64 = attempt.and_then(|text| text.trim().parse().ok()).unwrap_or(1);
        let path = |path: &Path| json_string(&path.to_string_lossy());
        format!(
            "{{\"input\":{},\"out\":{},\"source\":{},\"attempt\":{attempt}}}\n",
            path(&self.input),
            path(&self.results),
            json_string(source),
        )
    }

    /// Lets the worker read the results, and remove whatever the filter left.
    pub(crate) fn share_results(&self) {
        if let Err(error) = share(&self.root, |entry| self.is_input(entry)) {
            eprintln!("shim: cannot open {} to the worker: {error}", self.root.display());
        }
    }

    /// Whether this is one of the worker's own files. A folder in its place is not, and may have to be
    /// opened.
    fn is_input(&self, entry: &DirEntry) -> bool {
        entry.file_type().is_ok_and(|kind| kind.is_file())
            && [&self.input, &self.source, &self.attempt].contains(&&entry.path())
    }

    /// Takes the text that the filter wrote to its termination log, and empties the log.
    pub(crate) fn take_termination_text(&self) -> Option<String> {
        // Read only a regular file: reading a pipe may never return.
        fs::metadata(&self.termination_log).ok().filter(|found| found.is_file() && found.len() > 0)?;
        let log = OpenOptions::new().read(true).write(true).open(&self.termination_log).ok()?;
        let mut bytes = Vec::new();
        (&log).take(TEXT_BYTES_MAX as u64).read_to_end(&mut bytes).ok()?;
        if let Err(error) = log.set_len(0) {
            eprintln!("shim: cannot empty {}: {error}", self.termination_log.display());
        }
        let text = String::from_utf8_lossy(&bytes);
        Some(beginning(text.trim()).to_owned()).filter(|text| !text.is_empty())
    }

    /// Explains why this container ended, unless the filter has already written its own explanation.
    pub(crate) fn write_termination_text(&self, text: &str) {
        let is_empty =
            fs::metadata(&self.termination_log).is_ok_and(|found| found.is_file() && found.len() == 0);
        if is_empty && let Err(error) = fs::write(&self.termination_log, beginning(text)) {
            eprintln!("shim: cannot write to {}: {error}", self.termination_log.display());
        }
    }
}

fn json_string(text: &str) -> String {
    let mut json = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            character if character.is_control() => json.push_str(&format!("\\u{:04x}", u32::from(character))),
            character => json.push(character),
        }
    }
    json.push('"');
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_may_be_any_text() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(folder.path().into(), OsStr::new("detect"), "/dev/null".into());
        fs::write(folder.path().join("input.source_uri"), "s3://b/a \"b\"\\\n\u{7f}é").unwrap();
        fs::write(folder.path().join("input.attempt"), "3").unwrap();
        let root = folder.path().display();
        assert_eq!(
            workspace.file_line(&workspace.source()),
            format!(
                "{{\"input\":\"{root}/input\",\"out\":\"{root}/out/detect\",\
                 \"source\":\"s3://b/a \\\"b\\\"\\\\\\u000a\\u007fé\",\"attempt\":3}}\n"
            )
        );
    }

    #[test]
    fn the_termination_log_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let workspace = Workspace::new(folder.path().into(), OsStr::new("detect"), log.clone());
        assert_eq!(workspace.take_termination_text(), None, "there is none");
        fs::write(&log, "  no model\n").unwrap();
        workspace.write_termination_text("ours");
        assert_eq!(workspace.take_termination_text().as_deref(), Some("no model"));
        assert_eq!(workspace.take_termination_text(), None);
        workspace.write_termination_text("ours");
        assert_eq!(fs::read_to_string(&log).unwrap(), "ours");
    }
}
