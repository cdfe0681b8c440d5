//! Of two contenders one leads, whatever dies, falls silent or is told to stop.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use operator::lease::{DURATION, Election, Leadership};
use testbed::Testbed;
use tokio::time::{Instant, sleep, timeout};

use crate::lease_api::LeaseApi;

fn contender(client: Client, identity: &str) -> Election {
    Election::new(client, "default", "operator", identity)
}

/// Soon, for a machine that does other things too.
const SOON: Duration = Duration::from_secs(10);

async fn leads(election: &Election, within: Duration) -> Leadership {
    timeout(within, election.acquire()).await.expect("it leads in time")
}

async fn does_not_lead(election: &Election, during: Duration) {
    assert!(timeout(during, election.acquire()).await.is_err(), "two lead");
}

/// The scenarios that a real API server shows as well.
async fn a_leader_stays_the_only_one(first: &Election, second: &Election) {
    let leader = leads(first, SOON).await;
    does_not_lead(second, first.duration * 2).await;
    assert!(!*leader.lost().borrow());
    leader.release().await;
}

async fn a_released_lease_is_taken_at_once(first: &Election, second: &Election) {
    let leader = leads(first, SOON).await;
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
    // It looks as often as a leader renews, and the lease would have been held for longer.
    assert!(waited <= first.renew * 3 + SOON && waited < first.duration + first.renew * 2, "{waited:?}");
    leader.release().await;
}

async fn a_dead_leader_is_replaced_when_its_time_is_up(first: &Election, second: &Election) {
    let leader = leads(first, SOON).await;
    let lost = leader.lost();
    let died = Instant::now();
    drop(leader);
    let leader = leads(second, first.duration * 2 + SOON).await;
    assert!(*lost.borrow());
    let waited = died.elapsed();
    // The dead one renewed last when it took the lease, just before it died.
    assert!(waited + SOON >= first.duration && waited <= first.duration + first.renew + SOON, "{waited:?}");
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
    a_leader_stays_the_only_one(&first, &second).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_takes_over_at_once_after_a_release() {
    let (api, first, _, second) = in_memory();
    a_released_lease_is_taken_at_once(&first, &second).await;
    assert_eq!((api.spec().holder_identity, api.spec().lease_transitions), (None, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn the_next_takes_over_after_a_death() {
    let (_, first, _, second) = in_memory();
    a_dead_leader_is_replaced_when_its_time_is_up(&first, &second).await;
}

/// The leader cannot know whether it is alone, so it stops; only then may the other begin.
#[tokio::test(start_paused = true)]
async fn a_leader_that_hears_nothing_stops_before_another_begins() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, SOON).await;
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
    assert!(stopped <= DURATION * 2 / 3 && began >= DURATION, "{stopped:?} {began:?}");
}

#[tokio::test(start_paused = true)]
async fn a_short_silence_is_survived() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, SOON).await;
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
    let leader = leads(&first, DURATION + SOON).await;
    api.forgetful.store(true, Ordering::SeqCst);
    // The request hangs for as long as the leader may lead, and the next leader may be the same.
    let mut lost = leader.lost();
    timeout(DURATION, lost.wait_for(|lost| *lost)).await.unwrap().unwrap();
    let leader = leads(&first, SOON).await;
    assert_eq!(api.spec().lease_transitions, Some(1));
    leader.release().await;
}

#[tokio::test(start_paused = true)]
async fn somebody_who_writes_a_label_changes_nothing() {
    let (api, first, _, second) = in_memory();
    let leader = leads(&first, SOON).await;
    let label = |lease: &mut Option<Lease>| {
        lease.as_mut().unwrap().metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    };
    api.change(label);
    does_not_lead(&second, DURATION * 2).await;
    assert!(!*leader.lost().borrow());
}

async fn assert_lost_by(change: impl FnOnce(&mut Option<Lease>)) {
    let (api, first, ..) = in_memory();
    let leader = leads(&first, SOON).await;
    api.change(change);
    let mut lost = leader.lost();
    timeout(first.renew + SOON, lost.wait_for(|lost| *lost)).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_taken_or_deleted_is_lost() {
    assert_lost_by(|lease| *lease = None).await;
    assert_lost_by(|lease| {
        lease.as_mut().unwrap().spec.as_mut().unwrap().holder_identity = Some("third".to_owned());
    })
    .await;
}

/// The same on a real API server, with shorter times.
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
    a_leader_stays_the_only_one(&real("first", "only"), &real("second", "only")).await;
    a_released_lease_is_taken_at_once(&real("first", "released"), &real("second", "released")).await;
    a_dead_leader_is_replaced_when_its_time_is_up(&real("first", "dead"), &real("second", "dead")).await;
    let leases: Api<Lease> = Api::namespaced(testbed.client(), &namespace.name);
    let spec = leases.get("dead").await.unwrap().spec.unwrap();
    assert_eq!((spec.holder_identity, spec.lease_transitions), (None, Some(2)));
}
