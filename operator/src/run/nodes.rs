//! Nodes on which pods never come up: the sandbox, the network or a volume fails, and the kubelet reports
//! that only in events. Such a node looks empty and attracts the next pods, so the run's status names it.
//! Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Obstacle, Reason};
use crate::pods::WorkerPod;

/// How many pods must die on a node before it is named: a single one may have had bad luck.
const NAMED_AFTER: usize = 2;
/// A death counts for this many times `--start-timeout`. On a broken node, the next pod that it attracts dies
/// one such time later, so the node stays named; a repaired or removed node is forgotten.
const REMEMBERED_FOR: u32 = 3;

/// Deaths of pods that never came up, by node and pod.
#[derive(Debug, Default)]
pub struct Nodes {
    deaths: BTreeMap<String, BTreeMap<String, Instant>>,
}

impl Nodes {
    /// The living pods to replace, because their nodes have not brought them up for too long. Each pod is
    /// counted once, however often it is shown before it is gone.
    pub fn give_up(
        &mut self,
        pods: &[Arc<WorkerPod>],
        start_timeout: Duration,
        now: Instant,
    ) -> Vec<Arc<WorkerPod>> {
        let overdue = |since: Instant| now.saturating_duration_since(since) >= start_timeout;
        let dead: Vec<_> = pods
            .iter()
            .filter(|pod| pod.is_alive() && pod.unprepared.is_some_and(overdue))
            .map(Arc::clone)
            .collect();
        for pod in &dead {
            let Some(node) = pod.node.clone() else { continue };
            self.deaths.entry(node).or_default().entry(pod.name.clone()).or_insert(now);
        }
        self.forget(pods, start_timeout, now);
        dead
    }

    /// Forgets deaths that are long past, and deaths before another pod came up on the same node.
    fn forget(&mut self, pods: &[Arc<WorkerPod>], start_timeout: Duration, now: Instant) {
        if self.deaths.is_empty() {
            return;
        }
        let mut last_start: BTreeMap<&str, Instant> = BTreeMap::new();
        for pod in pods {
            if let (Some(node), Some(started)) = (&pod.node, pod.claiming) {
                let last = last_start.entry(node).or_insert(started);
                *last = started.max(*last);
            }
        }
        let kept_for = start_timeout.saturating_mul(REMEMBERED_FOR);
        self.deaths.retain(|node, deaths| {
            let works_since = last_start.get(node.as_str());
            deaths.retain(|_, died| {
                now.saturating_duration_since(*died) < kept_for
                    && works_since.is_none_or(|started| started < died)
            });
            !deaths.is_empty()
        });
    }

    /// The node on which most pods died, once any node has several deaths.
    pub fn obstacle(&self) -> Option<Obstacle> {
        let several = self.deaths.iter().filter(|(_, deaths)| deaths.len() >= NAMED_AFTER);
        let (node, deaths) = several.max_by_key(|(_, deaths)| deaths.len())?;
        let pod = deaths.keys().next_back().map_or("", String::as_str);
        Some(Reason::NodeNotStarting.because(format!(
            "the node {node} does not set up the sandbox, network or volumes of worker pods, which are replaced: see the events of \
             the pod {pod}, then cordon or repair the node"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Stage;

    const START_TIMEOUT: Duration = Duration::from_secs(300);

    fn pod(name: &str, node: &str, unprepared: Option<Instant>) -> Arc<WorkerPod> {
        let pod = WorkerPod::in_stage(name, Stage::Starting, Instant::now());
        Arc::new(WorkerPod { node: Some(node.to_owned()), unprepared, ..pod })
    }

    fn names(pods: &[Arc<WorkerPod>]) -> Vec<&str> {
        pods.iter().map(|pod| pod.name.as_str()).collect()
    }

    #[test]
    fn a_pod_that_never_comes_up_is_replaced_and_one_that_pulls_its_image_is_not() {
        let start = Instant::now();
        let pods = [pod("dead", "n1", Some(start)), pod("pulling", "n1", None)];
        let mut nodes = Nodes::default();
        assert_eq!(names(&nodes.give_up(&pods, START_TIMEOUT, start + START_TIMEOUT / 2)), [""; 0]);
        assert_eq!(names(&nodes.give_up(&pods, START_TIMEOUT, start + START_TIMEOUT)), ["dead"]);
    }

    #[test]
    fn a_node_is_named_once_two_pods_died_there_and_each_counts_once() {
        let (start, mut nodes) = (Instant::now(), Nodes::default());
        let late = start + START_TIMEOUT;
        for _ in 0..3 {
            nodes.give_up(
                &[pod("one", "n1", Some(start)), pod("two", "n2", Some(start))],
                START_TIMEOUT,
                late,
            );
        }
        assert_eq!(nodes.obstacle(), None, "one died on each");
        nodes.give_up(&[pod("three", "n2", Some(start))], START_TIMEOUT, late);
        let obstacle = nodes.obstacle();
        assert!(
            obstacle.as_ref().is_some_and(|found| {
                found.reason == Reason::NodeNotStarting && found.message.contains("the node n2 ")
            }),
            "{obstacle:?}"
        );
    }

    #[test]
    fn a_node_that_works_again_is_no_longer_named() {
        let (start, mut nodes) = (Instant::now(), Nodes::default());
        let late = start + START_TIMEOUT;
        let dead = [pod("one", "n1", Some(start)), pod("two", "n1", Some(start))];
        let working = |since| {
            let pod = WorkerPod::in_stage("w", Stage::Working, since);
            [Arc::new(WorkerPod { node: Some("n1".to_owned()), claiming: Some(since), ..pod })]
        };
        nodes.give_up(&dead, START_TIMEOUT, late);
        nodes.give_up(&working(start), START_TIMEOUT, late);
        assert!(nodes.obstacle().is_some(), "that one came up before the others died");
        nodes.give_up(&working(late), START_TIMEOUT, late);
        assert_eq!(nodes.obstacle(), None);
    }

    #[test]
    fn deaths_of_long_ago_are_forgotten() {
        let (start, mut nodes) = (Instant::now(), Nodes::default());
        let dead = [pod("one", "n1", Some(start)), pod("two", "n1", Some(start))];
        nodes.give_up(&dead, START_TIMEOUT, start + START_TIMEOUT);
        nodes.give_up(&[], START_TIMEOUT, start + START_TIMEOUT * 3);
        assert!(nodes.obstacle().is_some(), "the next pod that the node attracts is still waiting");
        nodes.give_up(&[], START_TIMEOUT, start + START_TIMEOUT * 4);
        assert_eq!(nodes.obstacle(), None);
    }
}
