//! Permits that namespaces share fairly: waiting namespaces take turns, so that one with hundreds of runs
//! does not starve one with a single run. Within a namespace, the order is first come, first served.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

/// A fixed number of permits.
#[derive(Debug)]
pub struct Permits(Arc<Mutex<WaitingLine<oneshot::Sender<Permit>>>>);

/// The right to do something; dropping it passes it to the next in line.
#[derive(Debug)]
pub struct Permit(Arc<Mutex<WaitingLine<oneshot::Sender<Permit>>>>);

impl Permits {
    /// Creates this many permits.
    pub fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new(WaitingLine::new(count))))
    }

    /// Whether a permit is free, in which case nothing waits for one.
    pub fn is_one_free(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free > 0
    }

    /// Waits for a permit. A caller that stops waiting leaves its permit to the next in line.
    pub async fn acquire(&self, namespace: &str) -> Permit {
        let (sender, receiver) = oneshot::channel();
        let granted = self.0.lock().unwrap_or_else(PoisonError::into_inner).ask(namespace, sender);
        if granted.is_some() {
            return Permit(Arc::clone(&self.0));
        }
        match receiver.await {
            Ok(permit) => permit,
            // Senders are dropped only after they were used.
            Err(_dropped) => std::future::pending().await,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        loop {
            let next = self.0.lock().unwrap_or_else(PoisonError::into_inner).give_back();
            match next {
                None => return,
                Some(next) if next.is_closed() => {}
                Some(next) => {
                    // If the receiver stops waiting at this very moment, the permit is dropped, which passes
                    // it on again.
                    let _ = next.send(Self(Arc::clone(&self.0)));
                    return;
                }
            }
        }
    }
}

/// The callers that wait for a permit, and their order.
#[derive(Debug)]
struct WaitingLine<T> {
    free: usize,
    waiting: HashMap<String, VecDeque<T>>,
    /// The namespaces that wait, each once, in the order of their turns.
    order: VecDeque<String>,
}

impl<T> WaitingLine<T> {
    fn new(free: usize) -> Self {
        Self { free, waiting: HashMap::new(), order: VecDeque::new() }
    }

    /// Returns the asker if it gets a permit at once; otherwise it waits.
    fn ask(&mut self, namespace: &str, asker: T) -> Option<T> {
        if self.free > 0 {
            self.free -= 1;
            return Some(asker);
        }
        let queue = self.waiting.entry(namespace.to_owned()).or_default();
        if queue.is_empty() {
            self.order.push_back(namespace.to_owned());
        }
        queue.push_back(asker);
        None
    }

    /// Takes back a permit. Returns the asker that gets it next, if any waits.
    fn give_back(&mut self) -> Option<T> {
        let Some((namespace, next)) = self.next() else {
            self.free += 1;
            return None;
        };
        if self.waiting.get(&namespace).is_some_and(VecDeque::is_empty) {
            self.waiting.remove(&namespace);
        } else {
            self.order.push_back(namespace);
        }
        Some(next)
    }

    fn next(&mut self) -> Option<(String, T)> {
        let namespace = self.order.pop_front()?;
        let next = self.waiting.get_mut(&namespace)?.pop_front()?;
        Some((namespace, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn namespaces_that_wait_take_turns() {
        let mut line = WaitingLine::new(1);
        assert_eq!(line.ask("busy", "running"), Some("running"));
        for asker in ["busy-1", "busy-2", "busy-3"] {
            assert_eq!(line.ask("busy", asker), None);
        }
        assert_eq!(line.ask("quiet", "quiet-1"), None);
        assert_eq!(line.ask("other", "other-1"), None);
        let order: Vec<&str> = std::iter::from_fn(|| line.give_back()).collect();
        assert_eq!(order, ["busy-1", "quiet-1", "other-1", "busy-2", "busy-3"]);
        assert_eq!((line.free, line.waiting.len(), line.order.len()), (1, 0, 0), "nothing is left over");
    }

    #[test]
    fn one_run_waits_for_one_turn_however_many_runs_another_namespace_has() {
        let mut line = WaitingLine::new(2);
        for asker in 0..302 {
            line.ask("busy", asker);
        }
        line.ask("quiet", 1_000);
        let next: Vec<i32> = (0..2).filter_map(|_| line.give_back()).collect();
        assert_eq!(next, [2, 1_000]);
    }

    #[test]
    fn no_more_permits_are_given_than_there_are() {
        let permits = Permits::new(2);
        let first = permits.acquire("a").now_or_never();
        let second = permits.acquire("b").now_or_never();
        assert!(first.is_some() && second.is_some());
        assert!(permits.acquire("a").now_or_never().is_none());
        drop(first);
        assert!(
            permits.acquire("a").now_or_never().is_some(),
            "the one that stopped waiting took none with it"
        );
    }

    #[tokio::test]
    async fn a_permit_survives_those_that_stop_waiting_before_and_after_their_turn() {
        let permits = Permits::new(1);
        let held = permits.acquire("a").await;
        let mut before = Box::pin(permits.acquire("a"));
        let mut after = Box::pin(permits.acquire("b"));
        let mut patient = Box::pin(permits.acquire("c"));
        for waiting in [&mut before, &mut after, &mut patient] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(before);
        drop(held);
        assert!((&mut patient).now_or_never().is_none(), "it is the turn of b");
        drop(after);
        assert!(patient.now_or_never().is_some());
        assert!(permits.acquire("a").now_or_never().is_some());
    }
}
