//! Resource quantities (`500m`, `2Gi`): well-formed, and requests within limits.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::path::Path;
use super::rule::Rule;
use super::suggest;
use super::violation::{Findings, quote};

/// Quantities are compared in billionths, the smallest unit of Kubernetes (`n`).
pub(crate) type Nanos = i128;

pub(super) fn check(field: &Path, resources: &ResourceRequirements, out: &mut Findings) {
    let requests = parse_all(&field.field("requests"), resources.requests.as_ref(), out);
    let limits = parse_all(&field.field("limits"), resources.limits.as_ref(), out);
    for (name, (request, request_text)) in &requests {
        let Some((limit, limit_text)) = limits.get(name) else { continue };
        // Devices and huge pages cannot be overcommitted.
        let whole = name.contains('/') || name.starts_with("hugepages-");
        if whole && request != limit {
            let message =
                format!("the request {} differs from the limit {}", quote(request_text), quote(limit_text));
            let fix = format!("write {limit_text}: {name} cannot be overcommitted");
            out.add(&field.field("requests").field(name), Rule::RequestsWithinLimits, message, fix);
        } else if request > limit {
            let message =
                format!("the request {} is above the limit {}", quote(request_text), quote(limit_text));
            let fix = format!("lower it to at most {limit_text}, or raise limits.{name}");
            out.add(&field.field("requests").field(name), Rule::RequestsWithinLimits, message, fix);
        }
    }
}

fn parse_all<'a>(
    field: &Path,
    quantities: Option<&'a BTreeMap<String, Quantity>>,
    out: &mut Findings,
) -> BTreeMap<&'a str, (Nanos, &'a str)> {
    let mut parsed = BTreeMap::new();
    for (name, Quantity(text)) in quantities.into_iter().flatten() {
        check_resource_name(&field.field(name), name, out);
        match parse(text) {
            Some(nanos) if nanos >= 0 => {
                parsed.insert(name.as_str(), (nanos, text.as_str()));
            }
            Some(_) => {
                let message = format!("{} is negative", quote(text));
                out.add(&field.field(name), Rule::Quantity, message, "write zero or more");
            }
            None => {
                let message = format!("{} is not a quantity", quote(text));
                let fix = "write a number with an optional unit (m, k, M, G, T, Ki, Mi, Gi, Ti), for example 500m or 2Gi";
                out.add(&field.field(name), Rule::Quantity, message, fix);
            }
        }
    }
    parsed
}

/// Kubernetes has a few resources with a bare name; all others have a domain, such as `nvidia.com/gpu`.
fn check_resource_name(field: &Path, name: &str, out: &mut Findings) {
    const KNOWN: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
    if !KNOWN.contains(&name) && !name.starts_with("hugepages-") && !name.contains('/') {
        let message = format!("{} is not a resource", quote(name));
        out.add(field, Rule::ResourceName, message, suggest::fix(name, &KNOWN));
    }
}

/// The value in billionths; `None` if it is not a quantity. Any further precision is cut off, because no
/// resource has it.
pub(crate) fn parse(text: &str) -> Option<Nanos> {
    let (sign, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let digits: Nanos = format!("{whole}{fraction}").parse().ok()?;
    let (base, exponent): (Nanos, i32) = match suffix {
        "n" => (10, -9),
        "u" => (10, -6),
        "m" => (10, -3),
        "" => (10, 0),
        "k" => (10, 3),
        "M" => (10, 6),
        "G" => (10, 9),
        "T" => (10, 12),
        "P" => (10, 15),
        "E" => (10, 18),
        "Ki" => (1024, 1),
        "Mi" => (1024, 2),
        "Gi" => (1024, 3),
        "Ti" => (1024, 4),
        "Pi" => (1024, 5),
        "Ei" => (1024, 6),
        other => (10, other.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let places = u32::try_from(fraction.len()).ok()?;
    let scale = Nanos::checked_pow(10, 9)?;
    let nanos = if exponent >= 0 {
        let unit = base.checked_pow(exponent.unsigned_abs())?;
        digits.checked_mul(unit)?.checked_mul(scale)?.checked_div(Nanos::checked_pow(10, places)?)?
    } else {
        let divisor = Nanos::checked_pow(10, exponent.unsigned_abs().checked_add(places)?)?;
        digits.checked_mul(scale)?.checked_div(divisor)?
    };
    Some(sign * nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Nanos = 1_000_000_000;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, nanos) in [
            ("1", ONE),
            ("0.5", ONE / 2),
            (".5", ONE / 2),
            ("5.", 5 * ONE),
            ("500m", ONE / 2),
            ("1.5Gi", 3 * 512 * 1024 * 1024 * ONE),
            ("1e3", 1000 * ONE),
            ("2E-3", ONE / 500),
            ("7Ei", 7 * (1 << 60) * ONE),
            ("-1", -ONE),
        ] {
            assert_eq!(parse(text), Some(nanos), "{text}");
        }
        for text in ["", ".", "Gi", "1GB", "1 Gi", "1gi", "1..5", "1m5", "--1", "1e", "１", "1e999"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
