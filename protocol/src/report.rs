//! The termination message of claimer and publisher: one line that names the entry, so that the operator
//! settles exactly what this pod processed, and states how it ended. The kubelet cuts messages, so the part
//! of unknown length comes last.

use std::fmt;
use std::str::FromStr;

use crate::Exit;

/// The longest message: a pod's status keeps at most 4 KiB per container, and a run keeps only the start of
/// it.
const MESSAGE_BYTES_MAX: usize = 1_024;
/// The length that is never cut. The kubelet keeps 12 KiB for all containers of a pod; with 32 filters,
/// claimer and publisher, that is 361 bytes each, so a shorter message was not cut.
const MESSAGE_BYTES_KEPT: usize = 361;
/// The entry's placeholder while no file is claimed.
const NO_ENTRY: &str = "-";
const OK: &str = "ok";

/// How a claimer or publisher ended:
/// `<entry or -> <attempt> <ok | ExitName | ExitName+up | ExitName+down> <startMs>-<endMs> <text…>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Id of the entry in the work stream; absent before a file is claimed, and always absent from the
    /// publisher.
    pub entry: Option<String>,
    /// Which attempt of the file this is, counted from 1; 0 if unknown.
    pub attempt: u64,
    /// How it ended.
    pub outcome: Result<(), Exit>,
    /// After a storage failure, whether a previously read object is still readable; absent if there is no
    /// such object.
    pub canary: Option<bool>,
    /// When the file was claimed, or when the program started if none was; in milliseconds since 1970.
    pub started_ms: u64,
    /// When it ended, in milliseconds since 1970.
    pub ended_ms: u64,
    /// On success, the key of the object that was fetched or published last; otherwise what failed and why.
    pub text: String,
}

impl Report {
    /// Parses a message, even one that was cut; `None` for any other text. Pass it untrimmed, because keys
    /// may end in spaces.
    pub fn parse(message: &str) -> Option<Self> {
        let mut words = message.splitn(5, ' ');
        let entry = match words.next()? {
            NO_ENTRY => None,
            id => Some(entry_id(id)?),
        };
        let attempt = number(words.next()?)?;
        let (outcome, canary) = outcome(words.next()?)?;
        let (started, ended) = words.next()?.split_once('-')?;
        let (started_ms, ended_ms) = (number(started)?, number(ended)?);
        let text = words.next().unwrap_or_default().to_owned();
        Some(Self { entry, attempt, outcome, canary, started_ms, ended_ms, text })
    }

    /// The key of an object that was fetched or published, if it is certainly exact: neither cut nor escaped.
    pub fn key(&self) -> Option<&str> {
        let whole = self.to_string().len() < MESSAGE_BYTES_KEPT;
        let plain = !self.text.is_empty() && !self.text.contains('\\');
        (self.outcome.is_ok() && whole && plain).then_some(self.text.as_str())
    }

    /// The failure in readable form: `<ExitName>: <text>`.
    pub fn reason(&self) -> Option<String> {
        self.outcome.err().map(|exit| one_line(&format!("{}: {}", exit.as_ref(), self.text)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, attempt, outcome, canary, started_ms, ended_ms, text } = self;
        let outcome = outcome.map_or_else(|exit| with_canary(exit, *canary), |()| OK.to_owned());
        let entry = entry.as_deref().unwrap_or(NO_ENTRY);
        let line = format!("{entry} {attempt} {outcome} {started_ms}-{ended_ms} {text}");
        f.write_str(&one_line(&line))
    }
}

/// `<milliseconds>-<sequence>`, as Valkey writes it.
fn entry_id(word: &str) -> Option<String> {
    let (time, sequence) = word.split_once('-')?;
    number(time).and(number(sequence)).map(|_| word.to_owned())
}

/// Only digits are valid: `parse` alone would accept a sign.
pub(crate) fn number(word: &str) -> Option<u64> {
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?
}

fn outcome(word: &str) -> Option<(Result<(), Exit>, Option<bool>)> {
    if word == OK {
        return Some((Ok(()), None));
    }
    canary_and_exit(word).map(|(exit, canary)| (Err(exit), canary))
}

/// `ExitName`, `ExitName+up` or `ExitName+down`.
pub(crate) fn with_canary(exit: Exit, canary: Option<bool>) -> String {
    let canary = match canary {
        None => "",
        Some(true) => "+up",
        Some(false) => "+down",
    };
    format!("{}{canary}", exit.as_ref())
}

/// Parses the output of [`with_canary`].
pub(crate) fn canary_and_exit(word: &str) -> Option<(Exit, Option<bool>)> {
    let (name, canary) = match word.split_once('+') {
        None => (word, None),
        Some((name, "up")) => (name, Some(true)),
        Some((name, "down")) => (name, Some(false)),
        Some(_) => return None,
    };
    Some((Exit::from_str(name).ok()?, canary))
}

/// Escapes control characters, which keys may contain, and cuts long text.
pub(crate) fn one_line(text: &str) -> String {
    let mut line: String = text
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if line.len() > MESSAGE_BYTES_MAX {
        let end = line.floor_char_boundary(MESSAGE_BYTES_MAX - '…'.len_utf8());
        line.truncate(end);
        line.push('…');
    }
    line
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use strum::VariantArray;

    fn fetched(key: &str) -> Report {
        Report {
            entry: Some("1763405000000-12".to_owned()),
            attempt: 3,
            outcome: Ok(()),
            canary: None,
            started_ms: 1_763_405_001_000,
            ended_ms: 1_763_405_002_500,
            text: key.to_owned(),
        }
    }

    /// A report of each kind, with texts that could be mistaken for other parts.
    fn all() -> Vec<Report> {
        let mut all: Vec<Report> =
            ["a.mp4", " a  b ", "- 0 ok 1-2 x", "ü/日本.mp4", "", "a+b"].map(fetched).to_vec();
        for exit in Exit::VARIANTS {
            for canary in [None, Some(true), Some(false)] {
                let text = "fetch the file: s3://b/a b: no usable answer".to_owned();
                all.push(Report { outcome: Err(*exit), canary, text, ..fetched("") });
            }
        }
        all.push(Report {
            entry: None,
            attempt: 0,
            outcome: Err(Exit::QueueDenied),
            text: "claim a file".to_owned(),
            ..fetched("")
        });
        all
    }

    #[test]
    fn what_is_written_is_read_again() {
        for report in all() {
            assert_eq!(Report::parse(&report.to_string()), Some(report));
        }
    }

    #[test]
    fn the_form_is_fixed() {
        assert_eq!(
            fetched("in/a.mp4").to_string(),
            "1763405000000-12 3 ok 1763405001000-1763405002500 in/a.mp4"
        );
        let failed = Report {
            entry: None,
            attempt: 0,
            outcome: Err(Exit::NoAccess),
            canary: Some(true),
            ..fetched("why")
        };
        assert_eq!(failed.to_string(), "- 0 NoAccess+up 1763405001000-1763405002500 why");
        assert_eq!(failed.reason().as_deref(), Some("NoAccess: why"));
        assert_eq!(fetched("a").reason(), None);
    }

    #[test]
    fn a_message_that_kubelet_cut_still_says_everything_but_the_text() {
        for mut report in all() {
            report.text = format!("{}{}", report.text, "ü".repeat(300));
            let message = report.to_string();
            for end in (100..message.len()).filter(|end| message.is_char_boundary(*end)) {
                let cut = Report::parse(&message[..end]).unwrap();
                assert!(report.text.starts_with(&cut.text));
                assert_eq!(Report { text: report.text.clone(), ..cut }, report, "{end}");
            }
        }
        assert_eq!(Report::parse("1-0 1 ok 5-9"), Some(Report { text: String::new(), ..small() }));
    }

    fn small() -> Report {
        Report { entry: Some("1-0".to_owned()), attempt: 1, started_ms: 5, ended_ms: 9, ..fetched("a") }
    }

    #[test]
    fn no_other_text_is_taken_for_a_report() {
        for other in [
            "",
            " ",
            "-",
            "- 0",
            "- 0 ok",
            "- 0 ok 5",
            "- 0 ok -5-9 a",
            "- +1 ok 5-9 a",
            "- 0 fine 5-9 a",
            "- 0 NoAccess+maybe 5-9 a",
            "- 0 ok+up 5-9 a",
            "1 0 ok 5-9 a",
            "1-x 0 ok 5-9 a",
            "1-0  1 ok 5-9 a",
            "1-0 18446744073709551616 ok 5-9 a",
            "ObjectGone: fetch the file: s3://b/a: not found: 404 NoSuchKey",
            "claimed s3://bkt/a (attempt 1) after 12ms",
            "thread 'main' panicked at src/main.rs:1:1",
        ] {
            assert_eq!(Report::parse(other), None, "{other:?}");
        }
    }

    /// Tries every message with one part replaced, removed or repeated by every other part.
    #[test]
    fn no_text_makes_it_panic_and_what_it_accepts_it_writes_the_same() {
        let parts =
            ["-", "1-0", "0", "ok", "NoAccess+up", "5-9", "+", "ü", "\n", "", "18446744073709551615", "-1"];
        let mut accepted = 0;
        for a in parts {
            for b in parts {
                for c in parts {
                    for d in parts {
                        let text = format!("{a} {b} {c} {d} x");
                        if let Some(report) = Report::parse(&text) {
                            assert_eq!(Report::parse(&report.to_string()), Some(report), "{text:?}");
                            accepted += 1;
                        }
                    }
                }
            }
        }
        assert!(accepted > 0);
    }

    #[test]
    fn a_message_is_one_line_of_bounded_length() {
        let line = fetched(&format!("a\nb\r\u{0}{}", "ü".repeat(2_000))).to_string();
        assert!(line.contains(" a\\nb\\r\\u{0}ü") && line.ends_with('…'), "{line}");
        assert!(line.len() <= MESSAGE_BYTES_MAX);
    }

    #[test]
    fn a_key_is_given_only_if_it_is_the_exact_one() {
        let read = |report: Report| Report::parse(&report.to_string()).unwrap();
        assert_eq!(read(fetched(" in/a b.mp4 ")).key(), Some(" in/a b.mp4 "));
        assert_eq!(read(fetched(&"k".repeat(300))).key(), Some("k".repeat(300).as_str()));
        assert_eq!(read(fetched(&"k".repeat(361))).key(), None, "kubelet may have cut it");
        assert_eq!(read(fetched("new\nline")).key(), None, "it was escaped");
        assert_eq!(read(fetched("new\\nline")).key(), None, "it looks as if it was escaped");
        assert_eq!(read(fetched("")).key(), None);
        assert_eq!(read(Report { outcome: Err(Exit::NoAccess), ..fetched("a") }).key(), None);
    }
}
