//! Reads objects from files, folders and standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::document::Document;
use crate::validate::{Checked, Error, Finding, Severity};

/// A document and its origin.
pub(crate) struct Source {
    pub(crate) file: String,
    pub(crate) document: Document,
}

impl Source {
    /// Kind, namespace and name.
    pub(crate) fn title(&self) -> String {
        let value = &self.document.value;
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let (kind, namespace, name) = (text("/kind"), text("/metadata/namespace"), text("/metadata/name"));
        match namespace {
            "" => format!("{kind} {name}"),
            namespace => format!("{kind} {namespace}/{name}"),
        }
    }

    /// A finding about this object, located at the field.
    pub(crate) fn finding(&self, severity: Severity, field: &str, rule: String, message: String) -> Finding {
        let (file, line) = (self.file.clone(), self.document.line(field));
        Finding { severity, file, line, object: self.title(), rule, message }
    }

    /// A kind or version that our group does not have is a typing mistake; other groups are none of our
    /// business.
    pub(crate) fn unknown_kind(&self) -> Option<Finding> {
        let version = self.document.value.get("apiVersion")?.as_str()?;
        if !version.starts_with("filter.plainsight.ai/") {
            return None;
        }
        let kind = self.document.value.get("kind").and_then(Value::as_str).unwrap_or_default();
        let message = format!(
            "{version} has no kind {kind:?}; write apiVersion: filter.plainsight.ai/v1alpha1 and one of the kinds Pipeline, PipelineRun, PipelinePolicy, ReferenceGrant"
        );
        Some(self.finding(Severity::Error, "kind", "unknown-kind".to_owned(), message))
    }
}

/// Reads all documents of files, of folders, and of standard input. A file that is not YAML is a finding; a
/// missing file is an error.
pub(crate) fn read(
    paths: &[PathBuf],
    mut stdin: impl Read,
    checked: &mut Checked,
) -> Result<Vec<Source>, Error> {
    let mut sources = Vec::new();
    for path in paths {
        let failed = |source| Error::Read { path: path.display().to_string(), source };
        if path == Path::new("-") {
            let mut text = String::new();
            stdin.read_to_string(&mut text).map_err(failed)?;
            documents("-", &text, &mut sources, checked);
        } else if path.is_dir() {
            let files = files_below(path).map_err(failed)?;
            if files.is_empty() {
                return Err(Error::Empty(path.display().to_string()));
            }
            for file in files {
                let text = std::fs::read_to_string(&file).map_err(failed)?;
                documents(&file.display().to_string(), &text, &mut sources, checked);
            }
        } else {
            let text = std::fs::read_to_string(path).map_err(failed)?;
            documents(&path.display().to_string(), &text, &mut sources, checked);
        }
    }
    Ok(sources)
}

fn documents(file: &str, text: &str, sources: &mut Vec<Source>, checked: &mut Checked) {
    match Document::read(text) {
        Ok(documents) => {
            sources.extend(documents.into_iter().map(|document| Source { file: file.to_owned(), document }));
        }
        Err(error) => checked.findings.push(Finding {
            severity: Severity::Error,
            file: file.to_owned(),
            line: error.line,
            object: "file".to_owned(),
            rule: "yaml".to_owned(),
            message: error.to_string(),
        }),
    }
}

/// Files in a stable order, so that every call prints the same.
fn files_below(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    entries.sort();
    for path in entries {
        // Links to folders are not followed: a link to a parent would never end.
        if path.is_symlink() && path.is_dir() {
            continue;
        }
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else if path
            .extension()
            .is_some_and(|end| ["yaml", "yml", "json"].iter().any(|known| end == *known))
        {
            files.push(path);
        }
    }
    Ok(files)
}
