//! Writes container images from files of this machine, without Docker and without a registry.
//!
//! The archive is an OCI image layout that also has Docker's manifest, so that `ctr`, `docker load` and
//! `skopeo` all accept it. Times, owners and order are fixed, so identical files produce identical bytes and
//! digests.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use aws_lc_rs::digest;
use serde_json::json;

use crate::{
    command,
    error::{Doing, Result},
    paths,
};

/// The contents and the declarations of an image.
#[derive(Debug, Default, Clone)]
pub struct Image {
    /// Its full name with tag.
    pub name: String,
    /// Files by their absolute path in the image.
    pub files: BTreeMap<PathBuf, Content>,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// `uid:gid`; empty is root.
    pub user: String,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Labels, as `org.opencontainers.image.*`.
    pub labels: BTreeMap<String, String>,
}

/// One entry of an image.
#[derive(Debug, Clone)]
pub enum Content {
    /// A file of this machine.
    Copy(PathBuf),
    /// A small text.
    Text(String),
    /// A program.
    Program(Vec<u8>),
    /// A symbolic link.
    Link(PathBuf),
    /// An empty folder with this mode.
    Folder(u32),
}

impl Image {
    /// Adds a program with the shared libraries that it links to.
    pub fn add_program(&mut self, source: &Path, content: Content, path: &str) {
        self.files.insert(PathBuf::from(path), content);
        for library in libraries(source) {
            self.files.insert(library.clone(), Content::Copy(library));
        }
    }

    /// Writes the archive; returns the digest of its manifest.
    pub fn write(&self, archive: &Path) -> Result<String> {
        let doing = || format!("write the image {}", archive.display());
        let layer = self.layer().doing(doing)?;
        let layer_digest = sha256(&layer);
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }, "os": "linux",
            "config": {"User": self.user, "Entrypoint": self.entrypoint, "Env": self.env, "Labels": self.labels},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
        })
        .to_string()
        .into_bytes();
        let blob = |media: &str, bytes: &[u8]| {
            json!({"mediaType": format!("application/vnd.oci.image.{media}"), "size": bytes.len(),
                   "digest": format!("sha256:{}", sha256(bytes))})
        };
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob("config.v1+json", &config), "layers": [blob("layer.v1.tar", &layer)],
        })
        .to_string()
        .into_bytes();
        let mut entry = blob("manifest.v1+json", &manifest);
        let tag = self.name.rsplit(':').next().unwrap_or("latest");
        entry["annotations"] =
            json!({"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": tag});
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string().into_bytes();
        let path = |bytes: &[u8]| format!("blobs/sha256/{}", sha256(bytes));
        let docker =
            json!([{"Config": path(&config), "RepoTags": [self.name], "Layers": [path(&layer)]}]).to_string();
        if let Some(parent) = archive.parent() {
            paths::make_dir(parent)?;
        }
        // Written under another name until it is complete, so that an interrupted write is never loaded. The
        // name is unique, because tests build the same image concurrently.
        let half = archive.with_extension(format!("half-{}", paths::unique()));
        let mut tar = tar::Builder::new(File::create(&half).doing(doing)?);
        for (name, bytes) in [
            ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#.as_slice()),
            ("index.json", &index),
            ("manifest.json", docker.as_bytes()),
            (&path(&config), &config),
            (&path(&layer), &layer),
            (&path(&manifest), &manifest),
        ] {
            append(&mut tar, Path::new(name), tar::EntryType::Regular, 0o644, bytes).doing(doing)?;
        }
        tar.into_inner().and_then(|mut file| file.flush()).doing(doing)?;
        // An identical archive stays, so that nodes that have it need not load it again.
        if fs::read(archive).ok() == Some(fs::read(&half).doing(doing)?) {
            fs::remove_file(&half).doing(doing)?;
        } else {
            fs::rename(&half, archive).doing(doing)?;
        }
        Ok(format!("sha256:{}", sha256(&manifest)))
    }

    /// The single layer: every file, after its parent folders.
    fn layer(&self) -> io::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        let mut folders = BTreeMap::new();
        for (path, content) in &self.files {
            for folder in path.ancestors().skip(1).filter(|folder| *folder != Path::new("/")) {
                folders.entry(folder.to_owned()).or_insert(0o755);
            }
            if let Content::Folder(mode) = content {
                folders.insert(path.clone(), *mode);
            }
        }
        for (path, mode) in folders {
            append(&mut tar, &path, tar::EntryType::Directory, mode, &[])?;
        }
        for (path, content) in &self.files {
            match content {
                Content::Copy(source) => {
                    let mode =
                        if fs::metadata(source)?.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
                    let mut bytes = Vec::new();
                    File::open(source)?.read_to_end(&mut bytes)?;
                    append(&mut tar, path, tar::EntryType::Regular, mode, &bytes)?;
                }
                Content::Program(bytes) => append(&mut tar, path, tar::EntryType::Regular, 0o755, bytes)?,
                Content::Text(text) => {
                    append(&mut tar, path, tar::EntryType::Regular, 0o644, text.as_bytes())?
                }
                Content::Link(target) => {
                    let mut header = header(tar::EntryType::Symlink, 0o777, 0);
                    tar.append_link(&mut header, relative(path), target)?;
                }
                Content::Folder(_) => {}
            }
        }
        tar.into_inner()
    }
}

fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    path: &Path,
    kind: tar::EntryType,
    mode: u32,
    bytes: &[u8],
) -> io::Result<()> {
    tar.append_data(&mut header(kind, mode, bytes.len() as u64), relative(path), bytes)
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// The shared libraries of a program, including its loader; none if it is static.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let listed =
        command::run("list shared libraries", &["ldd", &program.display().to_string()]).unwrap_or_default();
    listed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from))
        .collect()
}

/// The files of an archive by their path, for tests that serve it as a registry would.
pub fn read(archive: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let doing = || format!("read the image {}", archive.display());
    let mut tar = tar::Archive::new(File::open(archive).doing(doing)?);
    let mut files = BTreeMap::new();
    for entry in tar.entries().doing(doing)? {
        let mut entry = entry.doing(doing)?;
        let path = entry.path().doing(doing)?.into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).doing(doing)?;
        files.insert(path, bytes);
    }
    Ok(files)
}

/// The SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    digest::digest(&digest::SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_same_files_make_the_same_image() {
        let folder = std::env::temp_dir().join(format!("testbed-image-{}", std::process::id()));
        let mut image = Image { name: "localhost/x:1".to_owned(), ..Image::default() };
        image.files.insert("/etc/motd".into(), Content::Text("hello".to_owned()));
        let digests = ["a.tar", "b.tar"].map(|name| image.write(&folder.join(name)).unwrap());
        assert_eq!(digests[0], digests[1]);
        image.user = "65532".to_owned();
        assert_ne!(image.write(&folder.join("c.tar")).unwrap(), digests[0]);
        let files = read(&folder.join("a.tar")).unwrap();
        let manifest = format!("blobs/sha256/{}", digests[0].trim_start_matches("sha256:"));
        assert!(files.contains_key(Path::new(&manifest)), "{:?}", files.keys());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_archive_is_replaced_only_by_another_image() {
        let folder = std::env::temp_dir().join(format!("testbed-archive-{}", std::process::id()));
        let archive = folder.join("a.tar");
        let mut image = Image { name: "localhost/x:1".to_owned(), ..Image::default() };
        let mut inode = |user: &str| {
            image.user = user.to_owned();
            image.write(&archive).unwrap();
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no half-written file is left");
            fs::metadata(&archive).unwrap().ino()
        };
        let first = inode("1");
        // The inode of an open file is not reused for another file.
        let _kept = File::open(&archive).unwrap();
        assert_eq!(inode("1"), first);
        assert_ne!(inode("2"), first);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_dynamic_program_brings_its_loader() {
        assert!(
            libraries(Path::new("/bin/ls"))
                .iter()
                .any(|path| path.display().to_string().contains("ld-linux"))
        );
    }
}
