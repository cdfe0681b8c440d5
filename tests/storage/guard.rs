//! An endpoint must not open a way to addresses that only the operator can reach, however it is written and
//! whatever its name resolves to.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use storage::{AddressGuard, Bucket, StorageError};
use tests::s3::TestS3;
use tokio::net::TcpListener;

use crate::harness::{BUCKET, bucket, first_page, keys, no_loopback, only_loopback, store, with_hosts};

/// A port on which every connection is counted and closed.
async fn counted(address: &str) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let (port, count) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&count);
    tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            seen.fetch_add(1, Ordering::SeqCst);
        }
    });
    (port, count)
}

async fn assert_refused(bucket: &Bucket) {
    let start = Instant::now();
    let error = first_page(bucket).await.unwrap_err();
    assert!(matches!(error, StorageError::AddressRefused(_)) && !error.is_transient(), "{error:?}");
    for word in ["not allowed for endpoints", "administrator"] {
        assert!(error.to_string().contains(word), "no {word:?} in {error}");
    }
    // Six tries would add up to about ten seconds of waiting.
    assert!(start.elapsed() < Duration::from_secs(8), "a refusal is tried again");
}

#[tokio::test]
async fn a_refused_address_is_never_connected_to() {
    let (port, count) = counted("127.0.0.1").await;
    for (endpoint, skip) in [
        (format!("http://localhost:{port}"), false),
        (format!("https://localhost:{port}"), false),
        (format!("https://localhost:{port}"), true),
        (format!("http://localhost:{port}"), true),
        (format!("http://127.0.0.1:{port}"), false),
        (format!("https://127.0.0.1:{port}"), false),
        (format!("https://127.0.0.1:{port}"), true),
        (format!("http://2130706433:{port}"), false),
        (format!("http://[::ffff:127.0.0.1]:{port}"), false),
    ] {
        let mut bucket = bucket(&endpoint);
        (bucket.skip_tls_verify, bucket.max_attempts) = (skip, 6);
        bucket.addresses = Some(AddressGuard::new(|address| !address.to_canonical().is_loopback()));
        assert_refused(&bucket).await;
        assert_eq!(count.load(Ordering::SeqCst), 0, "{endpoint}");
    }
}

#[tokio::test]
async fn an_allowed_address_is_listed_by_name_and_by_number() {
    let mut s3 = TestS3::start(BUCKET).await;
    let (tls, _) = s3.with_tls("localhost").await;
    store(&s3, &["a".to_owned()]).await;
    let plain = s3.url.rsplit(':').next().unwrap();
    for (endpoint, skip) in [
        (format!("http://localhost:{plain}"), false),
        (format!("http://127.0.0.1:{plain}"), false),
        (format!("https://localhost:{tls}"), true),
        (format!("https://127.0.0.1:{tls}"), true),
    ] {
        let mut bucket = bucket(&endpoint);
        (bucket.skip_tls_verify, bucket.addresses) = (skip, only_loopback());
        assert_eq!(keys(&first_page(&bucket).await.unwrap().files), ["a"], "{endpoint}");
    }
}

#[tokio::test]
async fn a_guard_does_not_make_certificates_matter_less() {
    let mut s3 = TestS3::start(BUCKET).await;
    let (tls, _) = s3.with_tls("localhost").await;
    let mut bucket = bucket(&format!("https://localhost:{tls}"));
    bucket.addresses = only_loopback();
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(&error, StorageError::Unreachable(said) if said.contains("certificate")), "{error:?}");
}

#[tokio::test]
async fn of_several_addresses_only_the_allowed_ones_are_used() {
    if !with_hosts(
        "guard::of_several_addresses_only_the_allowed_ones_are_used",
        "127.0.0.1 both.test\n127.0.0.2 both.test\n",
    ) {
        return;
    }
    let (port, count) = counted("127.0.0.1").await;
    let mut bucket = bucket(&format!("http://both.test:{port}"));
    bucket.max_attempts = 1;
    bucket.addresses = Some(AddressGuard::new(|address| address != Ipv4Addr::LOCALHOST));
    // The second address refuses connections. This failure shows that the first address was not tried.
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(error, StorageError::Unreachable(_)), "{error:?}");
    assert_eq!(count.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_names_of_aws_are_looked_at_too() {
    let host = format!("{BUCKET}.s3.eu-west-1.amazonaws.com");
    if !with_hosts("guard::the_names_of_aws_are_looked_at_too", &format!("127.0.0.1 {host}\n")) {
        return;
    }
    let mut bucket = bucket("unused");
    (bucket.endpoint, bucket.region, bucket.path_style) = (None, Some("eu-west-1".to_owned()), false);
    bucket.addresses = no_loopback();
    assert_refused(&bucket).await;
}
