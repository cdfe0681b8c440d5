//! Files that failed permanently.

use redis::streams::StreamRangeReply;

use crate::Error;
use crate::message::{DeadLetter, EntryId};
use crate::run_queue::RunQueue;

const DOING: &str = "list dead letters";

impl RunQueue {
    /// A page of the dead letters, in the order in which they failed.
    pub async fn dead_letters(
        &self,
        after: Option<&EntryId>,
        count: usize,
    ) -> Result<Vec<DeadLetter>, Error> {
        let start = after.map_or_else(|| "-".to_owned(), |entry| format!("({entry}"));
        self.range_of_dead_letters("XRANGE", &start, "+", count).await
    }

    /// The most recent dead letters, newest first.
    pub async fn newest_dead_letters(&self, count: usize) -> Result<Vec<DeadLetter>, Error> {
        self.range_of_dead_letters("XREVRANGE", "+", "-", count).await
    }

    async fn range_of_dead_letters(
        &self,
        command: &str,
        from: &str,
        to: &str,
        count: usize,
    ) -> Result<Vec<DeadLetter>, Error> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("HGET").arg(&self.keys.meta).arg("epoch");
        pipeline.cmd(command).arg(&self.keys.dlq).arg(from).arg(to).arg("COUNT").arg(count);
        let (epoch, entries): (Option<String>, StreamRangeReply) =
            self.connection.pipeline(DOING, &pipeline).await?;
        // An empty list of dead letters must not look like a missing queue.
        if epoch.as_ref() != Some(&self.epoch) {
            return Err(Error::Lost { doing: DOING });
        }
        entries.ids.into_iter().map(|entry| DeadLetter::read(DOING, entry)).collect()
    }
}
