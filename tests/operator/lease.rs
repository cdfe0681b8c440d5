//! One of two contenders leads, even if one dies, loses contact or is stopped.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use operator::lease::{DURATION, Election, Leadership, RENEW};
use testbed::Testbed;
use tokio::time::{Instant, sleep, timeout};

use crate::lease_api::LeaseApi;

fn contender(client: Client, identity: &str) -> Election {
    Election::new(client, "default", "operator", identity)
}

/// The maximum delay on the virtual clock, where answers take no time: timers have millisecond resolution,
/// and several run in sequence.
const AT_ONCE: Duration = Duration::from_millis(10);
/// The maximum delay with a real API server, on a machine that does other things too.
const SOON: Duration = Duration::from_secs(10);

async fn leads(election: &Election, within: Duration) -> Leadership {
    timeout(within, election.acquire()).await.expect("it leads in time")
}

async fn does_not_lead(election: &Election, during: Duration) {
    assert!(timeout(during, election.acquire()).await.is_err(), "two lead");
}

/// These scenarios also run on a real API server; `late` is the maximum delay.
async fn a_leader_stays_the_only_one(first: &Election, second: &Election, late: Duration) {
    let leader = leads(first, late).await;
    does_not_lead(second, first.duration * 2).await;
    assert!(!*leader.lost().borrow());
    leader.release().await;
}

async fn a_released_lease_is_taken_at_once(first: &Election, second: &Election, late: Duration) {
    let leader = leads(first, late).await;
    let lost = leader.lost();
    let waiting = async {
        let waited = Instant::now();
        (leads(second, first.duration * 3).await, waited.elapsed())
    };
    let release = async {
        sleep(first.renew * 2).await;
        leader.release().await;
    };
    let ((leader, waited), ()) = tokio::join!(waiting, release);
    assert!(*lost.borrow());
    // The lease was released after two renewals. The next contender checks as often as a leader renews;
    // without the release, the lease would have been held for longer.
    let (release, held) = (first.renew * 2, first.renew * 2 + first.duration);
    assert!(waited + late >= release && waited <= release + first.renew + late, "{waited:?}");
    assert!(waited < held, "{waited:?}");
    leader.release().await;
}

async fn a_dead_leader_is_replaced_when_its_time_is_up(first: &Election, second: &Election, late: Duration) {
    let leader = leads(first, late).await;
    let lost = leader.lost();
    let died = Instant::now();
    drop(leader);
    let leader = leads(second, first.duration * 2 + late).await;
    assert!(*lost.borrow());
    let waited = died.elapsed();
    // The dead leader last renewed when it acquired the lease, just before it died.
    assert!(waited + late >= first.duration && waited <= first.duration + first.renew + late, "{waited:?}");
    leader.release().await;
}

fn in_memory() -> (LeaseApi, Election, LeaseApi, Election) {
    let one = LeaseApi::default();
    let other = one.for_another();
    let (first, second) = (contender(one.client(), "first"), contender(other.client(), "second"));
    (one, first, other, second)
}

#[tokio::test(start_paused = true)]
async fn one_of_two_leads_for_as_long_as_it_lives() {
    let (_, first, _, second) = in_memory();
    a_leader_stays_the_only_one(&first, &second, AT_ONCE).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_takes_over_at_once_after_a_release() {
    let (api, first, _, second) = in_memory();
    a_released_lease_is_taken_at_once(&first, &second, AT_ONCE).await;
    assert_eq!((api.spec().holder_identity, api.spec().lease_transitions), (None, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn the_next_takes_over_after_a_death() {
    let (_, first, _, second) = in_memory();
    a_dead_leader_is_replaced_when_its_time_is_up(&first, &second, AT_ONCE).await;
}

/// The leader cannot know whether it is alone, so it stops; only then may the other start to lead.
#[tokio::test(start_paused = true)]
async fn a_leader_that_hears_nothing_stops_before_another_begins() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, AT_ONCE).await;
    let (lost, mut told) = (leader.lost(), leader.lost());
    api.silent.store(true, Ordering::SeqCst);
    let cut_off = Instant::now();
    let other = async {
        let leader = leads(&second, DURATION * 3).await;
        assert!(*lost.borrow(), "two lead");
        (cut_off.elapsed(), leader)
    };
    let itself = async {
        told.wait_for(|lost| *lost).await.unwrap();
        cut_off.elapsed()
    };
    let (stopped, (began, _leader)) = tokio::join!(itself, other);
    let (stops, begins) = (DURATION * 2 / 3, DURATION..=DURATION + RENEW + AT_ONCE);
    assert!(stopped.abs_diff(stops) <= AT_ONCE && begins.contains(&began), "{stopped:?} {began:?}");
}

#[tokio::test(start_paused = true)]
async fn a_short_silence_is_survived() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, AT_ONCE).await;
    api.silent.store(true, Ordering::SeqCst);
    sleep(Duration::from_secs(4)).await;
    api.silent.store(false, Ordering::SeqCst);
    does_not_lead(&second, DURATION * 2).await;
    assert!(!*leader.lost().borrow());
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_does_not_lock_its_writer_out() {
    let (api, first, ..) = in_memory();
    api.forgetful.store(true, Ordering::SeqCst);
    let leader = leads(&first, DURATION + AT_ONCE).await;
    api.forgetful.store(true, Ordering::SeqCst);
    // The request hangs for as long as the leader may lead; then the same contender may lead again.
    let mut lost = leader.lost();
    timeout(DURATION, lost.wait_for(|lost| *lost)).await.unwrap().unwrap();
    let leader = leads(&first, AT_ONCE).await;
    assert_eq!(api.spec().lease_transitions, Some(1));
    leader.release().await;
}

#[tokio::test(start_paused = true)]
async fn somebody_who_writes_a_label_changes_nothing() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, AT_ONCE).await;
    let label = |lease: &mut Option<Lease>| {
        lease.as_mut().unwrap().metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    };
    api.change(label);
    does_not_lead(&second, DURATION * 2).await;
    assert!(!*leader.lost().borrow());
}

async fn assert_lost_by(change: impl FnOnce(&mut Option<Lease>)) {
    let (api, first, ..) = in_memory();
    let leader = leads(&first, AT_ONCE).await;
    api.change(change);
    let mut lost = leader.lost();
    timeout(first.renew + AT_ONCE, lost.wait_for(|lost| *lost)).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_taken_or_deleted_is_lost() {
    assert_lost_by(|lease| *lease = None).await;
    assert_lost_by(|lease| {
        lease.as_mut().unwrap().spec.as_mut().unwrap().holder_identity = Some("third".to_owned());
    })
    .await;
}

/// The same scenarios on a real API server, with shorter times.
#[tokio::test]
#[ignore = "needs the cluster"]
async fn on_a_real_api_server_one_leads_and_the_next_takes_over() {
    let testbed = Testbed::start_or_reuse().await.unwrap();
    let namespace = testbed.namespace("lease").await.unwrap();
    let real = |identity: &str, name: &str| Election {
        duration: Duration::from_secs(20),
        renew: Duration::from_secs(4),
        ..Election::new(testbed.client(), &namespace.name, name, identity)
    };
    let pair = |name: &str| (real("first", name), real("second", name));
    let [only, released, dead] = ["only", "released", "dead"].map(pair);
    // Each scenario uses its own Lease, so that none waits for another.
    tokio::join!(
        a_leader_stays_the_only_one(&only.0, &only.1, SOON),
        a_released_lease_is_taken_at_once(&released.0, &released.1, SOON),
        a_dead_leader_is_replaced_when_its_time_is_up(&dead.0, &dead.1, SOON),
    );
    let leases: Api<Lease> = Api::namespaced(testbed.client(), &namespace.name);
    let spec = leases.get("dead").await.unwrap().spec.unwrap();
    assert_eq!((spec.holder_identity, spec.lease_transitions), (None, Some(2)));
}
