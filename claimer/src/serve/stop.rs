//! Whether the pod is about to end: its files are finished or released, and no other is begun.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The flag that all tasks of the worker share.
#[derive(Clone, Default)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Makes the pod end; the first reason is logged.
    pub(super) fn set(&self, why: &str) {
        if !self.0.swap(true, Ordering::Relaxed) {
            eprintln!("this pod ends: {why}");
        }
    }

    /// Makes the pod end once it is old, and never returns.
    pub(super) async fn set_after<T>(&self, age: Duration) -> T {
        tokio::time::sleep(age).await;
        self.set("it has reached its maximum age");
        std::future::pending().await
    }
}
