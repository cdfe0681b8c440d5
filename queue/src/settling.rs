//! Settles claimed files: by their result, or because their pods died.

use std::time::Duration;

use crate::calls::{Pending, Reclaimed};
use crate::outcome::{Disruption, Fate, RetryPolicy, Settlement, Verdict, truncated_for_charge};
use crate::reply::Reply;
use crate::run_queue::{RunQueue, bytes};
use crate::script::Script;
use crate::{Error, random};

impl RunQueue {
    /// Settles entries whose attempt has ended, each only if its consumer still holds it. The fates are in
    /// the order of the settlements.
    pub async fn settle(&self, settlements: &[Settlement], policy: &RetryPolicy) -> Result<Vec<Fate>, Error> {
        let mut fates = Vec::with_capacity(settlements.len());
        for batch in settlements.chunks(self.batch) {
            let mut arguments = self.attempt_arguments(policy);
            for Settlement { entry, consumer, verdict } in batch {
                let (word, failure) = match verdict {
                    Verdict::Succeeded => ("succeeded", None),
                    Verdict::Failed(failure) => ("failed", Some(failure)),
                    Verdict::Rejected(failure) => ("rejected", Some(failure)),
                    Verdict::Disrupted(Disruption { failure, counts: true }) => ("disrupted", Some(failure)),
                    Verdict::Disrupted(Disruption { failure, counts: false }) => {
                        ("interrupted", Some(failure))
                    }
                    Verdict::Released => ("released", None),
                };
                arguments.extend([bytes(entry.as_str()), bytes(consumer), bytes(word)]);
                if let Some(failure) = failure {
                    let reason = match verdict {
                        Verdict::Disrupted(_) => truncated_for_charge(failure.reason()),
                        _ => failure.reason(),
                    };
                    let exit_code = failure.exit_code().map(|code| code.to_string()).unwrap_or_default();
                    arguments.extend([bytes(reason), bytes(&exit_code), bytes(&random::fraction()?)]);
                }
            }
            fates.extend(read_fates(self.call(Script::Settle, &arguments).await?)?);
        }
        Ok(fates)
    }

    /// Settles entries of dead consumers, as disruptions that count. `judge` is called with every pending
    /// entry, and returns the reason if its consumer is dead. Entries that have been idle for less than
    /// `min_idle` are left alone. All pending entries are visited, so that living consumers cannot hide a
    /// dead one. Afterwards, entries that were handed out and have no holder are queued again.
    pub async fn reclaim(
        &self,
        min_idle: Duration,
        policy: &RetryPolicy,
        mut judge: impl FnMut(&Pending) -> Option<String>,
    ) -> Result<Reclaimed, Error> {
        let mut dead = Vec::new();
        let visit = |pending: &Pending| dead.extend(judge(pending).map(|reason| (pending.clone(), reason)));
        let removed_consumers = self.for_each_pending(min_idle, visit).await?;
        let mut fates = Vec::with_capacity(dead.len());
        for batch in dead.chunks(self.batch) {
            fates.extend(self.reclaim_from(batch, min_idle, policy).await?);
        }
        Ok(Reclaimed { fates, held_by_nobody: self.recover().await?, removed_consumers })
    }

    /// Settles entries whose consumers were judged dead, each with its reason, if they are still held and
    /// idle. A part of [`Self::reclaim`], for tests of events between judging and settling.
    pub async fn reclaim_from(
        &self,
        dead: &[(Pending, String)],
        min_idle: Duration,
        policy: &RetryPolicy,
    ) -> Result<Vec<Fate>, Error> {
        if dead.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = self.attempt_arguments(policy);
        for (pending, reason) in dead {
            arguments.extend([
                bytes(pending.entry.as_str()),
                bytes(&pending.consumer),
                bytes(&min_idle.as_millis().to_string()),
                bytes(truncated_for_charge(reason)),
                bytes(&random::fraction()?),
            ]);
        }
        read_fates(self.call(Script::Reclaim, &arguments).await?)
    }

    /// Queues entries again that were handed out before this call and have no holder. Also a part of
    /// [`Self::reclaim`].
    pub async fn recover(&self) -> Result<u64, Error> {
        let (mut recovered, mut start, mut end) = (0, "-".to_owned(), String::new());
        loop {
            let arguments = [self.run.as_str(), &start, &end, &self.batch.to_string()].map(bytes);
            let mut reply = self.call(Script::Recover, &arguments).await?;
            if reply.word() != "OK" {
                return reply.unexpected();
            }
            recovered += reply.next::<u64>()?;
            let last: String = reply.next()?;
            end = reply.next()?;
            if last.is_empty() {
                return Ok(recovered);
            }
            start = format!("({last}");
        }
    }

    pub(crate) fn attempt_arguments(&self, policy: &RetryPolicy) -> Vec<Vec<u8>> {
        let RetryPolicy { max_attempts, max_disruptions, backoff_initial, backoff_max, keep_results } =
            policy;
        let numbers = [
            max_attempts.to_string(),
            max_disruptions.to_string(),
            backoff_initial.as_millis().to_string(),
            backoff_max.as_millis().to_string(),
            keep_results.to_string(),
        ];
        std::iter::once(bytes(self.run.as_str())).chain(numbers.iter().map(|number| bytes(number))).collect()
    }
}

fn read_fates(mut reply: Reply) -> Result<Vec<Fate>, Error> {
    if reply.word() != "OK" {
        return reply.unexpected();
    }
    let doing = Script::Settle.doing();
    let fates: Vec<redis::Value> = reply.next()?;
    fates
        .into_iter()
        .map(|fate| {
            let mut fate = Reply::read(doing, fate)?;
            match fate.word() {
                "SUCCEEDED" => Ok(Fate::Succeeded),
                "RELEASED" => Ok(Fate::Released),
                "RETRYING" => Ok(Fate::Retrying {
                    file: fate.next()?,
                    attempts: fate.next()?,
                    delay: Duration::from_millis(fate.next()?),
                }),
                "DISRUPTED" => Ok(Fate::Disrupted { file: fate.next()?, disruptions: fate.next()? }),
                "DEAD" => Ok(Fate::DeadLettered { file: fate.next()?, attempts: fate.next()? }),
                "IGNORED" => Ok(Fate::Ignored),
                _ => fate.unexpected(),
            }
        })
        .collect()
}
