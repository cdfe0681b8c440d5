//! Runs the machine's programs (`ip`, `ctr`, `umount`, …) to their end.

use std::process::{Command, Stdio};

use crate::error::{Doing, Error, Result};

/// Enough of a failed program's output to see the cause, without hiding the rest.
const OUTPUT_TAIL: usize = 2_000;

/// Runs `words` and returns its output; `doing` is the infinitive at the start of an error.
pub(crate) fn run<S: AsRef<str>>(doing: &str, words: &[S]) -> Result<String> {
    let mut command = Command::new(words[0].as_ref());
    command.args(words[1..].iter().map(AsRef::as_ref));
    finish(doing, &mut command)
}

/// Does the same for one line of words separated by spaces.
pub(crate) fn run_line(doing: &str, line: &str) -> Result<String> {
    run(doing, &line.split_whitespace().collect::<Vec<_>>())
}

/// Does the same for a command with its own environment or folder.
pub(crate) fn finish(doing: &str, command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().doing(|| format!("{doing} ({command:?})"))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    let all = printed + &String::from_utf8_lossy(&output.stderr);
    Err(Error::Command {
        doing: doing.to_owned(),
        command: format!("{command:?}"),
        status: output.status,
        output: tail(&all, OUTPUT_TAIL),
    })
}

/// The last `bytes` bytes of a text, cut at a character.
pub(crate) fn tail(text: &str, bytes: usize) -> String {
    let start = text.floor_char_boundary(text.trim_end().len().saturating_sub(bytes));
    text[start..].trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_is_named_with_its_output() {
        let error = run("list a folder", &["ls", "/nowhere/at/all"]).unwrap_err().to_string();
        assert!(error.contains("list a folder") && error.contains("/nowhere/at/all"), "{error}");
    }

    #[test]
    fn a_tail_is_cut_at_a_character() {
        assert_eq!(tail("aé", 1), "é");
        assert_eq!(tail("abc\n", 2), "bc");
    }
}
