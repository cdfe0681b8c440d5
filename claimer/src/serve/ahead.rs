//! Fetches files before their turn, within limits of bytes and disk space.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use queue::Claim;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_util::task::LocalPoolHandle;

use super::reports::Reports;
use super::room::{Room, Slot};
use super::say_failed;
use super::stop::Stop;
use super::transfers::Transfers;

/// A file that is being fetched or has been fetched.
pub(super) struct Next {
    pub(super) claim: Claim,
    /// `None` if it could not be fetched.
    pub(super) fetched: JoinHandle<Option<Fetched>>,
}

/// A fetched file.
pub(super) struct Fetched {
    pub(super) slot: Slot,
    /// Its share of the bytes that may be fetched ahead.
    pub(super) share: OwnedSemaphorePermit,
}

pub(super) struct FetchAhead {
    room: Room,
    transfers: Arc<Transfers>,
    reports: Arc<Reports>,
    stop: Stop,
    background: LocalPoolHandle,
    /// In KiB.
    bytes: Arc<Semaphore>,
    most: u32,
    /// Bytes that are being fetched and may not be on the disk yet.
    under_way: Arc<AtomicU64>,
}

impl FetchAhead {
    pub(super) fn new(
        room: Room,
        transfers: Arc<Transfers>,
        reports: Arc<Reports>,
        stop: Stop,
        background: LocalPoolHandle,
        prefetch_bytes: u64,
    ) -> Self {
        let most = u32::try_from(prefetch_bytes / 1024).unwrap_or(u32::MAX).max(1);
        let bytes = Arc::new(Semaphore::new(most as usize));
        Self { room, transfers, reports, stop, background, bytes, most, under_way: Arc::default() }
    }

    /// Runs as long as the pod lives.
    pub(super) async fn run(
        &self,
        mut files: mpsc::Receiver<Claim>,
        ready: mpsc::UnboundedSender<Next>,
    ) -> Infallible {
        let mut number = 0;
        while let Some(claim) = files.recv().await {
            let share = Arc::clone(&self.bytes).acquire_many_owned(self.share_of(claim.file.size)).await;
            let Ok(share) = share else { break };
            number += 1;
            let fetched = self.fetch(number, &claim, share);
            // The receiver is gone because the pod ends.
            if ready.send(Next { claim, fetched }).is_err() {
                break;
            }
        }
        drop(ready);
        std::future::pending().await
    }

    /// A file that exceeds the limit for prefetching, or for which the disk has too little space, is fetched
    /// alone.
    fn share_of(&self, size: u64) -> u32 {
        if !self.room.has_space_for(self.under_way.load(Ordering::Relaxed).saturating_add(size)) {
            return self.most;
        }
        u32::try_from(size / 1024 + 1).unwrap_or(u32::MAX).min(self.most)
    }

    /// A failure is reported at once, not when the file's turn comes, because it says that the storage fails
    /// now. The file's share is then free for the next one.
    fn fetch(&self, number: u64, claim: &Claim, share: OwnedSemaphorePermit) -> JoinHandle<Option<Fetched>> {
        let (room, transfers, claim) = (self.room.clone(), Arc::clone(&self.transfers), claim.clone());
        let (reports, stop) = (Arc::clone(&self.reports), self.stop.clone());
        let (under_way, size) = (Arc::clone(&self.under_way), claim.file.size);
        under_way.fetch_add(size, Ordering::Relaxed);
        self.background.spawn_pinned(move || async move {
            let fetched = transfers.fetch(&room, number, &claim).await;
            under_way.fetch_sub(size, Ordering::Relaxed);
            match fetched {
                Ok(slot) => Some(Fetched { slot, share }),
                Err(failure) => {
                    say_failed(&reports, &stop, &claim.entry, failure);
                    None
                }
            }
        })
    }
}
