//! Connections: TLS, credentials, time limits, and recovery after the server was unavailable.

use std::time::{Duration, Instant};

use queue::{Error, Opened, Server};
use tests::valkey::{Flavor, KEEP, Options, TestServer, owner};

use super::{counts, open, queue_with, run_id, worker};

fn install_crypto() {
    // The first test installs it for all of them.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

#[tokio::test]
async fn tls_works_with_the_ca_and_is_refused_without_it() {
    install_crypto();
    for flavor in Flavor::ALL {
        let server = TestServer::start_with(
            flavor,
            Options { tls: true, password: Some("admin"), ..Options::default() },
        )
        .await;
        assert!(server.server().url.starts_with("rediss://"));
        let queue = queue_with(&server, "tls", &["a"]).await;
        assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0));
        queue.hand_out(&["pod".into()]).await.unwrap();
        let claimed = worker(server.server(), &queue, "pod").claim(super::SHORT).await.unwrap();
        assert_eq!(claimed.unwrap().file.key, "a");

        let stranger = Server { ca_certificate: None, ..server.server() };
        let untrusted = try_open(&stranger.connect().unwrap(), &run_id("tls")).await;
        assert!(matches!(untrusted, Err(Error::Unavailable { .. })), "an unknown CA is not trusted");
    }
}

#[tokio::test]
async fn a_wrong_password_is_refused_and_the_right_one_let_in() {
    for flavor in Flavor::ALL {
        let server =
            TestServer::start_with(flavor, Options { password: Some("right"), ..Options::default() }).await;
        let wrong = Server { password: Some("wrong".to_owned().into()), ..server.server() };
        let none = Server { password: None, ..server.server() };
        for login in [wrong, none] {
            let refused = try_open(&login.connect().unwrap(), &run_id("login")).await;
            let error = refused.err().unwrap();
            assert!(matches!(error, Error::Denied { .. }), "{error:?}");
        }
        open(&server.connect(), &run_id("login")).await;
    }
}

#[tokio::test]
async fn a_connection_that_was_refused_works_once_the_user_is_there() {
    let server = TestServer::start(Flavor::Valkey).await;
    let later = server.server().with_user("later", "secret".to_owned().into()).connect().unwrap();
    for _ in 0..2 {
        let refused = try_open(&later, &run_id("later")).await;
        assert!(matches!(refused, Err(Error::Denied { .. })));
    }
    let mut make = redis::cmd("ACL");
    server.raw(make.arg(&["SETUSER", "later", "on", ">secret", "~*", "+@all"])).await;
    open(&later, &run_id("later")).await;
}

#[tokio::test]
async fn a_connection_outlives_a_restart_of_the_server() {
    for flavor in Flavor::ALL {
        let mut server =
            TestServer::start_with(flavor, Options { persistent: true, ..Options::default() }).await;
        let queue = queue_with(&server, "restarted", &["a"]).await;
        server.kill();
        assert!(matches!(queue.stats().await, Err(Error::Unavailable { .. })));
        server.restart().await;
        tests::eventually("the same connection counts again", || async { queue.stats().await.is_ok() }).await;
        assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0));
    }
}

#[tokio::test]
async fn a_frozen_server_is_an_error_in_time_and_never_a_hang() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "frozen", &["a"]).await;
    let quick = Server { timeout: Duration::from_secs(2), ..server.server() };
    let queue = queue::RunQueue::of_epoch(&quick.connect().unwrap(), &run_id("frozen"), queue.epoch());
    tests::eventually("it is connected", || async { queue.stats().await.is_ok() }).await;
    server.freeze();
    let start = Instant::now();
    let mut pod = worker(quick, &queue, "pod");
    let (stats, claimed) = (queue.stats().await, pod.claim(Duration::from_millis(100)).await);
    server.thaw();
    assert!(matches!(stats, Err(Error::Unavailable { .. })), "{stats:?}");
    assert!(matches!(claimed, Err(Error::Unavailable { .. })), "{claimed:?}");
    assert!(start.elapsed() < Duration::from_secs(20), "it took {:?}", start.elapsed());
    tests::eventually("it goes on after the thaw", || async { queue.stats().await.is_ok() }).await;
}

#[tokio::test]
async fn unusable_settings_say_what_to_write() {
    let Err(Error::Config { detail }) = Server::at("redis://:hunter2@valkey").connect().map(|_| ()) else {
        panic!()
    };
    assert!(detail.contains("separately") && !detail.contains("hunter2"), "{detail}");
    for url in ["", "valkey.example:6379", "http://valkey"] {
        let Err(Error::Config { detail }) = Server::at(url).connect().map(|_| ()) else {
            panic!("{url:?} was accepted")
        };
        assert!(detail.contains("redis://host:port"), "{detail}");
    }
}

#[tokio::test]
async fn scripts_are_loaded_again_when_the_server_forgot_them() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "scripts", &["a"]).await;
    let mut flush = redis::cmd("SCRIPT");
    server.raw(flush.arg("FLUSH")).await;
    assert_eq!(counts(&queue).await, (1, 1, 0, 0, 0));
}

/// A proxy whose connections fall silent on command: nothing arrives, and no error appears.
async fn silent_proxy(target: String) -> (String, tokio::sync::watch::Sender<bool>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let (silence, silenced) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (target, mut silenced) = (target.clone(), silenced.clone());
            tokio::spawn(async move {
                // Connections opened after the command work; older ones never answer.
                silenced.mark_unchanged();
                let mut far = tokio::net::TcpStream::connect(target).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = silenced.changed() => std::future::pending::<()>().await,
                }
            });
        }
    });
    (url, silence)
}

#[tokio::test]
async fn a_connection_that_went_silent_is_replaced() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "silent", &["a"]).await;
    let (url, silence) = silent_proxy(server.server().url.replace("redis://", "")).await;
    let through = Server { url, timeout: Duration::from_secs(2), ..server.server() };
    let queue = queue::RunQueue::of_epoch(&through.connect().unwrap(), &run_id("silent"), queue.epoch());
    tests::eventually("it is connected", || async { queue.stats().await.is_ok() }).await;
    silence.send(true).unwrap();
    assert!(matches!(queue.stats().await, Err(Error::Unavailable { .. })));
    tests::eventually("the next call has a connection of its own", || async { queue.stats().await.is_ok() })
        .await;
}

#[tokio::test]
async fn a_server_that_is_full_is_tried_again_later() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "full", &["a"]).await;
    let mut limit = redis::cmd("CONFIG");
    server.raw(limit.arg("SET").arg("maxclients").arg(1)).await;
    let mut pod = worker(server.server(), &queue, "pod");
    let refused = pod.claim(super::SHORT).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }) && refused.is_transient(), "{refused:?}");
}

#[tokio::test]
async fn the_servers_are_the_versions_that_are_supported() {
    for (flavor, field) in [(Flavor::Valkey, "valkey_version:8."), (Flavor::Redis, "redis_version:7.")] {
        let server = TestServer::start(flavor).await;
        let mut info = redis::cmd("INFO");
        let info: String = redis::from_redis_value(server.raw(info.arg("server")).await).unwrap();
        assert!(info.contains(field), "{flavor:?} is not {field}");
    }
}

async fn try_open(connection: &queue::Connection, run: &protocol::RunId) -> Result<Opened, Error> {
    queue::RunQueue::open(connection, run, &owner("u"), "s", &KEEP).await
}
