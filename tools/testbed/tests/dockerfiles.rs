//! The images of `make images` and the Dockerfiles for users with Docker have the same contents and
//! declarations.
#![expect(clippy::unwrap_used, reason = "a Dockerfile that cannot be read is a failed test")]

use std::{collections::BTreeMap, fs, path::PathBuf};

use testbed::{
    Paths,
    image::{Content, Image},
    images::{RECIPES, Recipe, SHIM, Set, Source},
};

/// The shim's path in the stage `build`.
const BUILT_SHIM: &str = "/src/target/static/shim/shim";

/// The declarations of a Dockerfile stage.
#[derive(Debug, Default, PartialEq)]
struct Declared {
    user: String,
    entrypoint: Vec<String>,
    env: Vec<String>,
    labels: BTreeMap<String, String>,
    /// The files besides the program, and their origins.
    files: BTreeMap<PathBuf, String>,
}

/// A file of the table, in the words of a Dockerfile stage.
fn described(content: &Content) -> String {
    match content {
        Content::Copy(path) => path.display().to_string(),
        Content::Text(text) => text.clone(),
        Content::Folder(mode) => format!("a folder, {mode:o}"),
        Content::Program(_) | Content::Link(_) => "something that no Dockerfile has".to_owned(),
    }
}

/// What the script of the stage `build` adds to every image: the files it prints, and folders with a mode.
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

/// Every named stage of a Dockerfile; continuation lines do not matter here.
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
            // The program goes to the root together with the files of every image; other files keep their
            // paths.
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
        // An empty table needs no Dockerfile, but any other does.
        if table.is_empty() && !root.join(file).exists() {
            continue;
        }
        let text = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut declared = stages(&text);
        // Build-only stages declare nothing.
        declared.retain(|_, stage| *stage != Declared::default());
        assert_eq!(declared, table, "{file} (left) and the table (right)");
    }
    let elsewhere = RECIPES.iter().filter(|recipe| matches!(recipe.source, Source::Cargo));
    let elsewhere = elsewhere
        .filter(|recipe| !matches!(recipe.set, Set::Worker | Set::Product | Set::Filters | Set::Tests));
    assert_eq!(elsewhere.map(|recipe| recipe.name).collect::<Vec<_>>(), Vec::<&str>::new());
}

/// The base image and the path of its interpreter differ: users have no machine like the testbed's.
#[test]
fn dockerfiles_of_scripts_run_them_as_the_table_does() {
    let samples = Paths::find().unwrap().root.join("examples/filters");
    for recipe in RECIPES {
        let Source::Script(script) = recipe.source else { continue };
        let (folder, name) = script.split_once('/').unwrap();
        let text = fs::read_to_string(samples.join(folder).join("Dockerfile")).unwrap();
        assert!(text.contains(&format!("\nCOPY {name} /{name}\n")), "{folder}: {text}");
        let declared = &stages(&text)[""];
        let table = recipe.declaration();
        assert_eq!(declared.user, table.user, "{folder}");
        assert_eq!(declared.entrypoint.last(), table.entrypoint.last(), "{folder}");
    }
}
