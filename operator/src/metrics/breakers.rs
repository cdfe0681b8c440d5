//! The open breakers of all runs, as exposed in metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::gauge::Gauge;

/// Distinguishes the breakers of different runs.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// The open breakers of all runs for one dependency.
#[derive(Debug)]
pub struct Breakers {
    open: Gauge,
    next_probe: Gauge,
    /// When each breaker probes next, in seconds since 1970.
    due: Mutex<BTreeMap<u64, i64>>,
}

impl Breakers {
    /// No open breakers yet.
    pub fn new(open: Gauge, next_probe: Gauge) -> Arc<Self> {
        let breakers = Self { open, next_probe, due: Mutex::default() };
        // A breaker that never opened is closed, not absent.
        breakers.change(|_| {});
        Arc::new(breakers)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<u64, i64>)) {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut due);
        self.open.set(i64::try_from(due.len()).unwrap_or(i64::MAX));
        self.next_probe.set(due.values().min().copied().unwrap_or(0));
    }
}

/// The open breakers of one run. When a run is forgotten, its breakers are removed too.
#[derive(Debug, Default)]
pub struct OpenBreakers {
    counted: BTreeMap<&'static str, OpenBreaker>,
}

impl OpenBreakers {
    /// Sets which breakers are open, each with the time of its next probe.
    pub fn set(
        &mut self,
        all: &BTreeMap<&'static str, Arc<Breakers>>,
        next_probes: impl Iterator<Item = (&'static str, Instant)>,
    ) {
        let mut before = std::mem::take(&mut self.counted);
        for (dependency, next_probe) in next_probes {
            let Some(breakers) = all.get(dependency).filter(|_| !self.counted.contains_key(dependency))
            else {
                continue;
            };
            let breaker = before.remove(dependency).unwrap_or_else(|| OpenBreaker::new(breakers));
            breakers.change(|due| _ = due.insert(breaker.id, unix(next_probe)));
            self.counted.insert(dependency, breaker);
        }
    }
}

/// One open breaker, counted until it is dropped.
#[derive(Debug)]
struct OpenBreaker {
    id: u64,
    breakers: Arc<Breakers>,
}

impl OpenBreaker {
    fn new(breakers: &Arc<Breakers>) -> Self {
        Self { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), breakers: Arc::clone(breakers) }
    }
}

impl Drop for OpenBreaker {
    fn drop(&mut self) {
        self.breakers.change(|due| _ = due.remove(&self.id));
    }
}

/// The seconds from 1970 to a moment. It may be in the past: a probe that did not happen is overdue.
fn unix(moment: Instant) -> i64 {
    let (now, since_1970) =
        (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    let moment = match moment.checked_duration_since(now) {
        Some(left) => since_1970.saturating_add(left),
        None => since_1970.saturating_sub(now.duration_since(moment)),
    };
    i64::try_from(moment.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_run_is_counted_under_its_open_breakers_until_they_close_or_it_is_forgotten() {
        let all: BTreeMap<&'static str, Arc<Breakers>> = ["source", "credentials"]
            .map(|dependency| (dependency, Breakers::new(Gauge::default(), Gauge::default())))
            .into();
        let open = |dependency| all[dependency].open.get();
        let (mut one, mut two) = (OpenBreakers::default(), OpenBreakers::default());
        let now = Instant::now();
        one.set(&all, [("source", now), ("credentials", now), ("credentials", now)].into_iter());
        two.set(&all, [("source", now)].into_iter());
        two.set(&all, [("source", now)].into_iter());
        assert_eq!((open("source"), open("credentials")), (2, 1));
        two.set(&all, std::iter::empty());
        assert_eq!((open("source"), open("credentials")), (1, 1));
        drop(one);
        assert_eq!((open("source"), open("credentials")), (0, 0));
    }

    #[test]
    fn the_probe_that_is_due_first_is_shown_also_when_it_is_overdue() {
        let all: BTreeMap<&'static str, Arc<Breakers>> =
            [("source", Breakers::new(Gauge::default(), Gauge::default()))].into();
        let shown = || all["source"].next_probe.get();
        assert_eq!(shown(), 0, "none is open");
        let (mut one, mut two) = (OpenBreakers::default(), OpenBreakers::default());
        let now = Instant::now();
        let later = now + Duration::from_secs(1_000);
        one.set(&all, [("source", later)].into_iter());
        let of_one = shown();
        two.set(&all, [("source", now)].into_iter());
        assert!((999..=1_001).contains(&(of_one - shown())), "{of_one}, {}", shown());
        // The time at which it was due stays the same, however often it is set.
        let overdue = shown();
        std::thread::sleep(Duration::from_millis(1_100));
        two.set(&all, [("source", now)].into_iter());
        assert!((shown() - overdue).abs() <= 1, "{overdue}, {}", shown());
        drop(two);
        assert!((shown() - of_one).abs() <= 1);
        drop(one);
        assert_eq!(shown(), 0);
    }
}
