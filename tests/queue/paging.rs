//! Paging through claimed files ends, whatever workers do meanwhile.

use std::time::Duration;

use queue::RunQueue;
use tests::valkey::{Flavor, TestServer};

use super::{counts, queue_with};

/// Longer than any paging through a handful of files takes.
const LIMIT: Duration = Duration::from_secs(10);

/// A worker that claims files as fast as it can, and gets each of them again as soon as it is queued again.
struct Greedy(tokio::task::JoinHandle<()>);

impl Greedy {
    async fn start(
        server: &TestServer,
        queue: &RunQueue,
        consumer: &'static str,
        options: &'static [&str],
    ) -> Self {
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg(&queue.keys().group).arg(consumer).arg("COUNT").arg(1).arg(options);
        read.arg("STREAMS").arg(&queue.keys().work).arg(">");
        let mut connection = server.raw_connection().await;
        Self(tokio::spawn(async move {
            loop {
                read.query_async::<redis::Value>(&mut connection).await.unwrap();
            }
        }))
    }
}

impl Drop for Greedy {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[tokio::test]
async fn files_without_a_holder_are_recovered_once_while_a_worker_takes_them_again_and_again() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "greedy", &["a", "b", "c", "d"]).await.with_batch(1);
        let _greedy = Greedy::start(&server, &queue, "pod", &["NOACK"]).await;
        tests::eventually("all are taken", || async {
            let mut groups = redis::cmd("XINFO");
            let groups = server.raw(groups.arg("GROUPS").arg(&queue.keys().work)).await;
            let groups: Vec<std::collections::HashMap<String, redis::Value>> =
                redis::from_redis_value(groups).unwrap();
            redis::from_redis_value::<u64>(groups[0]["entries-read"].clone()).unwrap() >= 4
        })
        .await;
        let recovered = tokio::time::timeout(LIMIT, queue.recover()).await.expect("it ends").unwrap();
        assert_eq!((recovered, counts(&queue).await), (4, (4, 4, 0, 0, 0)));
    }
}

#[tokio::test]
async fn claimed_files_are_visited_to_an_end_while_what_is_queued_again_is_claimed_again() {
    for flavor in Flavor::ALL {
        let server = TestServer::start(flavor).await;
        let queue = queue_with(&server, "greedy", &["a", "b", "c", "d"]).await.with_batch(1);
        // No pod has this name, so its files are queued again.
        let _greedy = Greedy::start(&server, &queue, "No Pod", &[]).await;
        tests::eventually("all are claimed", || async { counts(&queue).await.2 == 4 }).await;
        let visited = tokio::time::timeout(LIMIT, queue.for_each_pending(Duration::ZERO, |_| {})).await;
        visited.expect("it ends").unwrap();
    }
}
