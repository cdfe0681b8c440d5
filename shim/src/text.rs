//! Texts for people: one line each, with bounded length.

use crate::wire::TEXT_BYTES_MAX;

/// Enough for the last frames of a stack trace.
const TAIL_BYTES_MAX: usize = 4 * 1024;

/// Escapes control characters, so that a text from any source is one line and cannot move a terminal's
/// cursor.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// The beginning of a text, at most [`TEXT_BYTES_MAX`].
pub(crate) fn beginning(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

/// The end of an output of any length.
#[derive(Default)]
pub(crate) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(TAIL_BYTES_MAX)..];
        let surplus = (self.bytes.len() + bytes.len()).saturating_sub(TAIL_BYTES_MAX);
        self.bytes.drain(..surplus);
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
    }

    /// The last lines, at most [`TEXT_BYTES_MAX`] in all; a line that does not fit is left out unless it is
    /// the last.
    pub(crate) fn last_lines(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        let text = text.trim_end();
        let start = text.ceil_char_boundary(text.len().saturating_sub(TEXT_BYTES_MAX));
        let last = &text[start..];
        match last.split_once('\n') {
            Some((_, whole)) if start > 0 => whole.to_owned(),
            _ => last.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        let text = "ü".repeat(TEXT_BYTES_MAX);
        assert_eq!(beginning(&text).len(), TEXT_BYTES_MAX);
        assert_eq!(beginning(&format!("x{text}")).len(), TEXT_BYTES_MAX - 1);
        assert_eq!(beginning("short"), "short");
    }

    #[test]
    fn of_a_long_output_the_last_whole_lines_are_kept() {
        let mut tail = Tail::default();
        for number in 0..10_000 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        assert!(tail.bytes.len() <= TAIL_BYTES_MAX);
        let lines = tail.last_lines();
        assert!(lines.len() <= TEXT_BYTES_MAX && lines.ends_with("line 9999"), "{lines}");
        assert!(lines.lines().all(|line| line.starts_with("line ")), "{lines}");
    }

    #[test]
    fn of_one_long_line_the_end_is_kept() {
        let mut tail = Tail::default();
        tail.push("ü".repeat(100_000).as_bytes());
        tail.push(b"\xffend\n");
        let lines = tail.last_lines();
        assert!(lines.ends_with("\u{fffd}end") && lines.len() <= TEXT_BYTES_MAX, "{lines}");
        tail.clear();
        assert_eq!(tail.last_lines(), "");
    }
}
