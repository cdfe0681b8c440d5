//! Mutated reviews: whatever comes, the answer is an answer. `REVIEWS` says how many (2,000 by default).

use proptest::prelude::Rng;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use tests::examples::{grant, pipeline, policy, run};

use crate::harness::{Webhook, over, path, review};

/// What people, tools and attackers put where it does not belong.
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

/// Changes one place, or several, anywhere in the value.
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

#[tokio::test(flavor = "multi_thread")]
async fn mutated_reviews_are_answered_and_never_bring_it_down() {
    let count: u32 = std::env::var("REVIEWS").ok().and_then(|count| count.parse().ok()).unwrap_or(2000);
    let webhook = Webhook::start();
    webhook.policy(&policy());
    webhook.pipeline(&pipeline());
    webhook.grant(&grant());
    let mut connection = webhook.client().http2().await;
    let mut runner =
        TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let objects = [pipeline(), run(), policy(), grant()];
    let (mut judged, mut refused) = (0, 0);
    for number in 0..count {
        let rng = runner.rng();
        let object = &objects[number as usize % objects.len()];
        let operation = ["CREATE", "UPDATE", "DELETE", "CONNECT"][rng.next_u32() as usize % 4];
        let mut question = review(operation, object);
        for _ in 0..=rng.next_u32() % 3 {
            mutate(&mut question, rng, 6);
        }
        let mut body = serde_json::to_vec(&question).unwrap();
        // A few are broken as bytes.
        if rng.next_u32().is_multiple_of(20) && !body.is_empty() {
            let at = rng.next_u32() as usize % body.len();
            body[at] ^= 1 << (rng.next_u32() % 8);
        }
        for step in ["mutate", "validate"] {
            let (status, answer) = over(&mut connection, &path(step, object), body.clone()).await.unwrap();
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            match status.as_u16() {
                200 => {
                    assert!(answer["response"]["allowed"].is_boolean(), "{answer}");
                    assert!(answer["response"]["uid"].is_string(), "{answer}");
                    judged += 1;
                }
                400 => {
                    assert!(answer["message"].as_str().is_some_and(|text| text.len() > 10), "{answer}");
                    refused += 1;
                }
                other => panic!("{other} for {}", String::from_utf8_lossy(&body)),
            }
        }
    }
    assert!(judged > count / 2 && refused > 0, "{judged} judged, {refused} refused");
}
