//! Groups of failures that are alike: a thousand files that are "not a picture" are one line for the person
//! who looks at the run. They are counted from the dead letters themselves, so no crash makes the counts
//! wrong.

use std::collections::HashMap;

use crds::v1alpha1::FailureGroup;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// How many groups a status shows.
const SHOWN: usize = 10;
/// How many groups are told apart: a filter may say something else about each of a million files.
const GROUPS_MAX: usize = 100;
/// The group of everything else.
const OTHER: &str = "other";
/// How long the text of a group may be.
const REASON_BYTES_MAX: usize = 200;
/// What takes the place of a part that differs from file to file.
const DIFFERS: &str = "…";

/// The failures of a run, by their kind.
#[derive(Debug, Default)]
pub struct FailureGroups(HashMap<Kind, Members>);

/// Failures are alike if their exit code is the same, and their reason is too, except for the parts that
/// differ from file to file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kind {
    reason: String,
    exit_code: Option<i32>,
}

#[derive(Debug)]
struct Members {
    count: i64,
    /// The newest of them, and when it failed.
    example: String,
    last_time: Option<Time>,
}

impl FailureGroups {
    /// Adds a file that failed permanently. Files are added in the order in which they failed.
    pub fn add(&mut self, file: &str, reason: &str, exit_code: Option<i32>, time: Option<&Time>) {
        let Self(groups) = self;
        let mut kind = Kind { reason: without_what_differs(reason), exit_code };
        if groups.len() >= GROUPS_MAX && !groups.contains_key(&kind) {
            kind = Kind { reason: OTHER.to_owned(), exit_code: None };
        }
        let members =
            groups.entry(kind).or_insert(Members { count: 0, example: String::new(), last_time: None });
        members.count += 1;
        members.example = file.to_owned();
        members.last_time = time.cloned();
    }

    /// The largest groups, largest first.
    pub fn largest(&self) -> Vec<FailureGroup> {
        let Self(groups) = self;
        let mut sorted: Vec<(&Kind, &Members)> = groups.iter().collect();
        // Groups of one size keep their order from one status to the next.
        sorted.sort_by(|(one, a), (two, b)| {
            b.count
                .cmp(&a.count)
                .then_with(|| (&one.reason, one.exit_code).cmp(&(&two.reason, two.exit_code)))
        });
        let shown = sorted.into_iter().take(SHOWN).map(|(kind, members)| FailureGroup {
            reason: kind.reason.clone(),
            count: members.count,
            example: Some(members.example.clone()),
            last_time: members.last_time.clone(),
        });
        shown.collect()
    }
}

/// A reason without names, numbers and paths. Who failed and how, which is said before the first colon,
/// stays: exit code 1 and exit code 137 are not alike.
fn without_what_differs(reason: &str) -> String {
    // The script says so of a file that was disrupted too often; the last disruption tells more.
    if let Some((before, last)) = reason.split_once(", the last time: ")
        && before.starts_with("disrupted ")
    {
        return cut(format!("disrupted again and again: {}", without_what_differs(last)));
    }
    let Some((who, said)) = reason.split_once(": ") else { return cut(reason.to_owned()) };
    let mut words: Vec<&str> = Vec::new();
    let said = without_quotes(said);
    for word in said.split_whitespace() {
        let differs =
            word.contains(|letter: char| letter.is_ascii_digit() || matches!(letter, '/' | '\\' | '…'));
        match differs {
            true if words.last() == Some(&DIFFERS) => {}
            true => words.push(DIFFERS),
            false => words.push(word),
        }
    }
    cut(format!("{who}: {}", words.join(" ")))
}

/// The text with everything in quotes left out. An apostrophe within a word is no quote.
fn without_quotes(text: &str) -> String {
    let (mut out, mut rest, mut is_start) = (String::new(), text, true);
    while let Some(letter) = rest.chars().next() {
        let after = &rest[letter.len_utf8()..];
        let end = (is_start && matches!(letter, '"' | '\'' | '`')).then(|| after.find(letter)).flatten();
        match end {
            Some(end) => {
                out.push_str(DIFFERS);
                rest = &after[end + letter.len_utf8()..];
            }
            None => {
                out.push(letter);
                rest = after;
            }
        }
        is_start = matches!(letter, ' ' | '\n' | '\t' | '(' | '[' | '=');
    }
    out
}

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(failures: &[(&str, Option<i32>)]) -> Vec<(String, i64)> {
        let mut groups = FailureGroups::default();
        for (number, (reason, exit_code)) in failures.iter().enumerate() {
            groups.add(&number.to_string(), reason, *exit_code, None);
        }
        groups.largest().into_iter().map(|group| (group.reason, group.count)).collect()
    }

    #[test]
    fn what_differs_from_file_to_file_makes_no_group_of_its_own() {
        let same = [
            "resize exited with code 1: cannot decode 'a b.jpg' at offset 17",
            "resize exited with code 1: cannot decode \"c\" at offset 0x3fa2",
            "resize exited with code 1: cannot decode `d` at offset 9",
        ];
        let reason = "resize exited with code 1: cannot decode … at offset …".to_owned();
        assert_eq!(of(&same.map(|reason| (reason, Some(1)))), [(reason, 3)]);
        let paths = ["s3://b/one.jpg: not found: 404 NoSuchKey", "s3://b/two.jpg: not found: 404 NoSuchKey"];
        let paths = paths.map(|said| format!("ObjectGone: cannot fetch the file: {said}"));
        let gone = "ObjectGone: cannot fetch the file: … not found: … NoSuchKey".to_owned();
        assert_eq!(of(&[(&paths[0], Some(15)), (&paths[1], Some(15))]), [(gone, 2)]);
        let lost = ["r-156l9advy", "r-73mtgq8nf"].map(|pod| {
            format!("disrupted 11 times in a row, the last time: PodGone: the pod {pod} was deleted")
        });
        let again = "disrupted again and again: PodGone: the pod … was deleted".to_owned();
        assert_eq!(of(&[(&lost[0], None), (&lost[1], None)]), [(again, 2)]);
    }

    #[test]
    fn who_failed_and_how_stays_apart() {
        let failures = [
            ("resize exited with code 1: not a picture", Some(1)),
            ("resize exited with code 1: not a picture", Some(1)),
            ("resize exited with code 137", Some(137)),
            ("detect exited with code 1: not a picture", Some(1)),
            ("resize exited with code 1: it's too large, isn't it", Some(1)),
        ];
        let groups = of(&failures);
        assert_eq!(groups[0], ("resize exited with code 1: not a picture".to_owned(), 2));
        assert_eq!(groups.len(), 4);
        assert!(groups.iter().any(|(reason, _)| reason.ends_with("it's too large, isn't it")), "{groups:?}");
    }

    #[test]
    fn groups_are_bounded_and_count_every_file() {
        let letters = |number: usize| {
            let letter = |digit: usize| char::from(b'a' + u8::try_from(digit).unwrap());
            format!("f exited with code 1: {}{}", letter(number / 26), letter(number % 26))
        };
        let mut groups = FailureGroups::default();
        for number in 0..300 {
            groups.add(&format!("file {number}"), &letters(number), Some(1), None);
        }
        let FailureGroups(all) = &groups;
        assert_eq!(all.len(), GROUPS_MAX + 1);
        assert_eq!(all.values().map(|members| members.count).sum::<i64>(), 300);
        let largest = groups.largest();
        assert_eq!((largest.len(), largest[0].reason.as_str(), largest[0].count), (SHOWN, OTHER, 200));
        assert_eq!(largest[0].example.as_deref(), Some("file 299"), "the newest");
        let long = of(&[(&format!("f: {}", "ü".repeat(400)), None)]);
        assert!(long[0].0.len() <= REASON_BYTES_MAX);
    }
}
