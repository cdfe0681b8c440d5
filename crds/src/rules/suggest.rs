//! "Did you mean": the nearest of the allowed words.

/// Less similar words are not what the user meant.
const LIKENESS: f64 = 0.7;
/// Longer texts are no mistyped words, and comparing two of them takes time by the product of their lengths.
const WORD_BYTES_MAX: usize = 128;

/// The allowed word that is nearest to the given one, if any is near.
pub(crate) fn nearest<'a>(written: &str, allowed: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if written.len() > WORD_BYTES_MAX {
        return None;
    }
    let written = written.to_lowercase();
    allowed
        .into_iter()
        .filter(|word| word.len() <= WORD_BYTES_MAX)
        .map(|word| (strsim::normalized_damerau_levenshtein(&written, &word.to_lowercase()), word))
        .filter(|(likeness, _)| *likeness >= LIKENESS)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, word)| word)
}

/// How to correct a wrong word: the nearest allowed word, or all of them.
pub(super) fn fix(written: &str, allowed: &[&str]) -> String {
    match nearest(written, allowed.iter().copied()) {
        Some(word) => format!("did you mean {word}?"),
        None => format!("write one of {}", allowed.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_recognised_and_others_are_not() {
        let allowed = ["Sequential", "Concurrent"];
        assert_eq!(nearest("sequential", allowed), Some("Sequential"));
        assert_eq!(nearest("Sequentail", allowed), Some("Sequential"));
        assert_eq!(nearest("concurent", allowed), Some("Concurrent"));
        assert_eq!(nearest("Parallel", allowed), None);
    }
}
