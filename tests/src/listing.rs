//! A bucket that generates its keys: a real server would take minutes to store so many.

use crate::fake::{Fake, listed_page, parameter};

/// The number of digits at the end of every key.
const DIGITS: usize = 6;

/// Files below a prefix.
#[derive(Clone, Debug)]
pub struct Folder {
    /// The prefix of all its keys.
    pub prefix: String,
    /// The number of its files.
    pub files: usize,
}

impl Folder {
    /// A folder of `files` files.
    pub fn new(prefix: &str, files: usize) -> Self {
        Self { prefix: prefix.to_owned(), files }
    }

    /// The key of the file with this number.
    pub fn key(&self, number: usize) -> String {
        format!("{}{number:0DIGITS$}", self.prefix)
    }

    /// The number of the file after a key, or of the first one without a key.
    fn number_after(&self, key: &str) -> usize {
        key.strip_prefix(self.prefix.as_str()).map_or(0, |number| number.parse::<usize>().unwrap() + 1)
    }
}

/// Serves listings, and nothing else, of the folder that the requested prefix names, with `page` keys per
/// page.
pub async fn serve(folders: Vec<Folder>, page: usize) -> Fake {
    Fake::start(move |request| {
        let prefix = parameter(request, "prefix");
        let folder = folders.iter().find(|folder| folder.prefix == prefix).unwrap();
        let first = folder.number_after(&parameter(request, "start-after"));
        let last = folder.files.min(first + page);
        let keys: Vec<String> = (first..last).map(|number| folder.key(number)).collect();
        listed_page((last < folder.files).then_some("more"), &keys)
    })
    .await
}
