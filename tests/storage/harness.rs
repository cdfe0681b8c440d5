//! A bucket with objects, and listings of it.

use std::process::Command;

use futures::{StreamExt, stream};
use storage::{AddressGuard, Bucket, ListedFile, ListedPage, Lister, Selection, StorageError};
use tests::s3::{TestS3, escape};

pub const BUCKET: &str = "videos";

/// The bucket at an endpoint, with the keys of the test server.
pub fn bucket(endpoint: &str) -> Bucket {
    Bucket { max_attempts: 2, ..tests::s3::bucket(endpoint, BUCKET) }
}

/// A guard that refuses this machine.
pub fn no_loopback() -> Option<AddressGuard> {
    Some(AddressGuard::new(|address| !address.is_loopback()))
}

/// A guard that refuses everything but this machine.
pub fn only_loopback() -> Option<AddressGuard> {
    Some(AddressGuard::new(|address| address.is_loopback()))
}

/// A listing of everything.
pub async fn lister(bucket: &Bucket) -> Lister {
    selecting(bucket, "", &[], &[]).await
}

pub async fn selecting(bucket: &Bucket, prefix: &str, include: &[&str], exclude: &[&str]) -> Lister {
    let owned = |globs: &[&str]| globs.iter().map(|&glob| glob.to_owned()).collect::<Vec<_>>();
    let selection = Selection::new(prefix, &owned(include), &owned(exclude)).unwrap();
    Lister::new(bucket, prefix, selection).await
}

/// The first page of everything.
pub async fn first_page(bucket: &Bucket) -> Result<ListedPage, StorageError> {
    lister(bucket).await.page("").await
}

/// Every file after a cursor, and the number of pages that it took.
pub async fn all(lister: &Lister, after: &str) -> (Vec<ListedFile>, usize) {
    let (mut files, mut after, mut pages) = (Vec::new(), after.to_owned(), 0);
    loop {
        let page = lister.page(&after).await.unwrap();
        files.extend(page.files);
        pages += 1;
        match page.next {
            Some(next) => after = next,
            None => return (files, pages),
        }
    }
}

pub fn keys(files: &[ListedFile]) -> Vec<&str> {
    files.iter().map(|file| file.key.as_str()).collect()
}

/// Stores objects, several at a time; the content of each is its key.
pub async fn store(s3: &TestS3, keys: &[String]) {
    let puts = keys.iter().map(|key| async {
        s3.client.put(BUCKET, &escape(key), key.clone().into_bytes()).await.unwrap();
    });
    stream::iter(puts).buffer_unordered(8).collect::<()>().await;
}

/// Runs a test of this suite again, in a process with these entries in /etc/hosts. Returns true in that
/// process.
pub fn with_hosts(test: &str, hosts: &str) -> bool {
    if std::env::var_os("WITH_HOSTS").is_some() {
        return true;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, hosts).unwrap();
    let script = format!("mount --bind {} /etc/hosts && exec \"$0\" \"$@\"", file.path().display());
    let mut again = Command::new("unshare");
    again.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
    again.arg(std::env::current_exe().unwrap()).args(["--exact", test]).env("WITH_HOSTS", "1");
    let output = again.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}
