//! The hash of a run's identity: the ledger uses it to tell whether a run with this id was executed before.

use crds::v1alpha1::PipelineRun;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The hash of the run's identity, which is the part of its spec that cannot change.
pub fn spec_hash(run: &PipelineRun) -> String {
    let mut spec = json!(run.spec);
    for path in ["/suspend", "/execution/parallelism", "/execution/maxFailedFiles"] {
        if let Some(value) = spec.pointer_mut(path) {
            *value = Value::Null;
        }
    }
    // Sort these lists, which act as a map and a set and may be written in any order.
    let by_text = |one: &Value| one.to_string();
    for path in ["/env", "/execution/nonRetryableExitCodes"] {
        if let Some(items) = spec.pointer_mut(path).and_then(Value::as_array_mut) {
            items.sort_by_key(by_text);
        }
    }
    let mut text = String::new();
    canonical(&spec, &mut text);
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Appends JSON with sorted fields and without empty ones: the same, regardless of how it was written.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut sorted: Vec<_> = fields.iter().filter(|(_, value)| !value.is_null()).collect();
            sorted.sort_by_key(|(name, _)| name.as_str());
            out.push('{');
            for (name, value) in sorted {
                out.push_str(&Value::from(name.as_str()).to_string());
                out.push(':');
                canonical(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn hash(spec: Value) -> String {
        let run = json!({"apiVersion": "filter.plainsight.ai/v1alpha1", "kind": "PipelineRun", "metadata": {"name": "r"}, "spec": spec});
        spec_hash(&serde_json::from_value(run).unwrap())
    }

    #[test]
    fn only_what_cannot_change_makes_a_run() {
        let plain = hash(json!({"pipelineRef": {"name": "p"}}));
        let paused = json!({"pipelineRef": {"name": "p"}, "suspend": true, "execution": {"parallelism": 77, "maxFailedFiles": "3%"}});
        assert_eq!(hash(paused), plain);
        assert_ne!(hash(json!({"pipelineRef": {"name": "q"}})), plain);
        assert_ne!(hash(json!({"pipelineRef": {"name": "p"}, "execution": {"maxAttempts": 4}})), plain);
        assert_eq!(hash(json!({"execution": {}, "pipelineRef": {"name": "p"}})), plain);
    }

    /// The webhook does not treat another order as a change, so the ledger must not either.
    #[test]
    fn the_order_of_variables_and_exit_codes_means_nothing() {
        let with = |env: [&str; 2], codes: [i32; 2]| {
            let env = env.map(|name| json!({"name": name, "value": "1"}));
            hash(
                json!({"pipelineRef": {"name": "p"}, "env": env, "execution": {"nonRetryableExitCodes": codes}}),
            )
        };
        assert_eq!(with(["A", "B"], [2, 3]), with(["B", "A"], [3, 2]));
        assert_ne!(with(["A", "B"], [2, 3]), with(["A", "C"], [2, 3]));
    }
}
