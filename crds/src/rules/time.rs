//! Durations in the notation of Go, Kubernetes and CEL: `90s`, `15m`, `1h30m`, `500ms`.

use std::time::Duration;

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, quote};

/// No limit of a run is longer than a year; it also keeps every sum of durations far from overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Parses a duration; `None` if it is not one.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number = &rest[..digits];
        if number.is_empty() || number.starts_with('.') || number.ends_with('.') {
            return None;
        }
        rest = &rest[digits..];
        let unit_end = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let seconds = match &rest[..unit_end] {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        rest = &rest[unit_end..];
        total =
            total.checked_add(Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?)?;
    }
    (!text.is_empty()).then_some(total)
}

/// Checks a duration field that must be at least `least`, and returns it if it is well-formed.
pub(super) fn check(field: &Path, text: &str, least: Duration, out: &mut Findings) -> Option<Duration> {
    let Some(duration) = parse_duration(text) else {
        let message = format!("{} is not a duration", quote(text));
        out.add(
            field,
            Rule::Duration,
            message,
            "write a number with ms, s, m or h, for example 90s, 15m or 1h30m",
        );
        return None;
    };
    if duration < least || duration > LONGEST {
        let message = format!("{} is not between {}s and one year", quote(text), least.as_secs_f64());
        out.add(field, Rule::Duration, message, "write a duration in this range, for example 15m");
    }
    Some(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_kubernetes_reads_them() {
        for (text, seconds) in
            [("90s", 90.0), ("15m", 900.0), ("1h30m", 5400.0), ("500ms", 0.5), ("1.5h", 5400.0), ("0s", 0.0)]
        {
            assert_eq!(parse_duration(text), Some(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in [
            "",
            "15",
            "15 m",
            "15min",
            "m",
            "-1s",
            "1d",
            "1.s",
            ".5s",
            "1..5s",
            "１s",
            "1e3s",
            "9999999999999999999999999h",
        ] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }
}
