//! Whether this replica can answer: every watch is complete, and a certificate is available.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The parts that are still missing. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<BTreeSet<&'static str>>>);

impl Health {
    /// Starts with these parts missing.
    pub fn waiting_for(what: impl IntoIterator<Item = &'static str>) -> Self {
        Self(Arc::new(Mutex::new(what.into_iter().collect())))
    }

    /// Marks a part as available. It stays available: a watch that breaks later keeps its last state, and
    /// judging by a slightly outdated state is better than not judging at all.
    pub fn have(&self, what: &'static str) {
        self.lock().remove(what);
    }

    /// The parts that are still missing.
    pub fn missing(&self) -> Vec<&'static str> {
        self.lock().iter().copied().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<&'static str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_healthy_when_nothing_is_missing() {
        let health = Health::waiting_for(["policies", "certificate"]);
        health.clone().have("policies");
        assert_eq!(health.missing(), ["certificate"]);
        health.have("certificate");
        assert!(health.missing().is_empty());
    }
}
