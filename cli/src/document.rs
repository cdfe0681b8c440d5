//! YAML and JSON documents, with the line of every value, so that a mistake is shown where it was written.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;

/// One document of a file.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// The document's content.
    pub(crate) value: Value,
    lines: Lines,
}

/// Where a value begins, and where the values inside it begin.
#[derive(Clone, Debug, Default)]
struct Lines {
    line: u64,
    below: BTreeMap<String, Lines>,
}

/// Why a text is not valid YAML.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Unreadable {
    /// The line of the mistake.
    pub(crate) line: u64,
    /// The mistake.
    pub(crate) message: String,
}

/// kustomize output for a whole cluster has some ten thousand objects; a YAML bomb has more. The library's
/// own limits are meant for configuration files.
const DOCUMENTS_MAX: usize = 100_000;
const NODES_MAX: usize = 20_000_000;

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS_MAX,
            max_nodes: NODES_MAX,
            max_events: 4 * NODES_MAX,
            max_total_scalar_bytes: usize::MAX,
            max_total_comment_bytes: usize::MAX,
        },
    }
}

/// The first line is the message; the rest is an excerpt of the source.
fn explain(error: &serde_saphyr::Error) -> String {
    match error.without_snippet() {
        serde_saphyr::Error::Budget { breach, .. } => format!(
            "it is too large to read at once ({breach:?}, of at most {DOCUMENTS_MAX} documents and {NODES_MAX} values); validate it in parts"
        ),
        _ => format!("it is not YAML: {}", error.to_string().lines().next().unwrap_or_default()),
    }
}

impl Document {
    /// All documents of a text, without empty ones, and with Lists taken apart.
    pub(crate) fn read(text: &str) -> Result<Vec<Self>, Unreadable> {
        let nodes: Vec<Spanned<Node>> =
            serde_saphyr::from_multiple_with_options(text, options()).map_err(|error| {
                let line = error.location().map_or(1, |location| location.line());
                Unreadable { line, message: explain(&error) }
            })?;
        let documents = nodes.into_iter().map(|node| {
            let (value, lines) = split(node);
            Self { value, lines }
        });
        Ok(documents.filter(|document| !document.value.is_null()).flat_map(Self::items).collect())
    }

    /// The line of a field as violations name it (`spec.filters[1].image`), or of the nearest value around
    /// it.
    pub(crate) fn line(&self, field: &str) -> u64 {
        let mut at = &self.lines;
        for step in steps(field) {
            match at.below.get(&step) {
                Some(below) => at = below,
                None => break,
            }
        }
        at.line
    }

    fn items(self) -> Vec<Self> {
        let is_list = self.value.get("kind").and_then(Value::as_str) == Some("List");
        match (is_list, self.value.get("items").and_then(Value::as_array)) {
            (true, Some(items)) => {
                let lines = self.lines.below.get("items");
                let item = |(index, value): (usize, &Value)| Self {
                    value: value.clone(),
                    lines: lines
                        .and_then(|lines| lines.below.get(&index.to_string()))
                        .cloned()
                        .unwrap_or_default(),
                };
                items.iter().enumerate().map(item).collect()
            }
            _ => vec![self],
        }
    }
}

/// `spec.filters[1].env["a.b"]` → spec, filters, 1, env, a.b
fn steps(field: &str) -> Vec<String> {
    let mut steps = Vec::new();
    let mut rest = field;
    while !rest.is_empty() {
        if let Some(quoted) = rest.strip_prefix("[\"") {
            let end = quoted.find("\"]").unwrap_or(quoted.len());
            steps.push(quoted[..end].to_owned());
            rest = quoted.get(end + 2..).unwrap_or_default();
        } else {
            rest = rest.trim_start_matches(['.', '[', ']']);
            let end = rest.find(['.', '[', ']']).unwrap_or(rest.len());
            if end > 0 {
                steps.push(rest[..end].to_owned());
            }
            rest = &rest[end..];
            rest = rest.strip_prefix(']').unwrap_or(rest);
        }
    }
    steps
}

fn split(node: Spanned<Node>) -> (Value, Lines) {
    let line = node.referenced.line();
    let mut below = BTreeMap::new();
    let value = match node.value {
        Node::Scalar(value) => value,
        Node::List(items) => {
            let items = items.into_iter().enumerate().map(|(index, item)| {
                let (value, lines) = split(item);
                below.insert(index.to_string(), lines);
                value
            });
            Value::Array(items.collect())
        }
        Node::Map(fields) => {
            let fields = fields.into_iter().map(|(key, field)| {
                let (value, lines) = split(field);
                below.insert(key.clone(), lines);
                (key, value)
            });
            Value::Object(fields.collect::<Map<_, _>>())
        }
    };
    (value, Lines { line, below })
}

enum Node {
    Scalar(Value),
    List(Vec<Spanned<Node>>),
    Map(BTreeMap<String, Spanned<Node>>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Scalar(Number::from_f64(value).map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Scalar(Value::String(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Node, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = fields.next_entry()? {
            map.insert(key, value);
        }
        Ok(Node::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "kind: A\nspec:\n  filters:\n    - name: x\n      image: i\n    - name: y\n  labels:\n    a.b/c: z\n---\n# nothing\n---\nkind: List\nitems:\n- kind: B\n- {kind: C, value: 1}\n";

    #[test]
    fn documents_are_read_with_lines_and_lists_are_taken_apart() {
        let documents = Document::read(TEXT).unwrap();
        let kinds: Vec<&str> =
            documents.iter().filter_map(|document| document.value["kind"].as_str()).collect();
        assert_eq!(kinds, ["A", "B", "C"]);
        let first = &documents[0];
        assert_eq!(first.line("spec.filters[1].name"), 6);
        assert_eq!(first.line("spec.filters[0].image"), 5);
        assert_eq!(first.line("spec.labels[\"a.b/c\"]"), 8);
        // A missing value is shown where it belongs.
        assert_eq!(first.line("spec.filters[1].image"), 6);
        assert_eq!(first.line("(object)"), 1);
        assert_eq!(documents[1].line("kind"), 14);
        assert_eq!(documents[2].value["value"], 1);
    }

    #[test]
    fn what_a_large_repository_builds_is_read_and_what_is_too_large_says_so() {
        let built = "kind: A\nspec: { a: [1, 2, 3] }\n---\n";
        assert_eq!(Document::read(&built.repeat(5_000)).unwrap().len(), 5_000);
        let error = Document::read(&"--- 1\n".repeat(DOCUMENTS_MAX + 1)).unwrap_err();
        assert!(
            error.message.contains("validate it in parts") && error.message.contains("Documents"),
            "{error}"
        );
    }

    #[test]
    fn a_text_that_is_not_yaml_says_where() {
        let error = Document::read("a: 1\nb: [1\nc: 2\n").unwrap_err();
        assert!(error.line >= 2, "{error:?}");
        let twice = Document::read("a: 1\na: 2\n").unwrap_err();
        assert!(twice.message.contains("duplicate") || twice.message.contains('a'), "{twice:?}");
    }
}
