//! The objects that the run reached last. A pod whose own transfer fails tries the canary: if that works, the
//! storage is up and the object is at fault. Several are kept, because filters and people delete processed
//! objects: a deleted canary shows nothing, and the pod tries the next.

use std::cmp::Reverse;
use std::time::Instant;

use protocol::env::CANARY_SEPARATOR;

use crate::pods::WorkerPod;

/// How many objects of each kind to keep: few enough to be tried one after another while a pod ends.
const KEPT: usize = 3;

/// The newest objects that were fetched and published.
#[derive(Debug, Default)]
pub struct Canaries {
    source: Newest,
    sink: Newest,
    /// The key that the queue last named.
    remembered: Option<String>,
}

/// Keys, and when each was last reached, newest first.
#[derive(Debug, Default)]
struct Newest(Vec<(String, Instant)>);

impl Canaries {
    /// Notes objects that pods have fetched and published.
    pub fn observe<'a>(&mut self, pods: impl IntoIterator<Item = &'a WorkerPod>) {
        for pod in pods {
            let fetched = pod.claimer.as_ref().and_then(|report| report.key()).zip(pod.fetched);
            let published = pod.publisher.as_ref().and_then(|report| report.key()).zip(pod.published);
            for (newest, found) in [(&mut self.source, fetched), (&mut self.sink, published)] {
                if let Some((key, milestone)) = found {
                    newest.reached(key, milestone.at);
                }
            }
        }
    }

    /// Notes the file that the queue remembers. The queue knows the whole key, which a pod's report may not
    /// hold, and it outlives this operator. Only a new key counts: a file that is named again in each pass
    /// would pass for the newest.
    pub fn recall(&mut self, key: Option<&str>, at: Instant) {
        if let Some(key) = key.filter(|key| self.remembered.as_deref() != Some(key)) {
            self.remembered = Some(key.to_owned());
            self.fetched(key, at);
        }
    }

    /// Notes a file that was fetched. A key that a variable cannot hold unchanged is ignored.
    pub fn fetched(&mut self, key: &str, at: Instant) {
        if !key.contains(|c: char| c.is_control()) {
            self.source.reached(key, at);
        }
    }

    /// The files that were fetched last, in the form that a claimer reads.
    pub fn source(&self) -> Option<String> {
        self.source.in_one()
    }

    /// The results that were published last, in the form that a publisher reads.
    pub fn sink(&self) -> Option<String> {
        self.sink.in_one()
    }
}

impl Newest {
    fn reached(&mut self, key: &str, at: Instant) {
        let Self(objects) = self;
        match objects.iter_mut().find(|(known, _)| known == key) {
            Some((_, last)) => *last = at.max(*last),
            None => objects.push((key.to_owned(), at)),
        }
        objects.sort_by_key(|(_, at)| Reverse(*at));
        objects.truncate(KEPT);
    }

    fn in_one(&self) -> Option<String> {
        let Self(objects) = self;
        let keys: Vec<&str> = objects.iter().map(|(key, _)| key.as_str()).collect();
        (!keys.is_empty()).then(|| keys.join(&CANARY_SEPARATOR.to_string()))
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
    fn the_objects_that_were_reached_last_are_the_canaries() {
        let now = Instant::now();
        let fetched = |key: &str, seconds: u64| {
            let at = now + Duration::from_secs(seconds);
            let mut pod = WorkerPod::in_stage("p", Stage::Working, at);
            pod.claimer = Report::parse(&format!("1-0 1 ok 5-9 {key}"));
            pod.fetched = Some(Milestone { at, witnessed: true });
            pod
        };
        let mut canaries = Canaries::default();
        assert_eq!((canaries.source(), canaries.sink()), (None, None));
        canaries.observe(&[fetched("a", 1), fetched("b", 3), fetched("c", 2)]);
        assert_eq!((canaries.source().as_deref(), canaries.sink()), (Some("b\nc\na"), None));
        canaries.observe(&[fetched("d", 4), fetched("c", 5), fetched("e", 1)]);
        assert_eq!(canaries.source().as_deref(), Some("c\nd\nb"), "each once, and the oldest go");
    }

    /// As seen by a restarted operator, and when reports name no key: long keys are cut, and a backslash may
    /// be an escape.
    #[test]
    fn the_file_that_the_queue_remembers_is_a_canary_and_is_newest_only_once() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut canaries = Canaries::default();
        canaries.recall(None, now);
        assert_eq!(canaries.source(), None, "no file has succeeded");
        let long = format!("a\\b/{}", "k".repeat(1_000));
        canaries.recall(Some(&long), now);
        assert_eq!(canaries.source(), Some(long.clone()));
        canaries.fetched("new", now + second);
        canaries.recall(Some(&long), now + second * 2);
        assert_eq!(canaries.source(), Some(format!("new\n{long}")), "nothing has succeeded since");
        canaries.recall(Some("newer"), now + second * 3);
        assert_eq!(canaries.source(), Some(format!("newer\nnew\n{long}")));
    }
}
