//! The messages between worker and shim: lines of text over a unix socket, each ended by a newline.
//!
//! The worker asks for one file at a time. The shim answers each `file` with exactly one `done` or
//! `unusable`. The end of the stream is a message too: the other side is gone.
//!
//! `Display` and `FromStr` omit the newline.

use std::{fmt, str::FromStr, time::Duration};

use crate::text::one_line;

/// No line is longer: a text of [`TEXT_BYTES_MAX`] grows at most sixfold when it is escaped.
pub const LINE_BYTES_MAX: usize = 8 * 1024;

/// Short enough to fit into the status of a pod and of a run beside everything else.
pub const TEXT_BYTES_MAX: usize = 1_024;

/// What has been asked to end after its timeout gets this long to save what is worth saving, and is killed
/// then.
pub const TIMEOUT_GRACE: Duration = Duration::from_secs(10);

/// What SIGKILL has not ended by then hangs in the kernel, and only the end of the shim's container may help.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How much later than a file's timeout its answer may come: both of these, and a while for temporary files
/// to be removed.
pub const OVERTIME_MAX: Duration = TIMEOUT_GRACE.saturating_add(KILL_TIMEOUT).saturating_add(CLEANUP_TIMEOUT);

/// Removing a file's temporary files takes milliseconds, except on a file system that hangs.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Changes with the meaning of any line, so that a shim and a worker of different versions notice.
const VERSION: &str = "1";

/// From the worker to the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The workspace holds the next file: process it.
    File {
        /// End the file after this long; `None` means no limit.
        timeout: Option<Duration>,
    },
    /// End the current file's processes: another filter failed.
    Stop,
}

/// From the shim to the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The command is an executable file.
    Hello,
    /// The command cannot be executed, for this reason. No file is to blame.
    Unusable(String),
    /// The current file has ended.
    Done(Done),
}

/// How one file ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// How its process ended, or how it answered.
    pub ending: Ending,
    /// User and system time of every process of the file.
    pub cpu: Duration,
    /// The largest resident set, in KiB, of any process so far: an upper bound for this file, because the
    /// kernel keeps one maximum for all children.
    pub peak_memory_kib: u64,
    /// Whether the kernel killed a process of this container for lack of memory during the file.
    pub oom_killed: bool,
    /// Whether the container had been asked to terminate: a failure may then be a disruption.
    pub after_term: bool,
    /// The filter's own explanation, or the end of its output. `Display` escapes control characters.
    pub text: String,
}

/// How a file's process ended, or how it answered. The last three occur only with `Lines`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it; 0 stands for any of the real-time signals.
    Signaled(i32),
    /// It did not end in time.
    TimedOut,
    /// The worker asked to stop it.
    Stopped,
    /// It answered `ok`.
    Accepted,
    /// It answered that it cannot process the file.
    Refused {
        /// Whether another attempt may succeed.
        retry: bool,
    },
    /// Its answer is invalid, it answered twice, or it exited with 0 without an answer.
    BadAnswer,
}

/// A line that does not belong to the protocol.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreadable {
    line: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a line of the protocol between worker and shim", self.line)
    }
}

impl std::error::Error for Unreadable {}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // 0 means no limit, so a timeout below a millisecond is rounded up.
            Self::File { timeout: Some(timeout) } => write!(f, "file {}", timeout.as_millis().max(1)),
            Self::File { timeout: None } => f.write_str("file 0"),
            Self::Stop => f.write_str("stop"),
        }
    }
}

impl FromStr for Request {
    type Err = Unreadable;

    fn from_str(line: &str) -> Result<Self, Unreadable> {
        let parsed = match line.split_once(' ') {
            None if line == "stop" => Some(Self::Stop),
            Some(("file", milliseconds)) => milliseconds.parse().ok().map(|milliseconds: u64| Self::File {
                timeout: (milliseconds > 0).then(|| Duration::from_millis(milliseconds)),
            }),
            _ => None,
        };
        parsed.ok_or_else(|| unreadable(line))
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello => write!(f, "hello {VERSION}"),
            Self::Unusable(text) => write!(f, "unusable {}", one_line(text)),
            Self::Done(done) => write!(f, "done {done}"),
        }
    }
}

impl FromStr for Message {
    type Err = Unreadable;

    fn from_str(line: &str) -> Result<Self, Unreadable> {
        let parsed = match line.split_once(' ') {
            Some(("hello", VERSION)) => Some(Self::Hello),
            Some(("unusable", text)) => Some(Self::Unusable(text.to_owned())),
            Some(("done", rest)) => Done::parse(rest).map(Self::Done),
            _ => None,
        };
        parsed.ok_or_else(|| unreadable(line))
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ending, cpu, peak_memory_kib, oom_killed, after_term, text } = self;
        let (cpu, oom, term) = (cpu.as_millis(), u8::from(*oom_killed), u8::from(*after_term));
        write!(f, "{ending} cpu={cpu} peak={peak_memory_kib} oom={oom} term={term} {}", one_line(text))
    }
}

impl Done {
    fn parse(rest: &str) -> Option<Self> {
        let mut words = rest.splitn(6, ' ');
        let ending = words.next()?.parse().ok()?;
        let mut field = |name: &str| words.next()?.strip_prefix(name)?.parse::<u64>().ok();
        let cpu = Duration::from_millis(field("cpu=")?);
        let peak_memory_kib = field("peak=")?;
        let mut flag = |name| field(name).filter(|value| *value < 2).map(|value| value == 1);
        let (oom_killed, after_term) = (flag("oom=")?, flag("term=")?);
        let text = words.next()?.to_owned();
        Some(Self { ending, cpu, peak_memory_kib, oom_killed, after_term, text })
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit:{code}"),
            Self::Signaled(signal) => write!(f, "signal:{signal}"),
            Self::TimedOut => f.write_str("timeout"),
            Self::Stopped => f.write_str("stopped"),
            Self::Accepted => f.write_str("ok"),
            Self::Refused { retry: true } => f.write_str("refused:retry"),
            Self::Refused { retry: false } => f.write_str("refused:final"),
            Self::BadAnswer => f.write_str("garbage"),
        }
    }
}

impl FromStr for Ending {
    type Err = Unreadable;

    fn from_str(word: &str) -> Result<Self, Unreadable> {
        let parsed = match word.split_once(':') {
            None => match word {
                "timeout" => Some(Self::TimedOut),
                "stopped" => Some(Self::Stopped),
                "ok" => Some(Self::Accepted),
                "garbage" => Some(Self::BadAnswer),
                _ => None,
            },
            Some(("exit", code)) => code.parse().ok().map(Self::Exited),
            Some(("signal", signal)) => signal.parse().ok().map(Self::Signaled),
            Some(("refused", "retry")) => Some(Self::Refused { retry: true }),
            Some(("refused", "final")) => Some(Self::Refused { retry: false }),
            Some(_) => None,
        };
        parsed.ok_or_else(|| unreadable(word))
    }
}

fn unreadable(line: &str) -> Unreadable {
    Unreadable { line: one_line(&line[..line.floor_char_boundary(100)]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(ending: Ending) -> Done {
        Done {
            ending,
            cpu: Duration::from_millis(12),
            peak_memory_kib: 3_456,
            oom_killed: false,
            after_term: true,
            text: "no such model: détecteur  v2".to_owned(),
        }
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        for (request, line) in [
            (Request::File { timeout: None }, "file 0"),
            (Request::File { timeout: Some(Duration::from_millis(1_500)) }, "file 1500"),
            (Request::Stop, "stop"),
        ] {
            assert_eq!(request.to_string(), line);
            assert_eq!(line.parse(), Ok(request));
        }
        assert_eq!(Request::File { timeout: Some(Duration::from_nanos(1)) }.to_string(), "file 1");
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let endings = [
            (Ending::Exited(0), "exit:0"),
            (Ending::Exited(255), "exit:255"),
            (Ending::Signaled(9), "signal:9"),
            (Ending::TimedOut, "timeout"),
            (Ending::Stopped, "stopped"),
            (Ending::Accepted, "ok"),
            (Ending::Refused { retry: true }, "refused:retry"),
            (Ending::Refused { retry: false }, "refused:final"),
            (Ending::BadAnswer, "garbage"),
        ];
        for (ending, word) in endings {
            let message = Message::Done(done(ending));
            let line = format!("done {word} cpu=12 peak=3456 oom=0 term=1 no such model: détecteur  v2");
            assert_eq!(message.to_string(), line);
            assert_eq!(line.parse(), Ok(message));
        }
        for message in [
            Message::Hello,
            Message::Unusable("there is no `x`".to_owned()),
            Message::Done(Done { text: String::new(), oom_killed: true, ..done(Ending::Accepted) }),
        ] {
            assert_eq!(message.to_string().parse(), Ok(message));
        }
        assert_eq!(Message::Hello.to_string(), "hello 1");
    }

    #[test]
    fn any_text_stays_on_one_line() {
        let message = Message::Done(Done { text: "a\nb\r\u{1b}[0m".to_owned(), ..done(Ending::Exited(1)) });
        assert!(message.to_string().ends_with(r" a\nb\r\u{1b}[0m"), "{message}");
        assert_eq!(Message::Unusable("a\nb".to_owned()).to_string(), r"unusable a\nb");
        let longest =
            Done { text: "\u{1b}".repeat(TEXT_BYTES_MAX), ..done(Ending::Refused { retry: false }) };
        assert!(Message::Done(longest).to_string().len() < LINE_BYTES_MAX);
    }

    #[test]
    fn other_lines_are_refused() {
        for line in ["", "file", "file x", "file -1", "stop now", "hello 1"] {
            assert!(line.parse::<Request>().is_err(), "{line}");
        }
        for line in [
            "",
            "hello 2",
            "hello",
            "done ok",
            "done ok cpu=1 peak=1 oom=2 term=0 ",
            "done ok cpu=1 peak=1 oom=0 term=0",
            "done well cpu=1 peak=1 oom=0 term=0 ",
            "done exit:x cpu=1 peak=1 oom=0 term=0 ",
            "stop",
        ] {
            assert!(line.parse::<Message>().is_err(), "{line}");
        }
    }
}
