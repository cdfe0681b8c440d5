//! Every documented way to name a service and to authenticate works.

use std::fs;

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use tests::s3::{certificate, escape};

use crate::harness::{BUCKET, Bench, listed};
use tests::fake::{Fake, object};

#[tokio::test]
async fn an_endpoint_without_a_scheme_is_https_and_its_certificate_matters() {
    let mut bench = Bench::start().await;
    let (port, ca) = bench.s3.with_tls("127.0.0.1").await;
    bench.offer("a", b"x").await;
    bench.set("S3_ENDPOINT", format!("127.0.0.1:{port}"));
    bench.claim().await.assert_failed(17, &["StorageUnreachable", "certificate"]);
    bench.assert_no_input();
    bench.set("S3_INSECURE_SKIP_TLS_VERIFY", "true").claim().await.assert_ok();
    assert_eq!(bench.input(), b"x");
    // With a CA that the machine trusts, no check has to be skipped.
    let file = bench.folder.path().join("ca.pem");
    fs::write(&file, ca).unwrap();
    bench.set("S3_INSECURE_SKIP_TLS_VERIFY", "false").set("SSL_CERT_FILE", file.display().to_string());
    bench.claim().await.assert_ok();
}

#[tokio::test]
async fn skipping_verification_still_sees_failures_and_large_files() {
    let mut bench = Bench::start().await;
    let (port, _) = bench.s3.with_tls("elsewhere.example").await;
    let content = crate::harness::noise(20 * 1024 * 1024);
    bench.offer("large", &content).await;
    bench.set("S3_ENDPOINT", format!("https://127.0.0.1:{port}")).set("S3_INSECURE_SKIP_TLS_VERIFY", "true");
    bench.claim().await.assert_ok();
    assert!(bench.input() == content);
    bench.set("S3_SECRET_ACCESS_KEY", "wrong").claim().await.assert_failed(14, &["NoAccess"]);
}

/// A wrapper that gives the program its own host names: `name` resolves to `address`.
fn with_hosts(bench: &Bench, address: &str, name: &str) -> String {
    let hosts = bench.folder.path().join("hosts");
    fs::write(&hosts, format!("127.0.0.1 localhost\n{address} {name}\n")).unwrap();
    format!("mount --bind {} /etc/hosts && exec \"$0\"", hosts.display())
}

/// An address of this machine that no other test process uses.
fn own_address(last: u8) -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{low}.{last}")
}

const UNSHARE: [&str; 6] = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"];

#[tokio::test]
async fn the_bucket_goes_into_the_host_name_unless_path_style_is_asked_for() {
    let mut bench = Bench::start().await;
    let port = bench.s3.with_virtual_hosts("s3.test").await;
    bench.offer("deep/a b", b"x").await;
    bench.set("S3_ENDPOINT", format!("http://s3.test:{port}")).set("S3_USE_PATH_STYLE", "false");
    let hosts = with_hosts(&bench, "127.0.0.1", &format!("{BUCKET}.s3.test"));
    let wrapper: Vec<&str> = UNSHARE.into_iter().chain([hosts.as_str()]).collect();
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_ok();
    assert_eq!(bench.input(), b"x");
    // With path style, the host is the endpoint's, which does not resolve here.
    bench.set("S3_USE_PATH_STYLE", "true");
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_failed(17, &["StorageUnreachable"]);
}

/// Without the bucket in front, a leading slash of the key becomes the second slash of the path.
#[tokio::test]
async fn keys_that_look_like_paths_stay_so_after_a_host_name() {
    let mut bench = Bench::start().await;
    let server = Fake::start(|request| object(request.uri().path().as_bytes(), "\"x-1\"")).await;
    let port = server.address.rsplit(':').next().unwrap();
    bench.set("S3_ENDPOINT", format!("http://s3.test:{port}")).set("S3_USE_PATH_STYLE", "false");
    let hosts = with_hosts(&bench, "127.0.0.1", &format!("{BUCKET}.s3.test"));
    let wrapper: Vec<&str> = UNSHARE.into_iter().chain([hosts.as_str()]).collect();
    for (number, key) in ["/lead", "//two", "../up", "a/../b", "?", "end/"].into_iter().enumerate() {
        let path = format!("/{}", escape(key));
        let mut file = listed(key, path.as_bytes());
        file.etag = "\"x-1\"".to_owned();
        bench.enqueue_next(file, number).await;
        bench.set("CONSUMER_NAME", format!("pod-{number}"));
        bench.run(&mut bench.wrapped(&wrapper)).await.assert_ok();
        assert_eq!(String::from_utf8(bench.input()).unwrap(), path);
    }
}

/// Uses port 443 of an address of its own, which needs root, as the testbed does.
#[tokio::test]
async fn without_an_endpoint_it_is_aws_in_its_region() {
    let mut bench = Bench::start().await;
    let host = format!("{BUCKET}.s3.eu-west-1.amazonaws.com");
    let (certificate, key, ca) = certificate(&host);
    let address = own_address(77);
    let file = listed("a", b"x");
    let etag = file.etag.clone();
    let aws =
        Fake::start_tls(&format!("{address}:443"), &certificate, &key, move |_| object(b"x", &etag)).await;
    bench.enqueue(vec![file]).await;
    let trusted = bench.folder.path().join("ca.pem");
    fs::write(&trusted, ca).unwrap();
    bench.set("S3_ENDPOINT", "").set("S3_REGION", "eu-west-1").set("S3_USE_PATH_STYLE", "false");
    bench.set("SSL_CERT_FILE", trusted.display().to_string());
    let hosts = with_hosts(&bench, &address, &host);
    let wrapper: Vec<&str> = UNSHARE.into_iter().chain([hosts.as_str()]).collect();
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_ok();
    assert_eq!((aws.header("host"), aws.paths()[0].split('?').next()), (host, Some("/a")));
    assert!(aws.header("authorization").contains("/eu-west-1/s3/"));
    bench.set("S3_REGION", "").claim().await.assert_failed(10, &["BadSettings", "S3_REGION"]);
}

#[tokio::test]
async fn given_keys_win_over_everything_in_the_environment() {
    let mut bench = Bench::start().await;
    bench.offer("a", b"x").await;
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", "stray"),
        ("AWS_SECRET_ACCESS_KEY", "stray"),
        ("AWS_SESSION_TOKEN", "stray"),
        ("AWS_REGION", "mars-north-1"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
        ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1"),
        ("AWS_PROFILE", "missing"),
        ("AWS_MAX_ATTEMPTS", "1"),
    ] {
        bench.set(name, value);
    }
    bench.claim().await.assert_ok();
}

/// EKS Pod Identity: an agent on the node exchanges a token for credentials.
#[tokio::test]
async fn without_keys_the_pods_own_identity_is_used() {
    let mut bench = Bench::start().await;
    let agent = Fake::start(|_| {
        let credentials = r#"{"AccessKeyId":"ambient-id","SecretAccessKey":"ambient-secret","Token":"ambient-token",
            "Expiration":"2099-01-01T00:00:00Z"}"#;
        Response::new(Full::new(Bytes::from_static(credentials.as_bytes())))
    })
    .await;
    let file = listed("a", b"x");
    let etag = file.etag.clone();
    let s3 = Fake::start(move |_| object(b"x", &etag)).await;
    bench.enqueue(vec![file]).await;
    let token = bench.folder.path().join("token");
    fs::write(&token, "who-i-am").unwrap();
    bench.set("S3_ACCESS_KEY_ID", "").set("S3_SECRET_ACCESS_KEY", "").set("S3_REGION", "eu-west-1");
    bench.set("S3_ENDPOINT", format!("http://{}", s3.address));
    bench.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("http://{}/v1/credentials", agent.address));
    bench.set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.display().to_string());
    // The identity comes from the environment, the endpoint does not.
    bench.set("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
    let ended = bench.claim().await;
    ended.assert_ok();
    assert_eq!(agent.header("authorization"), "who-i-am");
    assert!(s3.header("authorization").contains("Credential=ambient-id/"));
    assert_eq!(s3.header("x-amz-security-token"), "ambient-token");
}

/// IRSA: STS exchanges a projected token. Its certificate is verified whatever the bucket's setting is.
#[tokio::test]
async fn a_projected_token_is_exchanged_for_keys() {
    let mut bench = Bench::start().await;
    let host = "sts.eu-west-1.amazonaws.com";
    let (certificate, key, ca) = certificate(host);
    let address = own_address(78);
    let sts = Fake::start_tls(&format!("{address}:443"), &certificate, &key, |_| {
        let xml = "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
            <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>role-id</AccessKeyId>\
            <SecretAccessKey>role-secret</SecretAccessKey><SessionToken>role-token</SessionToken>\
            <Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>\
            </AssumeRoleWithWebIdentityResponse>";
        Response::builder().header("content-type", "text/xml").body(Full::new(Bytes::from(xml))).unwrap()
    })
    .await;
    let file = listed("a", b"x");
    let etag = file.etag.clone();
    let s3 = Fake::start(move |_| object(b"x", &etag)).await;
    bench.enqueue(vec![file]).await;
    let path = |name: &str, content: &str| {
        let path = bench.folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let (token, trusted) = (path("token", "projected"), path("ca.pem", &ca));
    bench.set("S3_ACCESS_KEY_ID", "").set("S3_SECRET_ACCESS_KEY", "");
    bench.set("S3_ENDPOINT", format!("http://{}", s3.address)).set("S3_INSECURE_SKIP_TLS_VERIFY", "true");
    bench.set("AWS_REGION", "eu-west-1").set("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/filters");
    bench.set("AWS_WEB_IDENTITY_TOKEN_FILE", token).set("SSL_CERT_FILE", trusted);
    let hosts = with_hosts(&bench, &address, host);
    let wrapper: Vec<&str> = UNSHARE.into_iter().chain([hosts.as_str()]).collect();
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_ok();
    assert_eq!(sts.header("host"), host);
    assert!(s3.header("authorization").contains("Credential=role-id/"));
    bench.env.remove("SSL_CERT_FILE");
    bench.run(&mut bench.wrapped(&wrapper)).await.assert_failed(14, &["NoAccess", "credentials"]);
}

#[tokio::test]
async fn no_identity_at_all_is_no_access() {
    let mut bench = Bench::start().await;
    bench.offer("a", b"x").await;
    bench.set("S3_ACCESS_KEY_ID", "").set("S3_SECRET_ACCESS_KEY", "");
    bench.set("AWS_EC2_METADATA_DISABLED", "true");
    bench.claim().await.assert_failed(14, &["NoAccess", "credentials"]);
}
