//! Decides which objects below a prefix are files of a run.

use globset::{GlobBuilder, GlobMatcher};

/// A glob of the selection is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{glob:?} is not a glob: {reason}")]
pub struct SelectionError {
    glob: String,
    reason: String,
}

/// Includes and excludes, compiled.
#[derive(Clone, Debug)]
pub struct Selection {
    prefix: String,
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
}

impl Selection {
    /// Compiles the globs with the options of the API's validation: `*` stays within a folder, `**` crosses
    /// folders.
    pub fn new(prefix: &str, include: &[String], exclude: &[String]) -> Result<Self, SelectionError> {
        Ok(Self { prefix: prefix.to_owned(), include: compiled(include)?, exclude: compiled(exclude)? })
    }

    /// Whether an object is a file of the run. Globs match the key after the prefix. A folder that a browser
    /// created, which is an empty object whose name ends in a slash, is not a file.
    pub fn takes(&self, key: &str, size: u64) -> bool {
        let Some(rest) = key.strip_prefix(&self.prefix) else { return false };
        if size == 0 && key.ends_with('/') {
            return false;
        }
        let matches = |globs: &[GlobMatcher]| globs.iter().any(|glob| glob.is_match(rest));
        (self.include.is_empty() || matches(&self.include)) && !matches(&self.exclude)
    }
}

// One matcher for each glob, not a `GlobSet`, whose shortcuts split a key like a path, so that `**/a.` would
// not match `b/a.`.
fn compiled(globs: &[String]) -> Result<Vec<GlobMatcher>, SelectionError> {
    let compile = |glob: &String| match GlobBuilder::new(glob).literal_separator(true).build() {
        Ok(built) => Ok(built.compile_matcher()),
        Err(error) => Err(SelectionError { glob: glob.clone(), reason: error.kind().to_string() }),
    };
    globs.iter().map(compile).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes(prefix: &str, include: &[&str], exclude: &[&str], key: &str) -> bool {
        let owned = |globs: &[&str]| globs.iter().map(|&glob| glob.to_owned()).collect::<Vec<_>>();
        Selection::new(prefix, &owned(include), &owned(exclude)).unwrap().takes(key, 1)
    }

    #[test]
    fn a_star_stays_within_a_folder_and_two_stars_cross() {
        for (glob, key, taken) in [
            ("*.jpg", "a.jpg", true),
            ("*.jpg", "b/a.jpg", false),
            ("**/*.jpg", "a.jpg", true),
            ("**/*.jpg", "b/c/a.jpg", true),
            ("{a,b}/*", "b/x", true),
            ("{a,b}/*", "c/x", false),
            ("a?c", "a/c", false),
            ("*.jpg", "A.JPG", false),
            ("*", "new\nline", true),
            ("**", "../etc/passwd", true),
            ("**/a.", "b/a.", true),
            ("[*]", "*", true),
        ] {
            assert_eq!(takes("", &[glob], &[], key), taken, "{glob} {key:?}");
        }
    }

    #[test]
    fn globs_see_the_key_after_the_prefix() {
        assert!(takes("cam/", &["*.jpg"], &[], "cam/a.jpg"));
        assert!(!takes("cam/", &["cam/*.jpg"], &[], "cam/a.jpg"));
        assert!(takes("cam", &["[/]a.jpg"], &[], "cam/a.jpg"));
        assert!(!takes("cam/", &[], &[], "other/a.jpg"), "a server that ignores the prefix");
    }

    #[test]
    fn a_file_must_be_included_and_not_excluded() {
        assert!(takes("", &[], &[], "anything"));
        assert!(takes("", &["*.jpg", "*.png"], &[], "a.png"));
        assert!(!takes("", &["*.jpg"], &["a*"], "a.jpg"));
        assert!(!takes("", &[], &["**/*.tmp"], "x/a.tmp"));
    }

    #[test]
    fn a_folder_is_no_file_but_an_empty_file_is_one() {
        let all = Selection::new("", &[], &[]).unwrap();
        assert!(!all.takes("folder/", 0) && !all.takes("/", 0));
        assert!(all.takes("folder/", 1) && all.takes("empty", 0));
    }

    #[test]
    fn a_glob_that_is_none_is_named() {
        let error = Selection::new("", &["ok".to_owned(), "{a".to_owned()], &[]).unwrap_err();
        assert!(error.to_string().contains("{a"), "{error}");
    }
}
