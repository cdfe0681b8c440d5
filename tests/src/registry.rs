//! An image registry that serves archives of the testbed, with as much of the protocol as a pull needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use serde_json::Value;
use testbed::image;

use crate::fake::{Fake, status};

/// The files of an archive.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Serves the archives of a folder on loopback, by their names and with any tag.
pub async fn serve(folder: &Path, names: &[&'static str]) -> Fake {
    let read = |name: &&'static str| (*name, image::read(&folder.join(format!("{name}.tar"))).unwrap());
    let images: BTreeMap<&str, Files> = names.iter().map(read).collect();
    Fake::start(move |request| answer(&images, request)).await
}

/// The registry's answers: a manifest, or a blob that it refers to.
fn answer(images: &BTreeMap<&str, Files>, request: &Request<Bytes>) -> Response<Full<Bytes>> {
    let words: Vec<&str> = request.uri().path().trim_matches('/').split('/').collect();
    let ["v2", name, kind, reference] = words[..] else { return status(200) };
    let Some(files) = images.get(name) else { return status(404) };
    let digest = if reference.starts_with("sha256:") { reference.to_owned() } else { manifest_of(files) };
    let Some(blob) = files.get(&Path::new("blobs").join(digest.replace(':', "/"))) else {
        return status(404);
    };
    let media = match kind {
        "manifests" => "application/vnd.oci.image.manifest.v1+json",
        _ => "application/octet-stream",
    };
    let response = Response::builder().header("content-type", media).header("docker-content-digest", digest);
    response.body(Full::new(Bytes::copy_from_slice(blob))).unwrap()
}

/// The digest of an image's only manifest.
fn manifest_of(files: &Files) -> String {
    let index: Value = serde_json::from_slice(&files[Path::new("index.json")]).unwrap();
    index["manifests"][0]["digest"].as_str().unwrap().to_owned()
}
