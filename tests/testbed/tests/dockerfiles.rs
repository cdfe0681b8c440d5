//! The images that `make images` builds and the Dockerfiles for users with Docker declare the same.
#![expect(clippy::unwrap_used, reason = "a Dockerfile that cannot be read is a failed test")]

use std::{collections::BTreeMap, fs};

use testbed::{
    Paths,
    image::Image,
    images::{RECIPES, Recipe, Set, Source},
};

/// What a stage of a Dockerfile declares.
#[derive(Debug, Default, PartialEq)]
struct Declared {
    user: String,
    entrypoint: Vec<String>,
    env: Vec<String>,
    labels: BTreeMap<String, String>,
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
fn dockerfiles_declare_what_the_table_declares() {
    let root = Paths::find().unwrap().root;
    let files: [(&str, &[Set]); 2] =
        [("Dockerfile", &[Set::Worker, Set::Product]), ("tests/filters/Dockerfile", &[Set::Filters])];
    for (file, sets) in files {
        let built = |recipe: &&Recipe| sets.contains(&recipe.set) && matches!(recipe.source, Source::Cargo);
        let table: BTreeMap<String, Declared> = RECIPES
            .iter()
            .filter(built)
            .map(|recipe| {
                let Image { user, entrypoint, env, labels, .. } = recipe.declaration();
                (recipe.name.to_owned(), Declared { user, entrypoint, env, labels })
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
    let elsewhere =
        elsewhere.filter(|recipe| !matches!(recipe.set, Set::Worker | Set::Product | Set::Filters));
    assert_eq!(elsewhere.map(|recipe| recipe.name).collect::<Vec<_>>(), Vec::<&str>::new());
}
