//! Git over HTTP, as engines fetch it: bare repositories that `git http-backend` serves, each with a clone to
//! commit from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Serves every repository of a folder; it ends when it is dropped.
pub struct GitServer {
    pub url: String,
    folder: TempDir,
    task: JoinHandle<()>,
}

impl GitServer {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(accept(listener, folder.path().join("bare")));
        Self { url, folder, task }
    }

    /// A new repository at `<url>/<name>`, with the branch `main`.
    pub fn repository(&self, name: &str) -> Repository {
        let bare = self.folder.path().join("bare").join(name);
        let work = self.folder.path().join("work").join(name);
        git(self.folder.path(), &["init", "--quiet", "--bare", "--initial-branch=main", path(&bare)]);
        git(self.folder.path(), &["clone", "--quiet", path(&bare), path(&work)]);
        git(&work, &["checkout", "--quiet", "-b", "main"]);
        Repository { work }
    }
}

impl Drop for GitServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A clone to commit from.
pub struct Repository {
    work: PathBuf,
}

impl Repository {
    /// Copies a folder of this project into the repository.
    pub fn copy(&self, from: &Path, to: &str) {
        let target = self.work.join(to);
        fs::create_dir_all(&target).unwrap();
        let copied = std::process::Command::new("cp").arg("-r").arg(from.join(".")).arg(&target).status();
        assert!(copied.unwrap().success(), "copy {}", from.display());
    }

    pub fn write(&self, file: &str, text: &str) {
        let file = self.work.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    /// Replaces a part of a file, which must exist.
    pub fn edit(&self, file: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.work.join(file)).unwrap();
        assert!(text.contains(from), "{file} does not hold {from:?}:\n{text}");
        self.write(file, &text.replace(from, to));
    }

    /// Moves a folder.
    pub fn rename(&self, from: &str, to: &str) {
        fs::rename(self.work.join(from), self.work.join(to)).unwrap();
    }

    /// Commits and pushes everything; returns the commit.
    pub fn commit(&self, message: &str) -> String {
        git(&self.work, &["add", "--all"]);
        git(&self.work, &["commit", "--quiet", "--message", message]);
        self.push()
    }

    /// Reverts the last commit with a new one.
    pub fn revert(&self) -> String {
        git(&self.work, &["revert", "--no-edit", "HEAD"]);
        self.push()
    }

    pub fn tag(&self, name: &str) {
        git(&self.work, &["tag", name]);
        git(&self.work, &["push", "--quiet", "origin", name]);
    }

    fn push(&self) -> String {
        git(&self.work, &["push", "--quiet", "origin", "main"]);
        git(&self.work, &["rev-parse", "HEAD"]).trim().to_owned()
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn git(folder: &Path, words: &[&str]) -> String {
    let mut command = std::process::Command::new("git");
    // Ignore the machine's settings: no hooks, no signatures, no user name.
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
    command.args(["-c", "user.name=suite", "-c", "user.email=suite@example.com"]);
    let output = command.args(words).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "git {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

async fn accept(listener: TcpListener, root: PathBuf) {
    while let Ok((stream, _)) = listener.accept().await {
        let root = root.clone();
        let service = hyper::service::service_fn(move |request| answer(root.clone(), request));
        tokio::spawn(
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
        );
    }
}

/// CGI: the request goes in through the environment and stdin, and the response comes out after a few
/// headers.
async fn answer(
    root: PathBuf,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Box<dyn std::error::Error + Send + Sync>> {
    let (head, body) = request.into_parts();
    let header =
        |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut command = Command::new("git");
    command
        .arg("http-backend")
        .env("GIT_PROJECT_ROOT", root)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("PATH_INFO", head.uri.path())
        .env("QUERY_STRING", head.uri.query().unwrap_or_default())
        .env("REQUEST_METHOD", head.method.as_str())
        .env("CONTENT_TYPE", header("content-type"))
        .env("HTTP_CONTENT_ENCODING", header("content-encoding"))
        .env("GIT_PROTOCOL", header("git-protocol"))
        .env("REMOTE_ADDR", "127.0.0.1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let body = body.collect().await?.to_bytes();
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&body).await?;
    }
    let output = child.wait_with_output().await?.stdout;
    let end =
        output.windows(4).position(|window| window == b"\r\n\r\n").ok_or("git http-backend said nothing")?;
    let mut response = Response::new(Full::new(Bytes::copy_from_slice(&output[end + 4..])));
    for line in String::from_utf8_lossy(&output[..end]).lines() {
        let Some((name, value)) = line.split_once(": ") else { continue };
        if name.eq_ignore_ascii_case("status") {
            *response.status_mut() = StatusCode::from_bytes(&value.as_bytes()[..3])?;
        } else {
            response.headers_mut().insert(http::HeaderName::try_from(name)?, value.parse()?);
        }
    }
    Ok(response)
}
