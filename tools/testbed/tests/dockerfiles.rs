//! The images that `make images` builds and the Dockerfiles for users with Docker hold and declare the same.
#![expect(clippy::unwrap_used, reason = "a Dockerfile that cannot be read is a failed test")]

use std::{collections::BTreeMap, fs, path::PathBuf};

use testbed::{
    Paths,
    image::{Content, Image},
    images::{RECIPES, Recipe, SHIM, Set, Source},
};

/// Where the stage `build` has it.
const BUILT_SHIM: &str = "/src/target/static/shim/shim";

/// What a stage of a Dockerfile declares.
#[derive(Debug, Default, PartialEq)]
struct Declared {
    user: String,
    entrypoint: Vec<String>,
    env: Vec<String>,
    labels: BTreeMap<String, String>,
    /// What is in it beside the program, and where that comes from.
    files: BTreeMap<PathBuf, String>,
}

/// A file of the table, as a stage of a Dockerfile has it.
fn described(content: &Content) -> String {
    match content {
        Content::Copy(path) => path.display().to_string(),
        Content::Text(text) => text.clone(),
        Content::Folder(mode) => format!("a folder, {mode:o}"),
        Content::Program(_) | Content::Link(_) => "what no Dockerfile has".to_owned(),
    }
}

/// What the script of the stage `build` puts into every image: what it prints into files, and folders of a mode.
fn in_every_image(text: &str) -> BTreeMap<PathBuf, String> {
    let mut files = BTreeMap::new();
    let steps = text.replace("\\\n", "");
    for step in steps.split("&&").filter_map(|step| step.split(" || ").next()).map(str::trim) {
        if let Some((printed, path)) =
            step.strip_prefix("printf '").and_then(|rest| rest.split_once("' >$root"))
        {
            files.insert(PathBuf::from(path), printed.replace("\\n", "\n"));
        }
        if let Some((mode, path)) = step.strip_prefix("chmod ").and_then(|rest| rest.split_once(" $root")) {
            files.insert(PathBuf::from(path), format!("a folder, {mode}"));
        }
    }
    files
}

/// Every named stage of a Dockerfile; continued lines are of no interest here.
fn stages(text: &str) -> BTreeMap<String, Declared> {
    let mut stages = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        let Some((instruction, rest)) = line.split_once(' ') else { continue };
        let stage: &mut Declared = stages.entry(current.clone()).or_default();
        match instruction {
            "FROM" => current = rest.split(" AS ").nth(1).unwrap_or_default().to_owned(),
            "USER" => stage.user = rest.to_owned(),
            "ENTRYPOINT" => stage.entrypoint = serde_json::from_str(rest).unwrap(),
            // The program with what is in every image goes to the root, and other files to where they were.
            "COPY" if rest.starts_with("--from=build ") && rest.ends_with(" /") => {
                stage.files.extend(in_every_image(text));
            }
            "COPY" if rest.starts_with("--from=build ") => {
                let (from, to) = rest.trim_start_matches("--from=build ").split_once(' ').unwrap();
                stage.files.insert(PathBuf::from(to), from.to_owned());
            }
            "ENV" => stage.env.push(rest.to_owned()),
            "LABEL" => {
                let (name, value) = rest.split_once('=').unwrap();
                stage.labels.insert(name.to_owned(), serde_json::from_str(value).unwrap());
            }
            _ => {}
        }
    }
    stages
}

#[test]
fn dockerfiles_hold_and_declare_what_the_table_does() {
    let root = Paths::find().unwrap().root;
    let files: [(&str, &[Set]); 2] =
        [("Dockerfile", &[Set::Worker, Set::Product]), ("examples/filters/Dockerfile", &[Set::Filters])];
    for (file, sets) in files {
        let built = |recipe: &&Recipe| sets.contains(&recipe.set) && matches!(recipe.source, Source::Cargo);
        let table: BTreeMap<String, Declared> = RECIPES
            .iter()
            .filter(built)
            .map(|recipe| {
                let Image { name: _, files, user, entrypoint, env, labels } = recipe.declaration();
                let mut files: BTreeMap<PathBuf, String> =
                    files.iter().map(|(path, content)| (path.clone(), described(content))).collect();
                if recipe.shim {
                    files.insert(SHIM.into(), BUILT_SHIM.to_owned());
                }
                (recipe.name.to_owned(), Declared { user, entrypoint, env, labels, files })
            })
            .collect();
        // While the table has none, there is nothing to write a Dockerfile for; once it has one, there must be.
        if table.is_empty() && !root.join(file).exists() {
            continue;
        }
        let text = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut declared = stages(&text);
        // Stages that only build declare nothing.
        declared.retain(|_, stage| *stage != Declared::default());
        assert_eq!(declared, table, "{file} (left) and the table (right)");
    }
    let elsewhere = RECIPES.iter().filter(|recipe| matches!(recipe.source, Source::Cargo));
    let elsewhere = elsewhere
        .filter(|recipe| !matches!(recipe.set, Set::Worker | Set::Product | Set::Filters | Set::Tests));
    assert_eq!(elsewhere.map(|recipe| recipe.name).collect::<Vec<_>>(), Vec::<&str>::new());
}
