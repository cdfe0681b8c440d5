//! Environment variables: names that every container runtime accepts, and one source each.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::EnvVar;

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};

pub(super) fn check(field: &Path, env: &[EnvVar], out: &mut Findings) {
    let mut seen = HashMap::new();
    for (index, variable) in env.iter().enumerate() {
        let at = field.index(index);
        if !is_name(&variable.name) {
            let message =
                format!("{} is not a valid name for an environment variable", quote(&variable.name));
            let fix = "use letters, digits, underscores, hyphens and dots, not starting with a digit, for example LOG_LEVEL";
            out.add(&at.field("name"), Rule::EnvName, message, fix);
        }
        if let Some(first) = seen.insert(&variable.name, index) {
            let message = format!("{} is set twice, first at {}", quote(&variable.name), field.index(first));
            out.add(&at.field("name"), Rule::EnvUnique, message, "keep one of the two");
        }
        check_source(&at, variable, out);
    }
}

fn check_source(at: &Path, variable: &EnvVar, out: &mut Findings) {
    let Some(from) = &variable.value_from else { return };
    let sources = [
        from.config_map_key_ref.is_some(),
        from.field_ref.is_some(),
        from.resource_field_ref.is_some(),
        from.secret_key_ref.is_some(),
    ];
    let set = sources.iter().filter(|set| **set).count();
    if variable.value.as_ref().is_some_and(|value| !value.is_empty()) {
        let message = format!("{} has both value and valueFrom", quote(&variable.name));
        out.add(at, Rule::EnvSource, message, "keep one of the two");
    } else if set != 1 {
        let message = format!("valueFrom of {} names {set} sources", quote(&variable.name));
        let fix = "name exactly one of configMapKeyRef, fieldRef, resourceFieldRef and secretKeyRef";
        out.add(&at.field("valueFrom"), Rule::EnvSource, message, fix);
    }
}

fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let dots = name == "." || name.starts_with("..");
    !name.is_empty() && !dots && name.chars().all(allowed) && !name.starts_with(|c: char| c.is_ascii_digit())
}
