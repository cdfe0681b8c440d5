//! A sample filter that stays running: it loads its model once, then detects the language of one text after
//! another and writes it to `language.json`. README.md explains how to turn it into your own filter.

mod detector;
mod lines;

use std::{fs, io, process::ExitCode};

use detector::Detector;
use lines::{File, Refusal};
use serde_json::json;

/// Enough to recognise a language, and the same memory for a file of any size.
const BYTES_READ: usize = 1 << 20;

fn main() -> ExitCode {
    let detector = Detector::load();
    println!("loaded {} words of {} languages", detector.words(), detector.languages());
    match lines::serve(|file| process(&detector, file)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("language: {error}");
            ExitCode::FAILURE
        }
    }
}

fn process(detector: &Detector, file: &File) -> Result<(), Refusal> {
    // This failure may be temporary, for example a full disk.
    let text =
        beginning(file).map_err(|error| Refusal::retry(format!("cannot read {}: {error}", file.input)))?;
    // This failure is permanent.
    let text =
        whole_characters(&text).ok_or_else(|| Refusal::last("the file is not UTF-8 text".to_owned()))?;
    let found = detector
        .detect(text)
        .ok_or_else(|| Refusal::last("the text is in no language that the filter knows".to_owned()))?;
    println!("{} is {}", file.source, found.language);
    let result = json!({ "source": file.source, "language": found.language, "share": found.share });
    let path = format!("{}/language.json", file.out);
    fs::write(&path, format!("{result}\n"))
        .map_err(|error| Refusal::retry(format!("cannot write {path}: {error}")))
}

fn beginning(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(fs::File::open(&file.input)?, BYTES_READ as u64), &mut bytes)?;
    Ok(bytes)
}

/// The bytes as text, without a character that is cut off at the end of the buffer.
fn whole_characters(bytes: &[u8]) -> Option<&str> {
    match str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() && bytes.len() == BYTES_READ => {
            str::from_utf8(&bytes[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_character_that_we_have_cut_off_ourselves_is_left_out() {
        let mut bytes = vec![b'a'; BYTES_READ - 1];
        bytes.push("é".as_bytes()[0]);
        assert_eq!(whole_characters(&bytes).map(str::len), Some(BYTES_READ - 1));
        assert_eq!(whole_characters(&"é".as_bytes()[..1]), None);
        assert_eq!(whole_characters(b"\xff\xd8\xff"), None);
    }
}
