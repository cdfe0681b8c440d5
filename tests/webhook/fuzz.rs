//! Mutated reviews: whatever the webhook receives, it answers. `REVIEWS` sets their number (4,000 by
//! default). Each run of the test uses different mutations and prints their seed; `SEED` repeats those of an
//! earlier run.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use serde_json::{Value, json};
use tests::examples::{grant, pipeline, policy, run};

use crate::harness::{Client, Webhook, over, path, review};

/// Concurrent connections: enough to keep a server with two processors busy, and to make requests meet.
const CONNECTIONS: usize = 8;

/// A value that people, tools and attackers put where it does not belong.
fn odd(rng: &mut TestRng) -> Value {
    match rng.next_u32() % 16 {
        0 => json!(null),
        1 => json!(-1),
        2 => json!(u64::MAX),
        3 => json!(1e308),
        4 => json!(""),
        5 => json!("a".repeat(5000)),
        6 => json!("\u{0}\u{202e}ä%s${{}}"),
        7 => json!([]),
        8 => json!({}),
        9 => json!([[[[[[null]]]]]]),
        10 => json!({ "": { "": "" } }),
        11 => json!(true),
        12 => json!("object.spec.all(x, y)"),
        13 => json!("(((((((((((((((((((("),
        14 => json!("99999999999999999999999h"),
        _ => json!("{{{}}}"),
    }
}

/// Changes one or several places in the value.
fn mutate(value: &mut Value, rng: &mut TestRng, depth: u32) {
    let here = rng.next_u32().is_multiple_of(depth + 2);
    match value {
        Value::Object(fields) if !here && !fields.is_empty() => {
            let index = rng.next_u32() as usize % fields.len();
            let key = fields.keys().nth(index).cloned().unwrap();
            match rng.next_u32() % 8 {
                0 => drop(fields.remove(&key)),
                1 => drop(fields.insert(format!("{key}x"), odd(rng))),
                _ => mutate(fields.get_mut(&key).unwrap(), rng, depth.saturating_sub(1)),
            }
        }
        Value::Array(items) if !here && !items.is_empty() => {
            let index = rng.next_u32() as usize % items.len();
            match rng.next_u32() % 8 {
                0 => drop(items.remove(index)),
                1 => items.push(items[index].clone()),
                _ => mutate(&mut items[index], rng, depth.saturating_sub(1)),
            }
        }
        other => *other = odd(rng),
    }
}

/// How many reviews were judged, and how many were refused as malformed.
#[derive(Default)]
struct Answers {
    judged: usize,
    refused: usize,
}

/// The origin of the mutations.
#[derive(Clone, Copy)]
struct Seed(u64);

impl Seed {
    /// The requested seed, or a new one each time.
    fn given_or_new() -> Self {
        let given = std::env::var("SEED").map(|seed| seed.parse().expect("SEED is a number"));
        // The keys of a hasher are random, and so is its hash of nothing.
        Self(given.unwrap_or_else(|_| RandomState::new().build_hasher().finish()))
    }

    /// Gives each connection its own mutations.
    fn rng_of(self, connection: usize) -> TestRng {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&(connection as u64).to_le_bytes());
        TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
    }
}

/// Sends this many mutated reviews, one after the other.
async fn ask(client: Client, mut rng: TestRng, reviews: usize, shows_progress: bool) -> Answers {
    let mut connection = client.http2().await;
    let objects = [pipeline(), run(), policy(), grant()];
    let mut answers = Answers::default();
    for number in 0..reviews {
        let object = &objects[number % objects.len()];
        let operation = ["CREATE", "UPDATE", "DELETE", "CONNECT"][rng.next_u32() as usize % 4];
        let step = ["mutate", "validate"][rng.next_u32() as usize % 2];
        let mut question = review(operation, object);
        for _ in 0..=rng.next_u32() % 3 {
            // Mostly mutates the object: a malformed review is refused before its object is read.
            let held = if operation == "DELETE" { "/request/oldObject" } else { "/request/object" };
            let part = [held, held, "/request/oldObject", ""][rng.next_u32() as usize % 4];
            if let Some(part) = question.pointer_mut(part) {
                mutate(part, &mut rng, 6);
            }
        }
        let mut body = serde_json::to_vec(&question).unwrap();
        // Breaks some of them as bytes.
        if rng.next_u32().is_multiple_of(20) && !body.is_empty() {
            let at = rng.next_u32() as usize % body.len();
            body[at] ^= 1 << (rng.next_u32() % 8);
        }
        let (status, answer) = over(&mut connection, &path(step, object), body.clone())
            .await
            .unwrap_or_else(|error| panic!("{error} for {}", String::from_utf8_lossy(&body)));
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        match status.as_u16() {
            200 => {
                assert!(answer["response"]["allowed"].is_boolean(), "{answer}");
                assert!(answer["response"]["uid"].is_string(), "{answer}");
                answers.judged += 1;
            }
            400 => {
                assert!(answer["message"].as_str().is_some_and(|text| text.len() > 10), "{answer}");
                answers.refused += 1;
            }
            other => panic!("{other} for {}", String::from_utf8_lossy(&body)),
        }
        let sent = number + 1;
        if shows_progress && sent.is_multiple_of(10_000) {
            println!("{} of {} reviews are answered", sent * CONNECTIONS, reviews * CONNECTIONS);
        }
    }
    answers
}

#[test]
fn mutated_reviews_are_answered_and_never_bring_it_down() {
    // A panic in a policy becomes an answer, but is a bug all the same. The hook applies to the whole
    // process, so the threads have a name: a panic in another test is not the webhook's.
    const THREADS: &str = "fuzzed-webhook";
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, report) = (Arc::clone(&panics), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        // Expressions are parsed on a thread without a name; threads of tests have one.
        if std::thread::current().name().is_none_or(|name| name == THREADS) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        report(panic);
    }));
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_name(THREADS).enable_all().build();
    let seed = Seed::given_or_new();
    println!("SEED={} repeats these mutations", seed.0);
    runtime.unwrap().block_on(answer_mutated_reviews(seed));
    assert_eq!(panics.load(Ordering::Relaxed), 0, "panics are above");
}

async fn answer_mutated_reviews(seed: Seed) {
    let reviews: usize = std::env::var("REVIEWS").map_or(4_000, |count| count.parse().unwrap());
    let webhook = Webhook::start();
    webhook.policy(&policy());
    webhook.pipeline(&pipeline());
    webhook.grant(&grant());
    let each = reviews.div_ceil(CONNECTIONS);
    let ask = |number| tokio::spawn(ask(webhook.client(), seed.rng_of(number), each, number == 0));
    let asked = (0..CONNECTIONS).map(ask);
    let answers = futures::future::try_join_all(asked).await.unwrap();
    let judged: usize = answers.iter().map(|answers| answers.judged).sum();
    let refused: usize = answers.iter().map(|answers| answers.refused).sum();
    println!("{judged} reviews were judged, {refused} refused");
    assert!(judged > reviews / 2 && refused > 0, "{judged} judged, {refused} refused");
}
