//! The path of a field, as people write it: `spec.filters[1].env[0].name`.

use std::fmt;

#[derive(Clone, Debug, Default)]
pub(super) struct Path(String);

impl Path {
    pub(super) fn root() -> Self {
        Self::default()
    }

    pub(super) fn field(&self, name: &str) -> Self {
        let plain =
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        Self(match (plain, self.0.is_empty()) {
            (true, true) => name.to_owned(),
            (true, false) => format!("{}.{name}", self.0),
            (false, _) => format!("{}[{name:?}]", self.0),
        })
    }

    pub(super) fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "(object)" } else { &self.0 })
    }
}
