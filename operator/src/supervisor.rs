//! One task per run, started when something happens to the run, and ended when nothing is left to do. A slow
//! or broken run delays only itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::sync::{Notify, mpsc};
use tokio::task::{Id, JoinSet};

use crate::context::Context;
use crate::error::chain;
use crate::run;
use crate::world::Uid;

/// How often the operator retries to remove deleted runs that are still in Valkey.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How often Valkey learns which finished runs still exist: much more often than the shortest useful
/// retention.
const RENEW_EVERY: Duration = Duration::from_secs(3_600);

/// Wakes the task of each run to which something happened.
pub async fn supervise(ctx: Arc<Context>, mut touched: mpsc::UnboundedReceiver<Uid>) {
    let mut tasks = JoinSet::new();
    let mut wakes: HashMap<Uid, Arc<Notify>> = HashMap::new();
    let mut uids: HashMap<Id, Uid> = HashMap::new();
    loop {
        let uid = tokio::select! {
            uid = touched.recv() => match uid {
                Some(uid) => uid,
                None => return,
            },
            Some(ended) = tasks.join_next_with_id() => {
                let (id, panicked) = match &ended {
                    Ok((id, ())) => (*id, false),
                    Err(error) => (error.id(), error.is_panic()),
                };
                let Some(uid) = uids.remove(&id) else { continue };
                let wake = wakes.remove(&uid);
                if panicked {
                    tracing::error!(uid = %uid, "the task of a run panicked and is restarted");
                    let world = Arc::clone(&ctx.world);
                    tokio::spawn(async move {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        world.touch(&uid);
                    });
                    continue;
                }
                // An event that arrived while the task ended would otherwise be missed.
                let missed = wake.is_some_and(|wake| wake.notified().now_or_never().is_some());
                if !missed {
                    continue;
                }
                uid
            }
        };
        if let Some(wake) = wakes.get(&uid) {
            wake.notify_one();
        } else if ctx.world.view(&uid).is_some() {
            let wake = Arc::new(Notify::new());
            let task = tasks.spawn(run::drive(Arc::clone(&ctx), Arc::clone(&uid), Arc::clone(&wake)));
            uids.insert(task.id(), Arc::clone(&uid));
            wakes.insert(uid, wake);
        }
    }
}

/// Removes data from Valkey that could not be removed when its run was deleted, and renews the ledger entries
/// of finished runs.
pub async fn sweep(ctx: Arc<Context>) {
    let (mut renewed, mut compared): (Option<Instant>, bool) = (None, false);
    loop {
        // Once: what goes from now on is seen. A run that the watches have not shown yet is looked up.
        if !compared {
            match run::note_gone_unseen(&ctx).await {
                Ok(()) => compared = true,
                Err(error) => {
                    tracing::debug!(error = chain(&error), "runs that went unseen are looked for again");
                }
            }
        }
        if renewed.is_none_or(|renewed| renewed.elapsed() >= RENEW_EVERY) {
            match run::renew_ledger(&ctx).await {
                Ok(()) => renewed = Some(Instant::now()),
                Err(error) => tracing::debug!(error = chain(&error), "the ledger was not renewed"),
            }
        }
        if let Err(error) = run::sweep(&ctx).await {
            tracing::debug!(error = chain(&error), "deleted runs are still in Valkey");
        }
        tokio::time::sleep(SWEEP_EVERY).await;
    }
}
