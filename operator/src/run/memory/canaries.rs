//! The objects that the run reached last. A pod whose own transfer fails tries the canary: if that works, the storage is up
//! and the object is at fault.

use std::time::Instant;

use crate::pods::WorkerPod;

/// The newest objects that were fetched and published.
#[derive(Debug, Default)]
pub struct Canaries {
    source: Option<(String, Instant)>,
    sink: Option<(String, Instant)>,
}

impl Canaries {
    /// Notes what pods have fetched and published.
    pub fn observe<'a>(&mut self, pods: impl IntoIterator<Item = &'a WorkerPod>) {
        for pod in pods {
            let fetched = pod.claimer.as_ref().and_then(|report| report.key()).zip(pod.fetched);
            let published = pod.publisher.as_ref().and_then(|report| report.key()).zip(pod.published);
            for (newest, found) in [(&mut self.source, fetched), (&mut self.sink, published)] {
                if let Some((key, milestone)) = found
                    && newest.as_ref().is_none_or(|(_, at)| *at < milestone.at)
                {
                    *newest = Some((key.to_owned(), milestone.at));
                }
            }
        }
    }

    /// The file that was fetched last.
    pub fn source(&self) -> Option<&str> {
        self.source.as_ref().map(|(key, _)| key.as_str())
    }

    /// The result that was published last.
    pub fn sink(&self) -> Option<&str> {
        self.sink.as_ref().map(|(key, _)| key.as_str())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pods::{Milestone, Stage};
    use protocol::Report;
    use std::time::Duration;

    #[test]
    fn the_object_that_was_reached_last_is_the_canary() {
        let now = Instant::now();
        let fetched = |key: &str, seconds: u64| {
            let at = now + Duration::from_secs(seconds);
            let mut pod = WorkerPod::in_stage("p", Stage::Working, at);
            pod.claimer = Report::parse(&format!("1-0 1 ok 5-9 {key}"));
            pod.fetched = Some(Milestone { at, witnessed: true });
            pod
        };
        let mut canaries = Canaries::default();
        canaries.observe(&[fetched("a", 1), fetched("b", 3), fetched("c", 2)]);
        assert_eq!((canaries.source(), canaries.sink()), (Some("b"), None));
        canaries.observe(&[fetched("d", 2)]);
        assert_eq!(canaries.source(), Some("b"), "d was fetched before");
    }
}
