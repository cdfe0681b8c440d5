//! Reports of a worker that processes many files on one of them: a line in the queue's hash of states. Only
//! the operator decides what happens to the file. The part of unknown length comes last.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::Exit;
use crate::report::{canary_and_exit, number, one_line, with_canary};

/// Marks a started file whose results are being published.
const PUBLISHING: &str = "publishing";

/// The state of a file, and the pod that reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileState {
    /// The pod that holds the file.
    pub pod: String,
    /// The state of the file.
    pub state: State,
}

/// The state of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its filters work on it.
    Started,
    /// All filters succeeded, and the results are being published. This is separate from [`Self::Started`],
    /// because the filters already work on the next file: if they fail, this file is not affected.
    Publishing,
    /// All filters succeeded, and the results are published.
    Succeeded,
    /// It was not tried, and this pod will not try it.
    Released,
    /// A filter failed.
    FilterFailed(FilterFailure),
    /// It could not be fetched, or its results could not be published.
    TransferFailed(TransferFailure),
}

impl State {
    /// Whether this is the pod's last report on the file.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Started | Self::Publishing => false,
            Self::Succeeded | Self::Released | Self::FilterFailed(_) | Self::TransferFailed(_) => true,
        }
    }
}

/// How a filter failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterFailure {
    /// Name of the filter.
    pub filter: String,
    /// How it ended.
    pub ending: FilterEnding,
    /// Whether the kernel killed a process of its container for lack of memory meanwhile.
    pub oom_killed: bool,
    /// Whether its container had been told to end.
    pub after_term: bool,
    /// Its last output.
    pub text: String,
}

/// How a failed filter ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterEnding {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// It took too long.
    TimedOut,
    /// It answered that it cannot process the file.
    Refused {
        /// Whether another attempt may succeed.
        retry: bool,
    },
    /// Its answer was invalid.
    BadAnswer,
}

/// How a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferFailure {
    /// The transfer that failed.
    pub transfer: Transfer,
    /// The reason.
    pub exit: Exit,
    /// Whether another object could be reached at the same moment; absent if unknown.
    pub canary: Option<bool>,
    /// How long the transfer was tried.
    pub took: Duration,
    /// A description of the failure.
    pub text: String,
}

/// A transfer from or to storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Fetching the file.
    Fetch,
    /// Publishing its results.
    Publish,
}

impl FileState {
    /// Parses a line; `None` for any other text, because a worker can write anything.
    pub fn parse(line: &str) -> Option<Self> {
        let (pod, said) = line.split_once(' ')?;
        let (word, rest) = said.split_once(' ').unwrap_or((said, ""));
        let state = match word {
            // An older operator treats it like any other started file.
            "started" if rest == PUBLISHING => State::Publishing,
            "started" => State::Started,
            "succeeded" => State::Succeeded,
            "released" => State::Released,
            "filter" => State::FilterFailed(FilterFailure::parse(rest)?),
            "fetch" => State::TransferFailed(TransferFailure::parse(Transfer::Fetch, rest)?),
            "publish" => State::TransferFailed(TransferFailure::parse(Transfer::Publish, rest)?),
            _ => return None,
        };
        Some(Self { pod: pod.to_owned(), state })
    }
}

impl fmt::Display for FileState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pod, state } = self;
        let line = match state {
            State::Started => format!("{pod} started"),
            State::Publishing => format!("{pod} started {PUBLISHING}"),
            State::Succeeded => format!("{pod} succeeded"),
            State::Released => format!("{pod} released"),
            State::FilterFailed(FilterFailure { filter, ending, oom_killed, after_term, text }) => {
                let (oom, term) = (u8::from(*oom_killed), u8::from(*after_term));
                format!("{pod} filter {filter} {ending} oom={oom} term={term} {text}")
            }
            State::TransferFailed(TransferFailure { transfer, exit, canary, took, text }) => {
                let word = match transfer {
                    Transfer::Fetch => "fetch",
                    Transfer::Publish => "publish",
                };
                format!("{pod} {word} {} {} {text}", with_canary(*exit, *canary), took.as_millis())
            }
        };
        f.write_str(&one_line(&line))
    }
}

impl FilterFailure {
    fn parse(rest: &str) -> Option<Self> {
        let mut words = rest.splitn(5, ' ');
        let filter = words.next()?.to_owned();
        let ending = words.next()?.parse().ok()?;
        let oom_killed = flag(words.next()?.strip_prefix("oom=")?)?;
        let after_term = flag(words.next()?.strip_prefix("term=")?)?;
        let text = words.next().unwrap_or_default().to_owned();
        Some(Self { filter, ending, oom_killed, after_term, text })
    }
}

impl TransferFailure {
    fn parse(transfer: Transfer, rest: &str) -> Option<Self> {
        let mut words = rest.splitn(3, ' ');
        let (exit, canary) = canary_and_exit(words.next()?)?;
        let took = Duration::from_millis(number(words.next()?)?);
        let text = words.next().unwrap_or_default().to_owned();
        Some(Self { transfer, exit, canary, took, text })
    }
}

impl fmt::Display for FilterEnding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit:{code}"),
            Self::Signaled(signal) => write!(f, "signal:{signal}"),
            Self::TimedOut => f.write_str("timeout"),
            Self::Refused { retry: true } => f.write_str("refused:retry"),
            Self::Refused { retry: false } => f.write_str("refused:final"),
            Self::BadAnswer => f.write_str("garbage"),
        }
    }
}

/// The text is not the ending of a filter.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an ending of a filter")]
pub struct NoEnding;

impl FromStr for FilterEnding {
    type Err = NoEnding;

    fn from_str(word: &str) -> Result<Self, NoEnding> {
        let ending = match word.split_once(':') {
            Some(("exit", code)) => code.parse().ok().map(Self::Exited),
            Some(("signal", signal)) => signal.parse().ok().map(Self::Signaled),
            Some(("refused", "retry")) => Some(Self::Refused { retry: true }),
            Some(("refused", "final")) => Some(Self::Refused { retry: false }),
            None if word == "timeout" => Some(Self::TimedOut),
            None if word == "garbage" => Some(Self::BadAnswer),
            _ => None,
        };
        ending.ok_or(NoEnding)
    }
}

fn flag(word: &str) -> Option<bool> {
    match word {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strum::VariantArray;

    #[test]
    fn what_is_written_is_read_again() {
        let mut states = vec![State::Started, State::Publishing, State::Succeeded, State::Released];
        let endings = [
            FilterEnding::Exited(3),
            FilterEnding::Signaled(9),
            FilterEnding::TimedOut,
            FilterEnding::Refused { retry: true },
            FilterEnding::Refused { retry: false },
            FilterEnding::BadAnswer,
        ];
        for ending in endings {
            for flag in [false, true] {
                states.push(State::FilterFailed(FilterFailure {
                    filter: "a-b".to_owned(),
                    ending,
                    oom_killed: flag,
                    after_term: !flag,
                    text: "no such file: a  b".to_owned(),
                }));
            }
        }
        for exit in Exit::VARIANTS {
            for (transfer, canary) in
                [(Transfer::Fetch, None), (Transfer::Fetch, Some(true)), (Transfer::Publish, Some(false))]
            {
                states.push(State::TransferFailed(TransferFailure {
                    transfer,
                    exit: *exit,
                    canary,
                    took: Duration::from_millis(1_234),
                    text: String::new(),
                }));
            }
        }
        for state in states {
            let state = FileState { pod: "run-abc".to_owned(), state };
            assert_eq!(FileState::parse(&state.to_string()), Some(state));
        }
    }

    #[test]
    fn anything_else_is_no_state() {
        for text in [
            "",
            "pod",
            "pod working",
            "pod filter a",
            "pod filter a exit:x oom=0 term=0 ",
            "pod fetch Nope 1 x",
        ] {
            assert_eq!(FileState::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_long_text_is_cut() {
        let state = FilterFailure {
            filter: "a".to_owned(),
            ending: FilterEnding::Exited(1),
            oom_killed: false,
            after_term: false,
            text: "x".repeat(10_000),
        };
        let line = FileState { pod: "p".to_owned(), state: State::FilterFailed(state) }.to_string();
        assert!(line.len() <= 1_024 && FileState::parse(&line).is_some());
    }
}
