//! One run: a task that drives it, pass by pass, from its creation to its end. Every pass can be the first of
//! a new operator.

mod access;
mod breaker;
pub mod build;
mod cleanup;
mod decide;
mod decision_log;
mod dependency;
mod ending;
mod failure_groups;
mod hand_out;
mod job;
mod limits;
mod list;
mod listing;
mod memory;
mod nodes;
mod pass;
mod process;
mod publish;
mod scan;
mod settle;
mod setup;
mod source_bucket;
mod spec_hash;
mod status;
mod verdict;
mod warm;
mod workers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::context::Context;
use crate::error::{Error, chain};
use crate::world::Uid;
use memory::Memory;
use pass::{Next, Pass};

pub use cleanup::{NOTES, note_gone_unseen, renew_ledger, sweep};
pub use limits::RunSettings;
pub use status::{is_finished, obstacle};

/// How often a run has a pass even if nothing happens: the safety net under the watches.
pub const RESYNC: Duration = Duration::from_secs(30);
/// How long to wait for further changes, so that they are handled together: a settled batch costs as much as
/// a settled file.
const GATHER: Duration = Duration::from_millis(25);
/// A pass that takes longer is abandoned and started again, which is safe because every step can be repeated.
const PASS_MAX: Duration = Duration::from_secs(120);
/// Counts are published at most this often, regardless of the number of files.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// The first wait after a failed pass.
const RETRY_FIRST: Duration = Duration::from_millis(500);

/// Drives a run until it needs no further pass.
pub async fn drive(ctx: Arc<Context>, uid: Uid, wake: Arc<Notify>) {
    let mut memory = Memory::default();
    loop {
        let permit = ctx.passes.acquire(&ctx.world.namespace(&uid)).await;
        let started = Instant::now();
        let passed = tokio::time::timeout(PASS_MAX, one_pass(&ctx, &uid, &mut memory)).await;
        drop(permit);
        ctx.metrics.passed(started.elapsed());
        match passed.unwrap_or(Err(Error::TooLong(PASS_MAX))) {
            Ok(Next::Done) => return,
            Ok(Next::Within(wait)) => {
                memory.failed_passes = 0;
                tokio::select! {
                    () = tokio::time::sleep(wait.min(RESYNC)) => {}
                    () = wake.notified() => tokio::time::sleep(GATHER).await,
                }
            }
            Err(error) => {
                ctx.metrics.pass_failed(error.as_ref());
                if let Error::Queue(error) = &error {
                    ctx.metrics.valkey_failed(error.as_ref());
                }
                let wait = RETRY_FIRST.saturating_mul(1 << memory.failed_passes.min(8)).min(RESYNC);
                memory.failed_passes += 1;
                tracing::warn!(uid = %uid, reason = error.as_ref(), error = chain(&error), ?wait, "a pass failed");
                tokio::time::sleep(wait).await;
            }
        }
    }
}

async fn one_pass(ctx: &Arc<Context>, uid: &Uid, memory: &mut Memory) -> Result<Next, Error> {
    // Keep this order: a pod that is removed in between is then in neither, rather than in both.
    memory.pods.gone.extend(ctx.world.take_gone(uid));
    let Some(view) = ctx.world.view(uid) else {
        if let Some(run_id) = &memory.run_id {
            cleanup::note_vanished(ctx, uid, run_id, memory.deleting.is_some()).await?;
        }
        return Ok(Next::Done);
    };
    Pass::new(ctx, uid, &view, memory).run().await
}
