//! Gives files to pods. A pod gets its file when it has a node, so that its claimer finds the file when it
//! starts; if the claimer does not start soon, the file goes to another pod.

use std::time::Duration;

use super::pass::{Pass, Prepared};
use super::scan::released;
use crate::error::Error;
use crate::pods::Stage;

impl Pass<'_> {
    /// Gives a file to each pod that can take one, first to those whose claimer is already waiting.
    pub async fn hand_out(&mut self, prepared: &Prepared) -> Result<(), Error> {
        self.take_back(prepared).await?;
        let pods = &self.memory.pods;
        let waiting = self.view.pods.iter().filter(|pod| pod.awaits_file(self.now));
        let mut waiting: Vec<_> =
            waiting.filter(|pod| !pods.is_done(&pod.name) && !pods.served.contains(&pod.name)).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        waiting.sort_by_key(|pod| pod.stage != Stage::Claiming);
        let waiting: Vec<String> = waiting.into_iter().map(|pod| pod.name.clone()).collect();
        for pod in prepared.queue.hand_out(&waiting).await? {
            self.memory.pods.late.remove(&pod);
            self.memory.pods.served.insert(pod);
        }
        Ok(())
    }

    /// Takes files back from pods that do not start. If a claimer reads its file at this very moment, its
    /// result is ignored, because the pod no longer holds the file.
    async fn take_back(&mut self, prepared: &Prepared) -> Result<(), Error> {
        let late = self.view.pods.iter().filter(|pod| pod.is_late(self.now));
        let late = late.filter(|pod| !self.memory.pods.late.contains(&pod.name));
        let late: Vec<String> = late.map(|pod| pod.name.clone()).collect();
        if late.is_empty() {
            return Ok(());
        }
        let claims = prepared.queue.claims_of(&late).await?;
        let release: Vec<_> = claims.iter().map(released).collect();
        self.settle_entries(prepared, &release).await?;
        for pod in late {
            // The pod gets another file if its claimer starts after all.
            self.memory.pods.served.remove(&pod);
            self.memory.pods.late.insert(pod);
        }
        Ok(())
    }

    /// When the first pod that has been given a file may be late.
    pub fn late_start(&self) -> Option<Duration> {
        let starting = self.view.pods.iter().filter(|pod| pod.is_alive() && pod.stage == Stage::Starting);
        starting.filter_map(|pod| pod.late_at()?.checked_duration_since(self.now)).min()
    }
}
