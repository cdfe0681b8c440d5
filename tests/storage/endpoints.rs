//! Listings: every way to name a service works, and refusals are recognized.

use storage::{AccessKeys, StorageError};
use tests::s3::{SECRET_KEY, TestS3};

use crate::harness::{BUCKET, bucket, first_page, keys, store, with_hosts};

#[tokio::test]
async fn an_endpoint_without_a_scheme_is_https_and_its_certificate_matters() {
    let mut s3 = TestS3::start(BUCKET).await;
    let (port, _) = s3.with_tls("127.0.0.1").await;
    store(&s3, &["a".to_owned()]).await;
    let mut bucket = bucket(&format!("127.0.0.1:{port}"));
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(&error, StorageError::Unreachable(said) if said.contains("certificate")), "{error:?}");
    bucket.skip_tls_verify = true;
    assert_eq!(keys(&first_page(&bucket).await.unwrap().files), ["a"]);
}

#[tokio::test]
async fn the_bucket_goes_into_the_host_name_unless_path_style_is_asked_for() {
    if !with_hosts(
        "endpoints::the_bucket_goes_into_the_host_name_unless_path_style_is_asked_for",
        &format!("127.0.0.1 {BUCKET}.s3.test\n"),
    ) {
        return;
    }
    let mut s3 = TestS3::start(BUCKET).await;
    store(&s3, &["deep/a b".to_owned()]).await;
    let port = s3.with_virtual_hosts("s3.test").await;
    let mut bucket = bucket(&format!("http://s3.test:{port}"));
    bucket.path_style = false;
    assert_eq!(keys(&first_page(&bucket).await.unwrap().files), ["deep/a b"]);
    // With path style the host is that of the endpoint, which has no address here.
    bucket.path_style = true;
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(error, StorageError::Unreachable(_)), "{error:?}");
}

#[tokio::test]
async fn a_bucket_that_is_not_there_is_called_so() {
    let s3 = TestS3::start(BUCKET).await;
    let mut bucket = bucket(&s3.url);
    bucket.name = "elsewhere".to_owned();
    let error = first_page(&bucket).await.unwrap_err();
    assert!(matches!(&error, StorageError::NoBucket(said) if said.contains("NoSuchBucket")), "{error:?}");
}

#[tokio::test]
async fn wrong_keys_are_no_access_and_are_not_repeated() {
    let s3 = TestS3::start(BUCKET).await;
    let mut bucket = bucket(&s3.url);
    for (id, secret) in [("nobody", SECRET_KEY), (tests::s3::ACCESS_KEY, "wrong-hunter3")] {
        bucket.keys = Some(AccessKeys { id: id.to_owned().into(), secret: secret.to_owned().into() });
        let error = first_page(&bucket).await.unwrap_err();
        assert!(matches!(error, StorageError::NoAccess(_)), "{error:?}");
        assert!(!format!("{error:?} {error}").contains(secret), "{error:?}");
    }
}

#[tokio::test]
async fn a_service_that_is_not_there_is_unreachable() {
    let error = first_page(&bucket("http://127.0.0.1:1")).await.unwrap_err();
    assert!(matches!(error, StorageError::Unreachable(_)) && error.is_transient(), "{error:?}");
}
