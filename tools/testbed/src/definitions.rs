//! CRDs of other projects that a deployment uses, from their Go modules: fetched once per machine, verified
//! by Go against go.sum, and never built.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{
    command,
    error::{Doing, Error, Result},
    image::sha256,
    paths::{self, Paths},
};

/// Modules of `tools/testbed/go/definitions`, and the files to keep of each.
const FILES: [(&str, &[&str]); 2] = [
    (
        "github.com/cert-manager/cert-manager",
        &["deploy/crds/cert-manager.io_certificates.yaml", "deploy/crds/cert-manager.io_issuers.yaml"],
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        &[
            "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        ],
    ),
];

/// A folder with the CRDs of cert-manager and the Prometheus operator that `kustomize/components` use.
pub fn definitions(paths: &Paths) -> Result<PathBuf> {
    let source = paths.testbed("go/definitions");
    let pinned = paths::read(source.join("go.mod"))? + &paths::read(source.join("go.sum"))?;
    let key = &sha256(format!("{pinned}{FILES:?}").as_bytes())[..12];
    let folder = paths::cache().join(format!("definitions-{key}"));
    if folder.is_dir() {
        return Ok(folder);
    }
    let half = paths::cache().join(format!(".definitions.fetching-{}", paths::unique()));
    paths::make_dir(&half)?;
    for (module, files) in FILES {
        let module = fetch(&source, module)?;
        for file in files.iter().map(|file| module.join(file)) {
            paths::write(half.join(file.file_name().unwrap_or_default()), paths::read(&file)?)?;
        }
    }
    match fs::rename(&half, &folder) {
        // Another process was faster, and its files are identical.
        Err(_) if folder.is_dir() => paths::remove(&half)?,
        renamed => renamed.doing(|| format!("keep {}", folder.display()))?,
    }
    Ok(folder)
}

/// The folder of a module that the go.mod of `source` requires.
fn fetch(source: &Path, module: &str) -> Result<PathBuf> {
    let mut download = Command::new("go");
    download.args(["mod", "download", "-json", module]).current_dir(source).env("GOWORK", "off");
    let doing = format!("fetch {module} (is Go installed?)");
    let answer: Value =
        serde_json::from_str(&command::finish(&doing, &mut download)?).doing(|| doing.clone())?;
    match answer["Dir"].as_str() {
        Some(folder) => Ok(PathBuf::from(folder)),
        None => Err(Error::Refused(format!("{doing}: {answer}"))),
    }
}
