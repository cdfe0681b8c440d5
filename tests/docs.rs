//! The documentation agrees with the code, and its links lead somewhere.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crds::rules::Rule;
use crds::v1alpha1::{Pipeline, PipelineRun};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray,
};
use strum::IntoEnumIterator;
use tests::root;

/// A control without a test is only a wish: each row of these pages names a test, and this test checks that
/// it exists.
#[test]
fn what_the_tables_of_threats_and_guarantees_name_exists() {
    let sources = sources();
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let rules: BTreeSet<String> = Rule::iter().map(|rule| rule.to_string()).collect();
    for (page, at_least) in [("SECURITY.md", 40), ("docs/guarantees.md", 30)] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let is_header = |line: &str| line.ends_with("| test |");
        let mut tests = 0;
        for row in text.lines().filter(|line| line.starts_with("| ") && !is_header(line)) {
            let named: Vec<&str> = row.rsplit('|').nth(1).unwrap().split('`').skip(1).step_by(2).collect();
            assert!(!named.is_empty(), "{page} names no test: {row}");
            for name in named {
                let exists = match name.strip_prefix("make ") {
                    Some(target) => makefile.contains(&format!("\n{target}:")),
                    None if name.contains('/') => root().join(name).exists(),
                    None if name.contains('_') => {
                        tests += 1;
                        sources.contains(&format!("fn {name}(")) || sources.contains(&format!("fn {name}<"))
                    }
                    None => rules.contains(name),
                };
                assert!(exists, "{page} names {name}, which does not exist");
            }
        }
        assert!(tests > at_least, "{page} names {tests} tests");
    }
}

/// Users copy what docs/write-a-filter.md quotes: each block of code is part of the file that the page links
/// before it, and a script that is started per file is quoted whole.
#[test]
fn what_write_a_filter_quotes_is_the_tested_file() {
    const LINK: &str = "](../examples/filters/";
    let page = fs::read_to_string(root().join("docs/write-a-filter.md")).unwrap();
    let mut quoted = Vec::new();
    for language in ["sh", "python", "rust"] {
        for (start, fence) in page.match_indices(&format!("\n```{language}\n")) {
            let (code, _) = page[start + fence.len()..].split_once("```").unwrap();
            let (_, link) = page[..start].rsplit_once(LINK).unwrap();
            let file = link.split(')').next().unwrap();
            let text = fs::read_to_string(root().join("examples/filters").join(file)).unwrap();
            assert!(text.contains(code), "{file} does not contain what the page quotes:\n{code}");
            quoted.push((file, text == code));
        }
    }
    let expected = [
        ("checksum-sh/filter.sh", true),
        ("word-count-py/filter.py", true),
        ("file-type-py/filter.py", false),
        ("thumbnail/src/main.rs", false),
    ];
    assert_eq!(quoted, expected, "what the page quotes, and whether it is the whole file");
}

#[test]
fn every_relative_link_of_a_page_resolves() {
    let mut links = 0;
    let mut broken = Vec::new();
    for page in files_below(root(), "md") {
        for link in links_of(&fs::read_to_string(&page).unwrap()) {
            links += 1;
            if !resolves(&page, &link) {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "there is no such file or heading:\n{}", broken.join("\n"));
    assert!(links > 200, "the pages have {links} links");
}

#[test]
fn a_link_to_a_missing_file_or_heading_does_not_resolve() {
    let page = root().join("docs/README.md");
    for link in ["modes.md", "modes.md#is-it-safe", "../policies/", "#documentation"] {
        assert!(resolves(&page, link), "{link}");
    }
    for link in ["mode.md", "modes.md#is-it-saf", "../policy/", "#document"] {
        assert!(!resolves(&page, link), "{link}");
    }
}

#[test]
fn links_and_headings_are_found_outside_code_only() {
    let page = "# A `b`, c_d\n[e\nf](g.md#h) `[i](j.md)` [k](https://l.example)\n```\n# m\n[n](o.md)\n```\n## P\n## P\n";
    assert_eq!(links_of(page), ["g.md#h"]);
    assert_eq!(anchors_of(page), ["a-b-c_d", "p", "p-1"].map(str::to_owned).into());
}

/// docs/fields.md has a row for every field of both specs, and no row for a field that does not exist.
#[test]
fn the_field_guide_has_a_row_for_every_field() {
    let page = fs::read_to_string(root().join("docs/fields.md")).unwrap();
    let (pipeline, run) = page.split_once("\n## PipelineRun\n").unwrap();
    for (text, definition) in [
        (pipeline, crds::definitions::definition::<Pipeline>()),
        (run, crds::definitions::definition::<PipelineRun>()),
    ] {
        let version = definition.spec.versions.into_iter().next().unwrap();
        let schema = version.schema.unwrap().open_api_v3_schema.unwrap();
        let mut fields = Fields::default();
        fields.add("", &schema.properties.unwrap()["spec"]);
        let documented = documented_fields(text);
        let kind = definition.spec.names.kind;
        let missing: Vec<_> = fields.leaves.difference(&documented).collect();
        assert!(missing.is_empty(), "docs/fields.md has no row for these fields of a {kind}: {missing:?}");
        let unknown: Vec<_> = documented.difference(&fields.all).collect();
        assert!(
            unknown.is_empty(),
            "docs/fields.md has rows for fields that a {kind} does not have: {unknown:?}"
        );
    }
}

/// Fields that contain a type of Kubernetes, whose own fields the guide does not repeat.
const OF_KUBERNETES: [&str; 6] =
    ["affinity", "env", "imagePullSecrets", "resources", "securityContext", "tolerations"];

/// The fields of a spec, by their paths.
#[derive(Default)]
struct Fields {
    all: BTreeSet<String>,
    /// Those without fields of their own.
    leaves: BTreeSet<String>,
}

impl Fields {
    fn add(&mut self, path: &str, schema: &JSONSchemaProps) {
        let items = match &schema.items {
            Some(JSONSchemaPropsOrArray::Schema(items)) => items.properties.as_ref(),
            Some(JSONSchemaPropsOrArray::Schemas(_)) | None => None,
        };
        let name = path.rsplit('.').next().unwrap();
        let below = schema.properties.as_ref().or(items).filter(|_| !OF_KUBERNETES.contains(&name));
        self.all.insert(path.to_owned());
        match below {
            Some(below) => below.iter().for_each(|(name, schema)| {
                self.add(&if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, schema);
            }),
            None => {
                self.leaves.insert(path.to_owned());
            }
        }
    }
}

/// The paths in the first column of the tables of fields, whose headers say where their fields are.
fn documented_fields(text: &str) -> BTreeSet<String> {
    let mut documented = BTreeSet::new();
    let mut parents: &[&str] = &[];
    for line in text.lines() {
        parents = match line.split(" | ").next().unwrap() {
            "| field of `spec`" => &[""],
            "| field" => &["source.bucket.", "sink.bucket."],
            "| field of `filters[]`" => &["filters."],
            "| field of `pod`" => &["pod."],
            row if row.starts_with('|') => {
                for name in row.split('`').skip(1).step_by(2) {
                    documented.extend(parents.iter().map(|parent| format!("{parent}{name}")));
                }
                parents
            }
            _ => &[],
        };
    }
    documented
}

/// The relative links of a page.
fn links_of(page: &str) -> Vec<String> {
    let prose = without_code(page);
    // Code spans are removed too; a link's text may contain one, but its target does not.
    let prose: String = prose.split('`').step_by(2).collect();
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The anchors of a page, as GitHub derives them from its headings.
fn anchors_of(page: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let prose = without_code(page);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let headings = headings.filter_map(|line| line.trim_start_matches('#').strip_prefix(' '));
    let anchors = headings.map(|heading| {
        let kept = heading.trim().chars().filter(|one| one.is_alphanumeric() || " -_".contains(*one));
        let anchor: String =
            kept.map(|one| if one == ' ' { '-' } else { one.to_ascii_lowercase() }).collect();
        let before = seen.entry(anchor.clone()).or_default();
        *before += 1;
        if *before == 1 { anchor } else { format!("{anchor}-{}", *before - 1) }
    });
    anchors.collect()
}

/// A page without its fenced blocks.
fn without_code(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

/// Whether a link of a page leads to a file or folder and, with an anchor, to a heading.
fn resolves(page: &Path, link: &str) -> bool {
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    match anchor {
        Some(anchor) => fs::read_to_string(target).is_ok_and(|text| anchors_of(&text).contains(anchor)),
        None => target.exists(),
    }
}

/// All Rust sources, as one text.
fn sources() -> String {
    files_below(root(), "rs").iter().map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// All files below a folder whose names end like this, without hidden folders and builds.
fn files_below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let hidden = path.file_name().unwrap().as_encoded_bytes().starts_with(b".");
        if path.is_dir() && !hidden && !path.ends_with("target") {
            files.extend(files_below(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files
}
