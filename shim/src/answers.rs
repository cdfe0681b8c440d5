//! Extracts the answers of a `Lines` filter from its output.

use crate::answer::{Answer, parse};

/// The beginning of a protocol line, in both directions.
pub(crate) const MARKER: &str = "::openfilter::";

/// A longer line is no answer; a reason of this length would be cut anyway.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Lines that start with the marker, in their order; the rest is log.
#[derive(Default)]
pub(crate) struct Answers {
    /// The current line, as long as it may still be an answer.
    line: Vec<u8>,
    /// Whether the current line is log.
    is_log: bool,
    read: Vec<Option<Answer>>,
}

impl Answers {
    /// Takes output, and returns the part of it that is log.
    pub(crate) fn sift(&mut self, output: &[u8]) -> Vec<u8> {
        let mut log = Vec::new();
        for piece in output.split_inclusive(|byte| *byte == b'\n') {
            if self.is_log {
                log.extend_from_slice(piece);
            } else {
                self.line.extend_from_slice(piece);
                // Keep one byte more than is allowed, so that the line is still too long at its end.
                self.line.truncate(ANSWER_BYTES_MAX + 1);
                if !starts_like_an_answer(&self.line) {
                    log.append(&mut self.line);
                    self.is_log = true;
                }
            }
            if piece.ends_with(b"\n") {
                self.end_line();
            }
        }
        log
    }

    /// Takes the end of the output, perhaps in the middle of a line; returns the part of that line that is
    /// log.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        if self.is_log || self.line.len() < MARKER.len() {
            self.is_log = false;
            return std::mem::take(&mut self.line);
        }
        self.end_line();
        Vec::new()
    }

    /// The answers since the last call; `None` is an answer that cannot be understood.
    pub(crate) fn take(&mut self) -> Vec<Option<Answer>> {
        std::mem::take(&mut self.read)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.read.is_empty()
    }

    fn end_line(&mut self) {
        if !std::mem::take(&mut self.is_log) {
            let fits = self.line.len() <= ANSWER_BYTES_MAX;
            let text = std::str::from_utf8(&self.line).ok().filter(|_| fits);
            self.read.push(text.and_then(|text| parse(text.strip_prefix(MARKER)?)));
            self.line.clear();
        }
    }
}

fn starts_like_an_answer(line: &[u8]) -> bool {
    let length = line.len().min(MARKER.len());
    line[..length] == MARKER.as_bytes()[..length]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sift(chunks: &[&str]) -> (String, Vec<Option<Answer>>) {
        let mut answers = Answers::default();
        let mut log: Vec<u8> = chunks.iter().flat_map(|chunk| answers.sift(chunk.as_bytes())).collect();
        log.extend(answers.finish());
        (String::from_utf8(log).unwrap(), answers.take())
    }

    #[test]
    fn answers_are_found_however_the_output_is_cut() {
        let output = "loading\n:: not one\n::openfilter::{\"ok\":true}\nafter ::openfilter::{}\n\n";
        let log = "loading\n:: not one\nafter ::openfilter::{}\n\n";
        for size in 1..output.len() {
            let chunks: Vec<&str> =
                output.as_bytes().chunks(size).map(|chunk| std::str::from_utf8(chunk).unwrap()).collect();
            assert_eq!(
                sift(&chunks),
                (log.to_owned(), vec![Some(Answer::Accepted)]),
                "{size} bytes at a time"
            );
        }
    }

    #[test]
    fn an_unfinished_line_counts_at_the_end() {
        assert_eq!(sift(&["::openfilter:: {\"ok\":true}"]), (String::new(), vec![Some(Answer::Accepted)]));
        assert_eq!(sift(&["::open"]), ("::open".to_owned(), vec![]));
        assert_eq!(sift(&["x\n"]), ("x\n".to_owned(), vec![]));
    }

    #[test]
    fn the_next_output_starts_on_a_line_of_its_own() {
        let mut answers = Answers::default();
        answers.sift(b"unfinished");
        answers.finish();
        assert_eq!(answers.sift(b"::openfilter::{\"ok\":true}\n"), b"");
        assert_eq!(answers.take(), [Some(Answer::Accepted)]);
    }

    #[test]
    fn what_cannot_be_understood_is_an_answer_too() {
        assert_eq!(sift(&["::openfilter:: fine\n"]), (String::new(), vec![None]));
        let reason = "x".repeat(ANSWER_BYTES_MAX);
        let long = format!("::openfilter::{{\"ok\":false,\"reason\":\"{reason}\"}}\nlog\n");
        assert_eq!(sift(&[&long]), ("log\n".to_owned(), vec![None]));
    }
}
