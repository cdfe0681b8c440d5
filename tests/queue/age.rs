//! The age of a run, by the server's clock: operators follow each other, and their clocks differ.

use std::time::Duration;

use queue::{Opened, RunQueue};
use tests::valkey::{Flavor, TestServer, owner};

use super::{SHORT, open, open_as, queue_with, run_id};

const HOUR: Duration = Duration::from_secs(3_600);

async fn age(queue: &RunQueue) -> Option<Duration> {
    queue.stats().await.unwrap().age
}

#[tokio::test]
async fn the_age_of_a_run_counts_from_its_first_start_whatever_the_next_operator_believes() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "aged", &["a"]).await;
        assert_eq!(age(&queue).await, None, "a queue that an older version opened does not know");
        assert!(queue.begin(Duration::ZERO).await.unwrap() < HOUR);
        tokio::time::sleep(SHORT).await;
        // The next operator's clock is an hour ahead.
        let other = open(&server.connect(), &run_id("aged")).await;
        let begun = other.begin(HOUR).await.unwrap();
        assert!(begun >= SHORT && begun < HOUR, "{begun:?}");
        assert!(age(&other).await.is_some_and(|age| age >= begun && age < HOUR));
    }
}

#[tokio::test]
async fn a_run_that_is_under_way_keeps_the_age_that_its_status_shows() {
    let server = TestServer::start(Flavor::Valkey).await;
    let queue = queue_with(&server, "upgraded", &["a"]).await;
    assert!(queue.begin(HOUR).await.unwrap() >= HOUR);
    assert!(age(&queue).await.is_some_and(|age| age >= HOUR));
}

#[tokio::test]
async fn a_run_that_was_created_again_has_its_own_start() {
    let server = TestServer::start(Flavor::Valkey).await;
    let (connection, run) = (server.connect(), run_id("again"));
    queue_with(&server, "again", &["a"]).await.begin(HOUR).await.unwrap();
    assert!(RunQueue::take_over(&connection, &run, "uid-1", &owner("uid-2")).await.unwrap());
    let Opened::Resumed(queue) = open_as(&connection, &run, "uid-2", "spec-1").await else {
        panic!("its files are lost")
    };
    assert_eq!(age(&queue).await, None);
}
