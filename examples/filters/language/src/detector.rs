//! The model: the words that each language uses most. Put your own here.

use std::collections::HashMap;

/// One line per language: its code, then its words.
const WORDS: &str = include_str!("words.txt");

/// Fewer known words are not conclusive.
const HITS_MIN: usize = 3;

/// Loaded once, and used for every file.
pub struct Detector {
    languages: Vec<&'static str>,
    /// For each word, the languages that use it, by their place in the list: `in` is English, German, Italian
    /// and Dutch.
    languages_of: HashMap<&'static str, Vec<usize>>,
}

/// The language of a text.
#[derive(Debug, PartialEq)]
pub struct Found {
    pub language: &'static str,
    /// The share of the text's words that are common in this language.
    pub share: f64,
}

impl Detector {
    pub fn load() -> Self {
        let (mut languages, mut languages_of) = (Vec::new(), HashMap::<_, Vec<_>>::new());
        for line in WORDS.lines() {
            let mut words = line.split_whitespace();
            let Some(language) = words.next() else { continue };
            for word in words {
                languages_of.entry(word).or_default().push(languages.len());
            }
            languages.push(language);
        }
        Self { languages, languages_of }
    }

    pub fn languages(&self) -> usize {
        self.languages.len()
    }

    pub fn words(&self) -> usize {
        self.languages_of.len()
    }

    /// The language with the most known words, or none if the text has almost no known words.
    pub fn detect(&self, text: &str) -> Option<Found> {
        let mut hits = vec![0_usize; self.languages.len()];
        let mut words = 0_usize;
        for word in text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()) {
            words += 1;
            for language in self.languages_of.get(word.to_lowercase().as_str()).into_iter().flatten() {
                hits[*language] += 1;
            }
        }
        let (best, hits) = hits.into_iter().enumerate().max_by_key(|(_, hits)| *hits)?;
        (hits >= HITS_MIN)
            .then(|| Found { language: self.languages[best], share: hits as f64 / words as f64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_in_the_language_whose_words_it_uses_most() {
        let detector = Detector::load();
        for (language, text) in [
            ("de", "Der Hund und die Katze sind in dem Haus, aber nicht im Garten."),
            ("en", "The dog and the cat are in the house, but not in the garden."),
            ("es", "El perro y el gato están en la casa, pero no en el jardín."),
            ("fr", "Le chien et le chat sont dans la maison, mais pas dans le jardin."),
            ("it", "Il cane e il gatto sono nella casa, ma non nel giardino."),
            ("nl", "De hond en de kat zijn in het huis, maar niet in de tuin."),
        ] {
            assert_eq!(detector.detect(text).map(|found| found.language), Some(language), "{text}");
        }
    }

    #[test]
    fn a_text_with_hardly_a_known_word_is_in_no_language() {
        let detector = Detector::load();
        for text in ["", "42", "colourless green ideas", "the the"] {
            assert_eq!(detector.detect(text), None, "{text}");
        }
    }
}
