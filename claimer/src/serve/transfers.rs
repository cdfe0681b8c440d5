//! Access to the storage, shared by all files of a pod.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use aws_sdk_s3::Client;
use protocol::{Transfer, TransferFailure};
use queue::Claim;
use storage::{Bucket, chain};

use super::ServeSettings;
use super::room::{Room, Slot};
use crate::canary::Canary;
use crate::fetch;
use crate::publish::{Destination, Known};

/// How many recently reached objects to remember: few enough to try one after the other.
const CANARIES: usize = 3;

/// Source and sink.
pub(super) struct Transfers {
    source: Reach,
    source_prefix: String,
    sink: Option<(Destination, Reach)>,
}

/// A bucket, and the objects of it that were reached last.
struct Reach {
    bucket: Bucket,
    client: Client,
    /// Keys, newest first.
    canaries: Mutex<VecDeque<String>>,
}

impl Transfers {
    pub(super) async fn of(settings: &ServeSettings) -> Self {
        let source = Reach::new(&settings.source, &settings.source_canaries).await;
        let sink = match &settings.destination {
            Some(destination) => {
                let reach = Reach::new(&destination.sink, &settings.sink_canaries).await;
                Some((destination.clone(), reach))
            }
            None => None,
        };
        Self { source, source_prefix: settings.source_prefix.clone(), sink }
    }

    /// The address of a file.
    pub(super) fn uri(&self, key: &str) -> String {
        self.source.bucket.uri(key)
    }

    /// Whether results are published.
    pub(super) fn has_sink(&self) -> bool {
        self.sink.is_some()
    }

    pub(super) async fn fetch(
        &self,
        room: &Room,
        number: u64,
        claim: &Claim,
    ) -> Result<Slot, TransferFailure> {
        let Reach { bucket, client, .. } = &self.source;
        let (began, key) = (Instant::now(), &claim.file.key);
        let failed = |exit, canary, text| TransferFailure {
            transfer: Transfer::Fetch,
            exit,
            canary,
            took: began.elapsed(),
            text,
        };
        let slot = room.slot(number).map_err(|error| failed(error.exit(), None, chain(&error)))?;
        if let Err(error) = fetch::fetch(client, bucket, &claim.file, &slot.input()).await {
            let known = self.source.known();
            let canary = Canary { client, bucket: &bucket.name, keys: &known };
            let canary = canary.read(key, error.exit(), &self.source_prefix).await;
            let error = error.at(&bucket.uri(key), canary);
            return Err(failed(error.exit(), canary, chain(&error)));
        }
        self.source.reached(key);
        Ok(slot)
    }

    pub(super) async fn publish(&self, claim: &Claim, slot: &Slot) -> Result<(), TransferFailure> {
        let Some((destination, reach)) = &self.sink else { return Ok(()) };
        let (began, key) = (Instant::now(), &claim.file.key);
        let folder = slot.results_of(&destination.from);
        // Not logged per file: the filters' logs name the files, and a log line costs as much as many a
        // filter.
        let (results, files) = (reach.known(), self.source.known());
        let known = Known { results: &results, files: &files };
        match destination.upload(&reach.client, key, &folder, known).await {
            Ok(published) => {
                reach.reached(&published.last);
                Ok(())
            }
            Err(error) => Err(TransferFailure {
                transfer: Transfer::Publish,
                exit: error.exit(),
                canary: error.canary(),
                took: began.elapsed(),
                text: chain(&error),
            }),
        }
    }
}

impl Reach {
    async fn new(bucket: &Bucket, canaries: &[String]) -> Self {
        let canaries = Mutex::new(canaries.iter().cloned().collect());
        Self { client: bucket.client().await, bucket: bucket.clone(), canaries }
    }

    fn reached(&self, key: &str) {
        let mut canaries = self.canaries.lock().unwrap_or_else(PoisonError::into_inner);
        canaries.retain(|known| known != key);
        canaries.push_front(key.to_owned());
        canaries.truncate(CANARIES);
    }

    fn known(&self) -> Vec<String> {
        self.canaries.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}
