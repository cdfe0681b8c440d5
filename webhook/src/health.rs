//! Whether this replica can answer: every watch is complete, and a certificate is there.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// What is still missing. Clones are the same health.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<BTreeSet<&'static str>>>);

impl Health {
    /// Waits for these.
    pub fn waiting_for(what: impl IntoIterator<Item = &'static str>) -> Self {
        Self(Arc::new(Mutex::new(what.into_iter().collect())))
    }

    /// This one is there. It stays so: a watch that breaks later still has what it knew, and a webhook that judges by
    /// what it knew a moment ago is better than none.
    pub fn have(&self, what: &'static str) {
        self.lock().remove(what);
    }

    /// What is still missing.
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
