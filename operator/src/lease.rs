//! Leader election on a `coordination.k8s.io` Lease: of several replicas, only one works.
//!
//! The clocks of two machines are never compared. A contender takes over a lease when, by its own clock, the
//! record has not changed for the lease's duration; the leader stops by its own clock well before that. Every
//! write names the version that it replaces, so that one of two concurrent writes is refused.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{info, warn};

/// How long after the last renewal others may take over: the usual value of the Kubernetes controllers.
pub const DURATION: Duration = Duration::from_secs(15);
/// How often the leader renews: two renewals may fail before the leader gives up.
pub const RENEW: Duration = Duration::from_secs(5);

/// One contender.
#[derive(Clone)]
pub struct Election {
    /// Client of the API server.
    pub client: Client,
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease, the same for all contenders.
    pub name: String,
    /// Name of this contender, which no process that may still be alive shares: the process named in the
    /// Lease leads.
    pub identity: String,
    /// How long after the last renewal others may take over, in whole seconds.
    pub duration: Duration,
    /// How often the leader renews, and how often the others check.
    pub renew: Duration,
}

/// The next step of a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Create,
    Take,
    Wait(Duration),
}

/// The result of one attempt.
enum Contended {
    /// We lead; the lease was requested at this time.
    Leads { lease: Box<Lease>, asked: Instant },
    /// Another contender leads: check again after this time.
    Waits(Duration),
}

impl Election {
    /// A contender with the usual times.
    pub fn new(client: Client, namespace: &str, name: &str, identity: &str) -> Self {
        let [namespace, name, identity] = [namespace, name, identity].map(str::to_owned);
        Self { client, namespace, name, identity, duration: DURATION, renew: RENEW }
    }

    /// Waits until this contender leads; retries if the API server fails. If this is cancelled at the wrong
    /// moment, the lease may stay held, without a process that knows it, until it expires.
    pub async fn acquire(&self) -> Leadership {
        let mut seen = Seen { lease: None, since: Instant::now() };
        loop {
            match timeout(self.duration, self.contend(&mut seen)).await {
                Ok(Ok(Contended::Leads { lease, asked })) => {
                    info!(lease = %self.name, identity = %self.identity, "leading");
                    return self.lead(*lease, asked);
                }
                Ok(Ok(Contended::Waits(wait))) => sleep(wait).await,
                Ok(Err(error)) => {
                    warn!(lease = %self.name, %error, "cannot contend for the lease");
                    sleep(self.retry()).await;
                }
                Err(_) => warn!(lease = %self.name, "the API server does not answer"),
            }
        }
    }

    /// Reads the lease once, and tries to take it if it is free.
    async fn contend(&self, seen: &mut Seen) -> Result<Contended, kube::Error> {
        let lease = self.api().get_opt(&self.name).await?;
        seen.note(lease, Instant::now());
        let asked = Instant::now();
        let taken = match decide(seen.lease.as_ref(), asked - seen.since, self.duration, &self.identity) {
            // Wait no longer than the interval between a leader's renewals, because it may release the lease
            // meanwhile.
            Step::Wait(wait) => return Ok(Contended::Waits(wait.min(self.renew))),
            Step::Create => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                let lease = Lease { metadata, spec: Some(self.held(None)) };
                self.api().create(&PostParams::default(), &lease).await
            }
            Step::Take => self.write(seen.lease.clone().unwrap_or_default(), |spec| self.held(spec)).await,
        };
        match taken {
            Ok(lease) => Ok(Contended::Leads { lease: Box::new(lease), asked }),
            // Another contender was faster, or our own write succeeded and its answer was lost: check again.
            Err(error) if is_code(&error, 409) || is_code(&error, 404) => Ok(Contended::Waits(self.retry())),
            Err(error) => Err(error),
        }
    }

    fn lead(&self, lease: Lease, renewed: Instant) -> Leadership {
        let (lost, told) = watch::channel(false);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(self.clone().keep(lease, renewed, lost, stopped));
        Leadership { lost: told, stop, task }
    }

    /// Renews until it is told to stop, another contender holds the lease, or no renewal succeeds for too
    /// long.
    async fn keep(
        self,
        mut lease: Lease,
        mut renewed: Instant,
        lost: watch::Sender<bool>,
        mut stop: oneshot::Receiver<()>,
    ) {
        let mut next = renewed + self.renew;
        loop {
            // The time counts from when the request was sent: others saw its effect only later.
            let deadline = renewed + self.deadline();
            let sent = next.min(deadline);
            let renewal = async {
                sleep_until(sent).await;
                timeout_at(deadline, self.renewal(&lease)).await
            };
            let answer = tokio::select! {
                biased;
                asked = &mut stop => {
                    lost.send_replace(true);
                    // A sender that was dropped without a message is like a crash: work may still be in
                    // progress.
                    if asked.is_ok() {
                        self.release().await;
                    }
                    return;
                }
                answer = renewal => answer,
            };
            match answer {
                Ok(Ok(Some(held))) => (lease, renewed, next) = (held, sent, sent + self.renew),
                Ok(Ok(None)) => {
                    warn!(lease = %self.name, "another contender holds the lease");
                    break;
                }
                Ok(Err(error)) => {
                    warn!(lease = %self.name, %error, "cannot renew the lease");
                    next = Instant::now() + self.retry();
                }
                Err(_) => {
                    warn!(lease = %self.name, "the lease was not renewed in time");
                    break;
                }
            }
        }
        lost.send_replace(true);
    }

    /// Renews the lease; `None` if another contender holds it by now, or it is gone.
    async fn renewal(&self, lease: &Lease) -> Result<Option<Lease>, kube::Error> {
        let mut lease = lease.clone();
        loop {
            match self.write(lease, |spec| self.held(spec)).await {
                Ok(held) => return Ok(Some(held)),
                Err(error) if is_code(&error, 404) => return Ok(None),
                Err(error) if is_code(&error, 409) => {}
                Err(error) => return Err(error),
            }
            // Either the answer of an earlier renewal was lost, or another client edited a label: the holder
            // decides.
            match self.api().get_opt(&self.name).await? {
                Some(current) if holder(current.spec.as_ref()) == Some(&self.identity) => lease = current,
                _ => return Ok(None),
            }
        }
    }

    /// Releases the lease, so that the next contender need not wait. If this fails, the lease expires.
    async fn release(&self) {
        let release = async {
            let Some(lease) = self.api().get_opt(&self.name).await? else { return Ok(()) };
            if holder(lease.spec.as_ref()) != Some(&self.identity) {
                return Ok(());
            }
            let nobodys =
                |spec: Option<LeaseSpec>| LeaseSpec { holder_identity: None, ..spec.unwrap_or_default() };
            self.write(lease, nobodys).await.map(|_| ())
        };
        match timeout(self.renew, release).await {
            Ok(Ok(())) => info!(lease = %self.name, "released the lease"),
            Ok(Err(error)) => warn!(lease = %self.name, %error, "cannot release the lease"),
            Err(_) => warn!(lease = %self.name, "cannot release the lease in time"),
        }
    }

    /// Replaces exactly the version that was read.
    async fn write(
        &self,
        lease: Lease,
        change: impl FnOnce(Option<LeaseSpec>) -> LeaseSpec,
    ) -> Result<Lease, kube::Error> {
        let lease = Lease { metadata: lease.metadata, spec: Some(change(lease.spec)) };
        self.api().replace(&self.name, &PostParams::default(), &lease).await
    }

    /// The record with us as the holder. Its times are for people only.
    fn held(&self, before: Option<LeaseSpec>) -> LeaseSpec {
        let (now, before) = (MicroTime(Timestamp::now()), before.unwrap_or_default());
        let same = before.holder_identity.as_ref() == Some(&self.identity);
        let transitions = before.lease_transitions.unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.duration.as_secs().max(1)).unwrap_or(i32::MAX)),
            acquire_time: before.acquire_time.filter(|_| same).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if same { transitions } else { transitions.saturating_add(1) }),
            ..before
        }
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// How long after its last renewal a leader still leads. The margin to the lease's duration exceeds the
    /// time after which any request is given up as lost.
    fn deadline(&self) -> Duration {
        self.duration * 2 / 3
    }

    /// The wait after a failure: it allows several tries before the deadline.
    fn retry(&self) -> Duration {
        self.renew / 5
    }
}

/// Leadership, held until it is released, dropped or lost. When [`Leadership::lost`] becomes true, stop
/// everything that only a leader may do.
pub struct Leadership {
    lost: watch::Receiver<bool>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Leadership {
    /// Becomes true when this process no longer leads.
    pub fn lost(&self) -> watch::Receiver<bool> {
        self.lost.clone()
    }

    /// Releases the leadership. Call it once all work that only a leader may do has stopped.
    pub async fn release(self) {
        let Self { lost: _, stop, task } = self;
        // Both fail only if the leadership is already lost.
        let _ = stop.send(());
        let _ = task.await;
    }
}

/// The lease as it was last read, and how long it has been unchanged by our own clock.
struct Seen {
    lease: Option<Lease>,
    since: Instant,
}

impl Seen {
    /// Only the record counts: a client that edits a label does not keep a dead leader alive.
    fn note(&mut self, lease: Option<Lease>, now: Instant) {
        if lease.as_ref().and_then(|lease| lease.spec.as_ref()) != self.spec() {
            self.since = now;
        }
        self.lease = lease;
    }

    fn spec(&self) -> Option<&LeaseSpec> {
        self.lease.as_ref().and_then(|lease| lease.spec.as_ref())
    }
}

/// Decides what to do about a lease whose record has not changed for some time. Pure.
fn decide(lease: Option<&Lease>, unchanged: Duration, duration: Duration, identity: &str) -> Step {
    let Some(lease) = lease else { return Step::Create };
    let record = lease.spec.as_ref();
    match holder(record) {
        // It was released; or it is ours, by a write whose answer was lost.
        None => Step::Take,
        Some(held_by) if held_by == identity => Step::Take,
        Some(_) => {
            // The holder's own duration, which may come from another version.
            let promised = record.and_then(|record| u64::try_from(record.lease_duration_seconds?).ok());
            let left = promised.map_or(duration, Duration::from_secs).saturating_sub(unchanged);
            if left.is_zero() { Step::Take } else { Step::Wait(left) }
        }
    }
}

fn holder(record: Option<&LeaseSpec>) -> Option<&String> {
    record.and_then(|record| record.holder_identity.as_ref()).filter(|holder| !holder.is_empty())
}

fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Duration = Duration::from_secs(10);

    fn lease(holder: &str, seconds: Option<i32>) -> Lease {
        let holder_identity = Some(holder.to_owned());
        let spec = LeaseSpec { holder_identity, lease_duration_seconds: seconds, ..LeaseSpec::default() };
        Lease { spec: Some(spec), ..Lease::default() }
    }

    fn step(lease: Option<Lease>, unchanged: u64) -> Step {
        decide(lease.as_ref(), Duration::from_secs(unchanged), TEN, "us")
    }

    #[test]
    fn a_lease_that_nobody_holds_is_taken_at_once() {
        assert_eq!(step(None, 0), Step::Create);
        assert_eq!(step(Some(Lease::default()), 0), Step::Take);
        assert_eq!(step(Some(lease("", Some(15))), 0), Step::Take);
        assert_eq!(step(Some(lease("us", Some(15))), 0), Step::Take);
    }

    #[test]
    fn the_lease_of_another_is_taken_only_when_it_has_not_changed_for_its_duration() {
        assert_eq!(step(Some(lease("them", Some(15))), 0), Step::Wait(Duration::from_secs(15)));
        assert_eq!(step(Some(lease("them", Some(15))), 14), Step::Wait(Duration::from_secs(1)));
        assert_eq!(step(Some(lease("them", Some(15))), 15), Step::Take);
        assert_eq!(step(Some(lease("them", None)), 9), Step::Wait(Duration::from_secs(1)));
        assert_eq!(step(Some(lease("them", None)), 10), Step::Take);
    }

    /// A record whose times are years off is judged like any other, because only our own clock counts.
    #[test]
    fn the_clock_of_the_holder_does_not_matter() {
        let start = Instant::now();
        let at = |seconds: i64| {
            let mut lease = lease("them", Some(15));
            let time = Timestamp::from_second(seconds).map(MicroTime).ok();
            lease.spec.as_mut().unwrap().renew_time = time;
            Some(lease)
        };
        let mut seen = Seen { lease: None, since: start };
        for (second, written) in [(0, 4_000_000_000), (10, 0), (20, 4_000_000_000)] {
            let now = start + Duration::from_secs(second);
            seen.note(at(written), now);
            assert_eq!(seen.since, now, "a record that changes is alive");
        }
        seen.note(at(4_000_000_000), start + Duration::from_secs(35));
        let unchanged = start + Duration::from_secs(35) - seen.since;
        assert_eq!(decide(seen.lease.as_ref(), unchanged, TEN, "us"), Step::Take);
    }

    #[test]
    fn a_label_does_not_keep_a_dead_leader_alive() {
        let start = Instant::now();
        let mut seen = Seen { lease: Some(lease("them", Some(15))), since: start };
        let mut labelled = lease("them", Some(15));
        labelled.metadata.resource_version = Some("2".to_owned());
        seen.note(Some(labelled), start + TEN);
        assert_eq!(seen.since, start);
        assert_eq!(seen.lease.and_then(|lease| lease.metadata.resource_version).as_deref(), Some("2"));
    }
}
