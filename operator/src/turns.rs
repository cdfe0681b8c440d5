//! Turns of listings. However many runs start together, only a few listings request or add a page at a time,
//! and all their answers and pages fit into a budget. Otherwise the operator would run out of memory, and
//! calls of Valkey would time out. A listing gives its turn back after a page if others wait, so that a small
//! bucket does not wait for a large one. Namespaces take turns, so that a single run in one namespace does
//! not wait for hundreds in another.

use std::pin::pin;
use std::time::Duration;

use storage::{ListedPage, PAGE_BYTES_MAX, StorageError};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::fair::{Permit, Permits};

/// The most memory that one request may need: the longest answer, and as much again for the parsed page.
const ANSWER_KIB: usize = 2 * PAGE_BYTES_MAX / 1_024;
/// The most memory that listings may need together: a quarter of the operator's default memory. Slow services
/// get half as much in addition.
const KIB_MAX: usize = 128 * 1_024;
/// Services usually answer within a second. A slower one must not delay listings of other services, so it
/// continues in the slow lane.
const PROMPT: Duration = Duration::from_secs(5);

/// Hands out turns, shared between namespaces.
#[derive(Debug)]
pub struct Turns {
    prompt: Lane,
    slow: Lane,
}

/// Turns, and the memory shared by all listings that have one.
#[derive(Debug)]
struct Lane {
    turns: Permits,
    /// First come, first served: only the few listings with a turn wait for it.
    room: Semaphore,
    answer_kib: u32,
}

/// Permission to request and add pages, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    lane: &'a Lane,
    namespace: &'a str,
    permit: Option<Permit>,
}

/// Memory reserved for an answer or a page, until it is dropped.
#[derive(Debug)]
pub struct Room<'a>(Option<SemaphorePermit<'a>>);

impl Turns {
    /// Allows this many listings at once.
    pub fn new(listings: usize) -> Self {
        Self::within(listings, KIB_MAX)
    }

    /// Allows this many listings at once, with memory for this many answers: for tests of a shortage.
    pub fn with_room_for(answers: usize, listings: usize) -> Self {
        Self::within(listings, answers * ANSWER_KIB)
    }

    fn within(listings: usize, kib: usize) -> Self {
        Self { prompt: Lane::new(listings, kib), slow: Lane::new(listings / 2, kib / 2) }
    }

    /// Waits for a turn of a run in this namespace.
    pub async fn next<'a>(&'a self, namespace: &'a str) -> Turn<'a> {
        let permit = self.prompt.turns.acquire(namespace).await;
        Turn { turns: self, lane: &self.prompt, namespace, permit: Some(permit) }
    }
}

impl Lane {
    fn new(listings: usize, kib: usize) -> Self {
        let answer_kib = u32::try_from(ANSWER_KIB.min(kib)).unwrap_or(u32::MAX);
        Self { turns: Permits::new(listings.max(1)), room: Semaphore::new(kib), answer_kib }
    }

    /// Waits for memory. The semaphore is never closed, so there is room eventually.
    async fn room(&self) -> Room<'_> {
        Room(self.room.acquire_many(self.answer_kib).await.ok())
    }
}

impl<'a> Turn<'a> {
    /// Requests a page, once there is room for the answer.
    pub async fn ask(
        &mut self,
        request: impl Future<Output = Result<ListedPage, StorageError>>,
    ) -> Result<(ListedPage, Room<'a>), StorageError> {
        let room = self.lane.room().await;
        self.ask_with(room, request).await
    }

    /// Reserves room for another page, if no other listing waits for it. Turns are handed out in order, so
    /// none waits while one is free.
    pub fn room_ahead(&self) -> Option<Room<'a>> {
        if !self.lane.turns.is_one_free() {
            return None;
        }
        self.lane.room.try_acquire_many(self.lane.answer_kib).ok().map(|room| Room(Some(room)))
    }

    /// Requests a page with room that is already reserved.
    pub async fn ask_with(
        &mut self,
        room: Room<'a>,
        request: impl Future<Output = Result<ListedPage, StorageError>>,
    ) -> Result<(ListedPage, Room<'a>), StorageError> {
        let mut request = pin!(request);
        let mut room = room;
        loop {
            if let Ok(answer) = tokio::time::timeout(PROMPT, request.as_mut()).await {
                return answer.map(|page| {
                    room.shrink_to(page.bytes());
                    (page, room)
                });
            }
            drop(room);
            room = self.step_aside().await;
        }
    }

    /// Leaves the lane, and continues when its turn comes in the slow lane. Meanwhile the request is
    /// suspended, and its answer stays in the socket.
    async fn step_aside(&mut self) -> Room<'a> {
        self.permit = None;
        self.lane = &self.turns.slow;
        self.permit = Some(self.lane.turns.acquire(self.namespace).await);
        self.lane.room().await
    }
}

impl Room<'_> {
    /// Frees the memory that the page does not need.
    fn shrink_to(&mut self, bytes: usize) {
        if let Room(Some(permit)) = self {
            drop(permit.split(permit.num_permits().saturating_sub(bytes.div_ceil(1_024))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use storage::Skipped;

    fn page() -> ListedPage {
        ListedPage { files: Vec::new(), skipped: Skipped::default(), next: None }
    }

    async fn answer_after(seconds: u64) -> Result<ListedPage, StorageError> {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        Ok(page())
    }

    #[tokio::test]
    async fn as_many_listings_have_a_turn_as_may_and_the_next_one_waits() {
        let turns = Turns::new(2);
        let (one, _two) = (turns.next("a").await, turns.next("a").await);
        assert!(turns.next("a").now_or_never().is_none());
        drop(one);
        assert!(turns.next("a").now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_run_waits_for_one_turn_however_many_runs_of_another_namespace_start_with_it() {
        let turns = Turns::new(1);
        let listing = turns.next("busy").await;
        let mut busy: Vec<_> = (0..300).map(|_| Box::pin(turns.next("busy"))).collect();
        assert!(busy.iter_mut().all(|waiting| waiting.now_or_never().is_none()));
        let mut quiet = Box::pin(turns.next("quiet"));
        assert!((&mut quiet).now_or_never().is_none());
        drop(listing);
        let next = busy.iter_mut().find_map(FutureExt::now_or_never);
        assert!(next.is_some() && (&mut quiet).now_or_never().is_none(), "busy asked first");
        drop(next);
        assert!(quiet.now_or_never().is_some(), "then it is the turn of quiet");
    }

    #[tokio::test]
    async fn answers_share_a_budget_and_a_page_keeps_only_what_it_needs() {
        let turns = Turns::with_room_for(2, 9);
        let (mut one, mut two, mut three) =
            (turns.next("a").await, turns.next("a").await, turns.next("a").await);
        let (slow, room) = (one.room_ahead(), two.room_ahead());
        assert!(slow.is_some() && three.room_ahead().is_none(), "there is room for two answers");
        assert!(three.ask(answer_after(0)).now_or_never().is_none(), "the third waits");
        drop(room);
        let (_page, _room) = two.ask(answer_after(0)).await.unwrap();
        assert!(three.ask(answer_after(0)).await.is_ok(), "an empty page needs next to nothing");
        drop(slow);
        assert!(one.ask(answer_after(0)).await.is_ok());
    }

    #[tokio::test]
    async fn a_listing_looks_ahead_only_while_a_turn_is_free() {
        let turns = Turns::new(2);
        let one = turns.next("a").await;
        assert!(one.room_ahead().is_some());
        let _two = turns.next("a").await;
        assert!(one.room_ahead().is_none(), "a third one may wait");
    }

    /// Services that do not answer wait for each other; other services do not wait for them.
    #[tokio::test(start_paused = true)]
    async fn a_slow_service_does_not_keep_the_others_waiting() {
        let turns = Turns::new(2);
        let started = tokio::time::Instant::now();
        let prompt = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for _ in 0..100 {
                turns.next("a").await.ask(answer_after(0)).await?;
            }
            Ok(started.elapsed())
        };
        let slow = futures::future::try_join_all((0..3).map(|_| slow_listing(&turns)));
        let (_, took) = futures::future::try_join(slow, prompt).await.unwrap();
        assert!(took < PROMPT * 4, "{took:?}");
    }

    async fn slow_listing(turns: &Turns) -> Result<(), StorageError> {
        let mut turn = turns.next("a").await;
        turn.ask(answer_after(600)).await.map(|_| ())
    }
}
