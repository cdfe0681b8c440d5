//! The command line: our options, `--`, and the filter's command.

use std::{ffi::OsString, fmt, path::PathBuf};

/// The shim's parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Args {
    pub(crate) mode: Mode,
    /// The filter's name, which is also the name of its results folder.
    pub(crate) filter: OsString,
    pub(crate) workspace: PathBuf,
    pub(crate) termination_log: PathBuf,
    /// Whether the command is kept running and gets a line per file.
    pub(crate) lines: bool,
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Process file by file, as the worker at this socket asks.
    Serve { socket: PathBuf },
    /// Process one file, and end.
    Once,
}

/// A mistake on the command line, and how to correct it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadArgs(String);

impl fmt::Display for BadArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Args {
    /// Parses the arguments after the program's own name.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, BadArgs> {
        let (mut socket, mut filter, mut workspace, mut termination_log) = (None, None, None, None);
        let (mut once, mut lines) = (false, false);
        while let Some(option) = arguments.next() {
            let option = option.to_string_lossy().into_owned();
            let value = match option.as_str() {
                "--" => break,
                "--once" => {
                    once = true;
                    continue;
                }
                "--lines" => {
                    lines = true;
                    continue;
                }
                "--socket" => &mut socket,
                "--filter" => &mut filter,
                "--workspace" => &mut workspace,
                "--termination-log" => &mut termination_log,
                _ => {
                    return Err(BadArgs(format!(
                        "`{option}` is not an option of the shim; the filter's command comes after `--`"
                    )));
                }
            };
            *value =
                Some(arguments.next().ok_or_else(|| BadArgs(format!("`{option}` needs a value after it")))?);
        }
        let command: Vec<OsString> = arguments.collect();
        if command.is_empty() {
            return Err(BadArgs("the filter's command is missing: add it after `--`".to_owned()));
        }
        let mode = match (socket, once) {
            (Some(socket), false) => Mode::Serve { socket: socket.into() },
            (None, true) if lines => Mode::Once,
            (None, true) => {
                return Err(BadArgs("`--once` needs `--lines`; otherwise run the command itself".to_owned()));
            }
            _ => return Err(BadArgs("give either `--socket` or `--once`".to_owned())),
        };
        Ok(Self {
            mode,
            filter: filter.ok_or_else(|| BadArgs("`--filter` is missing: name the filter".to_owned()))?,
            workspace: workspace.unwrap_or_else(|| "/ws".into()).into(),
            termination_log: termination_log.unwrap_or_else(|| "/dev/termination-log".into()).into(),
            lines,
            command,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, BadArgs> {
        Args::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn what_follows_the_dashes_belongs_to_the_filter() {
        let args = parse("--socket /s --filter detect -- run --lines -- x").unwrap();
        assert_eq!(args.command, ["run", "--lines", "--", "x"]);
        assert!(!args.lines);
        assert_eq!(args.mode, Mode::Serve { socket: "/s".into() });
        assert_eq!(args.workspace, PathBuf::from("/ws"));
        assert_eq!(args.termination_log, PathBuf::from("/dev/termination-log"));
    }

    #[test]
    fn one_file_only_is_for_lines() {
        assert_eq!(parse("--once --lines --filter f --workspace /w -- x").unwrap().mode, Mode::Once);
        let refused = parse("--once --filter f -- x").unwrap_err().to_string();
        assert!(refused.contains("`--lines`"), "{refused}");
    }

    #[test]
    fn mistakes_are_named() {
        for (line, named) in [
            ("--socket /s --filter f", "after `--`"),
            ("--socket /s --filter f --", "after `--`"),
            ("--socket /s -- x", "`--filter`"),
            ("--filter f -- x", "`--socket`"),
            ("--socket /s --once --lines --filter f -- x", "either"),
            ("--socket", "`--socket` needs a value"),
            ("--sockets /s --filter f -- x", "`--sockets`"),
        ] {
            let refused = parse(line).unwrap_err().to_string();
            assert!(refused.contains(named), "{line}: {refused}");
        }
    }
}
